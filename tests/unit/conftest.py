"""What the unit tests share: the command lines as functions."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from chimera_ir.commands import compile_command, plan_command, trace_command
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
