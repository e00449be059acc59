"""A table of texts, for a terminal or a notebook."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from rich.console import JustifyMethod

from chimera_ir.escapes import visible_lines

if TYPE_CHECKING:
    import rich.table


class Column(NamedTuple):
    """A column of a table on a terminal; the words of a ``whole`` one stay on one line."""

    head: str
    justify: JustifyMethod = "left"
    style: str = ""
    footer: str = ""
    whole: bool = False


class Table(NamedTuple):
    """A table of texts: rows with a cell for each column, of which the first names the row."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]

    @staticmethod
    def of_numbers(heads: Iterable[str], rows: Sequence[Sequence[str]], names: int = 0) -> "Table":
        """A table of numbers, behind ``names`` columns of words."""
        return Table([Column(head, "left" if n < names else "right") for n, head in enumerate(heads)], rows)

    def for_terminal(self, gap: int = 2) -> "rich.table.Table":
        """The table for a console of any width, with ``gap`` blanks between columns."""
        import rich.table
        from rich.box import SIMPLE_HEAD

        table = rich.table.Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, gap - 1))
        for head, justify, style, footer, whole in self.columns:
            table.add_column(head, footer, justify=justify, style=style, overflow="fold", no_wrap=whole)
        table.show_footer = any(column.footer for column in self.columns)
        for row in self.rows:
            table.add_row(*row)
        return table

    def html(self, caption: str) -> str:
        """The table in HTML that relies on no style of a notebook.

        Examples
        --------
        >>> table = Table([Column("n"), Column("n**2")], [["2", "4"]])
        >>> print(table.html("").replace(_FIRST, "a").replace(_OTHER, "b"))
        <table><thead><tr><th scope="col" a>n</th><th scope="col" b>n**2</th></tr></thead>
        <tbody><tr><th scope="row" a>2</th><td b>4</td></tr></tbody></table>
        """
        body = "\n".join(_row(row, 'th scope="row"', "td") for row in self.rows)
        heads = _row([column.head for column in self.columns], 'th scope="col"', 'th scope="col"')
        described = f'<caption style="text-align: left">{_text(caption)}</caption>' if caption else ""
        return f"<table>{described}<thead>{heads}</thead>\n<tbody>{body}</tbody></table>"


_FIRST, _OTHER = (f'style="padding: 3px 9px; text-align: {side}"' for side in ("left", "right"))
"""Attributes of the cells of the first column and of the others."""


def _row(cells: Sequence[str], first: str, other: str) -> str:
    tags = [f"{first} {_FIRST}", *(f"{other} {_OTHER}" for _ in cells[1:])]
    closed = (f"<{tag}>{_text(cell)}</{tag.split()[0]}>" for tag, cell in zip(tags, cells, strict=True))
    return f"<tr>{''.join(closed)}</tr>"


def _text(text: str) -> str:
    return escape(visible_lines(text))
