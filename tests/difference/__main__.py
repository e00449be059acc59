"""Compares what two revisions print and write: levels, scripts, reports, pictures, plans, predictions, diagnostics.

    python -m tests.difference OLD            # a revision with the working tree
    python -m tests.difference OLD NEW
    python -m tests.difference OLD --only 'library/chimera-*'

Scripts are compared by what they do: comments, docstrings and the layout of lines do not count. JSON is compared by
value, everything else as text. The copy of chimera_runtime in an output directory is left out, and so is what follows
from it: its files in the manifest, and the digest of the program. Exit status 0 if all is equal, 1 if not.
"""

import argparse
import ast
import difflib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHOWN = 12
"""How many lines of a difference are shown."""


def checkout(revision: str | None, into: Path) -> Path:
    """The files of a revision, in a folder of their own; the working tree where none is named."""
    if revision is None:
        return ROOT
    packed = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(into, filter="data")
    return into


def collected(tree: Path, out: Path, pattern: str) -> subprocess.Popen[bytes]:
    """Begins to collect what a checkout says."""
    path = os.pathsep.join((str(tree), str(tree / "templates")))
    script = ROOT / "tests" / "difference" / "collect.py"
    command = [sys.executable, str(script), str(tree), str(ROOT), str(out), pattern]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, cwd=out)


RUNTIME = "chimera_runtime/"
"""How paths in an output directory begin that are the runtime's."""

DIGEST = re.compile(r'(PROGRAM = |"program": )"[0-9a-f]{16}"')
"""The digest of a program and of the runtime, as scripts and program.json have it."""


def meaning(path: Path) -> str:
    """What of a file is compared, as text."""
    text = DIGEST.sub(r'\1"digest"', path.read_text(encoding="utf-8", errors="replace"))
    if path.name == ".chimera-compile":
        return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(RUNTIME))
    if path.suffix == ".json" or (path.name == "stdout" and text.startswith("{")):
        return json.dumps(json.loads(text), indent=1)
    if path.suffix == ".py":
        return ast.unparse(_undocumented(ast.parse(text)))
    return text


def _undocumented(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def kind(path: Path) -> str:
    """What sort of output a file is, for the summary."""
    return f"{path.parts[0]}: {path.name if path.suffix != '.py' else 'scripts'}"


def differences(old: Path, new: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """Every file with the lines in which it differs, and None where it does not."""
    names = {path.relative_to(side) for side in (old, new) for path in side.rglob("*") if path.is_file()}
    names = {name for name in names if f"/out/{RUNTIME}" not in name.as_posix()}
    for name in sorted(names):
        if not ((old / name).exists() and (new / name).exists()):
            yield name, [f"only in the {'old' if (old / name).exists() else 'new'} one"]
            continue
        if (old / name).read_bytes() == (new / name).read_bytes():
            yield name, None
            continue
        before, after = (meaning(side / name).splitlines() for side in (old, new))
        yield name, list(difflib.unified_diff(before, after, "old", "new", lineterm="", n=1)) or None


def main() -> None:
    """Collects from both sides at once, compares, and prints the first of each kind of difference and how many."""
    parser = argparse.ArgumentParser(prog="python -m tests.difference", description=__doc__.split("\n")[0])
    parser.add_argument("old")
    parser.add_argument("new", nargs="?")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases whose name matches")
    parser.add_argument("--all", action="store_true", help="show every difference, not one of each kind")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sides, running = [Path(folder) / "old", Path(folder) / "new"], []
        for side, revision in zip(sides, (arguments.old, arguments.new), strict=True):
            (side / "out").mkdir(parents=True)
            running.append(collected(checkout(revision, side / "tree"), side / "out", arguments.only))
        ended = [process.wait() for process in running]
        if any(ended):
            sys.exit("the outputs could not be collected")
        sys.exit(1 if told(differences(sides[0] / "out", sides[1] / "out"), every=arguments.all) else 0)


def told(found: Iterator[tuple[Path, list[str] | None]], *, every: bool) -> bool:
    """Prints the differences and a summary; whether there are any."""
    equal, different = Counter[str](), Counter[str]()
    for name, lines in found:
        (equal if lines is None else different)[kind(name)] += 1
        if lines is not None and (every or different[kind(name)] == 1):
            print(f"{name}:", *lines[:SHOWN], *(["..."] if len(lines) > SHOWN else []), sep="\n    ")
    for each in sorted({*equal, *different}):
        print(f"{each:<40} {equal[each]:>6} equal {different[each]:>6} different")
    return bool(different)


if __name__ == "__main__":
    main()
