"""All commands under one name: what each is called, what is imported for it, and what a shell completes."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

import chimera_ir
from chimera_ir import library
from chimera_ir.commands.common import WRONG_COMMAND, WRONG_TEXT
from chimera_ir.commands.group import COMMANDS, NAME
from tests.patience import PATIENCE
from tests.unit.command import Ended, Run
from tests.unit.conftest import calling

ROOT = Path(__file__).resolve().parents[2]
ENTRIES: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
ALIASES = [name for name in ENTRIES if name != NAME]
MODULE = (sys.executable, "-m", "chimera_ir")


def script(name: str) -> tuple[str, ...]:
    """A program of the package that the tests import."""
    module, _, function = ENTRIES[name].partition(":")
    return sys.executable, "-c", f"from {module} import {function}; {function}()"


def called(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "100"} | variables
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False, env=environment)


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calls a program of the package in this process."""
    monkeypatch.setenv("COLUMNS", "100")

    def call(name: str, *words: str) -> Ended:
        module, _, function = ENTRIES[name].partition(":")
        return calling(getattr(import_module(module), function), name, capsys, monkeypatch)(*words)

    return call


# What a command is called.


def test_the_older_names_of_commands_remain() -> None:
    assert [f"{NAME}-{name}" for name in ("compile", "plan", "profile", "trace")] == ALIASES


@pytest.mark.parametrize(
    "name", [*(alias.split("-")[1] for alias in ALIASES), *(f"profile {of}" for of in ("stages", "layers", "links"))]
)
def test_a_command_is_the_same_by_both_names_and_speaks_of_itself_by_that_which_was_typed(
    typed: Run, name: str
) -> None:
    first, *rest = name.split()
    alias = typed(f"{NAME}-{first}", *rest, "--help")
    command = typed(NAME, first, *rest, "--help")
    assert (alias.status, alias.err) == (command.status, command.err) == (0, "")
    assert alias.out.startswith(f"Usage: {NAME}-{name} ")
    assert command.out.startswith(f"Usage: {NAME} {name} ")
    assert alias.out.split("\n", 1)[1] == command.out.split("\n", 1)[1]


@pytest.mark.parametrize("program", [script(NAME), MODULE], ids=["program", "module"])
def test_the_help_has_a_line_for_each_command_and_the_version_is_that_of_the_package(program: tuple[str, ...]) -> None:
    done = called(*program, "--help")
    listed = [line.split() for line in done.stdout.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()]
    assert [words[0] for words in listed] == list(COMMANDS)
    assert all(len(words) > 4 and words[-1].endswith(".") and not words[-1].endswith("..") for words in listed)
    assert chimera_ir.__version__ in called(*program, "--version").stdout


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("compile", "gems", "--emit", "report"), 0),
        (("compile", "chimera", "--set", "D=3"), WRONG_TEXT),
        (("trace", "nowhere"), WRONG_COMMAND),
        (("compile", "nosuch"), WRONG_COMMAND),
        (("--nonsense",), WRONG_COMMAND),
        ((), WRONG_COMMAND),
    ],
)
def test_the_module_is_the_program(words: tuple[str, ...], status: int) -> None:
    program, module = ended_by_itself(words, status), called(*MODULE, *words)
    assert (program.returncode, program.stdout) == (module.returncode, module.stdout)
    assert program.stderr == module.stderr.replace("python -m chimera_ir", NAME)


def test_the_module_speaks_of_itself_by_that_name() -> None:
    assert called(*MODULE, "compile", "--nonsense").stderr.startswith("Usage: python -m chimera_ir compile ")


@pytest.mark.parametrize(
    ("word", "advice"),
    [("comple", "did you mean compile?"), ("Plan", "did you mean plan?"), ("zzz", "there are compile, run, compare")],
)
def test_a_command_that_there_is_not_gets_a_suggestion(word: str, advice: str) -> None:
    done = called(*script(NAME), word, "--set", "D=4")
    assert (done.returncode, done.stdout) == (WRONG_COMMAND, "")
    assert f"no such command '{word}' ({advice}" in done.stderr


