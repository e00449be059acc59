"""Colours of schemes and IR texts: lexers for Pygments, and source as a terminal shows it.

The lexers take their words and signs from the grammars. Entry points named ``pygments.lexers`` make them known to every
program that highlights with Pygments.
"""

import re
from collections.abc import Iterator

from pygments import highlight, token
from pygments.formatters import TerminalFormatter
from pygments.lexer import RegexLexer, words

from chimera_ir.source import grammar

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
