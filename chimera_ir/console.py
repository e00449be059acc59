"""Tables and pictures as text, as standard output would show them."""

import io
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.segment import Segment

from chimera_ir.escapes import visible_lines

_WIDE = 160


def printed(draw: Callable[[Console], None]) -> str:
    """The text that ``draw`` prints on a console like standard output (width, colours), without trailing blanks."""
    text, width = io.StringIO(), None if has_width() else _WIDE
    console = Console(file=text, highlight=False, emoji=False, force_terminal=_is_terminal() or None, width=width)
    console.push_render_hook(_EscapeHook())
    draw(console)
    return "\n".join(line.rstrip(" ") for line in text.getvalue().split("\n"))


def has_width() -> bool:
    """Whether standard output has a width: that of a terminal, or ``COLUMNS``."""
    return _is_terminal() or os.environ.get("COLUMNS", "").isdecimal()


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


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
