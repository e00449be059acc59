"""How compiling grows with the schedule, beside torch.distributed.pipelining's lowering of the same operations.

    .venv/bin/python benchmarks/compile_scale.py [--runs 5] [--large]

Ours is all of it: from the text of a library scheme to a verified program with its report, no files. Theirs is the
lowering of a given order of operations alone (``_add_unshard_reshard``, ``_add_reduce_grad``, ``_add_send_recv``, as
``_prepare_schedule_with_comms`` calls them), which verifies nothing.

Each measurement is a process of its own that reports the time of the work without imports, and its peak memory; the
two take turns, and the first round is thrown away. The exponent is that of the least-squares line through the
logarithms of size and median time, over the sizes of at least 4,096 operations: below, what does not grow counts.
"""

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

SIZES = ((4, 4), (8, 32), (16, 128), (32, 64), (32, 256), (64, 256), (64, 1024))
LARGE = ((64, 4096), (64, 8192))
FITTED = 4096


def ours(scheme: str) -> Callable[[int, int], Callable[[], object]]:
    """A compilation, ready to start."""

    def prepare(depth: int, micro_batches: int) -> Callable[[], object]:
        from chimera_ir import library
        from chimera_ir.driver import Level, Request, compile_scheme

        settings = {"D": depth, "N": micro_batches}
        request = Request(library.source(scheme), settings, max_operations=10_000_000)

        def work() -> object:
            report = None
            for level, value in compile_scheme(request, lambda _: None):
                report = value if level is Level.REPORT else report
            return report

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


SYSTEMS: dict[str, Callable[[int, int], Callable[[], object]]] = {
    "dapple": ours("dapple"),
    "chimera": ours("chimera"),
    "torch 1F1B": theirs,
}


def one(system: str, depth: int, micro_batches: int) -> None:
    """Measures once, in this process."""
    work = SYSTEMS[system](depth, micro_batches)
    begin = time.perf_counter()
    work()
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "peak": peak}))


def measured(system: str, size: tuple[int, int]) -> tuple[float, float]:
    """Seconds and peak memory in bytes of one run."""
    command = [sys.executable, __file__, "--one", system, *map(str, size)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found["seconds"], found["peak"]


def exponent(points: list[tuple[int, float]]) -> float:
    """The slope of the line through the logarithms."""
    xs, ys = [math.log(size) for size, _ in points], [math.log(time) for _, time in points]
    return statistics.linear_regression(xs, ys).slope


def main() -> None:
    """Measures all sizes and prints the table."""
    parser = argparse.ArgumentParser(description="How compiling grows with the schedule.")
    parser.add_argument("--runs", type=int, default=5, help="runs whose median counts [default: 5]")
    parser.add_argument(
        "--large", action="store_true", help="also up to a million operations; theirs is left out there"
    )
    parser.add_argument("--one", nargs=3, metavar=("SYSTEM", "D", "N"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one[0], int(options.one[1]), int(options.one[2]))
        return
    medians: dict[str, list[tuple[int, float]]] = {system: [] for system in SYSTEMS}
    print(f"{'D':>4} {'N':>5} {'operations':>11}" + "".join(f"{system:>24}" for system in SYSTEMS) + "   dapple/torch")
    for size in (*SIZES, *(LARGE if options.large else ())):
        operations = 2 * size[0] * size[1]
        systems = [system for system in SYSTEMS if size not in LARGE or system != "torch 1F1B"]
        rounds = [{system: measured(system, size) for system in systems} for _ in range(options.runs + 1)][1:]
        row = f"{size[0]:>4} {size[1]:>5} {operations:>11,}"
        for system in systems:
            middle = statistics.median(each[system][0] for each in rounds)
            peak = max(each[system][1] for each in rounds)
            medians[system].append((operations, middle))
            row += f"{middle:>14.3f} s {peak / 2**30:>4.2f} GiB"
        if "torch 1F1B" in systems:
            ratio = statistics.median(each["dapple"][0] / each["torch 1F1B"][0] for each in rounds)
            row += f"{ratio:>15.2f}"
        print(row, flush=True)
    for system, points in medians.items():
        print(f"{system}: grows with the operations to the power {exponent([p for p in points if p[0] >= FITTED]):.2f}")


if __name__ == "__main__":
    main()
