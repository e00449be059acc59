"""How long schedules with split backwards take for a step, beside torch.distributed.pipelining's on the same ranks.

    .venv/bin/python benchmarks/zero_bubble.py [--rounds 10] [--forward 10 20] [--micro-batches 8 16]
                                               [--markdown PAGE]

Stages sleep as long for a forward as for each half of a backward. Ours runs as under ``--rehearse``; theirs runs a
module whose halves sleep, each once, with the autograd that belongs to it: its weights join the way of its input in a
sum, so that taking the halves apart runs neither twice. Both live in the same processes and take turns, as in
runtime.py; a ratio is the median over the rounds, with the 95 % interval of the sign test. Schedules of one line are
for the same placement: one stage on each rank, or two, down the ranks and up again.
"""

import argparse
import statistics
from pathlib import Path

from paired import ratio
from side_by_side import Comparison, Contender, Samples, makespan, run
from tables import circumstances, publish, table

RANKS = 4
CLOSE = 0.05
"""By how much of its prediction a rehearsed step may be off."""

H1 = Contender("zb_h1", "generated", "zb_h1")
ZERO_BUBBLE = Contender("ScheduleInterleavedZeroBubble", "torch, listed", "ScheduleInterleavedZeroBubble")
OURS_V = tuple(Contender(name, "generated", name, "P") for name in ("zb_v", "v_half", "v_min"))
ZBV = Contender("ScheduleZBVZeroBubble", "torch, v", "ScheduleZBVZeroBubble")
OURS_DUAL = Contender("dualpipe_v", "generated", "dualpipe_v", "P")
DUAL = Contender("ScheduleDualPipeV", "torch, v", "ScheduleDualPipeV")
PAIRS = ((H1, ZERO_BUBBLE), *((ours, ZBV) for ours in OURS_V), (OURS_DUAL, DUAL))
"""Ours, and theirs with the same placement."""


def comparison(rounds: int, forward: int, micro_batches: int) -> Comparison:
    """All contenders at one size."""
    return Comparison(
        name=f"P={RANKS} N={micro_batches} F = I = W = {forward} ms",
        stages=RANKS,
        micro_batches=micro_batches,
        contenders=(H1, ZERO_BUBBLE, *OURS_V, ZBV, OURS_DUAL, DUAL),
        rounds=rounds,
        forward=forward / 1000,
        halves=True,
    )


def rows(point: Comparison, samples: dict[str, Samples]) -> list[list[str]]:
    """A row for each pair: times, ours over its prediction, and ours over theirs."""
    found = []
    for ours, theirs in PAIRS:
        mine, other = samples[ours.label].seconds, samples[theirs.label].seconds
        predicted = makespan(ours.name, RANKS, point.micro_batches, ours.workers) * point.forward
        off, paired = statistics.median(mine) / predicted, ratio(mine, other)
        found.append(
            [
                *(ours.label, theirs.label, str(point.micro_batches), f"{1000 * point.forward:g}"),
                *(f"{1000 * predicted:.1f}", f"{1000 * statistics.median(mine):.1f}"),
                *(f"{1000 * statistics.median(other):.1f}", f"{off:.3f}", "yes" if abs(off - 1) <= CLOSE else "no"),
                *(str(paired), "yes" if paired.high < 1.0 else "no"),
            ]
        )
    return found


def main() -> None:
    """Measures and prints the table, and publishes it with a page."""
    parser = argparse.ArgumentParser(description="Split backwards beside torch.distributed.pipelining.")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of each comparison that count [default: 10]")
    parser.add_argument("--forward", type=int, nargs="+", default=[10, 20], metavar="MS", help="[default: 10 20]")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 16], metavar="N", help="[default: 8 16]")
    parser.add_argument(
        "--markdown", type=Path, metavar="PAGE", help="write the data file, and its summary between the page's marks"
    )
    options = parser.parse_args()
    points = [comparison(options.rounds, f, n) for f in options.forward for n in options.micro_batches]
    heads = (
        *("", "torch", "N", "F, ms", "predicted, ms", "ours, ms", "torch, ms", "ours / predicted", "within 5 %"),
        *("ours / torch", "faster"),
    )
    filled = [row for point, samples in zip(points, run(points), strict=True) for row in rows(point, samples)]
    print(f"{circumstances()}\n\n{table(heads, filled)}")
    if options.markdown is not None:
        publish(options.markdown, "zero_bubble", heads, filled)


if __name__ == "__main__":
    main()
