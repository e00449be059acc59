"""Patterns of waits: every eye tells them from forwards and from one another; every picture has the same ones."""

from fractions import Fraction
from itertools import combinations, product

import pytest

import chimera_ir
from chimera_ir.page.contents import document
from chimera_ir.picture.chart import DARK_GROUND, LIGHT_GROUND, WAITS
from chimera_ir.picture.looks import FARTHEST, HUES, PAPER, mixed
from chimera_ir.source import templates
from tests.unit.test_chunks import difference
from tests.unit.test_picture import SIGHT, contrast

LEAST = 20
"""The difference in Lab that two areas must have."""


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("dark", [False, True])
def test_a_mark_differs_from_every_forward_as_every_eye_sees_it(sight: str, dark: bool) -> None:
    shades = [Fraction(part, 6) * FARTHEST for part in range(7)]
    forwards = {mixed(hue.light, PAPER, shade) for hue, shade in product(HUES, shades)}
    assert min(difference(mark, fill, sight) for mark, fill in product(marks(dark), forwards)) > LEAST


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("dark", [False, True])
def test_marks_differ_from_one_another_and_from_their_ground_as_every_eye_sees_them(sight: str, dark: bool) -> None:
    colours = [*marks(dark), DARK_GROUND if dark else LIGHT_GROUND]
    assert min(difference(*pair, sight) for pair in combinations(colours, 2)) > LEAST


@pytest.mark.parametrize("dark", [False, True])
def test_marks_are_seen_on_their_ground(dark: bool) -> None:
    """On a dark one with less contrast than the 3 of WCAG 2.1: brighter marks would look like forwards."""
    ground = DARK_GROUND if dark else LIGHT_GROUND
    assert min(contrast(mark, ground) for mark in marks(dark)) > (2.6 if dark else 5)


@pytest.mark.parametrize("name", ["zb_h1", "dualpipe_v", "dualpipe"])
def test_kinds_of_operations_differ_on_a_dark_page(name: str) -> None:
    looks = document(chimera_ir.compile(name)).schedules[0].looks
    kinds = [(look.name.split(": ")[-1], look.dark.fill) for look in looks]
    fills = [
        (one, other) for (kind, one), (another, other) in combinations(kinds, 2) if kind != another and one != other
    ]
    assert min(difference(*pair, next(iter(SIGHT))) for pair in fills) > LEAST


def marks(dark: bool) -> list[str]:
    return [wait.dark if dark else wait.mark for wait in WAITS.values()]


def test_the_script_of_pages_has_the_same_patterns() -> None:
    """In the lines of a bubble it tells causes apart."""
    script = (templates() / "page" / "theme.js").read_text(encoding="utf-8")
    for name, (size, path, width, mark, dark) in WAITS.items():
        row = f'{name}: {{ size: {size}, path: "{path}", width: {width}, mark: "{mark}", dark: "{dark}" }},'
        assert row in script
    assert f'const GROUND = {{ light: "{LIGHT_GROUND}", dark: "{DARK_GROUND}" }};' in script
