"""Runs the commands that README.md and the pages below docs/ quote, and compares what they print with what is quoted.

    python docs/check.py                       # says which blocks are out of date
    python docs/check.py --update              # writes what is printed now
    python docs/check.py docs/reference/ir.md  # only this page

A block is a fence of the kind ``console`` that begins with ``$ chimera compile``, ``compare``, ``plan`` or
``profile``, with one of these as ``$ chimera-compile``, or with ``$ python docs/paper_tables``; a line ``...`` in it
stands for any number of lines. The commands see docs/ and examples/; what they write goes into a directory that is
removed. A block that starts ranks is run for ``--update`` and for a page that is named: what it prints is compared by
tests/e2e/test_adoption.py.
"""

import os
import re
import runpy
import subprocess
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from chimera_ir import library, start
from chimera_ir.compilation import Compilation
from chimera_ir.request import Request

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(
    r"(?<=^```console\n)\$ (?:chimera[- ](?:compile|compare|plan|profile|search)|python docs/paper_tables).*?(?=^```$)",
    re.MULTILINE | re.DOTALL,
)
CALL = re.compile(r"(?P<words>[^|'\"<>;&$]+?)(?P<filter>(?: 2>&1)? \|.*)?")


@contextmanager
def stage() -> Iterator[tuple[Path, dict[str, str]]]:
    """A directory that sees docs/ and examples/, and an environment with the commands of this package, nothing kept."""
    python = Path(sys.executable).absolute()
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory() as programs:
        for name in ("docs", "examples"):
            (Path(place) / name).symlink_to(ROOT / name)
        for name, entry in scripts.items():
            module, _, function = entry.partition(":")
            script = Path(programs) / name
            program = f"from {module} import {function}\n{function}()\n"
            script.write_text(f"#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n{program}", encoding="utf-8")
            script.chmod(0o755)
        script = Path(programs) / "python"
        script.write_text(f'#!/bin/sh\nexec "{python}" "$@"\n', encoding="utf-8")
        script.chmod(0o755)
        path = os.pathsep.join((programs, str(python.parent), os.environ["PATH"]))
        kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
        yield Path(place), {**kept, "PATH": path}


def run(commands: list[str]) -> str:
    """The commands with what they print, errors included, as a terminal would show them."""
    shown = []
    with stage() as (place, environment):
        for command in commands:
            lines = [line.rstrip() for line in printed(command, place, environment).splitlines()]
            shown.append("\n".join([f"$ {command}", *lines]) + "\n")
    return "".join(shown)


def printed(command: str, place: Path, environment: Mapping[str, str]) -> str:
    """What one command prints.

    A command of this package runs in a process forked from this one, which has imported what most of them need; the
    shell filters what it prints. Whatever else there is, the shell runs.
    """
    found = CALL.fullmatch(command)
    words = found["words"].split() if found else []
    if found is None or words[0] not in CALLED or "profile" in words:
        return shell(f"({command}) 2>&1", place, environment)
    with tempfile.TemporaryDirectory() as folder:
        out, errors = (Path(folder) / name for name in ("out", "errors"))
        both = found["filter"] is None or found["filter"].startswith(" 2>&1")
        call(words, place, environment, out, out if both else errors)
        said = "" if both else errors.read_text(encoding="utf-8")
        return said + shell(f"cat {out} {found['filter'] or ''}", place, environment)


def shell(command: str, place: Path, environment: Mapping[str, str]) -> str:
    """The standard output of a command."""
    return subprocess.run(
        ["bash", "-c", command], cwd=place, env=environment, stdout=subprocess.PIPE, text=True, check=False
    ).stdout


def call(words: list[str], place: Path, environment: Mapping[str, str], out: Path, errors: Path) -> None:
    """Calls a command of this package, with files for its standard streams; afterwards its process has ended."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        for number, path in ((1, out), (2, errors)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        os.chdir(place)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = words[1:] if words[0] == "python" else words
        CALLED[words[0]]()
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _script() -> None:
    """A directory or file with Python, as ``python`` runs it."""
    runpy.run_path(sys.argv[0], run_name="__main__")


CALLED: Mapping[str, Callable[[], object]] = {
    "chimera": start.chimera,
    "chimera-compile": start.compile_,
    "python": _script,
}
"""What is called without a program of its own."""


def matches(text: str, printed: str) -> bool:
    """Whether a block says what is printed, up to its ``...`` lines."""
    pattern = "(?s:.*?)".join(re.escape(part) for part in re.split(r"^\.\.\.\n", text, flags=re.MULTILINE))
    return re.fullmatch(pattern, printed) is not None


def main() -> None:
    """Checks or updates every page."""
    pages = [Path(word).resolve() for word in sys.argv[1:] if word != "--update"]
    update, stale = "--update" in sys.argv[1:], 0
    assert Compilation(Request(library.source("chimera"))).files  # imports, before any fork, what compiling needs
    for page in pages or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        fresh = text
        for found in BLOCK.finditer(text):
            block = found[0]
            if "torchrun" in block and not (update or pages):
                continue
            printed = run([line[2:] for line in block.splitlines() if line.startswith("$ ")])
            if matches(block, printed):
                continue
            stale += 1
            sys.stdout.write(f"{page.relative_to(ROOT)}: {block.splitlines()[0]}\n")
            fresh = fresh.replace(block, printed)
        if update and fresh != text:
            page.write_text(fresh, encoding="utf-8")
    sys.exit(1 if stale and not update else 0)


if __name__ == "__main__":
    main()
