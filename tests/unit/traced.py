"""A trace whose every number is known: two workers, one micro-batch, updates of 7.2 ms that are all alike."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from chimera_ir.commands.compile_command import compile_command
from chimera_ir.trace.compare import TraceComparison, compare
from chimera_ir.trace.forecast import ProfileSource
from chimera_ir.trace.match import lanes
from chimera_ir.trace.trace_files import Trace

LANES = (
    (
        ("recv m0 s1->s0", 0, 10),
        ("load input m0", 10, 15),
        ("F m0 s0", 20, 1020),
        ("send m0 s0->s1", 1020, 1040),
        ("wait recv m0 s1->s0", 1040, 5100),
        ("wait send m0 s0->s1", 5100, 5110),
        ("B m0 s0", 5110, 7150),
        ("all_reduce s0", 7150, 7150),
        ("wait all_reduce s0", 7150, 7160),
        ("step s0", 7160, 7200),
    ),
    (
        ("recv m0 s0->s1", 0, 10),
        ("wait recv m0 s0->s1", 10, 1100),
        ("load target m0", 1100, 1110),
        ("F m0 s1", 1110, 2120),
        ("B m0 s1", 2120, 4200),
        ("send m0 s1->s0", 4200, 4250),
        ("all_reduce s1", 4250, 4260),
        ("wait send m0 s1->s0", 4260, 4300),
        ("wait all_reduce s1", 4300, 4300),
        ("step s1", 4300, 4310),
    ),
)
"""Each worker's operations of an update, in microseconds from its beginning."""

EVERY = 10_000
"""Microseconds from the beginning of an update to that of the next."""

SHIFT = 5_000_000_000
"""How far the clock of rank 1 is behind that of rank 0, in nanoseconds."""


def program() -> str:
    """The program that the lanes are of."""
    result = CliRunner().invoke(compile_command, ["dapple", "--set", "D=2", "--set", "N=1", "--emit", "program"])
    assert result.exit_code == 0
    return result.output


def lines(rank: int, updates: int = 4, **other: Any) -> list[dict[str, Any]]:
    """What a rank's file says; ``other`` facts of the run in place of the usual ones."""
    shift = SHIFT if rank == 1 else 0
    clock = {"at": 0, "offset": shift, "uncertainty": 1000 if rank else 0}
    first = {
        "format": "chimera trace",
        "version": 1,
        "scheme": "dapple(D=2, N=1)",
        "program": sha256(program().encode()).hexdigest(),
        "rank": rank,
        "worker": rank,
        "copy": 0,
        "copies": 1,
        "layout": "pipeline",
        "backend": "gloo",
        "updates": updates,
        "micro_batch_size": 1,
        "rehearse": {"F": 0.001, "B": 0.002},
        "clock": clock,
    }
    rows = [
        [update, text, *(1000 * (update * EVERY + time) + 8_000_000_000 - shift for time in (start, end))]
        for update in range(updates)
        for text, start, end in LANES[rank]
    ]
    half = len(rows) // 2
    return [first | other, {"operations": rows[:half]}, {"operations": rows[half:]}, {"ended": None, "clock": clock}]


def text(content: list[dict[str, Any]]) -> str:
    """The text of a file."""
    return "".join(json.dumps(line) + "\n" for line in content)


def write(directory: Path, **other: Any) -> Path:
    """The directory of the trace."""
    return write_of(directory, program(), [lines(rank, **other) for rank in range(2)])


def write_of(directory: Path, schedule: str, files: list[list[dict[str, Any]]]) -> Path:
    """The directory of a trace of a program, with the files of all ranks, which know the program's digest."""
    directory.mkdir()
    (directory / "schedule.sir").write_text(schedule)
    for rank, content in enumerate(files):
        content[0]["program"] = sha256(schedule.encode()).hexdigest()
        (directory / f"rank_{rank}.jsonl").write_text(text(content))
    return directory


def compared(trace: Trace, source: ProfileSource | None = None) -> TraceComparison:
    """The comparison of a trace with what its own operations, or the source, promise."""
    return compare(trace, lanes(trace), source)
