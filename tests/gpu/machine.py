"""What there is to run on: devices, versions, settings."""

import os
import platform
import subprocess
from dataclasses import dataclass

import torch

from tests.gpu.commands import ROOT

RANKS_OF_ONE_DEVICE = 4
"""How many ranks share a device that is alone: with gloo, or with NCCL if each is a node of its own."""

NODE = "tests/gpu/node.py"

SETTINGS = ("NCCL_", "TORCH_NCCL_", "CUDA_", "PYTORCH_CUDA_", "GLOO_")
"""How the variables begin that the report repeats."""


@dataclass(frozen=True)
class Ground:
    """What the steps run on.

    Attributes
    ----------
    devices
        How many GPUs there are, or are pretended.
    options
        Of train.py: backend and device.
    ranks
        How many can run at a time.
    pretended
        Whether the CPU stands in for the devices.
    started_by
        The script that torchrun starts in place of a program, with the program as its argument.
    """

    devices: int
    backend: str
    options: tuple[str, ...]
    ranks: int
    pretended: bool
    started_by: tuple[str, ...] = ()


def ground(devices: int, backend: str | None, pretended: bool) -> Ground:
    """One device is shared by several ranks, with gloo; of more each has a rank, with NCCL unless another is named."""
    chosen = backend or ("gloo" if devices == 1 or pretended else "nccl")
    options = ("--backend", chosen)
    if chosen == "strict":
        options += ("--backend-module", "tests/e2e/strict.py")
    elif chosen == "gloo" and not pretended:
        options += ("--device", "cuda")
    if devices > 1:
        return Ground(devices, chosen, options, devices, pretended)
    started_by = (NODE,) if chosen == "nccl" else ()
    return Ground(devices, chosen, options, RANKS_OF_ONE_DEVICE, pretended, started_by)


def circumstances() -> list[tuple[str, str]]:
    """Versions, devices and settings; what cannot be found out is left out."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else ""
    revision = _said("git", "rev-parse", "HEAD")
    changed = len(_said("git", "status", "--porcelain", "--untracked-files=no").splitlines())
    facts = [
        ("revision", f"{revision}, files changed: {changed}" if changed else revision),
        ("torch", torch.__version__),
        ("CUDA of torch", torch.version.cuda or "none"),
        ("NCCL", nccl),
        ("Python", platform.python_version()),
        ("system", f"{platform.platform()}, {os.cpu_count()} cores"),
        ("devices", _said("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")),
        ("links between devices", _said("nvidia-smi", "topo", "-m")),
        *((name, value) for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)),
    ]
    return [(name, value) for name, value in facts if value]


def _said(*words: str) -> str:
    """What a command says; nothing if it is not there or fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout.strip()
