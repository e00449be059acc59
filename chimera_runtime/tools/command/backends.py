"""``--backend`` and ``--backend-module``: gloo, nccl, or a backend that a file registers with torch.distributed."""

import importlib.util
import sys
from pathlib import Path

import torch.distributed as dist

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import MISUSED
from chimera_runtime.errors import tools_command as mistakes
from chimera_runtime.errors.tools import directory_cannot_be_written as cannot_be_run


def register(backend: str, module: Path) -> None:
    """Runs the file that registers a backend.

    Raises `Misuse` if the file is not there, or does not register the backend; `ModelError` if its code fails.
    """
    file = module.resolve()
    if not file.is_file():
        raise cannot_be_run("--backend-module", module, mistakes.NO_SUCH_FILE)
    spec = importlib.util.spec_from_file_location("chimera_backend", file)
    if spec is None or spec.loader is None:
        raise cannot_be_run("--backend-module", module, mistakes.NOT_PYTHON)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    with UserCode("importing the backend module", MISUSED):
        spec.loader.exec_module(loaded)
    if backend.lower() not in dist.Backend.backend_list:
        raise mistakes.backend_is_not_registered(backend, module)
