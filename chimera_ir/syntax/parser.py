"""Parses a text to a tree, and finds every syntax mistake that does not follow from an earlier one."""

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedToken
from lark.parsers.lalr_interactive_parser import InteractiveParser
from lark.visitors import Transformer_NonRecursive, v_args

from chimera_ir.diagnostics.catalogue import syntax as say
from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.ir.kinds import KINDS
from chimera_ir.ir.levels import Quantity, Strategy
from chimera_ir.plural import listed
from chimera_ir.source import Source, Span, parser_of
from chimera_ir.syntax import ast
from chimera_ir.syntax.mistakes import (
    CLOSERS,
    LETTERS,
    OPENERS,
    OPERATORS,
    Stop,
    lexical,
    span_of,
    starts_statement,
    statement_start,
    syntactic,
)

# Builds the tree of ``chimera_ir.syntax.ast`` from the parse tree of lark.

MAX_INTEGER = 2**63 - 1
"""The largest number that a scheme may write or compute."""

_Choice = TypeVar("_Choice", Quantity, Strategy)

_PLACEHOLDER = next(iter(KINDS.values()))
"""Stands for the kind of an operation whose letter is a mistake."""


_NODES: dict[str, Callable[..., Any]] = {
    "parameter": ast.Parameter,
    "workers": lambda count, *left_out, span: ast.Workers(count, left_out, span=span),
    "frozen": lambda *stages, span: ast.Frozen(stages, span=span),
    "feeds": lambda source, target, *named, span: ast.Feeds(source, target, named[-1], span=span),
    "several": ast.Several,
    "several_of": lambda group, numbers, span: ast.Several(
        group, ast.Index(ast.Word("", span=numbers.span), numbers, span=numbers.span), span=span
    ),
    "let": ast.Let,
    "table": lambda *entries, span: ast.NumberTable(entries, span=span),
    "function": lambda name, *parts, span: ast.Function(name, parts[:-1], parts[-1], span=span),
    "require": lambda condition, message, span: ast.Require(condition, message[1:-1], span=span),
    "update": ast.Update,
    "pipe": lambda name, index, *clauses, span: ast.PipeBlock(name, index, clauses, span=span),
    "index": ast.Index,
    "micros": ast.Micros,
    "slices": ast.Slices,
    "halves": ast.Halves,
    "pair": lambda subject, pipe, span: replace(subject, pipe=pipe, span=Span(subject.span.start, span.end)),
    "of": lambda name, *index, span: ast.PipeName(name, *(index or (None,)), span=span),
    "reads": ast.Reads,
    "recompute": lambda _, guard, span: ast.Recompute(guard, span=span),
    **dict.fromkeys(("by", "numbered", "weighed", "when"), lambda formula, span: formula),
    "range": ast.Range,
    "endless": ast.Endless,
    "choice": ast.Choice,
    **dict.fromkeys(
        ("either", "both"), lambda left, word, right, span: ast.Logical(ast.Logic(word), left, right, span=span)
    ),
    "negation": ast.Not,
    "comparison": lambda *c, span: ast.Comparison(c[::2], tuple(map(ast.Comparator, c[1::2])), span=span),
    **dict.fromkeys(
        ("sum", "product"), lambda left, sign, right, span: ast.Binary(ast.Arithmetic(sign), left, right, span=span)
    ),
    "minus": lambda _, operand, span: ast.Minus(operand, span=span),
    "name": lambda name, span: ast.Name(name.text, span=span),
    "call": lambda function, *arguments, span: ast.Call(function, arguments, span=span),
    "lookup": ast.Lookup,
    "group": lambda formula, span: replace(formula, span=span),
}
"""Maps a rule of the grammar to what makes its node of its parts, in order; an optional part may be None.

Parts are nodes, words, texts and operators. `_Builder` has a method for each other rule.
"""

