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
    """A table of texts, whose first column names the rows.

    Examples
    --------
    >>> print(table("", ["n", "n**2"], [["2", "4"]]))
    <table><thead><tr><th scope="col">n</th><th scope="col">n**2</th></tr></thead>
    <tbody><tr><th scope="row">2</th><td>4</td></tr></tbody></table>
    """
    body = "\n".join(f"<tr>{''.join(_row(row))}</tr>" for row in rows)
    columns = "".join(f'<th scope="col">{_text(head)}</th>' for head in heads)
    described = f"<caption>{_text(caption)}</caption>" if caption else ""
    return f"<table>{described}<thead><tr>{columns}</tr></thead>\n<tbody>{body}</tbody></table>"


def message(text: str) -> str:
    """A text of several lines, such as that of an error, with its columns aligned."""
    return f"<pre>{_text(text)}</pre>"


def _row(cells: Sequence[str]) -> Iterable[str]:
    first, *rest = cells
    return (f'<th scope="row">{_text(first)}</th>', *(f"<td>{_text(cell)}</td>" for cell in rest))


def _text(text: str) -> str:
    return escape(visible_lines(text))
