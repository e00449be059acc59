"""Parses a text to a tree, and finds every syntax mistake that does not follow from an earlier one."""

import re
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import islice
from typing import NamedTuple

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedToken
from lark.parsers.lalr_interactive_parser import InteractiveParser

from chimera_ir.diagnostics.catalogue.tokens import NameTooLong, NotText, TextTooLong, TooDeep, TooManyTokens
from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.grammars import parser_of
from chimera_ir.source import Source, Span
from chimera_ir.syntax import ast
from chimera_ir.syntax.build import build
from chimera_ir.syntax.mistakes import lexical, syntactic
from chimera_ir.syntax.stop import CLOSERS, OPENERS, Stop, span_of, starts_statement, statement_start

MAX_TEXT, MAX_TOKENS, MAX_NAME, MAX_DEPTH = 1 << 20, 100_000, 200, 100
"""The most characters of a text, words and signs, characters of a name, and levels of a formula and of brackets."""

MAX_MISTAKES = 20
"""The most mistakes that are reported; further ones are likely to follow from these."""


@dataclass(frozen=True)
class _KeepMistakes:
    """Makes lark's lexer keep the terminals that stand for mistakes, which no rule of the grammar uses."""

    always_accept: tuple[str, ...] = ("FRACTION", "GLUED", "FOREIGN", "OPEN_STRING", "STRAY")

    def process(self, stream: object) -> object:
        return stream


@cache
def _lark() -> Lark:
    return parser_of(
        "scheme.lark",
        start="scheme",
        postlex=_KeepMistakes(),
        keep_all_tokens=True,
        maybe_placeholders=False,
    )


@lru_cache(maxsize=64)
def parse(source: Source) -> ast.Scheme:
    """The scheme that a text describes; cached, because a sweep and a plan compile one text at many sizes.

    Raises `Rejected` if the text is not a scheme: with each mistake that does not follow from an earlier one.

    Examples
    --------
    >>> scheme = parse(Source("tiny.chim", "scheme tiny(D = 4) workers D"))
    >>> scheme.name.text, len(scheme.items)
    ('tiny', 1)
    """
    # Mistakes in single tokens. Their lines are left out.
    _require_text(source.text)
    tokens = _tokens(source.text)
    _require_shallow_brackets(tokens)
    mistakes = [mistake for token in tokens if (mistake := lexical(token)) is not None]
    rest = _Rest(_without_mistakes(tokens, mistakes), 0)
    # Mistakes between tokens: after each, parsing resumes behind the line with the mistake, which is left out.
    outcome = _parse(rest.tokens, 0, source.text)
    while isinstance(outcome, Diagnostic):
        mistakes.append(outcome)
        further = _without_statement(rest.tokens, outcome.span)
        if further is None or len(mistakes) >= MAX_MISTAKES:
            raise Rejected(mistakes)
        rest = further
        outcome = _parse(*rest, source.text)
    # The tree of all lines that are left, which `build` checks further.
    whole = _parse(rest.tokens, 0, source.text) if rest.start else outcome
    if isinstance(whole, Diagnostic):
        raise Rejected([*mistakes, whole])
    _require_shallow(whole)
    scheme, more = build(whole)
    if mistakes or more:
        raise Rejected([*mistakes, *more])
    return scheme


class _Rest(NamedTuple):
    """The tokens of a text without the lines that have a mistake.

    ``start`` is the position, among these tokens, at which the last such line stood.
    """

    tokens: list[Token]
    start: int


def _tokens(text: str) -> list[Token]:
    tokens = list(islice(_lark().lex(text), MAX_TOKENS + 1))
    if len(tokens) > MAX_TOKENS:
        raise Rejected([TooManyTokens(span_of(tokens[-1]), MAX_TOKENS)])
    long = next((token for token in tokens if token.type == "NAME" and len(token) > MAX_NAME), None)
    if long is not None:
        raise Rejected([NameTooLong(span_of(long), MAX_NAME)])
    return tokens


_NOT_TEXT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffd]")


