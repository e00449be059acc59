"""Programs with frozen stages train as one process does: encoders, stages behind trained ones, copies, and the rest."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from chimera_ir.ir.levels import Schedule
from chimera_ir.ir.text.printer import show
from chimera_ir.lower.lower import order
from tests.e2e.ranks import Job, Outcome, compiled, run_all
from tests.property.programs import doubled, one_direction, two_directions, with_frozen
from tests.property.slices import offloading, seq1f1b
from tests.property.test_split_backward import split

SCHEME = str(Path(__file__).resolve().parents[2] / "docs" / "examples" / "frozen.chim")
LOOP = Path(__file__).parent / "loops" / "frozen.py"
CHECK = ("--check-only", "--micro-batch-size", "2")

SIZES = {
    "encoder": {"a": 1, "g": 3, "D": 0},
    "longer encoder": {"a": 2, "g": 1, "D": 1},
    "behind": {"a": 0, "g": 2, "D": 2},
    "copies of an encoder": {"a": 1, "g": 1, "D": 0},
    "copies behind": {"a": 0, "g": 1, "D": 1},
}
"""Sizes of the example. Two workers have two copies on four ranks."""

SCHEDULES: dict[str, tuple[str, Schedule]] = {
    "two directions": ("zoo", order(with_frozen(two_directions(4, 4), 0, 2))),
    "several micro-batches": ("plain", order(with_frozen(doubled(4, 1), 0, 3))),
    "split": ("zoo", split(order(with_frozen(one_direction(4, 4), 0, 2)), 1)),
    "slices of an encoder": ("carried", order(with_frozen(seq1f1b(4, 2, 3), 0, 1))),
    "slices behind": ("carried", order(with_frozen(seq1f1b(4, 2, 3), 2))),
    "moves": ("zoo", order(with_frozen(offloading(4, 4), 1))),
}


def frozen_in(sizes: dict[str, int]) -> list[int]:
    encoder, trained = sizes["a"], sizes["a"] + sizes["g"]
    return [*range(encoder), *range(trained, trained + sizes["D"])]


def jobs(folder: Path) -> Iterator[Job]:
    def job(name: str, directory: Path, model: str, frozen: list[int], arguments: tuple[str, ...] = CHECK) -> Job:
        return Job(name, directory, arguments, "frozen.py", {"OF": model, "FROZEN": " ".join(map(str, frozen))})

    for name, sizes in SIZES.items():
        yield job(name, compiled(folder, SCHEME, **sizes, N=4), "zoo", frozen_in(sizes))
    sizes = {"a": 1, "g": 1, "D": 2}
    again = compiled(folder, SCHEME, asked=("--recompute",), **sizes, N=4)
    yield job("recomputing", again, "zoo", frozen_in(sizes))
    trained = ("--micro-batch-size", "2", "--steps", "2", "--eval-every", "1", "--check")
    yield job("evaluated", compiled(folder, SCHEME, **sizes, N=4), "zoo", frozen_in(sizes), trained)
    rehearsed = ("--rehearse", "F=0.001,B=0.002,I=0.001", "--steps", "2")
    yield job("rehearsed", compiled(folder, SCHEME, **sizes, N=4), "zoo", frozen_in(sizes), rehearsed)
    for name, (model, schedule) in SCHEDULES.items():
        path = folder / f"{name.replace(' ', '_')}.sir"
        path.write_text(show(schedule))
        yield job(name, compiled(folder, str(path)), model, [*schedule.header.frozen])
    for name, sizes in SIZES.items():
        if sum(sizes.values()) == 4:
            directory = compiled(folder, SCHEME, **sizes)
            yield Job(f"loop {name}", LOOP, (str(directory), *map(str, frozen_in(sizes))), model=None)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("frozen")
    return run_all(folder, 4, [*jobs(folder)])


@pytest.mark.parametrize("name", [*SIZES, "recomputing", "evaluated", *SCHEDULES])
def test_a_program_with_frozen_stages_trains_as_one_process_does(ran: dict[str, Outcome], name: str) -> None:
    ran[name].assert_passed()
    assert "check: passed" in ran[name].said[0]


def test_a_rehearsal_of_it_ends(ran: dict[str, Outcome]) -> None:
    ran["rehearsed"].assert_passed()


@pytest.mark.parametrize("name", [name for name, sizes in SIZES.items() if sum(sizes.values()) == 4])
def test_a_loop_of_ones_own_over_frozen_stages(ran: dict[str, Outcome], name: str) -> None:
    ran[f"loop {name}"].assert_passed()
