"""How long generated programs take for a step, beside torch.distributed.pipelining on the same ranks.

    .venv/bin/python benchmarks/runtime.py [--rounds 20] [--forward 5 10 20] [--micro-batches 4 8 16] [--parts steps ..]
                                           [--modules] [--markdown PAGE]

Stages sleep F forward and 2 F backward, so that only the schedule and the messages count, and four ranks do not fight
over fewer cores. Both systems live in the same processes and take turns; every step begins at a barrier and lasts from
the first rank's start to the last rank's end. The first round of each comparison does not count, and the first
comparison of a launch is run twice. By how much a sleep lasts too long is measured at start and taken off for both.

Ours runs as under ``--rehearse``: nothing but messages and sleeps. Theirs is a PipelineStage around a module that
sleeps in both passes, with the autograd that belongs to it; with ``--modules`` ours runs the same modules, loads data
and takes gradients, too.

A ratio is the median over the rounds of ours / theirs, with the 95 % interval of the sign test.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paired import Middle, ratio
from plots import Panel, Row, ratios, ready
from side_by_side import Comparison, Contender, Samples, makespan, run
from tables import circumstances, picture, publish, shown, table

STAGES = 4
MIB = 2**18
"""Floats in a MiB."""

DAPPLE, GPIPE, CHIMERA = (Contender(name, "generated", name) for name in ("dapple", "gpipe", "chimera"))
PLAIN_1F1B, PLAIN_GPIPE = (Contender(name, "torch", name) for name in ("Schedule1F1B", "ScheduleGPipe"))
PAIRS = ((DAPPLE, PLAIN_1F1B), (GPIPE, PLAIN_GPIPE))


Results = dict[str, Samples]


@dataclass(frozen=True)
class Part:
    """A table of the page: what is measured for it, and how a measurement becomes rows of it and of its picture."""

    title: str
    comparisons: tuple[Comparison, ...]
    heads: tuple[str, ...]
    rows: Callable[[Comparison, Results], list[list[str]]]
    panels: tuple[Panel, ...]
    drawn: Callable[[Comparison, Results], list[Row]]


def comparison(options: argparse.Namespace, stages: int, micro_batches: int, forward: int, floats: int) -> Comparison:
    """Ours and theirs for both schemes."""
    return Comparison(
        name=f"D={stages} N={micro_batches} F={forward} ms, {floats} floats",
        stages=stages,
        micro_batches=micro_batches,
        contenders=tuple(each for pair in PAIRS for each in pair),
        rounds=options.rounds,
        forward=forward / 1000,
        floats=floats,
        rehearsed=not options.modules,
    )


def against_torch(point: Comparison, samples: Results) -> list[list[str]]:
    """A row per scheme: times, times over the ideal, ratios and CPU times."""
    rows = []
    for ours, theirs in PAIRS:
        mine, other = samples[ours.label], samples[theirs.label]
        ideal = makespan(ours.name, point.stages, point.micro_batches) * point.forward
        paired, cpu = ratio(mine.seconds, other.seconds), ratio(mine.cpu, other.cpu)
        rows.append(
            [
                *(ours.label, size(point.floats), f"{1000 * point.forward:g}", str(point.micro_batches)),
                *(milliseconds(mine.seconds), milliseconds(other.seconds)),
                *(f"{statistics.median(each.seconds) / ideal:.3f}" for each in (mine, other)),
                *(str(paired), reached(point, paired)),
                *(f"{1000 * statistics.median(each.cpu):.2f}" for each in (mine, other)),
                *(str(cpu), "yes" if cpu.value <= 1.0 else "no"),
            ]
        )
    return rows


def drawn_against_torch(point: Comparison, samples: Results) -> list[Row]:
    """A row per scheme: the ratios of step times and of CPU times."""
    return [
        Row(
            f"{ours.label}, {size(point.floats)}, F = {1000 * point.forward:g} ms, N = {point.micro_batches}",
            (ratio(mine.seconds, other.seconds), ratio(mine.cpu, other.cpu)),
        )
        for ours, theirs in PAIRS
        for mine, other in [(samples[ours.label], samples[theirs.label])]
    ]


def size(floats: int) -> str:
    """The size of a message."""
    return f"{floats // MIB} MiB" if floats >= MIB else f"{4 * floats} B"


def milliseconds(seconds: Sequence[float]) -> str:
    """The median, and from where to where the middle half of the values goes."""
    low, mid, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [*seconds] * 3
    return f"{1000 * mid:.1f} ({1000 * low:.1f}..{1000 * high:.1f})"


def reached(point: Comparison, paired: Middle) -> str:
    """Whether the step is as fast as it should be: at most 0.97 of theirs for F = 5 ms, and nowhere surely slower."""
    return "yes" if (paired.value <= 0.97 if point.forward <= 0.005 else paired.low <= 1.0) else "no"


def speed_up(point: Comparison, samples: Results) -> list[list[str]]:
    """A row: how far both directions are from their ideal, and how much faster they are than one direction."""
    both, one, torch = (samples[each.label] for each in (CHIMERA, DAPPLE, PLAIN_1F1B))
    best, plain = (makespan(each.name, point.stages, point.micro_batches) for each in (CHIMERA, DAPPLE))
    theory, measured = plain / best, ratio(one.seconds, both.seconds)
    return [
        [
            *(str(point.stages), str(point.micro_batches), f"{1000 * point.forward:g}"),
            *(milliseconds(both.seconds), milliseconds(one.seconds), milliseconds(torch.seconds)),
            *(f"{statistics.median(both.seconds) / (best * point.forward):.3f}", f"{theory:.4f}", str(measured)),
            f"{100 * (measured.value / theory - 1):+.1f} %",
            str(ratio(torch.seconds, both.seconds)),
        ]
    ]


def drawn_speed_up(point: Comparison, samples: Results) -> list[Row]:
    """A row: the measured speed-up over what theory promises, and over their 1F1B."""
    both, one, torch = (samples[each.label].seconds for each in (CHIMERA, DAPPLE, PLAIN_1F1B))
    best, plain = (makespan(each.name, point.stages, point.micro_batches) for each in (CHIMERA, DAPPLE))
    promised = [best / plain * a for a in one]
    return [
        Row(
            f"D = N = {point.stages}, F = {1000 * point.forward:g} ms",
            (ratio(promised, both), ratio(torch, both)),
        )
    ]


def parts(options: argparse.Namespace) -> dict[str, Part]:
    """All tables, by the names that the command line knows them by."""
    times = ("", "message", "F, ms", "N", "ours, ms", "torch, ms", "ours / ideal", "torch / ideal", "ours / torch")
    heads = (*times, "reached", "CPU, ms", "CPU torch, ms", "CPU ours / torch", "at most theirs")
    small = [comparison(options, STAGES, n, f, 64) for f in options.forward for n in options.micro_batches]
    large = [comparison(options, STAGES, 8, f, mib * MIB) for mib in (1, 16) for f in options.forward]
    panels = (Panel("step time, ours / torch", 1.0), Panel("CPU time, ours / torch", 1.0))
    contenders = (CHIMERA, DAPPLE, PLAIN_1F1B)
    directions = [
        Comparison(f"D=N={d} F={f} ms", d, d, contenders, options.rounds, f / 1000, rehearsed=not options.modules)
        for d in (4, 8)
        for f in options.forward
    ]
    return {
        "steps": Part("Step time, small messages", tuple(small), heads, against_torch, panels, drawn_against_torch),
        "sizes": Part("Step time, large messages", tuple(large), heads, against_torch, panels, drawn_against_torch),
        "speedup": Part(
            "Two directions against one",
            tuple(directions),
            (
                *("D", "N", "F, ms", "chimera, ms", "dapple, ms", "torch 1F1B, ms", "chimera / ideal"),
                *("dapple / chimera in theory", "measured", "off by", "torch 1F1B / chimera"),
            ),
            speed_up,
            (Panel("speed-up over dapple / theory", 1.0), Panel("torch 1F1B / chimera", 1.0)),
            drawn_speed_up,
        ),
    }


def report(chosen: dict[str, Part], page: Path | None) -> None:
    """Measures everything and prints it; tables and pictures are published with a page, if there is one."""
    results = iter(run([each for part in chosen.values() for each in part.comparisons]))
    print(circumstances())
    for name, part in chosen.items():
        pairs = [(point, next(results)) for point in part.comparisons]
        rows = [row for pair in pairs for row in part.rows(*pair)]
        print(f"\n### {part.title}\n\n{table(part.heads, rows)}")
        if page is not None:
            ratios(picture(page, name), part.panels, [row for pair in pairs for row in part.drawn(*pair)])
            publish(page, name, part.heads, rows, shown(f"{part.title}: ratios with their intervals", name))


def main() -> None:
    """Measures and prints the tables, and publishes them with a page."""
    parser = argparse.ArgumentParser(description="Step times beside torch.distributed.pipelining.")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each comparison that count [default: 20]")
    parser.add_argument(
        "--forward", type=int, nargs="+", default=[5, 10, 20], metavar="MS", help="F [default: 5 10 20]"
    )
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16], metavar="N")
    parser.add_argument("--parts", nargs="+", choices=["steps", "sizes", "speedup"], help="[default: all]")
    parser.add_argument("--modules", action="store_true", help="ours runs the same modules as theirs")
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="PAGE",
        help="write data files and pictures, and summaries between the page's marks",
    )
    options = parser.parse_args()
    if options.markdown is not None:
        ready()
    all_parts = parts(options)
    chosen = {name: part for name, part in all_parts.items() if name in (options.parts or all_parts)}
    report(chosen, options.markdown)


if __name__ == "__main__":
    main()
