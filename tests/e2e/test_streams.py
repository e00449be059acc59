"""What is generated for schemes with weight versions trains: as one process does that reads the same versions."""

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.e2e.ranks import MODELS, Job, Outcome, compiled, interrupted, run_all, torchrun
from tests.repeatable import also

SCHEMES = Path(__file__).resolve().parent / "schemes" / "streams"
EXAMPLES = Path(__file__).resolve().parent.parent.parent / "docs" / "examples"
LIBRARY = ("pipedream", "pipedream_2bw")
SAMPLE = also(("pipedream",), ("pipedream_2bw",))
"""Schemes with which a run tries what does not depend on the scheme: momentum, and a rehearsal."""
LENGTHS = (1, 4)


def four_ranks(folder: Path) -> Iterator[Job]:
    """D=4 with one copy, D=2 with two; Adam with dropout and batch norm, and momentum; short runs and longer ones."""
    for scheme in LIBRARY:
        directory = compiled(folder, scheme, D=4)
        witness = folder / f"witness-{scheme}"
        witness.mkdir()
        replica = ("--check", "--steps", "3", "--layout", "replica", "--micro-batch-size", "2")
        yield Job(f"{scheme}-D2-W2", compiled(folder, scheme, D=2), replica, environment={"WITNESS": str(witness)})
        for steps in LENGTHS:
            metrics = ("--steps", str(steps), "--metrics", str(folder / f"{scheme}-{steps}.json"))
            yield Job(f"{scheme}-{steps}", directory, (*metrics, *(["--check"] if steps == 1 else [])))
    for scheme in SAMPLE:
        directory = compiled(folder, scheme, D=4)
        yield Job(f"{scheme}-momentum", directory, ("--check-only", "--seed", "3"), "plain.py")
        rehearse = ("--rehearse", "F=0.002,B=0.004", "--steps", "3", "--metrics", str(folder / f"{scheme}-r.json"))
        yield Job(f"{scheme}-rehearsed", directory, rehearse)
    yield Job("accumulate", compiled(folder, str(SCHEMES / "accumulate.chim")))
    yield Job("folded", compiled(folder, str(SCHEMES / "folded.chim")), ("--check", "--steps", "2"))
    yield Job("alone", compiled(folder, "pipedream_2bw", D=1, N=2))
    yield Job("both ways", compiled(folder, "amdp", D=4), ("--check-only",))
    yield Job("directions", compiled(folder, str(EXAMPLES / "streams.chim"), D=4), ("--check-only",))
    yield Job("turns", compiled(folder, str(EXAMPLES / "turns.chim")), ("--check-only",))
    yield Job("directions, an update each", compiled(folder, str(SCHEMES / "crossing.chim")), ("--check-only",))


def eight_ranks(folder: Path) -> Iterator[Job]:
    """D=4 with two copies; in a search also D=2 with four in both layouts, and D=8."""
    for scheme in also(("pipedream_2bw",), ("pipedream",)):
        yield Job(f"{scheme}-D4-W2", compiled(folder, scheme, D=4), ("--check-only",))
    for scheme, layout in also((), product(LIBRARY, ("pipeline", "replica"))):
        yield Job(f"{scheme}-D2-W4-{layout}", compiled(folder, scheme, D=2), ("--check-only", "--layout", layout))
    for scheme in also((), (*LIBRARY, "amdp")):
        yield Job(f"{scheme}-D8", compiled(folder, scheme, D=8), ("--check-only",), "plain.py")


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Outcome]]:
    folder = tmp_path_factory.mktemp("four")
    return folder, run_all(folder, 4, list(four_ranks(folder)))


def metrics(folder: Path, name: str) -> dict[str, list[float | None]]:
    found: dict[str, list[float | None]] = json.loads((folder / f"{name}.json").read_text())
    assert len({len(each) for each in found.values()}) == 1, "one entry per update in each list"
    return found


def test_weights_and_losses_are_those_of_one_process(four: tuple[Path, dict[str, Outcome]]) -> None:
    checked = 0
    for outcome in four[1].values():
        outcome.assert_passed()
        checked += "check: passed" in outcome.said[0]
    assert checked == 2 * len(LIBRARY) + len(SAMPLE) + 7


