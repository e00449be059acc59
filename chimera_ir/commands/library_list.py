"""The list of library schemes that ``chimera compile --list`` prints."""

from pathlib import Path

from chimera_ir import errors, library
from chimera_ir.diagnostics.model import Rejected
from chimera_ir.escapes import visible


def listed_library(further: tuple[Path, ...]) -> str:
    """A line for each scheme, of the library and of ``further`` directories: its name, parameters and summary.

    Where standard output has a width, longer summaries continue below themselves.
    """
    from rich.table import Column, Table
    from rich.text import Text

    from chimera_ir.console import has_width, printed

    names = library.names(further)
    summaries = [described(name, further) for name in names]
    if not has_width():
        width = max(map(len, names))
        return "".join(
            f"{visible(f'{name:<{width}}  {summary}')}\n" for name, summary in zip(names, summaries, strict=True)
        )
    table = Table.grid(Column(no_wrap=True), Column(), padding=(0, 2, 0, 0))
    for name, summary in zip(names, summaries, strict=True):
        table.add_row(Text(name), Text(summary))
    return printed(lambda console: console.print(table))


def described(name: str, further: tuple[Path, ...]) -> str:
    """The parameters and the summary of a scheme, or why there are none."""
    try:
        return f"({library.parameters(name, further)}) {library.summary(name, further)}".rstrip()
    except Rejected:
        return f"a text with mistakes: {library.source(name, further).name}"
    except errors.UnreadableText as error:
        return str(error)