_WORDS = ("NAME", "RECOMPUTE")
_PARTS = {*_WORDS, "STRING", "INTEGER", "AT", "PREFER", *OPERATORS}
"""The tokens that are parts of a node; any other token only says what follows."""


def _span(child: Any) -> Span:
    span: Span = span_of(child) if isinstance(child, Token) else child.span
    return span


def _part(child: Any) -> Any:
    if not isinstance(child, Token):
        return child
    return ast.Word(str(child), span=span_of(child)) if child.type in _WORDS else str(child)


def _with_parts(make: Callable[..., Any], _: str, children: list[Any], __: object) -> Any:
    """Calls ``make`` with the parts among the matches of a rule, and with the span from the first to the last match."""
    parts = [_part(child) for child in children if not isinstance(child, Token) or child.type in _PARTS]
    last = next(filter(None, reversed(children)))
    return make(*parts, span=Span(_span(children[0]).start, _span(last).end))


@v_args(wrapper=_with_parts)
class _Builder(Transformer_NonRecursive[Token, ast.Scheme]):
    """Builds the tree of ``chimera_ir.syntax.ast``; ``mistakes`` are those that the grammar does not see."""

    def __init__(self) -> None:
        super().__init__(visit_tokens=False)
        self.mistakes: list[Diagnostic] = []

    def __default__(self, data: str, children: list[Any], meta: object) -> Any:
        return _with_parts(_NODES[data], data, children, meta)

    def scheme(self, name: ast.Word, *parts: Any, span: Span) -> ast.Scheme:
        parameters = tuple(part for part in parts if isinstance(part, ast.Parameter))
        return ast.Scheme(name, parameters, parts[len(parameters) :], span=span)

    def stages(self, *parts: Any, span: Span) -> ast.Stages:
        first, *place = parts
        of_group = isinstance(first, ast.Several)
        group, variable, stages = (
            (first.group, first.index.variable, first.index.range) if of_group else (None, first, place.pop(0))
        )
        worker, formula = place if len(place) > 1 else (None, *place)
        return ast.Stages(group, variable, stages, worker, formula, span=span)

    def memory(self, quantity: ast.Word, *parts: Any, span: Span) -> ast.Memory:
        *worker, _, limit = parts
        return ast.Memory(self._chosen(quantity, "memory", Quantity), worker[0] if worker else None, limit, span=span)

    def sync(self, mode: ast.Word, guard: ast.Expression | None, *, span: Span) -> ast.Sync:
        return ast.Sync(self._chosen(mode, "sync", Strategy), guard, span=span)

    def operation(self, first: ast.Subject, second: ast.Subject | None, *parts: Any, span: Span) -> ast.Operation:
        *order, guard = parts
        word, formula = order or ("", None)
        clock, preference = (formula, None) if word == "@" else (None, formula)
        return ast.Operation((first, second) if second else (first,), clock, preference, guard, span=span)

    def subject(self, letter: ast.Word, micro: Any, stage: ast.Expression, *place: Any, span: Span) -> ast.Subject:
        if letter.text in say.UNSAYABLE:
            self.mistakes.append(say.CannotSay(letter.span, *say.UNSAYABLE[letter.text]))
        elif letter.text not in KINDS:
            nouns = {known: KINDS[known].noun for known in LETTERS}
            operations = listed(known if known == noun else f"{known} ({noun})" for known, noun in nouns.items())
            self.mistakes.append(say.UnknownLetter(letter.span, letter.text, listed(LETTERS, "or"), operations))
        kind = KINDS.get(letter.text, _PLACEHOLDER)
        return ast.Subject(kind, micro, stage, place[0] if place else None, None, span=span)

    def integer(self, text: str, *, span: Span) -> ast.Integer:
        digits = text.lstrip("0") or "0"
        if len(digits) > len(str(MAX_INTEGER)) or int(digits) > MAX_INTEGER:
            self.mistakes.append(say.NumberTooLarge(span))
            digits = "0"
        return ast.Integer(int(digits), span=span)

    def _chosen(self, word: ast.Word, clause: str, choices: type[_Choice]) -> _Choice:
        """The choice that a word names; a word that names none is a mistake, and stands for the first choice."""
        known = {choice.value: choice for choice in choices}
        if word.text not in known:
            quoted = (f"`{choice}`" for choice in known)
            self.mistakes.append(say.UnknownMode(word.span, clause, word.text, listed(quoted, "or")))
        return known.get(word.text, next(iter(choices)))


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
        "scheme.lark", start="scheme", postlex=_KeepMistakes(), keep_all_tokens=True, maybe_placeholders=True
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
    # The tree of all lines that are left, in which the grammar does not see every mistake.
    whole = _parse(rest.tokens, 0, source.text) if rest.start else outcome
    if isinstance(whole, Diagnostic):
        raise Rejected([*mistakes, whole])
    _require_shallow(whole)
    builder = _Builder()
    scheme = builder.transform(whole)
    if mistakes or builder.mistakes:
        raise Rejected([*mistakes, *builder.mistakes])
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
        raise Rejected([say.TooManyTokens(span_of(tokens[-1]), MAX_TOKENS)])
    long = next((token for token in tokens if token.type == "NAME" and len(token) > MAX_NAME), None)
    if long is not None:
        raise Rejected([say.NameTooLong(span_of(long), MAX_NAME)])
    return tokens


