"""The log has a whole line for every update, at once."""

import json
import os
from pathlib import Path

import pytest

from chimera_runtime.tools.log import Log
from chimera_runtime.tools.streams import Unwritable


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


def test_a_log_that_cannot_be_opened_is_refused_and_one_that_cannot_be_written_is_told_at_the_end(
    tmp_path: Path,
) -> None:
    with pytest.raises(Unwritable, match=r"--log-file .*: No such file or directory"):
        Log(tmp_path / "nowhere" / "log.jsonl")
    full = Log(Path("/dev/full"))
    for update in (1, 2):
        full.add({"update": update})
    with pytest.raises(Unwritable, match=f"--log-file /dev/full: {os.strerror(28)}"):
        full.close()
