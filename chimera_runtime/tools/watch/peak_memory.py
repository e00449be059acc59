"""``--peak-memory``: peak memory of every rank, next to the need that the report predicts."""

import gc
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

from chimera_runtime.ranks.cpu_allocator import give_back
from chimera_runtime.tools.watch.memory import RankNeed
from chimera_runtime.values.byte_text import byte_text

_STATUS = Path("/proc/self/status")
_PEAK, _NOW = "VmHWM", "VmRSS"

_CLEAR = Path("/proc/self/clear_refs")
"""File of Linux to which a 5 is written to begin a new peak: proc(5)."""

ON_HOST = "resident memory of the process, above what it had before its stages were built"
ON_GPU = "of tensors on the GPU, by torch's allocator"


class PeakMemory:
    """Compares the memory that this rank needs, computed before training, with its peak from then on.

    ``before`` are the bytes that the process used before its stages were built, see `resident`.
    """

    def __init__(self, need: RankNeed, before: int) -> None:
        self._world = need.context.world
        self._before = before
        facts = need.context.facts
        self._copies = sum(of_stage.copies for of_stage in facts.stages.values())
        self._activations = max((sum(k.activations + k.begun for k in moment) for moment in facts.kept), default=0)
        self._need = need.need().total
        self._on_host = need.on_host()
        if self._world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._world.device)
        else:
            gc.collect()
            give_back()
            with suppress(OSError):
                _CLEAR.write_text("5", encoding="ascii")

    def lines(self) -> list[str]:
        """Returns the lines of a table on rank 0, and none elsewhere: M_theta, M_a, bytes needed and used by each rank.

        Where saved tensors move to the host, it also has the bytes needed and used there. Every rank calls it, before
        any of them ends.
        """
        host = (self._on_host, self._world.host_link.peak) if self._world.job.moves else ()
        mine = self._copies, self._activations, (self._need, self._used(), *host)
        of_ranks = self._world.control_group.collect("peak", mine, "for the memory that it has used")
        if self._world.place.rank:
            return []
        units = self._world.job.units
        rows = [("rank", "M_theta", "M_a", "needs", "used", *(("needs on host", "used on host") if host else ()))]
        for rank, (copies, activations, sizes) in enumerate(of_ranks):
            rows.append((str(rank), str(copies), f"{activations / units:g}", *map(byte_text, sizes)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        measured = ON_GPU if self._world.device.type == "cuda" else ON_HOST
        measured += "; what is on the host apart" if host else ""
        return [f"peak memory ({measured})", *(f"  {line}" for line in table)]

    def _used(self) -> int:
        if self._world.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._world.device)
        return max(0, _read(_PEAK) - self._before - self._world.host_link.pinned)


def resident() -> int:
    """Bytes of this process that are in memory."""
    return _read(_NOW)


def _read(name: str) -> int:
    """Bytes in the line ``name`` of this process's status on Linux; on other systems always the peak."""
    with suppress(OSError, StopIteration):
        lines = _STATUS.read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
