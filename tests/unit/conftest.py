"""What the unit tests share: the command lines as functions."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from chimera_ir.commands import compile_command, group, plan_command, trace_command
from tests.unit.command import Ended, Run


def calling(
    main: Callable[[], object], name: str, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch
) -> Run:
    def call(*arguments: object) -> Ended:
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        assert end.value.code is None or isinstance(end.value.code, int)
        return Ended(end.value.code or 0, said.out, said.err)

    return call


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Calls `chimera-compile` in an empty directory."""
    monkeypatch.chdir(tmp_path)
    return calling(compile_command.main, "chimera-compile", capsys, monkeypatch)


@pytest.fixture(name="planner")
def _planner(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calls `chimera-plan`."""
    return calling(plan_command.main, "chimera-plan", capsys, monkeypatch)


@pytest.fixture(name="tracer")
def _tracer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calls `chimera-trace`."""
    return calling(trace_command.main, "chimera-trace", capsys, monkeypatch)


@pytest.fixture
def run_chimera(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command `chimera`, run in this process."""
    return calling(group.main, "chimera", capsys, monkeypatch)


@pytest.fixture
def plan(planner: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Calls `chimera-plan` in an empty directory, with the texts of a profile and of a cluster."""
    monkeypatch.chdir(tmp_path)

    def call(model: str, on: str, *arguments: object) -> Ended:
        Path("m.toml").write_text(model, encoding="utf-8")
        Path("c.toml").write_text(on, encoding="utf-8")
        return planner("--profile", "m.toml", "--cluster", "c.toml", *arguments)

    return call
