"""The command line as a process: what depends on the interpreter's start, its hash seed, its streams."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from tests.repeatable import also
from tests.unit.command import contents, shell

MIDDLE = Path(__file__).resolve().parent.parent / "errors" / "middle"


def test_the_same_input_gives_the_same_bytes_whatever_the_hash_seed_and_the_place(tmp_path: Path) -> None:
    written, said = [], []
    for seed in ("1", "2"):
        folder = tmp_path / f"folder{seed}"
        folder.mkdir()
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = shell("chimera", "--set", "N=6", "--set", "f=2", "--out", "o", env=environment, cwd=folder)
        assert (done.returncode, done.stderr) == (0, b"")
        said.append(done.stdout)
        written.append(contents(folder))
    assert said[0] == said[1]
    assert written[0] == written[1]


def test_diagnostics_do_not_depend_on_the_hash_seed() -> None:
    said = {
        shell(str(file), env=os.environ | {"PYTHONHASHSEED": seed}).stderr
        for seed in ("1", "2")
        for file in (MIDDLE / "missing_lines.sir",)
    }
    assert len(said) == 1
    assert said.pop().count(b"error[") >= 2


@pytest.mark.parametrize("arguments", [("--emit", "program", "--set", "N=500"), ("--out", "o"), ("--list",)])
def test_a_reader_who_leaves_early_causes_no_noise(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = shell("chimera", *arguments, stdout=writing, cwd=tmp_path)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "o" / "train.py").is_file() == ("--out" in arguments)


@pytest.mark.parametrize("encoding", also(["ascii"], ["latin-1"]))
def test_a_terminal_without_unicode_still_gets_a_report(tmp_path: Path, encoding: str) -> None:
    done = shell("chimera", "--out", "o", env=os.environ | {"PYTHONIOENCODING": encoding}, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"times as fast as" in done.stdout


@pytest.mark.parametrize("encoding", also(["cp1252"], ["ascii", "latin-1", "cp437"]))
def test_a_picture_has_the_same_columns_and_tells_its_operations_apart_in_every_encoding(encoding: str) -> None:
    pictures = []
    for environment in ({"PYTHONIOENCODING": "utf-8"}, {"PYTHONIOENCODING": encoding}):
        done = shell("dualpipe_v", "--emit", "timeline", env=os.environ | environment)
        assert (done.returncode, done.stderr) == (0, b"")
        pictures.append(done.stdout.decode(environment["PYTHONIOENCODING"]).replace("\r", ""))
    drawn, plain = pictures
    assert len(drawn) == len(plain)
    assert "?" not in plain
    signs = dict(zip(drawn, plain, strict=True))
    assert len({signs[sign] for sign in "─═╌≡·▾"}) == 6
    assert all(before == after or before in "─═╌≡·▾" for before, after in zip(drawn, plain, strict=True))


@pytest.mark.parametrize("entry", ["chimera", "module", "compile_", "plan", "profile", "trace"])
def test_an_interrupt_while_a_command_is_imported_ends_it_as_any_other(entry: str) -> None:
    """The first import that a command makes stands for all of them."""
    program = (
        "import builtins; from chimera_ir import start; original = builtins.__import__\n"
        "def interrupted(name, *rest):\n"
        "    if name.startswith('chimera_ir.'): raise KeyboardInterrupt\n"
        "    return original(name, *rest)\n"
        f"builtins.__import__ = interrupted; start.{entry}()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