def _require_text(text: str) -> None:
    if len(text) > MAX_TEXT:
        raise Rejected([TextTooLong(Span(MAX_TEXT, MAX_TEXT + 1), MAX_TEXT)])
    match = _NOT_TEXT.search(text)
    if match is not None:
        raise Rejected([NotText(Span(*match.span()), match[0])])


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
    """Raises `Rejected` if a formula is nested too deeply; the check itself does not recurse."""
    level = [tree]
    for _ in range(MAX_DEPTH + 4):
        level = [child for node in level for child in node.children if isinstance(child, Tree)]
    if level:
        first: Tree[Token] | Token = level[0]
        while isinstance(first, Tree):
            first = first.children[0]
        raise Rejected([TooDeep(span_of(first), MAX_DEPTH)])


def _parse(tokens: list[Token], start: int, text: str) -> Tree[Token] | Diagnostic:
    """Parses ``tokens`` from position ``start`` on; returns the first mistake or, if there is none, the tree.

    The tree is complete only if ``start`` is 0. ``text`` is the text of the tokens.
    """
    context = _context(tokens, start)
    parser = _fed(context)
    for position in range(start, len(tokens)):
        try:
            parser.feed_token(tokens[position])
        except UnexpectedToken:
            accepted = _accepted([*context, *tokens[start:position]])
            return syntactic(Stop(text, tokens, position, accepted))
    try:
        tree: Tree[Token] = parser.feed_eof(tokens[-1] if tokens else None)  # type: ignore[no-untyped-call]
    except UnexpectedToken:
        return syntactic(Stop(text, tokens, len(tokens), _accepted([*context, *tokens[start:]])))
    return tree


def _context(tokens: list[Token], start: int) -> list[Token]:
    """Returns tokens that bring the parser into the state for the line at ``start``: inside a pipe or outside."""
    if start < 2:
        return tokens[:start]
    header = [*tokens[:2], Token("LPAR", "("), Token("RPAR", ")")]
    brace = next((i for i in range(start - 1, 0, -1) if tokens[i] in ("{", "}")), 0)
    if tokens[brace] != "{":
        return header
    pipe = next(i for i in range(brace, 0, -1) if tokens[i] == "pipe")
    return header + tokens[pipe : brace + 1]


def _fed(tokens: list[Token]) -> InteractiveParser:
    parser: InteractiveParser = _lark().parse_interactive()
    for token in tokens:
        parser.feed_token(token)
    return parser


def _accepted(tokens: list[Token]) -> frozenset[str]:
    """Returns the names of the terminals that could follow ``tokens``.

    They are found by a new parser, because one that has failed cannot tell.
    """
    return frozenset(_fed(tokens).accepts())  # type: ignore[no-untyped-call]


def _without_mistakes(tokens: list[Token], mistakes: list[Diagnostic]) -> list[Token]:
    """Returns the tokens of the lines that have none of the ``mistakes`` in single tokens.

    Raises `Rejected` if the other lines cannot be checked without such a line.
    """
    for mistake in mistakes:
        at = _last(tokens, mistake.span)
        if span_of(tokens[at]) == mistake.span:  # or else it is gone, with an earlier one on its line
            rest = _without_statement(tokens, mistake.span)
            if rest is None or len(mistakes) >= MAX_MISTAKES:
                raise Rejected(mistakes)
            tokens = rest.tokens
    return tokens


def _last(tokens: list[Token], span: Span) -> int:
    """The position of the last token that starts at or before the start of ``span``; -1 if there is none."""
    return bisect_right(tokens, span.start, key=lambda token: token.start_pos or 0) - 1


def _without_statement(tokens: list[Token], mistake: Span) -> _Rest | None:
    """Returns the tokens without the line of the scheme in which ``mistake`` is.

    None if that line opens or closes a pipe, or opens the scheme: the other lines cannot be checked without it.
    """
    at = _last(tokens, mistake)
    if at < 0:
        return None
    start = statement_start(tokens, at)
    if start == 0 or tokens[start] in ("scheme", "pipe", "}"):
        return None
    stop = start + 1
    while stop < len(tokens) and not starts_statement(tokens, stop):
        stop += 1
    if "{" in tokens[start:stop]:
        return None
    return _Rest(tokens[:start] + tokens[stop:], start)
