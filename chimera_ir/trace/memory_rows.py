"""Memory of carries and of the host: what the ranks of a run used at most, beside what the profile predicts."""

from collections.abc import Iterator
from typing import NamedTuple

from chimera_ir.ir.levels import Program
from chimera_ir.ir.streams import view_of
from chimera_ir.predict.memory_need import carry_bytes, memory
from chimera_ir.trace.forecast import ProfileSource
from chimera_ir.trace.trace_files import Trace

HOST = "host"


class MemoryRow(NamedTuple):
    """The most bytes of a purpose on a worker, in the copy that used most; ``predicted`` is None without a profile."""

    worker: int
    purpose: str
    predicted: int | None
    measured: int


def memory_rows(trace: Trace, source: ProfileSource | None) -> Iterator[MemoryRow]:
    """Yields a row for each worker and each purpose of memory that was measured, in the order of workers."""
    used: dict[tuple[int, str], int] = {}
    for rank in trace.ranks:
        for purpose, measured in rank.memory.items():
            key = rank.worker, purpose
            used[key] = max(used.get(key, 0), measured)
    predicted = _predicted(view_of(trace.program), source) if source and used else {}
    for (worker, purpose), measured in sorted(used.items()):
        yield MemoryRow(worker, purpose, predicted.get((worker, purpose)), measured)


def _predicted(program: Program, source: ProfileSource) -> dict[tuple[int, str], int]:
    header, setting = program.header, source.setting
    needs = memory(program, setting)
    bytes_of = {(worker, HOST): need.host for worker, need in enumerate(needs) if header.moves}
    if header.slices == 1 or not setting.slices_known:
        return bytes_of
    carries = ((worker, carries_of(stage), size) for worker, stage, size in carry_bytes(program, setting))
    bytes_of |= {(worker, purpose): size for worker, purpose, size in carries}
    return bytes_of


def carries_of(stage: int) -> str:
    """The purpose of a stage's carries in a rank's file, such as ``carries s0``."""
    return f"carries s{stage}"
