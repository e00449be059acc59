"""How long a step of compiled 1F1B takes behind torch's interface, beside `Pipeline` and beside torch's own 1F1B.

    .venv/bin/python benchmarks/interface.py [--rounds 40] [--model examples/gpt.py] [--micro-batch-size 4]

All live in the same four processes and take turns. A ratio is the median over the rounds, with the 95 % interval of the
sign test: above 1 the interface is slower.
"""

import argparse
from pathlib import Path

from paired import ratio
from side_by_side import Comparison, Contender, run

STAGES, MICRO_BATCHES = 4, 8


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description="Steps behind torch's interface beside others.")
    parser.add_argument("--rounds", type=int, default=40, help="rounds that count [default: 40]")
    parser.add_argument("--model", default="examples/gpt.py", help="model file [default: examples/gpt.py]")
    parser.add_argument("--micro-batch-size", type=int, default=4, metavar="B")
    options = parser.parse_args()
    comparison = Comparison(
        name="dapple",
        stages=STAGES,
        micro_batches=MICRO_BATCHES,
        contenders=(
            Contender("interface", "interface", "dapple"),
            Contender("Pipeline", "pipeline", "dapple"),
            Contender("torch", "torch", "Schedule1F1B"),
        ),
        rounds=options.rounds,
        rehearsed=False,
        model=str(Path(options.model).resolve()),
        micro_batch_size=options.micro_batch_size,
    )
    (samples,) = run([comparison])
    print("| interface beside | step | CPU of the busiest rank |\n|---|---|---|")
    for other in ("Pipeline", "torch"):
        seconds = ratio(samples["interface"].seconds, samples[other].seconds)
        print(f"| {other} | {seconds} | {ratio(samples['interface'].cpu, samples[other].cpu)} |")


if __name__ == "__main__":
    main()
