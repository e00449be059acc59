"""The page on conformance is what the schemes compile to, and says of every library scheme what is published."""

from fractions import Fraction
from itertools import accumulate

import pytest

from chimera_ir import library
from conformance.page import page
from conformance.published import Published, compared, schedules
from tests.pages import page_of

PAGE = page_of("conformance.md")


def test_the_page_is_what_its_command_prints() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python docs/conformance writes it"


def test_every_library_scheme_is_on_the_page() -> None:
    assert {schedule.scheme for schedule in schedules()} == {*library.names()}


@pytest.mark.parametrize("schedule", schedules(), ids=lambda schedule: schedule.name)
def test_a_number_agrees_or_there_is_a_reason(schedule: Published) -> None:
    for number in compared(schedule):
        assert number.agrees == (not number.number.differs), number


def test_every_number_is_published_or_derived() -> None:
    assert all(bool(number.place) != bool(number.derived) for schedule in schedules() for number in schedule.numbers)


@pytest.mark.parametrize(("D", "N"), [(4, 8), (8, 16), (4, 12)])
def test_the_derived_numbers_of_eager_1f1b_are_those_of_its_definition(D: int, N: int) -> None:
    """Stage s begins with 2(D-s)-1 forwards, then takes turns: lanes and times from these words alone."""
    ends: dict[tuple[str, int, int], int] = {}
    lanes = []
    for stage in range(D):
        ahead = min(2 * (D - stage) - 1, N)
        order = [("F", m) for m in range(ahead)]
        for m in range(N):
            order += [("B", m), *([("F", m + ahead)] if m + ahead < N else [])]
        lanes.append([(kind, m, stage) for kind, m in order])
    queues = [lane[::-1] for lane in lanes]
    free = [0] * D
    while any(queues):
        for queue in filter(None, queues):
            kind, m, stage = operation = queue[-1]
            needs = [("F", m, stage - 1)] if kind == "F" else [("F", m, stage), ("B", m, stage + 1)]
            needs = [need for need in needs if 0 <= need[2] < D]
            if all(need in ends for need in needs):
                free[stage] = ends[operation] = max([free[stage], *map(ends.__getitem__, needs)]) + 1 + (kind == "B")
                queue.pop()
    peaks = []
    for lane in lanes:
        kept = list(accumulate(1 if kind == "F" else -1 for kind, _, _ in lane))
        peaks.append(max(kept))
    makespan = max(ends.values())
    own = {
        "bubble ratio": 1 - Fraction(3 * N, makespan),
        "most activations": Fraction(max(peaks)),
        "fewest activations": Fraction(min(peaks)),
    }
    (schedule,) = (schedule for schedule in schedules() if schedule.scheme == "eager_1f1b")
    assert {number.measure.value: number.at({"D": D, "N": N}) for number in schedule.numbers} == own
