"""How long chimera plan takes: GPT-2, 2,048 workers, mini-batches of 2,048; the paper's schemes, and the library.

    .venv/bin/python benchmarks/planner.py [--runs 3]

The profile is of the order of GPT-2's (Table 4 of the paper, sequences of 632), with D = 8 to 64 and B = 1 to 32.
Each run is a process of its own. Shown are the median of the time that passed and of all processors' time together; the
time that passed says little on a machine that is busy otherwise.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

PARAMETERS, LAYERS, HIDDEN, SEQUENCE = 1_389_327_360, 64, 1280, 632
DEPTHS, SIZES = (8, 16, 32, 64), (1, 2, 4, 8, 16, 32)

PAPER = ("chimera", "chimera_doubling", "chimera_halving", "dapple", "gems", "gpipe", "pipedream", "pipedream_2bw")
"""The schemes that the paper compares; planning with them is to take less than 5 s."""

CLUSTER = """\
[cluster]
name = "2,048 workers"
workers = 2048
per_node = 1
memory = "16 GB"
reserved = "1 GB"

[links.between]
latency = "5 us"
bandwidth = "9 GB/s"

[sum]
latency = "20 us"
bandwidth = "2 GB/s"
"""


def profile() -> str:
    """GPT-2 as so many equal stages; 5.6 TFLOP/s are reached by large micro-batches, half of it by B = 1.5."""
    lines = ['[model]\nname = "GPT-2"']
    for depth in DEPTHS:
        lines.append(f"[[depth]]\nstages = {depth}")
        for stage in range(depth):
            weights = 4 * PARAMETERS // depth
            lines.append(f'[[depth.stage]]\nweights = "{weights} B"\noptimizer = "{weights} B"')
            for size in SIZES:
                message = 4 * size * SEQUENCE * HIDDEN
                seconds = 2 * PARAMETERS / depth * size * SEQUENCE / (5.6e12 * size / (size + 1.5))
                lines.append(f'[[depth.stage.at]]\nmicro_batch_size = {size}\nforward = "{1e3 * seconds:.6f} ms"')
                lines.append(f'activations = "{34 * message * LAYERS // depth} B"\ninput = "{message} B"')
                lines += [f'output = "{message} B"'] if stage < depth - 1 else []
    return "\n".join(lines) + "\n"


def measured(folder: Path, schemes: Sequence[str]) -> tuple[float, float]:
    """Seconds that passed, and seconds of all processors, of one call; no schemes stand for the library."""
    planner = (sys.executable, "-c", "from chimera_ir.start import plan; plan()")
    command = [*planner, "--profile", "gpt2.toml", "--cluster", "cluster.toml"]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [*command, "--mini-batch", "2048", "--asynchronous", "--json", *(f"--scheme={name}" for name in schemes)],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ,
    )
    passed, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return passed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "gpt2.toml").write_text(profile(), encoding="utf-8")
        (folder / "cluster.toml").write_text(CLUSTER, encoding="utf-8")
        turns = [[measured(folder, schemes) for schemes in (PAPER, ())] for _ in range(runs)]
    for name, found in zip(("the paper's schemes", "the library"), zip(*turns, strict=True), strict=True):
        passed, processor = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"{name}: {passed:.1f} s passed, {processor:.1f} s of {os.cpu_count()} processors; median of {runs}")


if __name__ == "__main__":
    main()
