"""How compiling grows with the schedule, beside torch.distributed.pipelining's lowering of the same operations.

    .venv/bin/python benchmarks/compile_scale.py [--runs 5] [--large] [--markdown PAGE]
    .venv/bin/python benchmarks/compile_scale.py --slices [--runs 5]
    .venv/bin/python benchmarks/compile_scale.py --unclocked [--runs 5]

Ours is all of it: from the text of a library scheme to a verified program with its report, no files. Theirs is the
lowering of a given order of operations alone (``_add_unshard_reshard``, ``_add_reduce_grad``, ``_add_send_recv``, as
``_prepare_schedule_with_comms`` calls them), which verifies nothing.

Each measurement is a process of its own that reports the CPU time of the work without imports, and its peak memory;
they take turns, and the first round is thrown away. An exponent is the slope of the least-squares line through the
logarithms of operations and median time: over all sizes, and over those of at least 4,096 operations, for below what
does not grow counts. ``--large`` goes on to a million operations, measured once; theirs is left out there.
``--slices`` compiles 1F1B and, with as many operations, Seq1F1B of four slices, in turns;
``--unclocked`` compiles 1F1B and 1,008,000 operations of the same chain, under its bound, that the compiler orders.
"""

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paired import ratio
from plots import Series, growth
from tables import circumstances, picture, publish, shown, table

SIZES = ((4, 4), (8, 32), (16, 128), (32, 64), (32, 256), (64, 256), (64, 1024))
LARGE = ((64, 4096), (64, 8192))
FITTED = 4096
THEIRS = "torch"
SCHEMES = ("dapple", "chimera")
SLICED, SLICES, OF_SLICES = "seq1f1b", 4, (64, 512)
"""A scheme with slices, their number, and the workers and slices with which it is compared."""

UNCLOCKED, OF_UNCLOCKED = "unclocked", (64, 7875)
"""1F1B's operations without their clocks, and the size at which they are compared."""

UNCLOCKED_TEXT = """scheme unclocked(D = 4, N = 8)
workers D
memory activations on w <= D - w
pipe down {
  stages s in 0..D on s
  micros m in 0..N
  F(m, s)
  B(m, s)
}
"""


class Run(NamedTuple):
    """CPU seconds, and peak memory in bytes; of ours also the nodes of the DAG."""

    seconds: float
    peak: int
    nodes: int


def ours(scheme: str) -> Callable[[int, int], Callable[[], object]]:
    """A compilation, ready to start."""

    def prepare(depth: int, micro_batches: int) -> Callable[[], object]:
        from chimera_ir import library
        from chimera_ir.compilation import Compilation
        from chimera_ir.request import Request
        from chimera_ir.source import Source

        text = Source("unclocked.chim", UNCLOCKED_TEXT) if scheme == UNCLOCKED else library.source(scheme)
        sliced = {"k": SLICES, "N": micro_batches // SLICES} if scheme == SLICED else {}
        settings = {"D": depth, "N": micro_batches} | sliced
        request = Request(text, settings, max_operations=10_000_000)

        def work() -> object:
            compilation = Compilation(request)
            _ = compilation.report
            return compilation.verified.schedule

        return work

    return prepare


def theirs(depth: int, micro_batches: int) -> Callable[[], object]:
    """Their lowering of 1F1B, ready to start."""
    from torch.distributed.pipelining import schedules as peer

    forward, backward = peer._ComputationType.FORWARD, peer._ComputationType.FULL_BACKWARD

    def order(rank: int) -> list[Any]:
        ahead = min(depth - 1 - rank, micro_batches)
        actions = [peer._Action(rank, forward, m) for m in range(ahead)]
        for m in range(micro_batches):
            if m + ahead < micro_batches:
                actions.append(peer._Action(rank, forward, m + ahead))
            actions.append(peer._Action(rank, backward, m))
        return actions

    orders = {rank: order(rank) for rank in range(depth)}

    def work() -> object:
        lowered = {
            rank: peer._add_reduce_grad(peer._add_unshard_reshard(actions), micro_batches)
            for rank, actions in orders.items()
        }
        return peer._add_send_recv(lowered, stage_to_rank=lambda stage: stage, num_stages=depth)

    return work


SYSTEMS: Mapping[str, Callable[[int, int], Callable[[], object]]] = {
    **{scheme: ours(scheme) for scheme in (*SCHEMES, SLICED, UNCLOCKED)},
    THEIRS: theirs,
}


def one(system: str, depth: int, micro_batches: int) -> None:
    """Measures once, in this process."""
    work = SYSTEMS[system](depth, micro_batches)
    begin = time.process_time()
    result = work()
    seconds = time.process_time() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps([seconds, peak, 0 if system == THEIRS else nodes(result)]))


def nodes(schedule: Any) -> int:
    """The nodes of a schedule's DAG, sums and steps included."""
    header = schedule.header
    sums = sum(1 + len(header.members(group)) for group in header.groups)  # a sum, and a step of each member
    return sum(map(len, schedule.lanes)) + sums * header.updates


