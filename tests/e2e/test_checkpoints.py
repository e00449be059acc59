"""Checkpoints: exact, whole or not there, read by other schedules; runs that are killed, terminated and resumed."""

import json
import signal
from pathlib import Path

import pytest

from chimera_ir import library
from tests.e2e.ranks import MODELS, Job, Outcome, compiled, run_all, torchrun
from tests.e2e.test_ends import ended
from tests.kills import Kill, losses

LOOP = Path(__file__).resolve().parent / "loops" / "checkpoints.py"
CASES = ("exact", "elsewhere", "sharded", "mistakes", "files", "replicas", "one_rank")

SIZE = ("--micro-batch-size", "2")


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("checkpoints")
    chimera, gpipe, stream = (
        str(compiled(folder, scheme, D=4, N=4)) for scheme in ("chimera", "gpipe", "pipedream_2bw")
    )
    dapple, both = str(compiled(folder, "dapple", D=2, N=2)), str(compiled(folder, "chimera", D=2, N=4))
    schedules = {
        "exact": (chimera, dapple, stream),
        "elsewhere": (chimera, dapple, gpipe),
        "sharded": (chimera, dapple),
        "mistakes": (chimera,),
        "files": (chimera, dapple),
        "replicas": (both, chimera),
        "one_rank": (chimera,),
    }
    for case in CASES:
        (folder / f"saved-{case}").mkdir()
    return run_all(
        folder, 4, [Job(case, LOOP, (case, str(folder / f"saved-{case}"), *schedules[case]), None) for case in CASES]
    )


@pytest.mark.parametrize("case", CASES)
def test_a_loop_with_checkpoints(loops: dict[str, Outcome], case: str) -> None:
    loops[case].assert_passed()


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("kills"), "chimera", D=2, N=4)


def test_ranks_that_are_killed_are_started_again_and_train_as_if_nothing_had_been(
    two_stages: Path, tmp_path: Path
) -> None:
    """A sample of `python -m tests.kills`: at any moment, and inside of a save."""
    expected, _ = losses(tmp_path / "undisturbed", two_stages, None)
    assert losses(tmp_path / "in-a-save", two_stages, Kill(0, "before rename", 2)) == (expected, True)
    during_update_5 = Kill(1, "forward", 39)
    assert losses(tmp_path / "saved", two_stages, during_update_5, after=4) == (expected, True)


MOVES = """  offload(m, s, q) @ 2*(k*m + q) + s + 1 when s == 0
  reload(m, s, q) @ 2*(k*m + 2*(k-1) - q) + 2*D-2 - s when s == 0
"""


def test_ranks_killed_between_slices_are_started_again_without_carries_and_host_memory(tmp_path: Path) -> None:
    """Between the slices of a micro-batch in update 6; a checkpoint has neither, because a boundary has neither."""
    text = library.source("seq1f1b").text
    (tmp_path / "moving.chim").write_text(text.replace("  B(m, s, q)", f"{MOVES}  B(m, s, q)"))
    slices = compiled(tmp_path, str(tmp_path / "moving.chim"), D=2, N=2, k=2)
    expected, _ = losses(tmp_path / "undisturbed", slices, None, sliced=True)
    assert losses(tmp_path / "killed", slices, Kill(1, "forward", 51), sliced=True) == (expected, True)


def test_a_sigterm_saves_and_the_training_goes_on_from_there_on_more_ranks(two_stages: Path, tmp_path: Path) -> None:
    """Data workers get it, too. With two copies of half the micro-batches, as well: B*N*W items are the same ones."""
    saved, log = tmp_path / "saved", tmp_path / "log.jsonl"
    options = (*SIZE, "--save", str(saved), "--data-workers", "1")
    status, said, _ = ended(two_stages, signal.SIGTERM, *options, model="killed.py", to_all=True)
    assert status != 0
    (message,) = (line for line in said.splitlines() if line.startswith("train.py:"))
    (checkpoint,) = saved.glob("update-*")
    update = int(checkpoint.name.removeprefix("update-"))
    assert message == f"train.py: SIGTERM: saved after update {update} in {saved}, for --resume"

    model = ("--model", str(MODELS / "killed.py"), *SIZE, "--steps", str(update + 3), "--resume", str(saved))
    for ranks, micro_batches in ((2, 4), (4, 2)):
        directory = compiled(tmp_path / str(ranks), "chimera", D=2, N=micro_batches)
        log.unlink(missing_ok=True)
        done = torchrun(directory, ranks, *model, "--log-file", str(log))
        assert done.returncode == 0, done.stderr
        assert f"resumed from {checkpoint}, after update {update}, item {8 * update}" in done.stdout
        assert [json.loads(line)["update"] for line in log.read_text().splitlines()] == [*range(update + 1, update + 4)]
    assert "buffers are those of the first replica of each stage" in done.stdout


