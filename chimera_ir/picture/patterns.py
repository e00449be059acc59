"""Patterns that fill the time in which a worker waits, the same in every picture: lines on the picture's background.

The colour of the lines differs from the colours of forwards, of the background and of the other patterns by at least 20
in Lab, also as seen with the three kinds of colour blindness (``tests/unit/test_patterns.py``).
"""

from typing import NamedTuple


class Pattern(NamedTuple):
    """A square tile of ``size`` pixels, repeated: a path in SVG's syntax, drawn with a line of ``width`` pixels.

    ``mark`` is the colour of the line, and of a whole area that is too narrow for lines; ``dark`` is that in a dark
    picture.
    """

    size: int
    path: str
    width: float
    mark: str
    dark: str


LIGHT_GROUND, DARK_GROUND = "#f6f6f6", "#181a1f"
"""The colours between the lines, in light and in dark pictures."""

BUBBLE = Pattern(7, "M-1 1L1 -1M0 7L7 0M6 8L8 6", 0.7, "#555555", "#464646")
MESSAGE = Pattern(5, "M1.5 0V5", 2, "#4400bb", "#5555ff")
SUM = Pattern(5, "M0 1.5H5", 2, "#994400", "#783000")
SEND = Pattern(6, "M2 3H4M5 0H6M0 0H1M5 6H6M0 6H1", 2, "#883399", "#781888")
POST = Pattern(4, "M0 0L4 4M4 0L0 4", 1, "#442200", "#2000c8")
"""The pattern of time in which messages or sums are posted, or data loaded: no wait, and nothing is computed."""

WAITS = {"bubble": BUBBLE, "message": MESSAGE, "sum": SUM, "send": SEND, "post": POST}
"""All patterns, keyed by a short name of what they stand for."""
