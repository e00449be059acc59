"""The pages tell the truth: what they quote of chimera-compile is what it prints."""

import subprocess
import sys
from pathlib import Path

import pytest

from chimera_ir.driver import Level, Request, compile_scheme
from chimera_ir.source import Source

ROOT = Path(__file__).resolve().parent.parent


def test_every_quoted_command_prints_what_the_page_says() -> None:
    done = subprocess.run(
        [sys.executable, "docs/check.py"], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"run docs/check.py --update and read the difference:\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "schemes").glob("*.chim")), ids=lambda path: path.stem)
def test_every_example_scheme_compiles(path: Path) -> None:
    request = Request(Source(path.name, path.read_text()))
    levels = dict(compile_scheme(request, lambda warning: pytest.fail(warning.code)))
    assert Level.REPORT in levels
