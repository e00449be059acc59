"""Describes the place where the parser stopped, and the tokens around it."""

from dataclasses import dataclass
from functools import cached_property

from lark import Token

from chimera_ir.ir.kinds import KINDS
from chimera_ir.source import Span

OPENERS = {"(": ")", "[": "]", "{": "}"}
"""Maps each opening bracket to its closing bracket."""

CLOSERS = {closer: opener for opener, closer in OPENERS.items()}
"""Maps each closing bracket to its opening bracket."""

SCHEME_LINES = frozenset({"workers", "let", "fn", "require", "update", "memory", "pipe"})
"""The words that begin a line outside of a pipe."""

PIPE_LINES = frozenset({"stages", "micros", "slices", "let", "reads", "recompute", "sync"})
"""The words that begin a line in a pipe; the other lines are operations."""

LETTERS = tuple(letter for letter in KINDS if letter not in PIPE_LINES)
"""The letters that begin an operation."""


@dataclass(frozen=True)
class Stop:
    """The place where the parser stopped: at ``tokens[position]``, or at the end of ``text``.

    ``accepted`` are the terminals of the grammar that could stand there.
    """

    text: str
    tokens: list[Token]
    position: int
    accepted: frozenset[str]

    @property
    def token(self) -> Token | None:
        """The token that the parser did not take; None at the end of the text."""
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    @property
    def before(self) -> Token:
        """The last token that the parser took."""
        return self.tokens[self.position - 1]

    @property
    def span(self) -> Span:
        """The span of the token; at the end of the text, the place after the last token."""
        return self.gap if self.token is None else span_of(self.token)

    @property
    def shown(self) -> str:
        """The token that the parser did not take, in words."""
        return "the end of the text" if self.token is None else f"`{short(self.token)}`"

    @property
    def on_next_line(self) -> bool:
        """Whether the parser stopped at the start of a line, or at the end of the text."""
        return self.token is None or first_on_line(self.tokens, self.position)

    @property
    def wants_value(self) -> bool:
        """Whether an expression could start here."""
        return "INTEGER" in self.accepted

    @property
    def after_value(self) -> bool:
        """Whether a complete expression ends here."""
        return "PLUS" in self.accepted

    @property
    def gap(self) -> Span:
        """The place after the last token taken, where something is missing."""
        end = span_of(self.before).end
        return Span(end, end + 1)

    @cached_property
    def open_brackets(self) -> list[Token]:
        """The open brackets, the outermost first."""
        opened: list[Token] = []
        for token in self.tokens[: self.position]:
            if token in OPENERS:
                opened.append(token)
            elif token in CLOSERS and opened:
                opened.pop()
        return opened

    def line_start(self) -> int:
        """The position of the token that starts the line of the scheme in which the parser stopped."""
        return statement_start(self.tokens, self.position - 1)

    def text_between(self, start: int, end: int) -> str:
        """The text from the token at position ``start`` to before the one at ``end``, as one line."""
        if start >= end:
            return ""
        text = self.text[span_of(self.tokens[start]).start : span_of(self.tokens[end - 1]).end]
        return " ".join(text.split())


def span_of(token: Token) -> Span:
    """The span of a token."""
    return Span(token.start_pos or 0, token.end_pos or 0)


def starts_statement(tokens: list[Token], position: int) -> bool:
    """Whether a line of the scheme starts at a token, so that parsing can resume there."""
    token = tokens[position]
    if token in SCHEME_LINES or token in PIPE_LINES or token in ("scheme", "}"):
        return True
    return token.type == "NAME" and first_on_line(tokens, position)


def statement_start(tokens: list[Token], position: int) -> int:
    """Returns the position of the first token of the scheme's line to which the token at ``position`` belongs."""
    while position > 0 and not starts_statement(tokens, position):
        position -= 1
    return position


def first_on_line(tokens: list[Token], position: int) -> bool:
    """Whether a token is the first on its line."""
    return position == 0 or (tokens[position].line or 0) > (tokens[position - 1].end_line or 0)


def short(token: Token) -> str:
    """The text of a token, shortened if it is very long."""
    text = str(token)
    return text if len(text) <= 40 else text[:37] + "..."
