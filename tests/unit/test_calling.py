"""What every command takes: parameters as words, --quiet, --json, options in sections, colours and columns."""

import json
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from chimera_ir.commands.common import GENERAL, SectionedCommand
from chimera_ir.commands.compare_command import compare_command
from chimera_ir.commands.compile_command import compile_command
from chimera_ir.commands.explain_command import explain_command
from chimera_ir.commands.group import group
from chimera_ir.commands.plan_command import plan_command
from chimera_ir.commands.profile_command import profile_command
from chimera_ir.commands.run_command import run_command
from chimera_ir.commands.trace_command import trace_command
from tests.unit.command import Run, contents

ERRORS = Path(__file__).resolve().parent.parent / "errors"
WARNED = ERRORS / "middle" / "falling_clock_without_a_cycle.chim"


def commands(command: click.Command) -> list[SectionedCommand]:
    """The commands below a group that take options of their own, the group's included."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        below = [command.get_command(context, name) for name in command.list_commands(context)]
        return [each for entry in below if entry for each in commands(entry)]
    return [command]


ALL = commands(group)
ABSENT = {("layers", "--stages"), ("layers", "--split"), ("stages", "--every")}
"""What a section names for another command with the same sections."""


# Parameters as words.


def test_words_behind_the_scheme_are_what_set_says(run: Run) -> None:
    words = run("chimera", "D=8", "--emit", "program", "N=16")
    assert words == run("chimera", "--set", "D=8", "--set", "N=16", "--emit", "program")
    assert words.status == 0
    assert run("chimera", "N=8,16", "D=8").out == run("chimera", "--set", "N=8,16", "--set", "D=8").out


def test_a_plan_and_a_run_take_words_as_well() -> None:
    wrong = CliRunner().invoke(run_command, ["chimera", "D=x", "--model", __file__])
    assert "D=x: write NAME=INTEGER" in wrong.output
    required = ["--profile", "p", "--cluster", "c", "--mini-batch", "8"]
    assert "D=x: write NAME=INTEGER" in CliRunner().invoke(plan_command, [*required, "D=x"]).output


# Options in sections.


@pytest.mark.parametrize("command", ALL, ids=lambda command: command.name)
def test_a_section_names_options_that_there_are_and_each_option_is_in_the_help_once(command: SectionedCommand) -> None:
    named = [name for names in command.sections.values() for name in names]
    named = [name for name in named if (command.name, name) not in ABSENT]
    options = {option.opts[-1] for option in command.params if isinstance(option, click.Option) and not option.hidden}
    assert len(named) == len({*named})
    assert {*named} <= options
    text = CliRunner().invoke(command, ["--help"]).output
    listed = re.findall(r"^  (?:-\w, )?(--[a-z-]+)", text, re.M)
    assert sorted(listed) == sorted({*options, "--help"})
    headings = re.findall(r"^(\w.*):$", text, re.M)
    assert headings == ([*command.sections, GENERAL] if command.sections else ["Options"])
    assert headings[0] in ("Common options", "Options")


@pytest.mark.parametrize("columns", [80, 110])
def test_a_help_is_as_wide_as_the_terminal(run: Run, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", f"{columns}")
    widest = max(map(len, run("--help").out.splitlines()))
    assert columns - 20 < widest <= columns


def test_the_help_of_the_program_names_completion_for_each_shell() -> None:
    text = CliRunner().invoke(group, ["--help"]).output
    assert all(f"_CHIMERA_COMPLETE={shell}_source" in text for shell in ("bash", "zsh", "fish"))


# --quiet and --json.


@pytest.mark.parametrize("command", ALL, ids=lambda command: command.name)
def test_every_command_can_be_quiet(command: SectionedCommand) -> None:
    assert {"-q", "--quiet"} <= {name for option in command.params for name in option.opts}


def test_a_quiet_compilation_writes_its_output_and_says_nothing(run: Run, tmp_path: Path) -> None:
    ended = run(WARNED, "-q", "--out", "o")
    assert (ended.status, ended.out, ended.err) == (0, "", "")
    assert "o/train.py" in contents(tmp_path)


def test_what_is_asked_for_is_printed_quietly(run: Run) -> None:
    loud, quiet = run(WARNED, "--emit", "report"), run(WARNED, "--emit", "report", "--quiet")
    assert quiet.out == loud.out != ""
    assert (loud.err != "", quiet.err) == (True, "")
    assert run("chimera", "N=4,8", "-q").out == run("chimera", "N=4,8").out
    assert run("chimera", "D=3", "-q").err.startswith("error[")


def test_commands_with_results_print_them_as_json() -> None:
    below = profile_command.commands.values()
    for command in (compile_command, compare_command, plan_command, trace_command, explain_command, *below):
        assert "--json" in {name for option in command.params for name in option.opts}


def test_a_compilation_prints_its_report_as_json(run: Run, tmp_path: Path) -> None:
    printed = json.loads(run("chimera", "--json").out)
    assert printed["directory"] == "chimera.out"
    assert printed["report"] == json.loads((tmp_path / "chimera.out" / "report.json").read_text())
    assert printed["run"].startswith("torchrun --nproc-per-node=4 chimera.out/train.py")
    assert run("chimera", "N=4,8", "--json").out == run("chimera", "N=4,8", "--table", "json").out
    assert "chimera" in [scheme["name"] for scheme in json.loads(run("--list", "--json").out)]
    assert run("chimera", "--emit", "report", "--json").out == run("chimera", "--emit", "report").out


@pytest.mark.parametrize("option", [("--emit", "program"), ("--table", "csv")])
def test_what_is_no_json_is_refused_beside_it(run: Run, option: tuple[str, str]) -> None:
    run("chimera", "--json", *option).assert_refused(2, f"--json: leave {' '.join(option)} out")


# Colours and columns.


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)],
    ids=str,
)
def test_colours_are_forced_and_forbidden_by_the_environment(
    run: Run, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], coloured: bool
) -> None:
    for name, value in ({"TERM": "xterm"} | variables).items():
        monkeypatch.setenv(name, value)
    colour = re.compile(r"\x1b\[[0-9;]*3[0-9]")
    assert bool(colour.search(run("chimera", "D=3").err)) is coloured
    assert bool(colour.search(run("chimera", "--emit", "timeline").out)) is coloured


@pytest.mark.parametrize("columns", [60, 90])
def test_a_picture_is_as_wide_as_the_columns_that_a_reader_asks_for(
    run: Run, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", f"{columns}")
    widest = max(map(len, run("chimera", "N=16", "--emit", "timeline").out.splitlines()))
    assert columns - 20 < widest <= columns
