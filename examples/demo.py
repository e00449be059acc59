"""``make demo``: a library scheme is compiled, trains a byte-level GPT on four processes, and is timed beside 1F1B."""

import json
import os
import selectors
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = Path("build", "demo")
RANKS, STEPS = 4, 40
FORWARD, BACKWARD = 0.03, 0.06
"""Seconds of a forward and of a backward in the rehearsals."""

PATIENCE = 5
"""Seconds without output after which the demo says that it is still at work."""

STARTS = {
    "chimera": ("-m", "chimera_ir"),
    "torchrun": ("-m", "torch.distributed.run"),
    "python": (),
}
"""The programs of the tour as this interpreter starts them, wherever they are installed."""


def show(why: str, name: str, *arguments: str, is_shown: bool = True) -> None:
    """Runs a command of the tour, after printing what it is for; while it is silent, prints for how long it has run."""
    print(f"\n# {why}\n$ {' '.join((name, *arguments))}\n", flush=True)
    begin = time.monotonic()
    process = subprocess.Popen([sys.executable, *STARTS[name], *arguments], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process, selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        while True:
            if not ready.select(PATIENCE):
                print(f"({time.monotonic() - begin:.0f} s)", flush=True)
            elif text := os.read(process.stdout.fileno(), 65536):
                os.write(sys.stdout.fileno(), text if is_shown else b"")
            else:
                break
    if process.returncode:
        sys.exit(f"demo: {name} ended with status {process.returncode}")


def train(out: str, *options: str) -> tuple[str, ...]:
    """The command line that trains the byte-level GPT with a compiled schedule."""
    script = ("torchrun", f"--nproc-per-node={RANKS}", f"{out}/train.py", "--model", "examples/gpt.py")
    return (*script, "--micro-batch-size", "4", *options)


def rehearse(scheme: str) -> float:
    """Seconds of a step in which computing is replaced by sleeps: the median without the first two steps."""
    out, times = str(OUT / scheme), str(OUT / f"{scheme}.json")
    durations = f"F={FORWARD},B={BACKWARD}"
    rehearsal = train(out, "--rehearse", durations, "--steps", "6", "--metrics", times)
    show(f"Rehearse {scheme}: real messages, and sleeps in place of compute", *rehearsal)
    return statistics.median(json.loads((ROOT / times).read_text(encoding="utf-8"))["step_seconds"][2:])


def makespan(scheme: str) -> float:
    """The predicted length of a step, in forwards."""
    return float(json.loads((ROOT / OUT / scheme / "report.json").read_text(encoding="utf-8"))["makespan"])


def main() -> None:
    """Compiles, checks, trains, writes a sample of text, rehearses two schedules, and says where everything is."""
    print(
        f"This compiles two schedules for {RANKS} workers, trains a GPT of 3.6 million parameters for {STEPS} steps,\n"
        "writes text with it, and times both schedules: about a minute on two cores."
    )
    os.environ.update(OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")  # ranks share the cores: more threads would fight
    os.environ["COLUMNS"] = str(shutil.get_terminal_size().columns)
    if sys.stdout.isatty():
        os.environ["FORCE_COLOR"] = "1"  # of commands that write into a pipe
    ours, baseline = str(OUT / "chimera"), str(OUT / "dapple")
    model, log = f"{OUT}/model.pt", OUT / "log.jsonl"
    (ROOT / log).unlink(missing_ok=True)
    show("Compile Chimera: proven, costed, written as scripts", "chimera", "compile", "chimera", "--out", ours)
    training = train(ours, "--check", "--steps", str(STEPS), "--log-file", str(log), "--export", model)
    show("Compare it with training in one process, then train", *training)
    show("Write text with the weights: forty updates teach little", "python", "examples/sample.py", model)
    compiling = ("chimera", "compile", "dapple", "--set", "N=4", "--out", baseline)
    show("Compile 1F1B with a flush, its report left out", *compiling, is_shown=False)
    seconds = {scheme: rehearse(scheme) for scheme in ("chimera", "dapple")}

    losses = [json.loads(line)["loss"] for line in (ROOT / log).read_text(encoding="utf-8").splitlines()]
    ratio = seconds["dapple"] / seconds["chimera"]
    predicted = makespan("dapple") / makespan("chimera")
    print(
        f"\nThe loss fell from {losses[0]:.2f} to {statistics.mean(losses[-5:]):.2f} nats per byte.\n"
        f"A step of Chimera took {seconds['chimera']:.3f} s and one of 1F1B {seconds['dapple']:.3f} s on the same four "
        f"processes: {ratio:.2f} times as fast.\n"
        f"(Rehearsed: messages are real, a forward is a sleep of {FORWARD} s and a backward one of {BACKWARD} s. "
        f"Predicted: {predicted:.2f}.)\n\n"
        f"picture of the schedule   {ROOT / ours}/schedule.html\n"
        f"what each rank ran        {ROOT / ours}/rank_0.py .. rank_{RANKS - 1}.py\n"
        f"loss and time of a step   {ROOT / log}\n\n"
        "To have the command chimera in your shell:\n\n"
        f"    source {Path(sys.prefix)}/bin/activate\n\n"
        "Next: docs/tutorial/your_model.md, or `chimera --help`."
    )


if __name__ == "__main__":
    main()
