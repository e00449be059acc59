"""Tables and pictures as text, as standard output would show them."""

import io
import os
import re
import shlex
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from html import escape
from threading import Event, Thread, Timer
from time import monotonic

from pygments import highlight, token
from pygments.formatters import TerminalFormatter
from pygments.lexer import RegexLexer, words
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.segment import Segment

from chimera_ir.source import grammar

# Escapes for texts of unknown origin, before they are shown on a terminal, in a picture, page or command line.

_TAB = 4
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs")


def visible(text: str) -> str:
    """The text with tabs as blanks, and with escapes for characters that a terminal would obey instead of show.

    Examples
    --------
    >>> print(visible("a\\tb\\x1b[31m"))
    a    b\\x1b[31m
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_visible_character, text))


def visible_lines(text: str) -> str:
    """Several lines with escapes as in `visible`; the line ends stay."""
    if text.isascii() and text.isprintable():
        return text
    return "\n".join(map(visible, text.split("\n")))


def _visible_character(character: str) -> str:
    if character == "\t":
        return " " * _TAB
    if character != " " and unicodedata.category(character) in _HIDDEN:
        code = ord(character)
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return character


def as_argument(path: str) -> str:
    """A path, written so that no command takes it for an option."""
    return f"./{path}" if path.startswith("-") else path


def command_line(words: Iterable[str]) -> str:
    """The words as one line that a shell splits into the same words.

    Characters that cannot be shown are in the notation of bash, ksh and zsh.

    Examples
    --------
    >>> print(command_line(["torchrun", "it's/train.py", "a\\nb"]))
    torchrun 'it'"'"'s/train.py' $'a\\x0ab'
    """
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    if visible(word) == word:
        return shlex.quote(word)
    return f"$'{''.join(map(_quoted_character, word))}'"


def _quoted_character(character: str) -> str:
    if character in "'\\":
        return f"\\{character}"
    if visible(character) == character:
        return character
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))


# Colours of schemes and IR texts: lexers for Pygments, and source as a terminal shows it.
#
# The lexers take their words and signs from the grammars. Entry points named ``pygments.lexers`` make them known to
# every program that highlights with Pygments.

MAX_COLORED = 2**22
"""Characters of the longest text that is coloured: about two seconds of work."""

_LITERAL = re.compile(r'//.*|"([^"\n]+)"|/(?:\\.|[^/\n])+/')
_COLORS = {
    token.Token: ("", ""),
    token.Keyword: ("blue", "blue"),
    token.Keyword.Type: ("magenta", "magenta"),
    token.Name.Function: ("magenta", "magenta"),
    token.Name.Variable: ("cyan", "cyan"),
    token.Number: ("cyan", "cyan"),
    token.String: ("green", "green"),
    token.Comment: ("brightblack", "brightblack"),
}
"""The colours of each sort of word, on a light and on a dark background.

