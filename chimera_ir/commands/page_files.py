"""Checks and writes the file of a page, which the option ``--html`` names."""

from pathlib import Path
from typing import Any

import click

from chimera_ir import output
from chimera_ir.commands.common import GivenPath
from chimera_ir.commands.sections import report
from chimera_ir.escapes import visible

_OPTION = "--html"
_REMEDY = "choose another file, or remove it"


class PagePath(GivenPath):
    """The file of a page; ``-`` is not one, as what a command prints goes to standard output."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; a usage error if it is empty or ``-``."""
        if value == "-":
            self.fail("a page is written to a file; name one, such as page.html.", param, ctx)
        return super().convert(value, param, ctx)


PAGE = PagePath(path_type=Path)
"""The type of an option that names the file of a page, whether it exists or not."""


def refuse_page(file: Path, mark: str) -> None:
    """Raises `OutputRefused` if `write_page` could not write to ``file``; called before the page is made.

    A page of this command begins with the text ``mark``. A file that begins otherwise is never overwritten.
    """
    output.refuse_file(file, mark, force=False, option=_OPTION, remedy=_REMEDY)


def write_page(file: Path, page: str, mark: str) -> None:
    """Writes a page, whose first lines are ``mark``, to a file, and prints where; may raise `OutputRefused`."""
    output.write_file(file, page.removeprefix(mark), mark, force=False, option=_OPTION, remedy=_REMEDY)
    report(f"wrote {visible(str(file))}: open it in a browser\n")