def test_ctrl_c_saves_as_well(two_stages: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    status, said, _ = ended(two_stages, signal.SIGINT, *SIZE, "--save", str(saved), model="killed.py")
    assert status != 0
    (checkpoint,) = saved.glob("update-*")
    update = int(checkpoint.name.removeprefix("update-"))
    assert [line for line in said.splitlines() if line.startswith("train.py:")] == [
        "train.py: SIGINT: saving after this update; Ctrl-C again ends at once",
        f"train.py: SIGINT: saved after update {update} in {saved}, for --resume",
    ]


def test_a_stream_that_gets_a_sigterm_is_drained_saved_and_goes_on(tmp_path: Path) -> None:
    directory, saved, log = compiled(tmp_path, "pipedream_2bw", D=2, N=2), tmp_path / "saved", tmp_path / "log.jsonl"
    status, said, _ = ended(directory, signal.SIGTERM, *SIZE, "--save", str(saved), model="killed.py")
    assert status != 0
    (checkpoint,) = saved.glob("update-*")
    update = int(checkpoint.name.removeprefix("update-"))
    (message,) = (line for line in said.splitlines() if line.startswith("train.py:"))
    assert message == f"train.py: SIGTERM: saved after update {update} in {saved}, for --resume"
    assert f" {update}/1000000" in said, "those under way are completed and told"
    assert f" {update + 1}/1000000" not in said
    model = ("--model", str(MODELS / "killed.py"), *SIZE, "--steps", str(update + 3), "--resume", str(saved))
    done = torchrun(directory, 2, *model, "--log-file", str(log))
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["update"] for line in log.read_text().splitlines()] == [*range(update + 1, update + 4)]


def test_what_cannot_be_saved_or_resumed_is_one_message(two_stages: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / ".metadata").write_text("what")
    common = ("--steps", "2", *SIZE)
    jobs = [
        Job("file", two_stages, (*common, "--save", str(tmp_path / "file")), "killed.py"),
        Job("foreign", two_stages, (*common, "--resume", str(tmp_path / "foreign")), "killed.py"),
        Job("load", two_stages, (*common, "--load", str(tmp_path / "none.pt")), "killed.py"),
        Job("export", two_stages, (*common, "--export", str(tmp_path / "file" / "m.pt")), "killed.py"),
        Job("device", two_stages, (*common, "--export", "/dev/null"), "killed.py"),
    ]
    outcomes = run_all(tmp_path, 2, jobs)
    said = {name: "".join(outcome.said) for name, outcome in outcomes.items()}
    assert {status for outcome in outcomes.values() for status in outcome.statuses} == {"2"}
    messages = {
        name: [line for line in text.splitlines() if line.startswith("train.py: ")] for name, text in said.items()
    }
    assert messages["file"] == [f"train.py: checkpoints cannot be saved in {tmp_path / 'file'}: File exists"]
    assert messages["load"] == [f"train.py: {tmp_path / 'none.pt'}: No such file or directory"]
    assert "cannot be resumed from" in messages["foreign"][0]
    assert messages["export"] == [
        f"train.py: {tmp_path / 'file' / 'm.pt'} cannot be written: there is no directory {tmp_path / 'file'}"
    ]
    assert messages["device"] == ["train.py: /dev/null cannot be written: it is no regular file"]
    assert not any(line.startswith("step") for text in said.values() for line in text.splitlines()), "it is said before"
