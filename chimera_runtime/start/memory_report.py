"""Note on an error for lack of memory: how much there is, how much was used, and how much the schedule keeps."""

import os
import re
import resource
import sys

import torch

from chimera_runtime.program.rank_facts import KeptMicros, RankFacts
from chimera_runtime.values.byte_text import byte_text


def memory_report(device: torch.device, facts: RankFacts | None, slices: int = 1, units: int = 1) -> str:
    """Describes in one line the memory that this process uses and, with ``facts``, how much the schedule keeps.

    ``slices`` is the number of slices of a micro-batch. ``facts`` counts a whole micro-batch as ``units``: more than
    one where micro-batches are cut into parts.
    """
    used = _on_gpu(device) if device.type == "cuda" else _on_host()
    if facts is None:
        return f"memory: {used}"
    fullest = max(facts.kept, key=_activations, default=())
    copies = ", ".join(f"stage {stage}: {of_stage.copies}" for stage, of_stage in sorted(facts.stages.items()))
    words = [
        f"stage {micros.stage}: {(micros.activations + micros.begun) / units:g}"
        f"{f' and {micros.inputs / units:g} x inputs alone' if micros.inputs else ''}"
        f"{f' and {micros.carries * slices / units:g} carries' if micros.carries else ''}"
        for micros in fullest
    ]
    host = max((sum(of_stage.activations for of_stage in moment) for moment in facts.on_host), default=0)
    host_part = f", of up to {host / units:g} more on the host" if host else ""
    return (
        f"memory: {used}; the schedule keeps {sum(f.copies for f in facts.stages.values())} x M_theta of weights here "
        f"({copies}) and up to {_activations(fullest) / units:g} x M_a of activations ({', '.join(words) or 'none'})"
        f"{host_part}; "
        "--memory-limit of train.py says how many bytes that is"
    )


def wanted_bytes(error: BaseException | None) -> str:
    """The bytes that an allocation of torch lacked, as text; empty if the error for lack of memory does not say."""
    match = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMGT]iB)", f"{error}")
    if match is None:
        return ""
    return byte_text(int(match[1])) if match[2] == "bytes" else f"{match[1]} {match[2]}"


def _activations(kept: tuple[KeptMicros, ...]) -> int:
    return sum(of_stage.activations + of_stage.begun for of_stage in kept)


def _on_gpu(device: torch.device) -> str:
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return (
        f"{byte_text(allocated)} of tensors in {byte_text(reserved)} that torch holds, {byte_text(free)} free "
        f"of {byte_text(total)} on {device}; at most {byte_text(torch.cuda.max_memory_allocated(device))} of tensors "
        "before"
    )


def _on_host() -> str:
    """Describes the peak memory of this process (``ru_maxrss``, in bytes on macOS), and what there is for it."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    limited = "" if limit == resource.RLIM_INFINITY else f", limited to {byte_text(limit)} of addresses (ulimit -v)"
    return f"this process has used at most {byte_text(peak)}, of {byte_text(total)} in the machine{limited}"
