"""The carets stand under what is meant, whatever the line holds."""

import re
import sys
from collections import Counter

import pytest

from chimera_ir.diagnostics.model import Diagnostic, Note
from chimera_ir.diagnostics.render import MAX_NOTES, MAX_SHOWN, MAX_WIDTH, render, render_all
from chimera_ir.source import Source, Span


class Sample(Diagnostic, code="CH000"):
    title = "a title about {what}"
    label = "the label"
    help = "do something about {what}"
    what: str = "it"


def marked(text: str, part: str) -> tuple[str, str]:
    """The line that is shown, and what of it stands above the carets."""
    start = text.index(part)
    lines = render(Sample(Span(start, start + len(part))), Source("a.chim", text)).splitlines()
    line, carets = lines[3], lines[4]
    first, last = carets.index("^"), carets.rindex("^")
    return line, line[first : last + 1]


@pytest.mark.parametrize("before", ["", "abc ", "\t", "a\tb\t", "\x1b[31m", "\x00\x7f", "\u202e", "e\u0301 "])
def test_carets_stand_below_the_marked_part(before: str) -> None:
    text = f"{before}marked after"
    start = len(before)
    lines = render(Sample(Span(start, start + 6)), Source("a", text)).splitlines()
    line = lines[3].replace("\u0301", "")
    assert line[lines[4].index("^") : lines[4].rindex("^") + 1] == "marked"


def test_wide_characters_take_two_columns() -> None:
    lines = render(Sample(Span(2, 4)), Source("a", "漢字漢字x")).splitlines()
    assert lines[4] == "  |     ^^^^ the label"


def test_a_long_line_is_cut_around_the_marked_part() -> None:
    for text in ("x" * 5000 + "HERE" + "y" * 5000, "HERE" + "y" * 5000, "x" * 5000 + "HERE"):
        line, part = marked(text, "HERE")
        assert part == "HERE"
        assert len(line) <= MAX_WIDTH + len("1 | ")


def test_a_long_marked_part_is_cut_too() -> None:
    line, part = marked("a " + "z" * 5000, "z" * 5000)
    assert part.startswith("zzz")
    assert part.endswith("...")
    assert len(line) <= MAX_WIDTH + len("1 | ")


def test_no_control_character_reaches_the_terminal() -> None:
    source = Source("na\x1bme", "\x1b[2J\x07 bad \x9b \ud800")
    said = render(Sample(Span(0, 9), "\x1b]0;title\x07"), source)
    assert all(character.isprintable() or character == "\n" for character in said)


def test_a_place_at_or_beyond_the_end_is_shown_at_the_end() -> None:
    assert render(Sample(Span(99, 120)), Source("a", "ab")).splitlines()[3:5] == ["1 | ab", "  |   ^ the label"]
    assert render(Sample(Span(0, 0)), Source("a", "")).splitlines()[3:5] == ["1 |", "  | ^ the label"]


def test_a_place_over_several_lines_is_marked_to_the_end_of_the_first() -> None:
    assert render(Sample(Span(1, 6)), Source("a", "abc\ndef")).splitlines()[4] == "  |  ^^ the label"


def test_carriage_returns_are_no_part_of_a_line() -> None:
    assert render(Sample(Span(3, 4)), Source("a", "a\r\nb\r\n")).splitlines()[3:5] == ["2 | b", "  | ^ the label"]


def test_color_changes_nothing_but_color() -> None:
    source = Source("a.chim", "let two = 2")
    colored = render(Sample(Span(4, 7)), source, color=True)
    assert "\x1b[34mlet\x1b[" in colored, "a keyword of the line"
    for code in ("\x1b[1;31m", "\x1b[1;34m", "\x1b[1m", "\x1b[0m"):
        assert code in colored
    assert re.sub(r"\x1b\[[\d;]*m", "", colored) == render(Sample(Span(4, 7)), source)


def test_a_line_of_a_profile_has_no_colours_of_a_scheme() -> None:
    said = render(Sample(Span(0, 3)), Source("a.toml", "let = 2"), color=True)
    assert said.splitlines()[3].endswith(" let = 2")


def test_of_very_many_diagnostics_the_first_are_shown() -> None:
    said = render_all([Sample(Span(0, 1))] * (MAX_SHOWN + 37), Source("a", "x"))
    assert said.count("error[CH000]") == MAX_SHOWN
    assert said.endswith("\n\nand 37 more")


def test_braces_in_a_fact_are_shown_as_they_are() -> None:
    assert render(Sample(Span(0, 1), "{label} {0}"), Source("a", "x")).startswith(
        "error[CH000]: a title about {label} {0}\n"
    )


class Talkative(Diagnostic, code="CH002"):
    title = "a title"

    def notes(self) -> tuple[Note, ...]:
        return tuple(Note(f"note {number}", Span(number, number + 1)) for number in range(5000))


def test_of_very_many_notes_the_first_are_shown_and_how_many_more_there_are() -> None:
    said = render(Talkative(Span(0, 1)), Source("a.chim", "a" * 5000))
    assert said.count("note: ") == MAX_NOTES + 1
    assert f"note: note {MAX_NOTES - 1}\n" in said
    assert f"note: and {5000 - MAX_NOTES:,} more\n" in said


@pytest.mark.parametrize("letter", ["a", "\u00e9", "\u4e2d", "\u0301", "\x01"])
def test_of_a_very_long_line_only_what_is_near_is_looked_at(letter: str) -> None:
    """A line of a million letters costs as much as one of thousands: calls are counted, not seconds."""
    calls: list[int] = []
    for length in (2_000, 1_000_000):
        source, middle = Source("a.chim", letter * length), length // 2
        source.position(middle)
        counter = Counter[str]()
        sys.setprofile(lambda _, event, __, counter=counter: counter.update([event]))  # type: ignore[misc]
        try:
            said = render(Sample(Span(middle, middle + 3)), source)
        finally:
            sys.setprofile(None)
        assert max(map(len, said.splitlines())) < 12 * MAX_WIDTH
        calls.append(counter.total())
    assert calls[1] <= calls[0] + 10
