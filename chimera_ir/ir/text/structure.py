"""Splits a text of IR into lines by the grammar (`grammar/ir.lark`), and finds lines that are malformed or misplaced.

`reader` reads what each line says.
"""

import re
from functools import cache

from lark import Lark, Token, Tree, UnexpectedToken

from chimera_ir.diagnostics.catalogue import irtext as say
from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.grammars import parser_of
from chimera_ir.ir.kinds import KINDS
from chimera_ir.ir.text.header import span
from chimera_ir.ir.text.malformed import explain
from chimera_ir.source import Source, Span

MOST_MISTAKES = 50
"""The most mistakes of a text that are reported."""

_SHORT = 120

_HEADER = "plan|schedule|program|parameters|workers?|stages|micro_batches|kinds|updates|memory|sync|tied|pipe"
_ANY_LINE = re.compile(r"^[ \t]*[^\s#]", re.MULTILINE)
_HEADER_LINE = re.compile(rf"^[ \t]*(?:{_HEADER})\b", re.MULTILINE)


def count_lines(text: str) -> tuple[int, int]:
    """Returns how many lines of operations a text has, and how many other lines (header and headings).

    The first word of a line decides what it is; nothing is parsed.
    """
    lines, headers = (sum(1 for _ in form.finditer(text)) for form in (_ANY_LINE, _HEADER_LINE))
    return lines - headers, headers


@cache
def _parser() -> Lark:
    letters = " | ".join(f'"{letter}"' for letter in KINDS)
    return parser_of("ir.lark", f"\nLETTER: {letters}\n")


def tree_of(source: Source) -> Tree[Token]:
    """Returns the lines of a text as a tree of the title, the header, and the operations or lanes.

    Raises `Rejected` with all lines that the grammar does not know; if there are none, with the first one that is in a
    wrong place.
    """
    try:
        tree = _parser().parse(source.text)
    except UnexpectedToken as unexpected:
        raise Rejected(_structure(source, unexpected.token)) from None
    lines = list(tree.scan_values(lambda _: True))
    malformed = [token for token in lines if token.type == "OTHER"]
    if malformed:
        raise Rejected(_malformed(malformed, lines))
    return tree


def _malformed(malformed: list[Token], tokens: list[Token]) -> list[Diagnostic]:
    """The diagnostics of the lines that the grammar does not know; ``tokens`` are all lines of the text."""
    plan = tokens[0].startswith("plan")
    turn = not plan and any(token.type == "UPDATES" for token in tokens)
    shown = [explain(str(token), token.start_pos or 0, plan=plan, turn=turn) for token in malformed[:MOST_MISTAKES]]
    rest = malformed[MOST_MISTAKES:]
    return [*shown, *([say.MoreMistakes(span(rest[0]), len(rest))] if rest else [])]


def _structure(source: Source, unexpected: Token) -> list[Diagnostic]:
    """Returns the mistakes of a text in which the line ``unexpected`` is the first that may not stand where it is.

    They are the malformed lines of the text or, if all are well formed, one diagnostic of a line that is out of order.
    """
    tokens = list(_parser().lex(source.text))
    if not tokens:
        return [say.NoTitle(Span(0, 0))]
    if tokens[0].type != "TITLE" and tokens[0].split()[:1] not in (["plan"], ["schedule"], ["program"]):
        return [say.NoTitle(Span(span(tokens[0]).start, min(span(tokens[0])[1], span(tokens[0]).start + _SHORT)))]
    malformed = [token for token in tokens if token.type == "OTHER"]
    if malformed:
        return _malformed(malformed, tokens)
    if unexpected.type == "HEADING" and not tokens[0].startswith("plan"):
        unexpected = next(token for token in tokens if token.type not in _MISPLACED)
    lanes = any(token.type == "HEADING" for token in tokens)
    return [_MISPLACED.get(unexpected.type, say.NoHeading)(span(unexpected), lanes)]


_MISPLACED: dict[str, type[say.OutOfOrder]] = {"TITLE": say.SecondTitle, "HEADING": say.HeadingTooLate} | dict.fromkeys(
    ("PARAMETERS", "WORKERS", "STAGES", "MICRO_BATCHES", "KINDS", "UPDATES", "MEMORY", "SYNC", "TIED", "PIPE"),
    say.HeaderTooLate,
)
