"""How long a step of the loop of train.py takes, beside the same lane with its optimizers inside; and what it costs if
the number of micro-batches changes.

    .venv/bin/python benchmarks/loop.py [--rounds 40] [--model examples/gpt.py] [--micro-batch-size 4]
                                        [--parts lane numbers]

Both live in the same four processes and take turns. The ratio is the median over the rounds of the loop's step over the
other's, with the 95 % interval of the sign test: above 1 the loop is slower. ``numbers``: six updates whose N changes
each time over six with the mean of these N, in stages that sleep F = 5 ms forward and 2 F backward.
"""

import argparse
from pathlib import Path

from paired import ratio
from side_by_side import Comparison, Contender, run
from tables import table

STAGES = 4
SAME, CHANGING = (8, 8, 8, 8, 8, 8), (6, 10, 6, 10, 6, 10)
"""Numbers of micro-batches of updates that take the same time in `dapple`, which is linear in N."""


def of_numbers(rounds: int) -> Comparison:
    """Updates of one number beside updates whose number changes."""
    return Comparison(
        name="dapple",
        stages=STAGES,
        micro_batches=max(CHANGING),
        contenders=tuple(
            Contender(label, "numbers", "dapple", numbers=numbers)
            for label, numbers in (("same", SAME), ("changing", CHANGING))
        ),
        rounds=rounds,
        forward=0.005,
        rehearsed=False,
    )


def main() -> None:
    """Measures and prints a line per scheme."""
    parser = argparse.ArgumentParser(description="Steps of the loop of train.py beside steps within the lane.")
    parser.add_argument("--rounds", type=int, default=40, help="rounds that count [default: 40]")
    parser.add_argument("--model", default="examples/gpt.py", help="model file [default: examples/gpt.py]")
    parser.add_argument("--micro-batch-size", type=int, default=4, metavar="B")
    parser.add_argument("--parts", nargs="+", choices=["lane", "numbers"], default=["lane", "numbers"])
    options = parser.parse_args()
    if "numbers" in options.parts:
        (samples,) = run([of_numbers(options.rounds)])
        seconds = ratio(samples["changing"].seconds, samples["same"].seconds)
        print(table(("", "D", "N = 6, 10 in turn / N = 8"), [["dapple", str(STAGES), str(seconds)]]))
    if "lane" in options.parts:
        beside_the_lane(options)


def beside_the_lane(options: argparse.Namespace) -> None:
    """Measures the loop and the lane."""
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
