"""The log has a whole line for every update, at once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chimera_runtime.errors import Unwritable
from chimera_runtime.tools.watch.progress import Log


def test_a_line_is_there_as_soon_as_it_is_added_behind_those_of_an_earlier_run(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"update": 7}\n')
    log = Log(path)
    log.add({"update": 1, "loss": float("nan"), "learning_rates": {0: [0.5]}})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"update": 7},
        {"update": 1, "loss": None, "learning_rates": {"0": [0.5]}},
    ]
    log.close()


def test_a_log_of_another_run_that_goes_on_is_refused_also_beside_its_children(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    program = f"""
import os, pathlib, sys
from chimera_runtime.tools.watch.progress import Log
log = Log(pathlib.Path({str(path)!r}))
if os.fork():
    print("opened", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "opened\n"
        with pytest.raises(Unwritable, match=r"log.jsonl: another run appends to it; give each run a file of its own"):
            Log(path)
        other.kill()
        other.wait()
        Log(path).close()


def test_what_is_no_file_may_be_the_log_of_several_runs() -> None:
    program = "import pathlib; from chimera_runtime.tools.watch.progress import Log; Log(pathlib.Path('/dev/null'))"
    log = Log(Path("/dev/null"))
    subprocess.run([sys.executable, "-c", program], check=True)
    log.close()


def test_a_log_that_cannot_be_opened_or_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unwritable, match=r"--log-file .*: No such file or directory"):
        Log(tmp_path / "nowhere" / "log.jsonl")
    full = Log(Path("/dev/full"))
    with pytest.raises(Unwritable, match=f"--log-file /dev/full: {os.strerror(28)}"):
        full.add({"update": 1})
    full.close()
