"""The scripts of a page as text: their types, their length, and names that stay apart once they are one script."""

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.node import NODE, SCRIPTS
from tests.patience import PATIENCE

COMPILER = Path(sys.prefix) / "typescript" / "node_modules" / "typescript" / "bin" / "tsc"
OPTIONS = (
    *("--noEmit", "--allowJs", "--checkJs", "--strict", "--noUnusedLocals", "--noImplicitReturns", "--target"),
    *("es2022", "--module", "es2022", "--moduleResolution", "bundler", "--lib", "es2022,dom,dom.iterable"),
    *("--types", ""),
)
LONGEST = 400


def wrong_types(folder: Path) -> str:
    """Errors that TypeScript finds in the scripts of a folder, by their comments and the declarations beside them."""
    files = sorted([*folder.glob("*.js"), *folder.glob("*.d.ts")])
    command = [NODE, COMPILER, *OPTIONS, *files]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE).stdout


@pytest.mark.skipif(
    NODE is None or not COMPILER.exists(), reason="no TypeScript here; make typescript installs it where npm is"
)
def test_the_types_in_comments_hold(tmp_path: Path) -> None:
    assert wrong_types(SCRIPTS) == ""
    shutil.copytree(SCRIPTS, tmp_path, dirs_exist_ok=True)
    engine = (tmp_path / "engine.js").read_text(encoding="utf-8")
    assert "plan.schedule.events" in engine
    (tmp_path / "engine.js").write_text(
        engine.replace("plan.schedule.events", "plan.schedule.evenst"), encoding="utf-8"
    )
    assert "'evenst' does not exist" in wrong_types(tmp_path)


def test_a_script_is_short_enough_to_be_read_at_once() -> None:
    lengths = {
        path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in SCRIPTS.iterdir() if path.is_file()
    }
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}


def test_scripts_have_no_two_names_of_the_same_spelling_at_the_top() -> None:
    declared = Counter[str]()
    for path in SCRIPTS.glob("*.js"):
        text = path.read_text(encoding="utf-8")
        declared.update(re.findall(r"^(?:export )?(?:async )?(?:function\*?|class|let|var) (\w+)", text, re.MULTILINE))
        for single, several in re.findall(r"^(?:export )?const (?:(\w+)|\[([\w, ]+)\])", text, re.MULTILINE):
            declared.update([single] if single else several.split(", "))
    assert [name for name, count in declared.items() if count > 1] == []
