"""From text to tree, with every syntax mistake that can be told apart from the ones before it."""

import re
from functools import cache
from itertools import islice

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedToken
from lark.parsers.lalr_interactive_parser import InteractiveParser

from chimera_ir.diagnostics.catalogue.tokens import NotText, TextTooLong, TooDeep
from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.resources import grammar
from chimera_ir.source import Source, Span
from chimera_ir.syntax import ast
from chimera_ir.syntax.build import build
from chimera_ir.syntax.mistakes import lexical, syntactic
from chimera_ir.syntax.stop import CLOSERS, OPENERS, Stop, span_of, starts_statement

MAX_TEXT = 1 << 20
"""Characters of a text."""

MAX_TOKENS = 100_000
"""Words and signs of a text."""

MAX_DEPTH = 100
"""Levels of a formula, and of brackets."""

MAX_MISTAKES = 20
"""After so many the rest is likely to follow from them."""

_MISTAKES = ("FRACTION", "GLUED", "FOREIGN", "OPEN_STRING", "STRAY")


class _KeepMistakes:
    """Has lark keep the terminals that no rule takes."""

    always_accept = _MISTAKES

    def process(self, stream: object) -> object:
        """The tokens as they are."""
        return stream


@cache
def _lark() -> Lark:
    return Lark(
        grammar("scheme.lark"),
        start="scheme",
        parser="lalr",
        lexer="basic",
        postlex=_KeepMistakes(),
        keep_all_tokens=True,
        maybe_placeholders=False,
    )


def parse(source: Source) -> ast.Scheme:
    """The scheme that a text says.

    Raises
    ------
    Rejected
        If the text is not a scheme: with each mistake that is not a consequence of an earlier one.

    Examples
    --------
    >>> scheme = parse(Source("tiny.chim", "scheme tiny(D = 4) workers D"))
    >>> scheme.name.text, len(scheme.items)
    ('tiny', 1)
    """
    _require_text(source.text)
    tokens = _tokens(source.text)
    _require_shallow_brackets(tokens)
    mistakes = [found for token in tokens if (found := lexical(token)) is not None]
    remaining: list[Token] | None = tokens
    for mistake in mistakes[:MAX_MISTAKES]:
        remaining = _without_statement(remaining, mistake.span) if remaining else None
    while remaining is not None and len(mistakes) < MAX_MISTAKES:
        outcome = _parse(remaining, source.text)
        if isinstance(outcome, Tree):
            return _finish(outcome, mistakes)
        mistakes.append(outcome)
        remaining = _without_statement(remaining, outcome.span)
    raise Rejected(mistakes)


def _finish(tree: Tree[Token], mistakes: list[Diagnostic]) -> ast.Scheme:
    """The tree as a scheme, if neither it nor what was left out of it has a mistake."""
    _require_shallow(tree)
    scheme, more = build(tree)
    if mistakes or more:
        raise Rejected([*mistakes, *more])
    return scheme


def _tokens(text: str) -> list[Token]:
    tokens = list(islice(_lark().lex(text), MAX_TOKENS + 1))
    if len(tokens) > MAX_TOKENS:
        raise Rejected([TextTooLong(span_of(tokens[-1]), MAX_TOKENS, "words and signs")])
    return tokens


_NOT_TEXT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffd]")


def _require_text(text: str) -> None:
    if len(text) > MAX_TEXT:
        raise Rejected([TextTooLong(Span(MAX_TEXT, MAX_TEXT + 1), MAX_TEXT, "characters")])
    found = _NOT_TEXT.search(text)
    if found is not None:
        raise Rejected([NotText(Span(*found.span()), _described(found[0]))])


def _described(character: str) -> str:
    """A character that cannot be shown, in words."""
    if character == "\0":
        return "a NUL character"
    if "\udc80" <= character <= "\udcff":
        return f"the byte 0x{ord(character) - 0xDC00:02x}, which is not UTF-8"
    if character == "\ufffd":
        return "a byte that is not UTF-8"
    return f"the control character U+{ord(character):04X}"


def _require_shallow_brackets(tokens: list[Token]) -> None:
    depth = 0
    for token in tokens:
        if token in OPENERS:
            depth += 1
        elif token in CLOSERS:
            depth = max(depth - 1, 0)
        if depth > MAX_DEPTH:
            raise Rejected([TooDeep(span_of(token), MAX_DEPTH)])


def _require_shallow(tree: Tree[Token]) -> None:
    """Bounds the levels of every formula, without recursion."""
    level = [tree]
    for _ in range(MAX_DEPTH + 4):
        level = [child for node in level for child in node.children if isinstance(child, Tree)]
    if level:
        raise Rejected([TooDeep(span_of(_first_token(level[0])), MAX_DEPTH)])


def _first_token(tree: Tree[Token]) -> Token:
    first: Tree[Token] | Token = tree
    while isinstance(first, Tree):
        first = first.children[0]
    return first


def _parse(tokens: list[Token], text: str) -> Tree[Token] | Diagnostic:
    parser = _lark().parse_interactive()
    for position, token in enumerate(tokens):
        try:
            parser.feed_token(token)
        except UnexpectedToken:
            return syntactic(Stop(text, tokens, position, _accepted(tokens[:position])))
    try:
        tree: Tree[Token] = parser.feed_eof(tokens[-1] if tokens else None)  # type: ignore[no-untyped-call]
    except UnexpectedToken:
        return syntactic(Stop(text, tokens, len(tokens), _accepted(tokens)))
    return tree


def _accepted(tokens: list[Token]) -> frozenset[str]:
    """The names of the terminals that could follow; looked up afresh, as a parser that has failed has moved on."""
    parser: InteractiveParser = _lark().parse_interactive()
    for token in tokens:
        parser.feed_token(token)
    return frozenset(parser.accepts())  # type: ignore[no-untyped-call]


def _without_statement(tokens: list[Token], mistake: Span) -> list[Token] | None:
    """The tokens without the line that has the mistake; None if nothing can be said about the others then."""
    at = max((i for i, token in enumerate(tokens) if (token.start_pos or 0) <= mistake.start), default=None)
    if at is None:
        return None
    start = at
    while start > 0 and not starts_statement(tokens, start):
        start -= 1
    if start == 0 or tokens[start] in ("scheme", "pipe", "}"):
        return None
    stop = start + 1
    while stop < len(tokens) and not starts_statement(tokens, stop):
        stop += 1
    if "{" in tokens[start:stop]:
        return None
    return tokens[:start] + tokens[stop:]
