"""Streams in loops of one's own: training as train.py and as one process, drained or not, and what ends it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.ranks import Job, Outcome, compiled, run_all
from tests.repeatable import also

LOOP = Path(__file__).resolve().parent / "loops" / "streams.py"
SCHEMES = Path(__file__).resolve().parent / "schemes" / "streams"
PROGRAMS = {
    "pipedream-4": ("pipedream", {"D": 4}),
    "pipedream-2": ("pipedream", {"D": 2}),
    "2bw-4": ("pipedream_2bw", {"D": 4}),
    "2bw-2": ("pipedream_2bw", {"D": 2, "N": 3}),
    "accumulate": (str(SCHEMES / "accumulate.chim"), {}),
    "late": (str(SCHEMES / "late.chim"), {}),
    "crossing": (str(SCHEMES / "crossing.chim"), {}),
}
"""On four ranks those of two workers are two copies."""

COMPARED = also(
    (
        *(("steady", program) for program in PROGRAMS),
        *(("drained", part) for part in ("pipedream-4", "2bw-2", "crossing")),
    ),
    (("drained", program) for program in ("pipedream-2", "2bw-4", "accumulate", "late")),
)
TRAINED = also(("pipedream-4", "2bw-4"), ("pipedream-2",))
LOOPS = also(("hooked-pipedream-4", "left-2bw-4"), ("hooked-2bw-4", "left-pipedream-4"))
UPDATES = 9


def jobs(folder: Path, directories: dict[str, Path]) -> Iterator[Job]:
    words = [word for case, program in COMPARED for word in (case, str(directories[program]))]
    yield Job("compared", LOOP, ("compared", *words), model=None)
    for program in TRAINED:
        directory = directories[program]
        yield Job(f"loop-{program}", LOOP, ("trained", str(directory), str(folder / f"{program}.json")), model=None)
        arguments = ("--micro-batch-size", "2", "--steps", f"{UPDATES}")
        yield Job(f"train-{program}", directory, (*arguments, "--metrics", str(folder / f"{program}.metrics")))
    for name in LOOPS:
        case, _, program = name.partition("-")
        yield Job(name, LOOP, (case, str(directories[program])), model=None)
    yield Job("late-checked", directories["late"])
    yield Job("killed", LOOP, ("killed", str(directories["pipedream-4"])), model=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("streams")


@pytest.fixture(scope="module")
def directories(folder: Path) -> dict[str, Path]:
    return {name: compiled(folder, scheme, **sizes) for name, (scheme, sizes) in PROGRAMS.items()}


@pytest.fixture(scope="module")
def ran(folder: Path, directories: dict[str, Path]) -> tuple[Path, dict[str, Outcome]]:
    return folder, run_all(folder, 4, list(jobs(folder, directories)))


@pytest.mark.parametrize(("case", "program"), COMPARED)
def test_a_stream_trains_as_one_process_on_the_versions_of_its_runs(
    ran: tuple[Path, dict[str, Outcome]], directories: dict[str, Path], case: str, program: str
) -> None:
    outcome = ran[1]["compared"]
    assert all(f"passed: {case} {directories[program]}\n" in said for said in outcome.said), outcome.said
    assert len({*outcome.said}) == 1


@pytest.mark.parametrize("program", TRAINED)
def test_a_stream_without_a_drain_is_bitwise_that_of_train_py(
    ran: tuple[Path, dict[str, Outcome]], program: str
) -> None:
    """With dropout, batch norm and Adam: every loss depends on all weights before it to the last bit."""
    folder, outcomes = ran
    for name in (f"loop-{program}", f"train-{program}"):
        outcomes[name].assert_passed()
    mine = json.loads((folder / f"{program}.json").read_text())
    assert len(mine) == UPDATES
    assert mine == json.loads((folder / f"{program}.metrics").read_text())["loss"]


@pytest.mark.parametrize("case", LOOPS)
def test_a_loop_of_ones_own(ran: tuple[Path, dict[str, Outcome]], case: str) -> None:
    ran[1][case].assert_passed()


def test_turns_that_begin_elsewhere_are_the_same_program(ran: tuple[Path, dict[str, Outcome]]) -> None:
    outcome = ran[1]["late-checked"]
    outcome.assert_passed()
    assert "check: passed" in outcome.said[0]


def test_a_rank_that_dies_ends_the_others_with_an_error_each(ran: tuple[Path, dict[str, Outcome]]) -> None:
    assert [status == "0" for status in ran[1]["killed"].statuses] == [True, True, False, True], ran[1]["killed"]
