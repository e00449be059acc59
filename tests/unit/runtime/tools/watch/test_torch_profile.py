"""``--torch-profile``: the second to the fourth update of a run, a file for each rank."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.profiler import record_function

from chimera_runtime.errors import Misuse
from chimera_runtime.tools.watch.progress import MARKER, prepare, torch_profile


def names(file: Path) -> list[str]:
    events = json.loads(file.read_text())["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation" and event["name"][:2] == "up"]


@pytest.mark.parametrize(("updates", "recorded"), [(2, [1]), (4, [1, 2, 3]), (6, [1, 2, 3])])
def test_updates_after_the_first_are_recorded_three_at_most(tmp_path: Path, updates: int, recorded: list[int]) -> None:
    directory = tmp_path / "of" / "runs"
    prepare(HashStore(), directory)
    with torch_profile(directory, 1, updates) as of_run:
        for update in range(updates):
            with record_function(f"update {update}"):
                pass
            of_run.step()
    assert {file.name for file in directory.iterdir()} == {"rank_1.json", MARKER}
    assert sorted(names(directory / "rank_1.json")) == [f"update {update}" for update in recorded]


def test_a_run_of_one_update_has_none_to_record(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match="records updates after the first of a run, and this run has 1"):
        torch_profile(tmp_path, 0, 1)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Misuse, match=r"--torch-profile .*file"):
        prepare(HashStore(), tmp_path / "file")


def test_a_directory_in_which_another_run_records_is_refused(tmp_path: Path, other_job: Callable[..., Any]) -> None:
    with (
        other_job(tmp_path / MARKER),
        pytest.raises(Misuse, match=r"--torch-profile .*: another run records"),
    ):
        prepare(HashStore(), tmp_path)
    prepare(HashStore(), tmp_path)


def test_a_run_that_fails_before_it_has_recorded_anything_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="broken"), torch_profile(tmp_path, 0, 4):
        raise ValueError("broken")
    assert list(tmp_path.iterdir()) == []