def ended_by_itself(words: tuple[str, ...], status: int) -> subprocess.CompletedProcess[str]:
    done = called(*script(NAME), *words)
    assert done.returncode == status
    assert (done.stdout == "") == (status != 0)
    assert "Traceback" not in done.stderr
    return done


# What is imported.


PARTS = ("planner", "codegen", "predict", "profile")
"""Parts that an emitted program does without."""


def test_the_group_imports_nothing_that_a_command_needs() -> None:
    program = (
        "import atexit, sys; from chimera_ir.start import chimera\n"
        "atexit.register(lambda: print(*sorted(sys.modules)))\n"
        "chimera()"
    )
    heavy = {"lark", "chimera_ir.compilation", "rich", "jinja2", "torch", "networkx", "chimera_ir.planner"}
    assert not heavy & {*called(sys.executable, "-c", program, "--version").stdout.splitlines()[-1].split()}
    loaded = called(sys.executable, "-c", program, "compile", "gems", "--emit", "program").stdout
    assert "chimera_ir.compilation" in loaded.splitlines()[-1]
    needless = {"rich", "jinja2", "torch", *(f"chimera_ir.{part}" for part in PARTS)}
    assert not needless & {*loaded.splitlines()[-1].split()}


# What a shell completes.


Completed = Callable[[str, str], dict[str, str]]


@pytest.fixture
def completed(typed: Run, monkeypatch: pytest.MonkeyPatch) -> Completed:
    """Completions that a shell is offered for a program at the end of a line: each value with its type."""
    monkeypatch.chdir(ROOT)

    def offered(name: str, line: str) -> dict[str, str]:
        with monkeypatch.context() as environment:
            environment.setenv(f"_{name.replace('-', '_').upper()}_COMPLETE", "bash_complete")
            environment.setenv("COMP_WORDS", line)
            environment.setenv("COMP_CWORD", str(line.count(" ")))
            ended = typed(name)
        assert (ended.status, ended.err) == (0, "")
        entries = (entry.partition(",") for entry in ended.out.splitlines() if entry)
        return {value: kind for kind, _, value in entries}

    return offered


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("chimera ", COMMANDS),
        ("chimera p", ("plan", "profile")),
        ("chimera explain ch60", ("CH601", "CH602", "CH603", "CH604")),
        ("chimera profile ", ("layers", "links", "stages")),
        ("chimera compile --em", ("--emit",)),
        ("chimera compile gems --emit p", ("plan", "program")),
        ("chimera compile pipedream_", ("pipedream_", "pipedream_2bw")),
        ("chimera compile --list gem", ("gem", "gems")),
        ("chimera plan --scheme gem", ("gem", "gems")),
        ("chimera run gpipe --mo", ("--model",)),
        ("chimera run gpipe --nno", ()),
        ("chimera run gpipe --backend ", ("gloo", "nccl")),
        ("chimera compile chimera --set ", ("D=4", "N=4", "f=1")),
        ("chimera compile chimera --set D=8 --set ", ("N=8", "f=1")),
        ("chimera run chimera --set D=8 --set N", ("N=8",)),
        ("chimera run chimera D=8 N", ("N=8",)),
        ("chimera compile chimera D=8,16 ", ("N=8", "f=1")),
        ("chimera compile docs/examples/1f1b.chim --set ", ("D=4", "N=8")),
        ("chimera compile docs/examples/stuck.sir --set ", ()),
        ("chimera compile nosuch --set ", ()),
        ("chimera compile --set ", ()),
    ],
)
def test_a_shell_completes_commands_options_values_schemes_and_parameters(
    line: str, values: tuple[str, ...], completed: Completed
) -> None:
    assert {*completed(NAME, line)} == {*values}


