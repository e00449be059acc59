"""``--backend`` and ``--backend-module``: gloo, nccl, or a backend that a file registers with torch.distributed."""

import importlib.util
import sys
from pathlib import Path

import torch.distributed as dist

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import MISUSED, Misuse


def register(backend: str, module: Path) -> None:
    """Runs the file that registers a backend.

    Raises
    ------
    Misuse
        If the file cannot be read, or does not register the backend.
    ModelError
        If it cannot be run.
    """
    file = module.resolve()
    if not file.is_file():
        raise Misuse(f"--backend-module {module}: there is no such file")
    spec = importlib.util.spec_from_file_location("chimera_backend", file)
    if spec is None or spec.loader is None:
        raise Misuse(f"--backend-module {module}: not a Python file (its name must end in .py)")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    with UserCode("importing the backend module", MISUSED):
        spec.loader.exec_module(loaded)
    if not known(backend):
        raise Misuse(
            f"--backend {backend}: {module} registers no backend of that name; it has to call "
            f"torch.distributed.Backend.register_backend({backend!r}, ..)"
        )


def known(backend: str) -> bool:
    """Whether torch.distributed has such a backend."""
    return backend.lower() in dist.Backend.backend_list
