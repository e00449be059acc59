"""Model files with layers: every D, W, scheme and split trains the same model, and a wrong split is one message."""

import json
import re
from pathlib import Path

import pytest

from tests.e2e.ranks import Job, Outcome, compiled, run_all
from tests.repeatable import also

ENDS = ("first,last",)
MODEL = "layered.py"
TRAINING: dict[str, tuple[str, int, tuple[str, ...]]] = dict(
    also(
        (
            ("dapple, D=4, equal", ("dapple", 4, ())),
            ("dapple, D=4, short ends", ("dapple", 4, ("--split", "0,1,3,6"))),
            ("chimera, D=2, W=2", ("chimera", 2, ("--split", "0,5"))),
        ),
        (
            ("dapple, D=4, long ends", ("dapple", 4, ("--split", "0,3,4,5"))),
            ("dapple, D=2, W=2", ("dapple", 2, ())),
            ("chimera, D=4", ("chimera", 4, ("--split", "0,1,2,3"))),
        ),
    )
)
"""Scheme, D, and which layers begin the stages; all train on 16 items per update, two in a micro-batch."""

REFUSED = {
    "not from 0": (("--split", "1,2,3,4"), r"split 1,2,3,4: it lists the first layer of each stage, so it begins"),
    "not ascending": (("--split", "0,3,2,5"), r"split 0,3,2,5: 2 is not behind the layer before it"),
    "beyond": (("--split", "0,1,2,7"), r"split 0,1,2,7: there is no layer 7; there are the layers 0 to 6"),
    "another D": (("--split", "0,3"), r"split 0,3: it begins the stages 0 to 1, and the schedule has the"),
    "no list": (("--split", "0,x"), r"argument --split: '0,x' does not list the first layer of each stage, as in 0,9"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layers")


@pytest.fixture(scope="module")
def ran(folder: Path) -> dict[str, Outcome]:
    jobs = []
    for name, (scheme, depth, split) in TRAINING.items():
        directory = compiled(folder, scheme, ENDS, D=depth, N=2 * depth)
        kept = ("--metrics", str(folder / f"{name}.json"))
        jobs.append(Job(name, directory, ("--check", "--steps", "4", "--micro-batch-size", "2", *split, *kept), MODEL))
    four = compiled(folder, "chimera", ENDS, D=4, N=4)
    jobs.append(Job("dropout", four, ("--check-only", "--split", "0,1,2,6"), MODEL, {"SPOILT": "dropout"}))
    stream = compiled(folder, "pipedream_2bw", ENDS, D=4, N=4)
    jobs.append(Job("stream", stream, ("--check-only", "--split", "0,1,3,6"), MODEL))
    jobs.append(Job("left out", four, ("--check-only",), MODEL, {"SPOILT": "left out"}))
    eight = compiled(folder, "interleaved", ENDS, P=4, v=2, N=4)
    jobs.append(Job("refused-too many stages", eight, (), MODEL))
    jobs += [Job(f"refused-{name}", four, arguments, MODEL) for name, (arguments, _) in REFUSED.items()]
    plain = compiled(folder, "chimera", D=4, N=4)
    jobs.append(Job("refused-stages", plain, ("--split", "0,1,2,3"), "plain.py"))
    return run_all(folder, 4, jobs)


def test_every_split_is_what_one_process_trains_and_what_reference_returns(ran: dict[str, Outcome]) -> None:
    for name in (*TRAINING, "dropout", "stream"):
        ran[name].assert_passed()
        assert "check: passed" in ran[name].said[0], name
        assert "  reference(): 13 parameters; loss off by" in ran[name].said[0], name


def test_losses_are_the_same_for_every_number_of_stages_scheme_and_split(ran: dict[str, Outcome], folder: Path) -> None:
    losses = [json.loads((folder / f"{name}.json").read_text())["loss"] for name in TRAINING]
    assert len(losses[0]) == 4
    assert losses[0][3] < losses[0][0], "or nothing is learnt"
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-12)


def test_a_layer_that_was_left_out_is_found(ran: dict[str, Outcome]) -> None:
    assert "no stage holds its h.4 (mix.weight, mix.bias): a layer that was left out" in "".join(ran["left out"].said)


MESSAGES = {name: words for name, (_, words) in REFUSED.items()} | {
    "too many stages": r"layers: the schedule has the stages 0 to 7, and there are the layers 0 to 6: a stage",
    "stages": r"--split: the build_stage of .*plain.py decides what a stage is; with layers",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_wrong_split_is_one_message(ran: dict[str, Outcome], name: str) -> None:
    outcome = ran[f"refused-{name}"]
    said = [line for text in outcome.said for line in text.splitlines() if line.startswith("train.py:")]
    assert "0" not in outcome.statuses
    assert len({*said}) == 1, outcome.said
    assert re.search(MESSAGES[name], said[0]), said[0]
