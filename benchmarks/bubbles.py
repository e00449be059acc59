"""The bubble that is really there: every library scheme rehearsed on real ranks, beside what its report says.

    .venv/bin/python benchmarks/bubbles.py [--forward 0.02] [--steps 13] [--markdown PAGE]

Each stage sleeps F for a forward and 2F for a backward; messages and sums are real. The measured bubble is the share
of a step in which a worker does not sleep: one minus the work of a worker per update over the median step time. The
first steps are thrown away, as many as there are workers and one more: in a scheme without a flush they fill the
pipeline. Sleeping processes hardly compete, so two cores are enough for four ranks.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from commands import COMPILE, torchrun
from tables import circumstances, put, table

MODEL = Path(__file__).resolve().parent.parent / "docs" / "examples" / "tiny.py"
SCHEMES = (
    *("gpipe D=4 N=4", "dapple D=4 N=4", "gems D=4 N=4", "chimera D=4 N=4", "chimera D=4 N=8"),
    *("chimera_doubling D=4 N=8", "chimera_halving D=4 N=8", "pipedream D=4", "pipedream_2bw D=4 N=4"),
)


def rehearsed(case: str, forward: float, steps: int) -> tuple[dict[str, float], list[float]]:
    """The report of a scheme with B = 2F for every backward, and the times of its steps."""
    name, *settings = case.split()
    with tempfile.TemporaryDirectory() as folder:
        out, metrics = Path(folder) / "out", Path(folder) / "metrics.json"
        parameters = [word for setting in settings for word in ("--set", setting)]
        compile_it = [*COMPILE, name, *parameters, "--cost", "B=2", "--out", str(out)]
        subprocess.run(compile_it, check=True, capture_output=True)
        report = json.loads((out / "report.json").read_text())
        ranks = [f"--nproc-per-node={report['workers']}", str(out / "train.py")]
        rehearse = ["--rehearse", f"F={forward},B={2 * forward}", "--steps", str(steps), "--metrics", str(metrics)]
        model = ["--model", str(MODEL), "--micro-batch-size", "2"]
        torchrun([*ranks, *model, *rehearse])
        return report, json.loads(metrics.read_text())["step_seconds"]


def main() -> None:
    """Rehearses all schemes and prints the table."""
    parser = argparse.ArgumentParser(description="The bubbles of rehearsed steps beside those of reports.")
    parser.add_argument("--forward", type=float, default=0.02, help="seconds of a forward [default: 0.02]")
    parser.add_argument("--steps", type=int, default=13, help="steps per scheme [default: 13]")
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="write the table between the page's marks")
    options = parser.parse_args()
    rows = []
    for case in SCHEMES:
        report, seconds = rehearsed(case, options.forward, options.steps)
        step = statistics.median(seconds[int(report["workers"]) + 1 :])
        makespan = float(report["makespan"]) * options.forward
        work = makespan * (1 - float(report["bubble_ratio"]))
        rows.append([case, f"{report['bubble_ratio']:.1%}", f"{1 - work / step:.1%}", f"{step / makespan:.3f}"])
    found = table(("", "bubble, report", "bubble, measured", "step over makespan"), rows)
    print(found)
    if options.markdown is not None:
        put(options.markdown, "bubbles", f"{circumstances()}\n\n{found}")


if __name__ == "__main__":
    main()
