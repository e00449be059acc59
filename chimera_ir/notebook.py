"""HTML that a notebook shows: a page in a frame of its own, or a message."""

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


def message(text: str) -> str:
    """A text of several lines, such as that of an error, with its columns aligned."""
    return f"<pre>{_text(text)}</pre>"


def _text(text: str) -> str:
    return escape(visible_lines(text))
