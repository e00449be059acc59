"""The page on conformance is what the schemes compile to, and says of every library scheme what is published."""

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
