"""A table of texts, for a terminal or a notebook."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod

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
    """A table of texts: rows with a cell for each column, of which the first ``names`` tell the rows apart."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    names: int = 1

    @staticmethod
    def of_numbers(heads: Iterable[str], rows: Sequence[Sequence[str]], names: int = 1, words: int = 0) -> "Table":
        """A table of numbers, of whose columns the first ``words`` have words."""
        columns = [Column(head, "left" if n < words else "right") for n, head in enumerate(heads)]
        return Table(columns, rows, names)

    def for_terminal(self, gap: int = 2) -> "FittedTable":
        """The table for a console of any width, with ``gap`` more blanks than one between columns."""
        return FittedTable(self, gap)

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


@dataclass(frozen=True, slots=True)
class FittedTable:
    """A table for a console of any width, in parts one below the other where its words would not stay whole.

    Each part begins with the columns that tell the rows apart.
    """

    table: Table
    gap: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> "Iterator[rich.table.Table]":
        room = options.max_width
        columns = range(len(self.table.columns))
        if self._width(map(self._least, columns)) <= room:
            yield self._drawn(columns, room)
            return
        names = [*columns[: self.table.names]]
        part = names
        for column in columns[len(names) :]:
            if len(part) > len(names) and self._width(map(self._usual, [*part, column])) > room:
                yield self._drawn(part, room)
                part = names
            part = [*part, column]
        yield self._drawn(part, room)

    def _drawn(self, columns: Sequence[int], room: int) -> "rich.table.Table":
        import rich.table
        from rich.box import SIMPLE_HEAD

        # Of the columns that can spare a column of the console, the widest one loses it, until all fit.
        widths, least = [*map(self._most, columns)], [*map(self._least, columns)]
        while self._width(widths) > room:
            spare = [(width, -place) for place, width in enumerate(widths) if width > least[place]]
            if not spare:
                break
            widths[-max(spare)[1]] -= 1
        table = rich.table.Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, self.gap - 1))
        for column, width in zip(columns, widths, strict=True):
            head, justify, style, footer, whole = self.table.columns[column]
            table.add_column(head, footer, justify=justify, style=style, overflow="fold", no_wrap=whole, width=width)
        table.show_footer = any(self.table.columns[column].footer for column in columns)
        for row in self.table.rows:
            table.add_row(*(row[column] for column in columns))
        return table

    def _width(self, widths: Iterable[int]) -> int:
        """The columns of the console that a table takes: with gaps, and a blank at either side."""
        listed = [*widths]
        return sum(listed) + (len(listed) - 1) * (self.gap + 1) + 2

    def _least(self, column: int) -> int:
        """The longest word of a column, or of a whole one the longest line."""
        return self._most(column) if self.table.columns[column].whole else _longest(_words(self._texts(column)))

    def _usual(self, column: int) -> int:
        """The width at which no more than the head is broken into lines."""
        head, *cells = self._texts(column)
        return max(self._least(column), _longest([*_words([head]), *cells]))

    def _most(self, column: int) -> int:
        return _longest(self._texts(column))

    def _texts(self, column: int) -> list[str]:
        head = self.table.columns[column]
        return [head.head, head.footer, *(row[column] for row in self.table.rows)]


def _longest(texts: Iterable[str]) -> int:
    return max((cell_len(line) for text in texts for line in text.split("\n")), default=0)


def _words(texts: Iterable[str]) -> list[str]:
    return [word for text in texts for word in text.split()]


_FIRST, _OTHER = (f'style="padding: 3px 9px; text-align: {side}"' for side in ("left", "right"))
"""Attributes of the cells of the first column and of the others."""


def _row(cells: Sequence[str], first: str, other: str) -> str:
    tags = [f"{first} {_FIRST}", *(f"{other} {_OTHER}" for _ in cells[1:])]
    closed = (f"<{tag}>{_text(cell)}</{tag.split()[0]}>" for tag, cell in zip(tags, cells, strict=True))
    return f"<tr>{''.join(closed)}</tr>"


def _text(text: str) -> str:
    return escape(visible_lines(text))