_NOT_TEXT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffd]")


def _require_text(text: str) -> None:
    if len(text) > MAX_TEXT:
        raise Rejected([say.TextTooLong(Span(MAX_TEXT, MAX_TEXT + 1), MAX_TEXT)])
    match = _NOT_TEXT.search(text)
    if match is not None:
        raise Rejected([say.NotText(Span(*match.span()), match[0])])


def _require_shallow_brackets(tokens: list[Token]) -> None:
    depth = 0
    for token in tokens:
        if token in OPENERS:
            depth += 1
        elif token in CLOSERS:
            depth = max(depth - 1, 0)
        if depth > MAX_DEPTH:
            raise Rejected([say.TooDeep(span_of(token), MAX_DEPTH)])


def _require_shallow(tree: Tree[Token]) -> None:
    level = [tree]
    for _ in range(MAX_DEPTH + 4):
        level = [child for node in level for child in node.children if isinstance(child, Tree)]
    if level:
        first: Tree[Token] | Token = level[0]
        while isinstance(first, Tree):
            first = first.children[0]
        raise Rejected([say.TooDeep(span_of(first), MAX_DEPTH)])


def _parse(tokens: list[Token], start: int, text: str) -> Tree[Token] | Diagnostic:
    """Parses ``tokens`` from ``start`` on; returns the first mistake, or the tree, which is complete only from 0."""
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
    """The terminals that could follow ``tokens``, from a new parser: one that has failed cannot tell."""
    return frozenset(_fed(tokens).accepts())  # type: ignore[no-untyped-call]


def _without_mistakes(tokens: list[Token], mistakes: list[Diagnostic]) -> list[Token]:
    """Drops lines with ``mistakes`` in single tokens; raises `Rejected` if the others depend on them."""
    for mistake in mistakes:
        at = _last(tokens, mistake.span)
        if span_of(tokens[at]) == mistake.span:  # or else it is gone, with an earlier one on its line
            rest = _without_statement(tokens, mistake.span)
            if rest is None or len(mistakes) >= MAX_MISTAKES:
                raise Rejected(mistakes)
            tokens = rest.tokens
    return tokens


def _last(tokens: list[Token], span: Span) -> int:
    return bisect_right(tokens, span.start, key=lambda token: token.start_pos or 0) - 1


def _without_statement(tokens: list[Token], mistake: Span) -> _Rest | None:
    """Drops the line of ``mistake``; None if it opens or closes a pipe, or opens the scheme."""
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
