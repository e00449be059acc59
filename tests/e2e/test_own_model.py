"""``--check`` beside the model that ``reference()`` returns."""

from pathlib import Path

import pytest

from tests.e2e.ranks import Job, Outcome, compiled, run_all


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder: Path = tmp_path_factory.mktemp("own")
    directory = compiled(folder, "chimera", D=2, N=4)
    right = Job("right", directory, model="whole.py")
    return run_all(folder, 2, [right, Job("left out", directory, model="whole.py", environment={"LEFT_OUT": "1"})])


def test_stages_that_are_the_users_model_pass(checked: dict[str, Outcome]) -> None:
    checked["right"].assert_passed()
    assert "check: passed" in checked["right"].said[0]
    assert "  reference(): 8 parameters; loss off by" in checked["right"].said[0]


def test_a_stage_without_a_layer_fails_and_the_layer_is_named(checked: dict[str, Outcome]) -> None:
    said = "".join(checked["left out"].said)
    assert "1" in checked["left out"].statuses
    assert said.count("check: FAILED") == 1
    assert "reference(): no stage holds its blocks.3 (linear.weight, linear.bias): a layer that was left out" in said
