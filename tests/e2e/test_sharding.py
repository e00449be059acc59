"""``--shard-optimizer``: weights are those of training without it, and each rank keeps what the report says."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import chimera_ir
from chimera_ir.commands.profile_command import profile_command
from chimera_runtime.values.byte_text import byte_text
from tests.e2e.ranks import MODELS, Job, Outcome, compiled, run_all

CLUSTER = """
[cluster]
name = "c"
workers = 4
memory = "1 GB"
[links.between]
latency = "1 us"
bandwidth = "1 GB/s"
"""
SIZE = ("--micro-batch-size", "2")
SHARDED = (*SIZE, "--shard-optimizer")
TRAINED = ("whole", "sharded", "traced")
FLOAT64 = 8


def jobs(folder: Path) -> Iterator[Job]:
    chimera = compiled(folder, "chimera", D=4, N=4)
    training = ("--steps", "3", "--clip-norm", "0.5", "--memory-limit", "1GiB")
    options = {"whole": SIZE, "sharded": (*SHARDED, "--check"), "traced": (*SHARDED, "--trace", str(folder / "trace"))}
    for name in TRAINED:
        export = ("--export", str(folder / f"{name}.pt"))
        yield Job(name, chimera, (*training, *options[name], *export), "plain.py")
    copies = compiled(folder, "chimera", D=2, N=2)
    yield Job("copies", copies, (*SHARDED, "--check-only", "--layout", "replica"), "plain.py")
    yield Job("tied", compiled(folder, "chimera", ("first,last",), D=4, N=4), (*SHARDED, "--check-only"), "tied.py")
    yield Job("stream", compiled(folder, "pipedream_2bw", D=4, N=4), SHARDED, "plain.py")
    yield Job("adaptive", chimera, SHARDED, "zoo.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharding")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Outcome]:
    return run_all(folder, 4, list(jobs(folder)))


@pytest.mark.parametrize("name", ["sharded", "copies", "tied"])
def test_it_trains_as_one_process_does(outcomes: dict[str, Outcome], name: str) -> None:
    outcomes[name].assert_passed()
    assert "check: passed" in outcomes[name].said[0]
    assert "replicas of every stage: bitwise equal" in outcomes[name].said[0]


def test_weights_are_bitwise_those_of_training_without_it(outcomes: dict[str, Outcome], folder: Path) -> None:
    for name in TRAINED:
        outcomes[name].assert_passed()
    whole, *others = (torch.load(folder / f"{name}.pt", weights_only=True) for name in TRAINED)
    for weights in others:
        assert weights.keys() == whole.keys()
        assert [name for name in whole if not torch.equal(whole[name], weights[name])] == []


def test_a_rank_needs_the_bytes_of_the_report(outcomes: dict[str, Outcome], folder: Path) -> None:
    """Momentum is as large as the weights. Eleven words cannot be halved: half a row more than the report's share."""
    profile = folder / "plain.toml"
    arguments = ["stages", "--stages", "4", "--micro-batch-size", "2", "--rounds", "5", "--out", str(profile)]
    done = CliRunner().invoke(profile_command, [*arguments, str(MODELS / "plain.py")])
    assert done.exit_code == 0, done.output
    (folder / "cluster.toml").write_text(CLUSTER)
    states = {}
    for sharded in (False, True):
        options = chimera_ir.Options(
            profile=profile, cluster=folder / "cluster.toml", micro_batch_size=2, shard_optimizer=sharded
        )
        prediction = chimera_ir.compile("chimera", options=options, D=4, N=4).prediction
        states[sharded] = prediction.as_json()["optimizer_state"]
    first, middle = (11 * 6 + 3 * 6 + 6) * FLOAT64, (6 * 6 + 6 + 2 * 6) * FLOAT64
    assert states[False] == [first + middle, 2 * middle, 2 * middle, first + middle]
    assert states[True] == [size // 2 for size in states[False]]
    more = {0: 6 // 2 * FLOAT64, 3: -6 // 2 * FLOAT64}
    for name, sharded in (("whole", False), ("sharded", True)):
        told = re.search(r"^memory: .* rank (\d) .* optimizer (\S+ \w+),", outcomes[name].said[0], re.M)
        assert told is not None, outcomes[name].said[0]
        rank = int(told[1])
        assert told[2] == byte_text(states[sharded][rank] + (more.get(rank, 0) if sharded else 0))


def test_streams_and_other_optimizers_are_refused_in_one_message(outcomes: dict[str, Outcome]) -> None:
    for name, words in (
        ("stream", "--shard-optimizer: pipedream_2bw(D=4, N=4) has no flush, and its stages step inside the schedule"),
        ("adaptive", "a Witnessed may look at a parameter as a whole"),
    ):
        said = [line for text in outcomes[name].said for line in text.splitlines() if line.startswith("train.py:")]
        assert "0" not in outcomes[name].statuses
        assert "2" in outcomes[name].statuses
        assert any(words in line for line in said), outcomes[name].said
