"""Runs the commands that README.md and the pages below docs/ quote, and compares what they print with what is quoted.

    python docs/check.py             # says which blocks are out of date
    python docs/check.py --update    # writes what is printed now

A block is a fence of the kind ``console`` that begins with ``$ chimera compile``, ``plan`` or ``profile``, with one of
these as ``$ chimera-compile``, or with ``$ python docs/paper_tables``; a line ``...`` in it stands for any number of
lines. The commands see docs/ and examples/; what they write goes into a directory that is removed.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(
    r"(?<=^```console\n)\$ (?:chimera[- ](?:compile|plan|profile)|python docs/paper_tables).*?(?=^```$)",
    re.MULTILINE | re.DOTALL,
)


@contextmanager
def stage() -> Iterator[tuple[Path, dict[str, str]]]:
    """A directory that sees docs/ and examples/, and an environment with the commands of this package, nothing kept."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory() as programs:
        for name in ("docs", "examples"):
            (Path(place) / name).symlink_to(ROOT / name)
        for name, entry in scripts.items():
            module, _, function = entry.partition(":")
            script = Path(programs) / name
            program = f"from {module} import {function}\n{function}()\n"
            script.write_text(
                f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n{program}", encoding="utf-8"
            )
            script.chmod(0o755)
        python = Path(programs) / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
        python.chmod(0o755)
        path = os.pathsep.join((programs, str(Path(sys.executable).parent), os.environ["PATH"]))
        yield Path(place), {**os.environ, "PATH": path, "CHIMERA_CACHE": ""}


def run(commands: list[str]) -> str:
    """The commands with what they print, errors included, as a terminal would show them."""
    shown = []
    with stage() as (place, environment):
        for command in commands:
            done = subprocess.run(
                ["bash", "-c", f"({command}) 2>&1"],
                cwd=place,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            lines = [line.rstrip() for line in done.stdout.splitlines()]
            shown.append("\n".join([f"$ {command}", *lines]) + "\n")
    return "".join(shown)


def matches(text: str, printed: str) -> bool:
    """Whether a block says what is printed, up to its ``...`` lines."""
    pattern = "(?s:.*?)".join(re.escape(part) for part in re.split(r"^\.\.\.\n", text, flags=re.MULTILINE))
    return re.fullmatch(pattern, printed) is not None


def main() -> None:
    """Checks or updates every page."""
    update, stale = "--update" in sys.argv[1:], 0
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        fresh = text
        for found in BLOCK.finditer(text):
            block = found[0]
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