def test_where_no_scheme_begins_so_a_shell_completes_files(completed: Completed) -> None:
    offered = completed(NAME, "chimera compile docs/ex")
    assert offered == {"docs/ex": "file"}
    assert completed(NAME, "chimera compile ") == {"": "file"} | dict.fromkeys(library.names(), "plain")
    assert completed(NAME, "chimera run gems --model ") == {"": "file"}


def test_the_old_names_complete_as_well(completed: Completed) -> None:
    assert {*completed("chimera-compile", "chimera-compile chimera --set f")} == {"f=1"}
    assert {*completed("chimera-profile", "chimera-profile st")} == {"stages"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_what_a_shell_is_given_to_read_names_the_program_and_its_variable(
    name: str, shell: str, typed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = f"_{name.replace('-', '_').upper()}_COMPLETE"
    monkeypatch.setenv(variable, f"{shell}_source")
    ended = typed(name)
    assert (ended.status, ended.err) == (0, "")
    assert f"{variable}={shell}_complete" in ended.out
    assert re.search(rf"(-F \w+|#compdef|--command) {name}( |$)", ended.out, re.M)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_with_what_it_reads(tmp_path: Path) -> None:
    program = tmp_path / NAME
    program.write_text(
        f"#!/bin/sh\nexec '{sys.executable}' -c 'from chimera_ir.start import chimera; chimera()' \"$@\"\n"
    )
    program.chmod(0o755)
    typed = (
        'eval "$(_CHIMERA_COMPLETE=bash_source chimera)"; compopt() { :; }\n'
        "COMP_WORDS=(chimera compile gems --set N); COMP_CWORD=4\n"
        '_chimera_completion chimera; echo "${COMPREPLY[@]}"'
    )
    done = called("bash", "--norc", "-c", typed, PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "N=4\n", "")


HOSTILE = {
    "a pipe": "pipe",
    "a device": "/dev/zero",
    "a directory": "folder",
    "a link to itself": "loop",
    "a long name": "x" * 300,
    "a long path": "y/" * 1500 + "z",
    "a terminal's commands": "a\x1b[31mb\x07\nc",
    "text that runs to the left": "a\u202eb",
    "no UTF-8": "\udcff",
}

PATHS = (
    ("compile", "{}.chim"),
    ("compile", "{}.sir"),
    ("compile", "dapple", "--library", "{}", "--emit", "plan"),
    ("compile", "dapple", "--against", "{}.csv", "--emit", "report"),
    ("compile", "dapple", "--profile", "{}", "--cluster", "{}", "--micro-batch-size", "1"),
    ("compile", "dapple", "D=2", "N=2", "--html", "{}/page.html"),
    ("compile", "dapple", "D=2", "N=2", "--out", "{}/" + "x" * 300),
    ("compare", "{}", "dapple"),
    ("plan", "--profile", "{}", "--cluster", "{}"),
    ("trace", "{}"),
    ("view", "{}"),
    ("new", "{}/x.py"),
    ("explain", "{}"),
    ("run", "{}", "--model", "{}"),
    ("run", "dapple", "--model", "{}.py", "--save", "y/" * 1500),
)


@pytest.mark.full
@pytest.mark.parametrize("name", HOSTILE)
def test_a_path_of_any_kind_ends_in_words_that_can_be_printed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for ending in ("", ".chim", ".sir", ".csv", ".zip"):
        os.mkfifo(f"pipe{ending}")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    command = calling(import_module("chimera_ir.commands.group").main, NAME, capsys, monkeypatch)
    for words in PATHS:
        ended = command(*(word.format(HOSTILE[name]) for word in words))
        assert ended.status in (0, WRONG_COMMAND, WRONG_TEXT), (words, ended)
        assert "Traceback" not in ended.err
        assert all(line.isprintable() for line in f"{ended.out}\n{ended.err}".splitlines()), (words, ended)