def measured(system: str, size: tuple[int, int]) -> Run:
    """One run in a process of its own."""
    command = [sys.executable, __file__, "--one", system, *map(str, size)]
    return Run(*json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def beside_whole(scheme: str, size: tuple[int, int], how: str, runs: int) -> str:
    """The CPU time of compiling a scheme beside that of 1F1B with as many operations; ``how`` are its parameters."""
    whole = SCHEMES[0]
    rounds = [{system: measured(system, size) for system in (whole, scheme)} for _ in range(runs + 1)]
    rounds = rounds[1:] or rounds
    against = ratio([each[scheme].seconds for each in rounds], [each[whole].seconds for each in rounds])
    seconds = {system: _middle([each[system] for each in rounds]) for system in (whole, scheme)}
    depth, count = size
    return (
        f"{2 * depth * count:,} operations: {whole} D={depth} N={count} {seconds[whole]:.2f} s, {scheme} {how} "
        f"{seconds[scheme]:.2f} s, ratio {against}"
    )


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """The slope of the line through the logarithms."""
    xs, ys = [math.log(size) for size, _ in points], [math.log(time) for _, time in points]
    return statistics.linear_regression(xs, ys).slope


def rows(size: tuple[int, int], rounds: Sequence[Mapping[str, Run]]) -> list[list[str]]:
    """A row for each scheme."""
    found: list[list[str]] = []
    for scheme in SCHEMES:
        mine, their = [each[scheme] for each in rounds], [each[THEIRS] for each in rounds if THEIRS in each]
        beside = ["", "", ""]
        if their:
            against = ratio([run.seconds for run in mine], [run.seconds for run in their])
            beside = [f"{_middle(their):.2f}", str(against), f"{max(run.peak for run in their) / 2**30:.2f}"]
        counts = [f"{2 * size[0] * size[1]:,}", f"{mine[0].nodes:,}"]
        peak = f"{max(run.peak for run in mine) / 2**30:.2f}"
        found.append([scheme, *map(str, size), *counts, f"{_middle(mine):.2f}", *beside[:2], peak, beside[2]])
    return found


def _middle(runs: Sequence[Run]) -> float:
    return statistics.median(run.seconds for run in runs)


def powers(points: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """The exponents of all systems."""
    told = []
    for system, its in points.items():
        fitted = [point for point in its if point[0] >= FITTED]
        told.append(
            f"{system} {exponent(its):.2f} over all sizes, {exponent(fitted):.2f} from {FITTED:,} operations on"
        )
    return "Time grows with the operations to the power of: " + "; ".join(told) + "."


def drawn(page: Path, points: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Draws the times, and gives the line that shows them on the page."""
    series = [Series(system, tuple(costs), system != THEIRS) for system, costs in points.items()]
    growth(picture(page, "compile"), "compute operations", "CPU seconds", series)
    return shown("CPU time over the number of operations, both on logarithmic scales", "compile")


def main() -> None:
    """Measures all sizes and prints the table, and publishes it with a page."""
    parser = argparse.ArgumentParser(description="How compiling grows with the schedule.")
    parser.add_argument("--runs", type=int, default=5, help="runs whose median counts [default: 5]")
    parser.add_argument(
        "--large", action="store_true", help="also up to a million operations, once; theirs is left out there"
    )
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="PAGE",
        help="write the data file and the picture, and the summary between the page's marks",
    )
    parser.add_argument("--slices", action="store_true", help="compare with a scheme with slices alone")
    parser.add_argument("--unclocked", action="store_true", help="compare with operations without clocks alone")
    parser.add_argument("--one", nargs=3, metavar=("SYSTEM", "D", "N"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one[0], int(options.one[1]), int(options.one[2]))
        return
    if options.slices:
        depth, count = OF_SLICES
        print(beside_whole(SLICED, OF_SLICES, f"D={depth} N={count // SLICES} k={SLICES}", options.runs))
        return
    if options.unclocked:
        print(beside_whole(UNCLOCKED, OF_UNCLOCKED, "D={} N={}".format(*OF_UNCLOCKED), options.runs))
        return
    points: dict[str, list[tuple[int, float]]] = {system: [] for system in (*SCHEMES, THEIRS)}
    listed: list[list[str]] = []
    for size in (*SIZES, *(LARGE if options.large else ())):
        systems = SCHEMES if size in LARGE else tuple(points)
        rounds = [
            {system: measured(system, size) for system in systems}
            for _ in range(1 if size in LARGE else options.runs + 1)
        ]
        rounds = rounds[1:] or rounds
        for system in systems:
            points[system].append((2 * size[0] * size[1], _middle([each[system] for each in rounds])))
        listed += rows(size, rounds)
        print(*("  ".join(row) for row in listed[-len(SCHEMES) :]), sep="\n", file=sys.stderr, flush=True)
    heads = ("", "D", "N", "operations", "DAG nodes", "CPU, s", "torch, s", "ours / torch", "peak, GiB", "torch, GiB")
    print("\n\n".join([circumstances(), table(heads, listed), powers(points)]))
    if options.markdown is not None:
        publish(options.markdown, "compile", heads, listed, powers(points), drawn(options.markdown, points))


if __name__ == "__main__":
    main()
