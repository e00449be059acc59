"""Runs cases on the checkout that is imported from, and writes what they say and write, a folder for each.

PYTHONPATH=CHECKOUT python collect.py CHECKOUT INPUTS OUT [PATTERN]
"""

import contextlib
import io
import os
import pkgutil
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any


def commands(checkout: Path) -> dict[str, Callable[[], object]]:
    """The commands that a checkout installs, ready to be called."""
    told = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    found = {}
    for name, target in told.items():
        module, _, function = target.partition(":")
        found[name] = getattr(import_module(module), function)
    return found


def warm_up() -> None:
    """Imports the compiler, all but what needs torch, so that no case has to."""
    package = import_module("chimera_ir")
    for module in pkgutil.walk_packages(package.__path__, "chimera_ir."):
        if ".measure" not in module.name and not module.name.endswith("__main__"):
            import_module(module.name)


def call(command: Callable[[], object], words: list[str]) -> tuple[int, str, str]:
    """The exit status of a command, what it prints and what it says on standard error."""
    sys.argv = words
    printed, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        try:
            command()
            status: object = 0
        except SystemExit as end:
            status = end.code
    return int(status or 0) if not isinstance(status, str) else 1, printed.getvalue(), said.getvalue()


def run(command: Callable[[], object], words: list[str], into: Path) -> None:
    """One case, in a process of its own that has all modules already."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        (into / "died").write_text(str(status)) if status else None
        return
    ended = 1
    try:
        status, printed, said = call(command, words)
        (into / "status").write_text(f"{status}\n", encoding="utf-8")
        (into / "stdout").write_text(printed, encoding="utf-8")
        (into / "stderr").write_text(said, encoding="utf-8")
        ended = 0
    finally:
        os._exit(ended)


def collect(case: Any, command: Callable[[], object] | None, inputs: Path, into: Path) -> None:
    """Collects all that one case prints and writes; ``command`` is None if the checkout does not have it."""
    into.mkdir(parents=True)
    if command is None:
        (into / "status").write_text("no such command\n")
        return
    with tempfile.TemporaryDirectory() as place:
        for name in ("docs", "examples", "tests"):
            (Path(place) / name).symlink_to(inputs / name)
        os.chdir(place)
        run(command, [case.command, *case.arguments], into)
        if (Path(place) / "out").exists():
            shutil.copytree(Path(place) / "out", into / "out")
        os.chdir("/")


def part(name: str) -> str:
    """Part of the cases that a case belongs to: ``library/gpipe``."""
    return "/".join(name.split("/")[:2]).partition("-")[0]


def main() -> None:
    """Runs all cases, or those whose name matches a pattern."""
    checkout, inputs, out = map(Path, sys.argv[1:4])
    pattern = sys.argv[4] if len(sys.argv) > 4 else "*"
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    cases = import_module("cases").cases
    known = commands(checkout)
    assert Path(str(import_module("chimera_ir").__file__)).is_relative_to(checkout), "another chimera_ir was imported"
    warm_up()
    os.environ |= {"CHIMERA_CACHE": "", "COLUMNS": "120", "NO_COLOR": "1"}
    begun = time.monotonic()
    chosen = [case for case in cases(inputs) if fnmatch(case.name, pattern)]
    for number, case in enumerate(chosen):
        collect(case, known.get(case.command), inputs, out / case.name)
        if number + 1 == len(chosen) or part(chosen[number + 1].name) != part(case.name):
            done = f"{part(case.name)}, {number + 1} of {len(chosen)} cases, {time.monotonic() - begun:.0f} s"
            print(f"{out.parent.name}: {done}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
