"""Warnings in the comments of a measured file: chimera profile writes them for figures that are too uncertain.

    # warning: stage 0 of 2: too noisy to use: after 30 rounds the median may be off by more than 5 %: step 7.6 %

People who correct the figure by hand remove the line.
"""

import re
from collections.abc import Iterator, Sequence

from chimera_ir.source import Source

WARNING = "warning: "
"""The beginning of a warning, after the sign of a comment."""

SHOWN = 3
"""The most warnings that are shown to people; files and JSON have all."""

_LINE = re.compile(rf"^# {WARNING}(.+?)\r?$", re.M)


def warnings(source: Source) -> tuple[str, ...]:
    """The warnings in a file, each with the name of the file in front."""
    return tuple(f"{source.name}: {line[1]}" for line in _LINE.finditer(source.text))


def shown(lines: Sequence[str]) -> Iterator[str]:
    """Yields the first SHOWN warnings, and a line with the number of further ones."""
    yield from lines[:SHOWN]
    rest = len(lines) - SHOWN
    if rest > 0:
        yield f"{rest} more such {'line is' if rest == 1 else 'lines are'} in the files"
