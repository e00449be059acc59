"""``--bundle FILE``: what a bug report needs, in a zip file that is written when a run fails.

Every rank adds what it knows; the first one of each machine adds the program and the versions.
"""

import fcntl
import json
import os
import platform
import socket
import sys
import threading
import time
import traceback
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import FrameType

import torch

from chimera_runtime.errors import Misuse, Unwritable
from chimera_runtime.tools.open.stdio import last_lines, write_error

_PROGRAM = ("schedule.sir", "program.json", "report.json")
_ABOUT = "about.json"

_PACKAGES = ("torch", "numpy", "chimera_ir")

_PREFIXES = ("CUDA_", "GLOO_", "NCCL_", "PYTORCH_", "TORCH_", "TORCHELASTIC_", "TORCHINDUCTOR_", "MALLOC_")
_NAMES = {
    *("GLIBC_TUNABLES", "KMP_AFFINITY", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "OMP_PROC_BIND"),
    *("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE"),
}


class BugReport:
    """The part of this rank in the file.

    Raises
    ------
    Misuse
        If there is a file of that name that is none of these.
    Unwritable
        If the file cannot be written.
    """

    def __init__(self, options: Namespace, directory: Path, rank: int) -> None:
        self._path: Path = options.bundle.resolve()
        self._directory = directory
        self._rank = rank
        self._about = {
            "command": _without_values_for_the_model(sys.argv),
            "python": sys.version,
            "platform": platform.platform(),
            "packages": dict(_packages()),
            "build": torch.__config__.show(),
            "device": _device(options),
            "environment": dict(
                sorted((k, v) for k, v in os.environ.items() if k in _NAMES or k.startswith(_PREFIXES))
            ),
        }
        try:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                _clear(self._path)
        except OSError as error:
            raise Unwritable(f"--bundle {options.bundle}: {error.strerror}") from error

    def add(self, message: str) -> None:
        """Adds what this rank says at its end, its last lines before, and where its threads are.

        It may take as long as other ranks of the machine do the same: to be called in a thread. That it cannot be done
        is told and stops nothing.
        """
        try:
            self._add(message)
        except (OSError, zipfile.BadZipFile) as error:
            write_error(f"train.py: rank {self._rank}: --bundle {self._path}: {error}")

    def _add(self, message: str) -> None:
        texts = {f"rank_{self._rank}.txt": "\n".join(self._account(message))}
        with os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
                if _ABOUT not in archive.namelist():
                    texts[_ABOUT] = json.dumps(self._about, indent=2)
                    for name in _PROGRAM:
                        if (self._directory / name).is_file():
                            archive.write(self._directory / name, name)
                for name, text in texts.items():
                    archive.writestr(name, text)

    def _account(self, message: str) -> Iterator[str]:
        yield f"rank {self._rank} on {socket.gethostname()}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
        yield f"\nat its end:\n{message}"
        yield "\nthe last lines that it wrote:"
        yield from tuple(last_lines)
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for thread, frame in sys._current_frames().items():
            if thread != threading.get_ident():
                yield f"\nthread {names.get(thread, thread)}:\n{_stack(frame)}"


def _stack(frame: FrameType) -> str:
    """Where a thread is, which runs on meanwhile and may change what is read, such as the cache of source lines."""
    try:
        return "".join(traceback.format_stack(frame)).rstrip()
    except Exception as error:
        return f"(cannot be told: {error!r})"


def _clear(path: Path) -> None:
    """Makes room for a new bundle; what lies there may be one of an earlier run."""
    if path.exists() and not _is_bundle(path):
        raise Misuse(f"--bundle {path}: exists and was not written by --bundle; choose another name or remove it")
    path.touch()
    path.unlink()


def _is_bundle(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return _ABOUT in archive.namelist()


def _without_values_for_the_model(words: list[str]) -> list[str]:
    """The command line without what follows ``--``: that is the model file's, and may be anything."""
    if "--" not in words:
        return words
    end = words.index("--")
    return [*words[: end + 1], f"({len(words) - end - 1} left out)"]


def _packages() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _device(options: Namespace) -> str:
    """The GPU of this rank or, where none is used, the processor."""
    count = torch.cuda.device_count()
    if count and (options.device == "cuda" or (options.device is None and options.backend != "gloo")):
        local = int(os.environ.get("LOCAL_RANK", "0")) % count
        return f"{count} GPUs, {torch.cuda.get_device_name(local)}"
    return f"{os.cpu_count()} processors, {platform.machine()}"