def test_weights_and_losses_are_those_of_one_process_on_eight_ranks(tmp_path: Path) -> None:
    for outcome in run_all(tmp_path, 8, list(eight_ranks(tmp_path))).values():
        outcome.assert_passed()
        assert "check: passed" in outcome.said[0]


@pytest.mark.parametrize("scheme", LIBRARY)
def test_a_run_begins_like_every_longer_one(four: tuple[Path, dict[str, Outcome]], scheme: str) -> None:
    """However many updates there are: those that a short run leaves out are those that a long one adds."""
    short, long = (metrics(four[0], f"{scheme}-{steps}")["loss"] for steps in LENGTHS)
    assert (len(short), len(long)) == LENGTHS
    assert short == long[:1]


@pytest.mark.parametrize("scheme", SAMPLE)
def test_a_rehearsal_times_every_update_from_the_end_of_the_one_before(
    four: tuple[Path, dict[str, Outcome]], scheme: str
) -> None:
    found = metrics(four[0], f"{scheme}-r")
    assert found["loss"] == [None, None, None]
    seconds = [each for each in found["step_seconds"] if each is not None]
    assert min(seconds) > 0
    assert seconds[0] > 0.002 * 12, "the first one fills the pipeline"


@pytest.mark.parametrize("scheme", LIBRARY)
def test_replicas_stay_bitwise_equal(four: tuple[Path, dict[str, Outcome]], scheme: str) -> None:
    """The last three digests: before them are those of the check, on rank 0 of both stages."""
    logs = sorted((four[0] / f"witness-{scheme}").iterdir())
    first, again, second, too = [log.read_text().splitlines()[-3:] for log in logs]
    assert first == again != second == too, "two ranks hold each of two stages"
    assert len({*first}) == 3, "one digest per update"


def test_the_check_finds_backwards_on_other_weights_than_their_forwards(tmp_path: Path) -> None:
    """Without versions a stage steps between a forward and its backward, and autograd does not notice."""
    directory = compiled(tmp_path, "pipedream", D=3)
    script = directory / "rank_1.py"
    unstashed = re.sub(r"stage1\.(stash|drop)\(.*?\)", "pass", script.read_text())
    newest = "stage1 = lane.stage(1)\n    stage1._stage.weights.select = lambda _version: None"
    script.write_text(unstashed.replace("stage1 = lane.stage(1)", newest))
    done = torchrun(directory, 3, "--model", str(MODELS / "plain.py"), "--check-only")
    assert done.returncode != 0
    assert "check: FAILED\n  gradients of 8 updates: " in done.stderr
    assert re.search(r"  stage 1: gradients of update [2-8] differ by \d\.\d+e-0[1-6], most in ", done.stderr)


def test_a_rank_that_dies_is_named_with_the_micro_batch_of_the_run(tmp_path: Path) -> None:
    directory = compiled(tmp_path, "pipedream", D=2)
    arguments = ("--model", str(MODELS / "failing.py"), "--steps", "500")
    done = torchrun(directory, 2, *arguments, FAIL="kill-in-backward:1:12")
    assert done.returncode != 0
    (message,) = (line for line in done.stderr.splitlines() if line.startswith("train.py:"))
    waited = "(recv m12 s1->s0|send m13 s0->s1)"
    assert re.match(rf"train\.py: rank 0 \(worker 0\): wait {waited}: rank 1: the connection was closed", message)


def test_ctrl_c_keeps_the_metrics_of_the_updates_that_are_over(tmp_path: Path) -> None:
    directory, file = compiled(tmp_path, "pipedream", D=2), tmp_path / "metrics.json"
    arguments = ("--model", str(MODELS / "failing.py"), "--steps", "100000", "--metrics", str(file))
    status, said, _ = interrupted(directory, 2, *arguments, when=" 5/100000")
    assert status != 0
    assert said.count("train.py: interrupted") == 1
    assert 5 <= len(metrics(tmp_path, "metrics")["loss"]) < 100000
