"""Prints the interpreter to make a virtual environment with: python3, or a faster build of the same version.

    python3 .ci/interpreter.py

A Python that was built without optimisation, as pyenv builds it unless told otherwise, takes 1.6 times as long for all
that a compiler does. Where such a one comes first on the path and an optimised one of the same version after it, that
one is taken, and said so. Versions are not mixed, as packages may exist for one only.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ABOUT = """
import json, os, sys, sysconfig
import ensurepip, venv

headers = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
optimised = sys.base_prefix == "/usr" or "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "")
print(json.dumps([[*sys.version_info[:2], headers], optimised]))
"""
"""Program that says what an interpreter is. It fails where no environment can be made. Distributions optimise."""


class Interpreter(NamedTuple):
    """An executable, what it is (its version, and whether C can be compiled for it), and whether it was optimised."""

    path: str
    kind: list[int]
    optimised: bool


def preferred(interpreters: Sequence[Interpreter]) -> Interpreter:
    """The first one; if it was not optimised, the first of the same kind that was."""
    first = interpreters[0]
    return next((other for other in interpreters if other.optimised and other.kind == first.kind), first)


def on_path(path: str, name: str = "python3") -> list[Interpreter]:
    """The interpreters of this name that run, in the order of a path's folders."""
    interpreters: list[Interpreter] = []
    for executable in (Path(folder, name) for folder in path.split(os.pathsep) if folder):
        if os.access(executable, os.X_OK):
            done = subprocess.run((executable, "-c", ABOUT), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            if done.returncode == 0:
                interpreters.append(Interpreter(str(executable), *json.loads(done.stdout)))
    return interpreters


def main() -> None:
    """Prints a path, and to the standard error why it is not that of the first interpreter."""
    interpreters = on_path(os.environ["PATH"])
    chosen = preferred(interpreters) if interpreters else Interpreter(sys.executable, [], True)
    if interpreters and chosen != interpreters[0]:
        slow = f"{interpreters[0].path} was built without --enable-optimizations"
        print(f"{slow}: {chosen.path} is used (PYTHON=python3: the first)", file=sys.stderr)
    print(chosen.path)


if __name__ == "__main__":
    main()
