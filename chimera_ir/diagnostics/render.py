"""Diagnostics as text: a sentence, the place, the line with carets, notes, and help."""

import unicodedata
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import PurePath
from typing import NamedTuple

from chimera_ir.diagnostics.model import Diagnostic, Note, Severity, as_cells
from chimera_ir.escapes import visible
from chimera_ir.source import Source, Span

MAX_WIDTH = 100
"""Most columns of a source line that are shown; a longer line is cut around the marked part."""

MAX_SHOWN, MAX_NOTES = 20, 20
"""Most diagnostics that are shown in full, and most notes of a diagnostic that are shown."""

MAX_SENTENCE = 500
"""Most columns of a title, label, note or help."""

_REACH = 4 * MAX_WIDTH
"""Most characters on each side of the marked part that are looked at; some of them may take no column."""

_ELLIPSIS = "..."


class _Style(NamedTuple):
    """Escape sequences that mark parts of the output; empty strings without color."""

    error: str = ""
    warning: str = ""
    gutter: str = ""
    note: str = ""
    bold: str = ""
    end: str = ""


_PLAIN = _Style()
_COLOR = _Style("\033[1;31m", "\033[1;33m", "\033[1;34m", "\033[1;36m", "\033[1m", "\033[0m")


def render(diagnostic: Diagnostic, source: Source, color: bool = False) -> str:
    """A diagnostic as lines of text, without a newline at the end.

    Examples
    --------
    >>> from chimera_ir.diagnostics.catalogue.syntax import SingleEquals
    >>> print(render(SingleEquals(Span(10, 11)), Source("a.chim", "require D = 4")))
    error[CH114]: `=` gives a name to a value; it does not compare
     --> a.chim:1:11
      |
    1 | require D = 4
      |           ^ did you mean `==`?
      = help: compare with `==`
    """
    style = _COLOR if color else _PLAIN
    mark = {Severity.ERROR: style.error, Severity.WARNING: style.warning}[diagnostic.severity]
    words = as_cells if source.is_csv else str
    title, label, help = (
        words(diagnostic.fill(text)) for text in (diagnostic.title, diagnostic.label, diagnostic.help)
    )
    facts = ((note, words(diagnostic.relative_to_turn(note.text))) for note in _some(diagnostic.notes()))
    notes = tuple(note._replace(text=text) for note, text in facts)
    places = [diagnostic.span, *(note.span for note in notes if note.span is not None)]
    margin = max(len(str(source.position(span.start).line)) for span in places)
    head = f"{mark}{diagnostic.severity.value}[{diagnostic.code}]{style.end}"
    lines = [f"{head}{style.bold}: {_sentence(title)}{style.end}"]
    lines += _excerpt(diagnostic.span, label, source, margin, mark, style)
    lines += [_fact("note", note.text, margin, style) for note in notes if note.span is None]
    if help:
        lines.append(_fact("help", help, margin, style))
    for note in notes:
        if note.span is not None:
            lines.append(f"{style.note}note{style.end}: {_sentence(note.text)}")
            lines += _excerpt(note.span, "", source, margin, style.note, style)
    lines += [f"{' ' * margin}   {visible(row)}" for row in diagnostic.drawing()]
    return "\n".join(lines)


def render_all(diagnostics: Iterable[Diagnostic], source: Source, color: bool = False) -> str:
    """The `blocks` of some diagnostics as one text, with a blank line between them."""
    return "\n\n".join(blocks(tuple(diagnostics), source, color))


def blocks(diagnostics: Sequence[Diagnostic], source: Source, color: bool = False) -> list[str]:
    """The texts of the first `MAX_SHOWN` diagnostics; then, if there are others, a line with their number."""
    shown = [render(diagnostic, source, color) for diagnostic in diagnostics[:MAX_SHOWN]]
    rest = len(diagnostics) - len(shown)
    return [*shown, f"and {rest:,} more"] if rest else shown


def _some(notes: tuple[Note, ...]) -> tuple[Note, ...]:
    rest = notes[MAX_NOTES:]
    return (*notes[:MAX_NOTES], Note(f"and {len(rest):,} more", rest[0].span)) if rest else notes


def _fact(kind: str, text: str, margin: int, style: _Style) -> str:
    return f"{' ' * margin} {style.gutter}={style.end} {style.bold}{kind}:{style.end} {_sentence(text)}"


def _sentence(text: str) -> str:
    shown = visible(text)
    return shown if len(shown) <= MAX_SENTENCE else _head(shown, MAX_SENTENCE)


def _excerpt(span: Span, label: str, source: Source, margin: int, mark: str, style: _Style) -> list[str]:
    """Lines that show a span: its place, its source line, carets in the colour ``mark`` with a label below."""
    position = source.position(span.start)
    text = source.line(position.line)
    start = position.column - 1
    stop = max(min(start + span.end - span.start, len(text)), start + 1)
    before, marked, after = (visible(part) for part in _near(text, start, stop))
    before, marked, after = _cut(before, marked, after)
    carets = "^" * max(_width(marked), 1)
    bar = f"{style.gutter}|{style.end}"
    place = f"{source.origin}{visible(source.name)}:{source.place(span.start)}"
    number = f"{style.gutter}{position.line:>{margin}}{style.end}"
    return [
        f"{' ' * margin}{style.gutter}-->{style.end} {place}",
        f"{' ' * margin} {bar}",
        f"{number} {bar} {_code(f'{before}{marked}{after}', source, style)}".rstrip(),
        f"{' ' * margin} {bar} {' ' * _width(before)}{mark}{carets}{' ' if label else ''}{_sentence(label)}{style.end}",
    ]


def _code(text: str, source: Source, style: _Style) -> str:
    if style is _PLAIN:
        return text
    from chimera_ir.highlight import colored

    return colored(text, ".sir" if source.is_ir else PurePath(source.name).suffix)


def _near(text: str, start: int, stop: int) -> tuple[str, str, str]:
    first, last = max(0, start - _REACH), min(stop, start + _REACH)
    before = _ELLIPSIS + text[first:start] if first else text[:start]
    after = text[last : last + _REACH].rstrip() if last == stop else ""
    return before, text[start:last], after


def _cut(before: str, marked: str, after: str) -> tuple[str, str, str]:
    """The parts of a line as `_near` gives them, shortened to `MAX_WIDTH` columns; the marked part stays if it fits."""
    if _width(before) + _width(marked) + _width(after) <= MAX_WIDTH:
        return before, marked, after
    if _width(marked) > MAX_WIDTH // 2:
        marked, after = _head(marked, MAX_WIDTH // 2), ""
    room = MAX_WIDTH - _width(marked)
    columns = min(_width(before), max(room // 2, room - _width(after)))
    if columns < _width(before):
        before = _ELLIPSIS + before[len(before) - _fitting(reversed(before), columns - len(_ELLIPSIS)) :]
    if _width(after) > room - _width(before):
        after = _head(after, room - _width(before))
    return before, marked, after


def _head(text: str, width: int) -> str:
    fitting = _fitting(text, width - len(_ELLIPSIS))
    return text if fitting == len(text) else text[:fitting] + _ELLIPSIS


def _fitting(characters: Iterable[str], width: int) -> int:
    """Number of characters from the first one on that together take at most ``width`` columns."""
    return sum(columns <= width for columns in accumulate(map(_width, characters)))


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(_width_of(character) for character in text)


def _width_of(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1
