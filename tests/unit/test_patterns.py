"""Patterns of waits: every eye tells them from forwards and from one another; every picture has the same ones."""

import re
from fractions import Fraction
from itertools import combinations, product
from xml.etree import ElementTree

import pytest

from chimera_ir.picture import svg
from chimera_ir.picture.looks import FARTHEST
from chimera_ir.picture.patterns import BUBBLE, DARK_GROUND, LIGHT_GROUND, MESSAGE, SUM, WAITS, Pattern
from chimera_ir.picture.replayed import draw_replay
from chimera_ir.picture.words import HUES, PAPER, mixed
from tests.test_architecture import ROOT
from tests.unit.clocked import two_directions
from tests.unit.test_chunks import SVG, difference, replayed
from tests.unit.test_picture import SIGHT, timeline

LEAST = 20
"""The difference in Lab that two areas must have."""


@pytest.mark.parametrize("sight", SIGHT)
def test_a_mark_differs_from_every_forward_as_every_eye_sees_it(sight: str) -> None:
    shades = [Fraction(part, 6) * FARTHEST for part in range(7)]
    forwards = {mixed(hue.light, PAPER, shade) for hue, shade in product(HUES, shades)}
    assert min(difference(wait.mark, fill, sight) for wait, fill in product(WAITS.values(), forwards)) > LEAST


@pytest.mark.parametrize("sight", SIGHT)
def test_marks_differ_from_one_another_and_from_their_grounds_as_every_eye_sees_them(sight: str) -> None:
    marks = [wait.mark for wait in WAITS.values()]
    assert min(difference(*pair, sight) for pair in combinations([*marks, LIGHT_GROUND], 2)) > LEAST
    assert min(difference(*pair, sight) for pair in combinations([*marks, DARK_GROUND], 2)) > LEAST


def tiles(document: str) -> dict[str, tuple[str, str]]:
    """Path and mark of each pattern in a picture, by the name that a filled area refers to."""
    drawn = {}
    for pattern in ElementTree.fromstring(document).iter(f"{SVG}pattern"):
        ground, mark = pattern
        assert ground.get("fill") == LIGHT_GROUND
        drawn[pattern.get("id", "")] = mark.get("d", ""), mark.get("stroke", "")
    return drawn


def test_every_picture_draws_the_same_patterns() -> None:
    bubble, message, summing = ((pattern.path, pattern.mark) for pattern in (BUBBLE, MESSAGE, SUM))
    plan = two_directions(4)
    assert tiles(svg.draw(timeline(plan))) == {"bubble": bubble}
    assert tiles(draw_replay(replayed(plan))) == {
        "idle-bubble": bubble,
        "idle-message": message,
        "idle-sum": summing,
    }


def test_pages_have_the_patterns_of_all_pictures() -> None:
    """The scripts of a page have a table of their own; in the lines of a bubble they tell its causes apart."""
    theme = (ROOT / "templates" / "page" / "theme.js").read_text(encoding="utf-8")
    row = re.compile(r'^  (\w+): \{ size: (\d+), path: "([^"]*)", width: ([\d.]+), mark: "(#\w+)" \},$', re.MULTILINE)
    rows = {name: Pattern(int(size), path, float(width), mark) for name, size, path, width, mark in row.findall(theme)}
    assert rows == WAITS
    assert f'light: "{LIGHT_GROUND}", dark: "{DARK_GROUND}"' in theme
