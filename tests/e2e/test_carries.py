"""Slices at run time: stages that look back train as one process does on whole sequences; other stages are refused."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.ranks import Job, Outcome, compiled, run_all

SCHEMES = {
    "plain": """
  F(m, s, q) @ 2*(k*m + q) + s
  B(m, s, q) @ 2*(k*m + 2*(k-1) - q) + 2*D-1 - s""",
    "split": """
  F(m, s, q) @ 3*(k*m + q) + s
  I(m, s, q) @ 3*(k*m + 2*(k-1) - q) + 2*D - s
  W(m, s, q) @ 3*(k*m + 2*(k-1) - q) + 2*D + 1""",
    "again": """
  recompute when s == 0
  F(m, s, q) @ 2*(k*m + q) + s
  B(m, s, q) @ 2*(k*m + 2*(k-1) - q) + 2*D-1 - s""",
}
TEXT = """scheme {name}(D = 2, N = 4, k = 3)
pipe down {{
  stages s in 0..D on s
  micros m in 0..N/2
  slices q in 0..k{operations}
}}
pipe up {{
  stages s in 0..D on D-1 - s
  micros m in N/2..N
  slices q in 0..k{operations} }}
"""
STREAM = """scheme stream(D = 2, N = 2, k = 3)
update every N
pipe down {
  stages s in 0..D on s
  micros m in 0..
  slices q in 0..k
  reads version max(0, m/N - 1)
  F(m, s, q) @ 2*(k*m + q) + s
  B(m, s, q) @ 2*(k*m + 2*(k-1) - q) + 2*D-1 - s }
"""
LIBRARY = {"seq1f1b": {"D": 2}, "seq1f1b_interleaved": {"P": 2, "v": 2}, "seq1f1b_zb": {"D": 2}, "terapipe": {"D": 2}}
UNEQUAL = {"unequal-seq1f1b": "seq1f1b", "unequal-seq1f1b_zb": "seq1f1b_zb"}
TRAINING = ("--check", "--steps", "2", "--micro-batch-size", "2")
REFUSED = {
    "future": ({}, "slice 0 of the outputs of stage 0 differs .* stage 0 is not causal: a position depends on later"),
    "forgets": ({}, "slice 2 of the outputs of stage 0 differs .* the carry of stage 0 lacks something"),
    "detached": ({}, "the gradients of stage 0 differ by .* return the carry with its graph, without detach"),
    "empty": ({}, "stage [01] returned a carry without tensors for slice 0, and slice 1 needs one"),
    "changes": ({}, "stage [01] returned for slice 0 the carry .*, which was .* for the first micro-batch"),
    "": (
        {"LENGTH": "11"},
        "a micro-batch of the dataset: dimension 1 is 11, and slices of equal lengths need a multiple",
    ),
}


def written(folder: Path, name: str, scheme: str) -> str:
    """A file with a scheme of two pipes in opposite directions, the second after the first."""
    text = TEXT.format(name=name, operations=scheme)
    first, second = text.split("pipe up")
    late = re.sub(r"@ ", "@ 1000 + ", second)
    (folder / f"{name}.chim").write_text(f"{first}pipe up{late}")
    return str(folder / f"{name}.chim")


def jobs(folder: Path) -> Iterator[Job]:
    directories = {name: compiled(folder, written(folder, name, scheme)) for name, scheme in SCHEMES.items()}
    kinds = {"plain": "lists,joins", "split": "joins,recurs", "again": "recurs,lists"}
    for name, directory in directories.items():
        drops = {"DROPS": "1"} if name == "again" else {"LOSS": "mean"} if name == "split" else {}
        yield Job(name, directory, TRAINING, "carried.py", {"CARRIED": kinds[name], **drops})
    tied = compiled(folder, str(folder / "plain.chim"), ("first,last",))
    yield Job("tied", tied, ("--check-only", "--memory-limit", "1GiB"), "carried.py", {"TIED": "1"})
    yield Job("autocast", directories["split"], (*TRAINING, "--autocast", "bf16"), "carried.py", {"CUT": "1"})
    alone = compiled(folder, str(folder / "again.chim"), D=1, N=2)
    yield Job("copies", alone, TRAINING, "carried.py")
    small = compiled(folder, str(folder / "plain.chim"), N=2, k=4)
    yield Job("example", small, ("--check-only", "--micro-batch-size", "1"), "short_context.py")
    stream = (folder / "stream.chim").write_text(STREAM) and compiled(folder, str(folder / "stream.chim"))
    yield Job("stream", stream, TRAINING, "carried.py")
    for name, scheme in UNEQUAL.items():
        directory = compiled(folder, scheme, asked=("--slice-lengths", "3,2,2,1"), D=2, N=2, k=4)
        yield Job(name, directory, (*TRAINING, "--eval-every", "1"), "carried.py", {"LENGTH": "11"})
    for scheme, sizes in LIBRARY.items():
        directory = compiled(folder, scheme, **sizes, N=2, k=3)
        yield Job(scheme, directory, ("--check-only",), "carried.py", {"CARRIED": "lists,recurs,joins"})
    watched = ("--steps", "2", "--micro-batch-size", "2", "--eval-every", "1")
    for name, k in (("whole", 1), ("sliced", 3)):
        yield Job(name, compiled(folder, str(folder / "plain.chim"), k=k), watched, "carried.py", {"CUT": "1"})
    for spoilt, (environment, _) in REFUSED.items():
        arguments = TRAINING if spoilt != "changes" else TRAINING[1:]
        yield Job(f"refused-{spoilt}", directories["plain"], arguments, "carried.py", environment | {"SPOILT": spoilt})


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Outcome]]:
    folder = tmp_path_factory.mktemp("carried")
    return folder, run_all(folder, 2, [*jobs(folder)])


@pytest.mark.parametrize("job", [*SCHEMES, "tied", "autocast", "copies", "example", "stream", *LIBRARY, *UNEQUAL])
def test_stages_that_look_back_train_as_on_whole_sequences(ran: tuple[Path, dict[str, Outcome]], job: str) -> None:
    outcome = ran[1][job]
    outcome.assert_passed()
    assert "check: passed" in outcome.said[0]
    slices = 4 if job == "example" or job in UNEQUAL else 3
    assert f"{slices} slices: loss off from that of whole sequences by" in outcome.said[0]


def test_training_and_validation_in_slices_are_those_of_whole_sequences(ran: tuple[Path, dict[str, Outcome]]) -> None:
    def figures(name: str) -> list[str]:
        ran[1][name].assert_passed()
        return re.findall(r"(?:loss|held out) ([\d.]+)", ran[1][name].said[0])

    assert len(figures("whole")) == 4
    assert figures("sliced") == figures("whole")


def test_the_memory_of_carries_is_counted(ran: tuple[Path, dict[str, Outcome]]) -> None:
    """Keys and values are views into the 18 numbers of 8 bytes that the projection makes for each of 4 positions."""
    assert "4 slices of 1.66 KiB, 4 carries of 576 B" in ran[1]["tied"].said[0]
    assert 4 * 18 * 8 == 576


@pytest.mark.parametrize("spoilt", REFUSED)
def test_a_model_that_cannot_run_in_slices_is_refused(ran: tuple[Path, dict[str, Outcome]], spoilt: str) -> None:
    outcome = ran[1][f"refused-{spoilt}"]
    assert set(outcome.statuses) != {"0"}
    assert re.search(REFUSED[spoilt][1], "".join(outcome.said), re.S), "".join(outcome.said)
    assert "Traceback" not in "".join(outcome.said)
