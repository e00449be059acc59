"""What tests start as processes of their own, however it is installed: nothing has to lie beside the interpreter."""

import os
import shutil
import socket
import sys
from contextlib import suppress
from importlib import metadata
from itertools import count

COMPILE = (sys.executable, "-c", "from chimera_ir.start import compile_; compile_()")
"""chimera-compile, of the package that the tests import."""


_ports = count(10_000 + os.getpid() * 20 % 20_000)
"""Below those that a system hands out by itself; processes of tests begin at different ones."""


def free_port() -> int:
    """A port for a server that is started later, and that no other process is given in the meantime."""
    for port in _ports:
        with suppress(OSError), socket.socket() as server:
            server.bind(("127.0.0.1", port))
            return port
    raise AssertionError("count() does not end")


def program(name: str, distribution: str) -> str:
    """The path of a program: where its distribution is installed, whatever environment that is, else on the PATH.

    Raises
    ------
    FileNotFoundError
        If neither has one of that name.
    """
    with suppress(metadata.PackageNotFoundError):
        for file in metadata.files(distribution) or ():
            if file.name in (name, f"{name}.exe") and file.parent.name in ("bin", "Scripts"):
                return str(file.locate())
    if path := shutil.which(name):
        return path
    raise FileNotFoundError(f"{name} is not installed: pip install {distribution}")
