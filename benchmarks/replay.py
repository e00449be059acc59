"""How long the replay of a compiled program takes, and how that grows with the program and with the copies.

    .venv/bin/python benchmarks/replay.py [--runs 5] [--large]

The stages and links are of the order of GPT-2 on 2,048 workers (D=32, W=64); what they cost plays no part in how long a
replay takes. Compiling is not counted. Times are of the processor, the median of the runs, after one that is thrown
away. The exponent is that of the least-squares line through the logarithms of instructions and time.
"""

import argparse
import math
import statistics
import time

from chimera_ir import library
from chimera_ir.compilation import Compilation
from chimera_ir.ir.levels import Program
from chimera_ir.predict.replay import Replay, replay
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.cluster import Cluster, Link
from chimera_ir.profile.costs import RECOMPUTING, StageCosts, Timing
from chimera_ir.request import Request
from chimera_runtime.program.kept_bytes import MicroBatchBytes

SIZES = (
    *(("chimera", 32, N, 64) for N in (32, 64, 128)),
    *(("chimera", 32, 128, W) for W in (1, 16)),
    ("dapple", 32, 128, 64),
    ("chimera", 8, 32, 256),
    ("pipedream_2bw", 32, 32, 64),
)
LARGE = (("chimera", 64, 1024, 32), ("dapple", 64, 1024, 32))


def program(scheme: str, depth: int, micro_batches: int) -> Program:
    """A library scheme, compiled and verified."""
    settings = {"D": depth, "N": micro_batches}
    return Compilation(Request(library.source(scheme), settings)).verified.program


def setting(depth: int, copies: int) -> Setting:
    """Stages of unequal cost and size; the first and the last one are heavier."""
    stages = []
    for stage in range(depth):
        heavy = 1.2 if stage in (0, depth - 1) else 1.0
        times = {"F": 0.02 * heavy, "B": 0.04 * heavy, RECOMPUTING: 0.06 * heavy}
        time_of = Timing(times, MicroBatchBytes(400_000_000, 5_000_000), 5_000_000, 5_000_000)
        size = int(heavy * 4 * 1_400_000_000 / depth)
        stages.append(StageCosts(size, size, 2 * size, {1: time_of}))
    link = Link(1e-4, 1e-9)
    return Setting(tuple(stages), Cluster("large", 2048, 1, 16 * 10**9, 0, link, link, link), copies, 1)


def timed(what: Program, where: Setting, runs: int) -> tuple[float, Replay]:
    """The processor's median seconds for a replay, and the replay."""
    taken = []
    for _ in range(runs + 1):
        begin = time.process_time()
        found = replay(what, where)
        taken.append(time.process_time() - begin)
    return statistics.median(taken[1:]), found


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description="How long the replay of a compiled program takes.")
    parser.add_argument("--runs", type=int, default=5, help="runs whose median counts [default: 5]")
    parser.add_argument("--large", action="store_true", help="also D=64, N=1024")
    options = parser.parse_args()
    points = []
    print(f"{'scheme':<15}{'D':>4}{'N':>6}{'W':>5}{'workers':>9}{'instructions':>14}{'replay':>10}{'predicted':>12}")
    for scheme, depth, micro_batches, copies in (*SIZES, *(LARGE if options.large else ())):
        compiled = program(scheme, depth, micro_batches)
        seconds, found = timed(compiled, setting(depth, copies), options.runs)
        instructions = sum(map(len, compiled.lanes))
        if not compiled.header.asynchronous:
            points.append((math.log(instructions), math.log(seconds)))
        print(
            f"{scheme:<15}{depth:>4}{micro_batches:>6}{copies:>5}{depth * copies:>9,}{instructions:>14,}"
            f"{seconds:>8.3f} s{found.seconds:>10.3f} s",
            flush=True,
        )
    print(
        f"\nexponent, without {'pipedream_2bw'}: {statistics.linear_regression(*zip(*points, strict=True)).slope:.2f}"
    )


if __name__ == "__main__":
    main()
