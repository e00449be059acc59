"""How long a step of the loop of train.py takes, beside the same lane with its optimizers inside.

    .venv/bin/python benchmarks/loop.py [--rounds 40] [--model examples/gpt.py] [--micro-batch-size 4]

Both live in the same four processes and take turns. The ratio is the median over the rounds of the loop's step over the
other's, with the 95 % interval of the sign test: above 1 the loop is slower.
"""

import argparse
from pathlib import Path

from paired import ratio
from side_by_side import Comparison, Contender, run

STAGES = 4


def main() -> None:
    """Measures and prints a line per scheme."""
    parser = argparse.ArgumentParser(description="Steps of the loop of train.py beside steps within the lane.")
    parser.add_argument("--rounds", type=int, default=40, help="rounds that count [default: 40]")
    parser.add_argument("--model", default="examples/gpt.py", help="model file [default: examples/gpt.py]")
    parser.add_argument("--micro-batch-size", type=int, default=4, metavar="B")
    options = parser.parse_args()
    comparisons = [
        Comparison(
            name=scheme,
            stages=STAGES,
            micro_batches=STAGES,
            contenders=(Contender("lane", "generated", scheme), Contender("loop", "loop", scheme)),
            rounds=options.rounds,
            rehearsed=False,
            model=str(Path(options.model).resolve()),
            micro_batch_size=options.micro_batch_size,
        )
        for scheme in ("dapple", "chimera")
    ]
    for comparison, samples in zip(comparisons, run(comparisons), strict=True):
        seconds = ratio(samples["loop"].seconds, samples["lane"].seconds)
        cpu = ratio(samples["loop"].cpu, samples["lane"].cpu)
        print(f"{comparison.name}, D = N = {STAGES}: step, loop / lane {seconds}; CPU of the busiest rank {cpu}")


if __name__ == "__main__":
    main()
