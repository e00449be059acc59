"""HTML that a notebook shows: a page in a frame of its own, a table, or a message."""

from collections.abc import Iterable, Sequence
from html import escape

from chimera_ir.escapes import visible_lines

HEIGHT = 720
"""The height of a frame in pixels, in which a page scrolls; a reader may drag its lower edge."""


def frame(page: str, title: str) -> str:
    """A frame around a whole HTML page, whose scripts cannot reach the notebook.

    Examples
    --------
    >>> frame("<p>a</p>", "two words")[:67]
    '<iframe title="two words" sandbox="allow-scripts" srcdoc="&lt;p&gt;'
    """
    style = f"width: 100%; height: {HEIGHT}px; border: 0; resize: vertical"
    return f'<iframe title="{_text(title)}" sandbox="allow-scripts" srcdoc="{escape(page)}" style="{style}"></iframe>'


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts, whose first column names the rows; a notebook's own style is not relied on.

    Examples
    --------
    >>> print(table("", ["n", "n**2"], [["2", "4"]]).replace(_FIRST, "a").replace(_OTHER, "b"))
    <table><thead><tr><th scope="col" a>n</th><th scope="col" b>n**2</th></tr></thead>
    <tbody><tr><th scope="row" a>2</th><td b>4</td></tr></tbody></table>
    """
    body = "\n".join(_row(row, 'th scope="row"', "td") for row in rows)
    columns = _row(heads, 'th scope="col"', 'th scope="col"')
    described = f'<caption style="text-align: left">{_text(caption)}</caption>' if caption else ""
    return f"<table>{described}<thead>{columns}</thead>\n<tbody>{body}</tbody></table>"


def message(text: str) -> str:
    """A text of several lines, such as that of an error, with its columns aligned."""
    return f"<pre>{_text(text)}</pre>"


_FIRST, _OTHER = (f'style="padding: 3px 9px; text-align: {side}"' for side in ("left", "right"))
"""Attributes of the cells of the first column and of the others."""


def _row(cells: Sequence[str], first: str, other: str) -> str:
    tags = [f"{first} {_FIRST}", *(f"{other} {_OTHER}" for _ in cells[1:])]
    closed = (f"<{tag}>{_text(cell)}</{tag.split()[0]}>" for tag, cell in zip(tags, cells, strict=True))
    return f"<tr>{''.join(closed)}</tr>"


def _text(text: str) -> str:
    return escape(visible_lines(text))
