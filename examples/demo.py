"""``make demo``: from a library scheme to a byte-level GPT that trains on four processes, is stopped, and goes on."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "demo"
RANKS, STEPS, STOPPED = 4, 90, 30


STARTS = {
    "chimera-compile": ("-c", "from chimera_ir.start import compile_; compile_()"),
    "torchrun": ("-m", "torch.distributed.run"),
    "python": (),
}
"""The programs of the tour as this interpreter starts them, wherever they are installed."""


def show(name: str, *arguments: str, stop_at: str | None = None) -> None:
    """Runs a command of the tour, after printing it; with ``stop_at`` it gets a SIGTERM after a line with that in it."""
    print(f"\n$ {' '.join((name, *arguments))}\n", flush=True)
    words = [sys.executable, *STARTS[name], *arguments]
    errors = None if stop_at is None else subprocess.PIPE  # torchrun says at length that it was stopped
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if stop_at is not None and stop_at in line:
            print("(SIGTERM, as a machine that is needed for something else would send it)", flush=True)
            process.send_signal(signal.SIGTERM)
            stop_at = ""
            break
    rest, said = process.communicate()
    print(rest, end="")
    if errors is not None:
        print(*(line for line in said.splitlines() if line.startswith("train.py:")), sep="\n", flush=True)
    if process.returncode and not errors:
        sys.exit(f"demo: {name} ended with status {process.returncode}")


def main() -> None:
    """Compiles, checks, trains, is stopped, resumes, writes a sample of text, and says where everything is."""
    out = str(OUT.relative_to(ROOT))
    for left in ("saved", "log.jsonl"):
        shutil.rmtree(OUT / left, ignore_errors=True)
    (OUT / "log.jsonl").unlink(missing_ok=True)
    show("chimera-compile", "chimera", "--set", f"D={RANKS}", "--out", out)
    training = (
        *("torchrun", f"--nproc-per-node={RANKS}", f"{out}/train.py", "--model", "examples/gpt.py"),
        *("--micro-batch-size", "8", "--steps", str(STEPS), "--log-file", f"{out}/log.jsonl"),
        *("--save", f"{out}/saved", "--resume", f"{out}/saved"),
    )
    show(*training, "--check", stop_at=f"step {STOPPED}/{STEPS}")
    show(*training, "--export", f"{out}/model.pt")
    show("python", "examples/sample.py", f"{out}/model.pt")
    losses = [json.loads(line)["loss"] for line in (OUT / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    last = sum(losses[-5:]) / 5
    print(f"\nThe loss fell from {losses[0]:.2f} to {last:.2f} nats per byte (the mean of the last five steps).")
    print(f"The picture of the schedule:  {OUT}/timeline.svg")
    print(f"What each rank ran:           {OUT}/rank_0.py .. rank_{RANKS - 1}.py")
    print(f"The program, as text:         {OUT}/schedule.sir")
    print(f"Loss and time of every step:  {OUT}/log.jsonl")
    print(f"Checkpoints, and the weights: {OUT}/saved, {OUT}/model.pt")


if __name__ == "__main__":
    main()
