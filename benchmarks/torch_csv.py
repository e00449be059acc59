"""How long it takes to read and prove a schedule in torch's text, beside torch's own loading of the file.

    .venv/bin/python benchmarks/torch_csv.py [--rounds 15] [--ranks 8] [--micro-batches 64]

The files have messages, as torch writes them. Both read the same file in turns, in this process; torch accepts it
without a look at its messages. Times are of the processor: the median, and in brackets the quartiles.
"""

import argparse
import csv
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from unittest import mock

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.distributed.pipelining.stage import PipelineStage

import chimera_ir

NAMES = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def seconds(call: Callable[[], object]) -> float:
    """The processor time of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def middle(times: list[float]) -> str:
    """The median and the quartiles of some times, in milliseconds."""
    low, median, high = (1000 * time for time in quantiles(times, n=4))
    return f"{median:.1f} ms ({low:.1f} to {high:.1f})"


def compared(file: Path, ranks: int, micro_batches: int, rounds: int) -> str:
    """The times for a file of two stages on each rank."""
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages = 0, ranks, 2 * ranks
    runtime = _PipelineScheduleRuntime([stage], micro_batches)
    loaded: list[float] = []
    proven: list[float] = []
    for _ in range(rounds):
        loaded.append(seconds(lambda: runtime._load_csv(str(file), format="compute_comms")))
        proven.append(seconds(lambda: chimera_ir.compile(file).verified))
    return f"torch {middle(loaded)}  read and proven {middle(proven)}"


def main() -> None:
    """Measures, and prints a row for each schedule."""
    parser = argparse.ArgumentParser(description="Reading and proving a schedule of torch beside torch's loading.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=64)
    arguments = parser.parse_args()
    ranks, micro_batches = arguments.ranks, arguments.micro_batches
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            rows = get_schedule_ops(name, ranks, micro_batches, with_comms=True)
            file = Path(folder) / f"{name}.csv"
            with file.open("w", newline="") as text:
                csv.writer(text).writerows(rows)
            cells = sum(map(len, rows))
            print(f"{name:<22} {cells:>6,} cells  {compared(file, ranks, micro_batches, arguments.rounds)}")


if __name__ == "__main__":
    main()
