"""What the unit tests share: the command line as a function."""

import sys
from pathlib import Path

import pytest

from chimera_ir import tracer as tracing
from chimera_ir.cli import main
from tests.unit.command import Ended, Run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Calls the entry point in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["chimera-compile", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        assert end.value.code is None or isinstance(end.value.code, int)
        return Ended(end.value.code or 0, said.out, said.err)

    return call


@pytest.fixture
def tracer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calls `chimera-trace`."""

    def call(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["chimera-trace", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            tracing.main()
        said = capsys.readouterr()
        return Ended(int(end.value.code or 0), said.out, said.err)

    return call