They are chosen from a terminal's sixteen to be legible on both.
"""


def literals(name: str) -> list[str]:
    """Returns the words and signs that stand between quotation marks in a grammar, the longest first."""
    quoted = {match[1] for match in _LITERAL.finditer(grammar(name).read_text(encoding="utf-8")) if match[1]}
    return sorted(quoted, key=lambda literal: (-len(literal), literal))


def keywords(name: str) -> list[str]:
    """Returns the words of two letters or more among the `literals` of a grammar."""
    return [literal for literal in literals(name) if re.fullmatch("[a-z_]{2,}", literal)]


def _rules(name: str, *special: tuple[str, object]) -> Iterator[tuple[object, object]]:
    """Yields the rules of a lexer for the grammar ``name``; those in ``special`` come before names and numbers."""
    yield r"\s+", token.Whitespace
    yield r"#.*", token.Comment.Single
    yield words(keywords(name), prefix=r"\b", suffix=r"\b"), token.Keyword
    yield from special
    yield r"[A-Za-z_]\w*(?=\s*\()", token.Name.Function
    yield r"[A-Za-z_]\w*", token.Name
    yield r"[0-9]+\b", token.Number.Integer
    yield words([literal for literal in literals(name) if not literal[0].isalpha()]), token.Operator


class SchemeLexer(RegexLexer):
    """Lexer of the scheme language."""

    name = "Chimera scheme"
    aliases = ("chim",)
    filenames = ("*.chim",)
    tokens = {"root": [*_rules("scheme.lark", (r'"[^"\n]*"', token.String))]}  # noqa: RUF012


class IrLexer(RegexLexer):
    """Lexer of plans, schedules and programs as text."""

    name = "Chimera IR"
    aliases = ("sir",)
    filenames = ("*.sir",)
    tokens = {  # noqa: RUF012
        "root": [
            *_rules(
                "ir.lark",
                (r"[A-Z]\b", token.Keyword.Type),
                (r"[msvw](?:[+-]?[0-9]+)?\b", token.Name.Variable),
            )
        ]
    }


def colored(text: str, ending: str) -> str:
    """The text with escape sequences for colours; unchanged if ``ending`` is not .chim or .sir, or it is too long.

    Examples
    --------
    >>> colored("workers D", ".chim")
    '\\x1b[34mworkers\\x1b[39;49;00m D'
    """
    lexer = {".chim": SchemeLexer, ".sir": IrLexer}.get(ending)
    if lexer is None or len(text) > MAX_COLORED:
        return text
    return highlight(text, lexer(stripnl=False, ensurenl=False), TerminalFormatter(colorscheme=_COLORS))


# HTML that a notebook shows: a page in a frame of its own, a table, or a message.

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
    """HTML of a table's row; ``first`` is the tag of its first cell, ``other`` that of the other cells."""
    tags = [f"{first} {_FIRST}", *(f"{other} {_OTHER}" for _ in cells[1:])]
    closed = (f"<{tag}>{_text(cell)}</{tag.split()[0]}>" for tag, cell in zip(tags, cells, strict=True))
    return f"<tr>{''.join(closed)}</tr>"


def _text(text: str) -> str:
    return escape(visible_lines(text))


# Progress on standard error: on a terminal a line that changes, in a log a line every few seconds.

AFTER, EVERY = 1.0, 8.0
"""Seconds before anything is shown, and from a line of a log to the next."""


@contextmanager
def shown(quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Yields a function that sets the text of a progress line; after a second, the line shows on standard error.

    With ``quiet``, or if standard error is not a terminal, nothing is shown. Afterwards the terminal is as it was.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_interactive:
        yield lambda _: None
        return
    line = Progress(
        *(SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    task = line.add_task("reading the text")
    timer = Timer(AFTER, line.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda doing: line.update(task, description=doing)
    finally:
        timer.cancel()
        timer.join()
        line.stop()


@contextmanager
def logged() -> Iterator[Callable[[str], None]]:
    """Yields a function that sets a text; every few seconds, the text of that moment is written to standard error.

    Each line has the seconds since the beginning. A block that is over before the first line writes nothing.
    """
    start, over, last = monotonic(), Event(), ["starting"]

    def write() -> None:
        while not over.wait(EVERY):
            with suppress(OSError, ValueError):
                sys.stderr.write(f"{last[0]} ({monotonic() - start:.0f} s)\n")
                sys.stderr.flush()

    thread = Thread(target=write, daemon=True)
    thread.start()
    try:
        yield lambda doing: last.__setitem__(0, doing)
    finally:
        over.set()
        thread.join()


_WIDE = 160


def printed(draw: Callable[[Console], None]) -> str:
    """Returns the text that ``draw`` prints on a console as wide and as colourful as standard output.

    Its lines have no trailing blanks.
    """
    text = io.StringIO()
    console = _console(text)
    console.push_render_hook(_EscapeHook())
    draw(console)
    return "\n".join(line.rstrip(" ") for line in text.getvalue().split("\n"))


def appearance() -> tuple[object, ...]:
    """The width and colours of standard output, on which the text from `printed` depends."""
    console = _console(io.StringIO())
    return console.width, console.is_terminal, console.color_system, console.no_color, console.legacy_windows


def has_width() -> bool:
    """Whether standard output has a width: that of a terminal, or ``COLUMNS``."""
    return _is_terminal() or os.environ.get("COLUMNS", "").isdecimal()


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def _console(text: io.StringIO) -> Console:
    width = None if has_width() else _WIDE
    return Console(file=text, highlight=False, force_terminal=_is_terminal() or None, width=width)


class _EscapeHook(RenderHook):
    """Makes control characters visible, so that a terminal obeys no codes but the colours of this program."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Escaped(renderable) for renderable in renderables]


@dataclass(frozen=True, slots=True)
class _Escaped:
    original: ConsoleRenderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self.original, options):
            yield Segment(visible_lines(text), style, control)
