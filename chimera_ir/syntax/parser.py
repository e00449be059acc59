"""Parses a text to a tree, and finds every syntax mistake that does not follow from an earlier one."""

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import islice
from typing import Any, NamedTuple

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedToken
from lark.parsers.lalr_interactive_parser import InteractiveParser
from lark.visitors import Transformer_NonRecursive

from chimera_ir.diagnostics.catalogue import syntax as say
from chimera_ir.diagnostics.catalogue.torchcells import UNSAYABLE, CannotSay
from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.ir.kinds import KINDS
from chimera_ir.plural import listed
from chimera_ir.source import Source, Span, parser_of
from chimera_ir.syntax import ast
from chimera_ir.syntax.mistakes import (
    CLOSERS,
    LETTERS,
    OPENERS,
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

_PLACEHOLDER = next(iter(KINDS.values()))
"""Stands for the kind of an operation whose letter is a mistake."""


def build(tree: Tree[Token]) -> tuple[ast.Scheme, tuple[Diagnostic, ...]]:
    """The scheme of a parse tree, and the mistakes that the grammar does not see.

    If there are any mistakes, some parts of the scheme are placeholders.
    """
    builder = _Builder()
    return builder.transform(tree), tuple(builder.mistakes)


_Children = list[Any]
"""Matches of a grammar rule in the order of the text: tokens, and nodes that are already built."""


_PLAIN: dict[str, Callable[..., ast.SyntaxNode]] = {
    "update": ast.Update,
    "halves": ast.Halves,
    "reads": ast.Reads,
    "range": ast.Range,
    "endless": ast.Endless,
    "choice": ast.Choice,
    "either": partial(ast.Logical, ast.Logic.OR),
    "both": partial(ast.Logical, ast.Logic.AND),
    "negation": ast.Not,
    "minus": ast.Minus,
}
"""Maps a rule of the grammar to the type of its node, if the node's fields are the rule's expressions, in order."""

_NAMED: dict[str, tuple[Callable[..., ast.SyntaxNode], int]] = {
    "parameter": (ast.Parameter, 0),
    "lookup": (ast.Lookup, 0),
    "let": (ast.Let, 1),
    "index": (ast.Index, 1),
    "slices": (ast.Slices, 1),
}
"""Maps a rule to its node, which has a name and one more part, and to the place of the name among the matches."""


class _Builder(Transformer_NonRecursive[Token, ast.Scheme]):
    """Builds the tree, with a method for each rule of the grammar that makes a node and is in no table."""

    def __init__(self) -> None:
        super().__init__()
        self.mistakes: list[Diagnostic] = []

    def __default__(self, data: str, children: _Children, meta: object) -> Any:
        if data in _PLAIN:
            return _PLAIN[data](*_nodes(children), span=_around(children))
        if data in _NAMED:
            node, at = _NAMED[data]
            return node(_word(children[at]), children[at + 2], span=_around(children))
        return Tree(data, children)

    def scheme(self, c: _Children) -> ast.Scheme:
        parameters = tuple(child for child in _part(c, "parameters") if isinstance(child, ast.Parameter))
        items = (child for child in _nodes(c) if not isinstance(child, Tree))
        return ast.Scheme(_word(c[1]), parameters, tuple(items), span=_around(c))

    def workers(self, c: _Children) -> ast.Workers:
        return ast.Workers(c[1], _nodes(_part(c, "except")), span=_around(c))

    def table(self, c: _Children) -> ast.NumberTable:
        return ast.NumberTable(_nodes(c), span=_around(c))

    def function(self, c: _Children) -> ast.Function:
        names = tuple(_word(child) for child in c[3:-2] if child.type == "NAME")
        return ast.Function(_word(c[1]), names, c[-1], span=_around(c))

    def require(self, c: _Children) -> ast.Require:
        return ast.Require(c[1], str(c[3])[1:-1], span=_around(c))

    def memory(self, c: _Children) -> ast.Memory:
        quantities = {quantity.value: quantity for quantity in ast.MemoryQuantity}
        if c[1] not in quantities:
            self._unknown(c[1], "memory", list(quantities))
        worker = _word(c[3]) if len(c) > 4 else None
        return ast.Memory(quantities.get(c[1], ast.MemoryQuantity.WEIGHTS), worker, c[-1], span=_around(c))

    def pipe(self, c: _Children) -> ast.PipeBlock:
        index = c[2] if isinstance(c[2], ast.Index) else None
        return ast.PipeBlock(_word(c[1]), index, _nodes(c[3:]), span=_around(c))

    def stages(self, c: _Children) -> ast.Stages:
        worker = _word(c[5]) if len(c) > 6 else None
        return ast.Stages(_word(c[1]), c[3], worker, c[-1], span=_around(c))

    def micros(self, c: _Children) -> ast.Micros:
        halves = next((child for child in c if isinstance(child, ast.Halves)), None)
        step, number, weight = (_argument(c, rule) for rule in ("by", "numbered", "weighed"))
        return ast.Micros(_word(c[1]), c[3], halves, step, number, weight, span=_around(c))

    def operation(self, c: _Children) -> ast.Operation:
        subjects = [child for child in c if isinstance(child, ast.Subject)]
        pipe = next((child for child in c if isinstance(child, ast.PipeName)), None)
        if pipe is not None:
            subjects[-1] = replace(subjects[-1], pipe=pipe, span=_around([subjects[-1], pipe]))
        clock = c[c.index("@") + 1] if "@" in c else None
        preference, guard = _argument(c, "prefer"), _argument(c, "when")
        return ast.Operation(tuple(subjects), clock, preference, guard, span=_around(c))

    def subject(self, c: _Children) -> ast.Subject:
        if c[0] in UNSAYABLE:
            self.mistakes.append(CannotSay(_of(c[0]), *UNSAYABLE[c[0]]))
        elif c[0] not in KINDS:
            nouns = {letter: KINDS[letter].noun for letter in LETTERS}
            operations = listed(letter if letter == noun else f"{letter} ({noun})" for letter, noun in nouns.items())
            self.mistakes.append(say.UnknownLetter(_of(c[0]), str(c[0]), listed(LETTERS, "or"), operations))
        micro, stage, *place = c[2:-1:2]
        kind = KINDS.get(c[0], _PLACEHOLDER)
        return ast.Subject(kind, micro, stage, place[0] if place else None, None, span=_around(c))

    def of(self, c: _Children) -> ast.PipeName:
        return ast.PipeName(_word(c[1]), c[3] if len(c) > 2 else None, span=_around(c))

    def recompute(self, c: _Children) -> ast.Recompute:
        return ast.Recompute(_argument(c, "when"), span=_around(c))

    def sync(self, c: _Children) -> ast.Sync:
        modes = {mode.value: mode for mode in ast.SyncMode}
        if c[1] not in modes:
            self._unknown(c[1], "sync", list(modes))
        return ast.Sync(modes.get(c[1], ast.SyncMode.LAZY), _argument(c, "when"), span=_around(c))

    def comparison(self, c: _Children) -> ast.Comparison:
        return ast.Comparison(tuple(c[::2]), tuple(ast.Comparator(str(token)) for token in c[1::2]), span=_around(c))

    def sum(self, c: _Children) -> ast.Binary:
        return ast.Binary(ast.Arithmetic(str(c[1])), c[0], c[2], span=_around(c))

    product = sum

    def integer(self, c: _Children) -> ast.Integer:
        digits = str(c[0]).lstrip("0") or "0"
        if len(digits) > len(str(MAX_INTEGER)) or int(digits) > MAX_INTEGER:
            self.mistakes.append(say.NumberTooLarge(_of(c[0])))
            digits = "0"
        return ast.Integer(int(digits), span=_of(c[0]))

    def name(self, c: _Children) -> ast.Name:
        return ast.Name(str(c[0]), span=_of(c[0]))

    def call(self, c: _Children) -> ast.Call:
        return ast.Call(_word(c[0]), _nodes(c), span=_around(c))

    def group(self, c: _Children) -> Any:
        return replace(c[1], span=_around(c))

    def _unknown(self, word: Token, clause: str, choices: list[str]) -> None:
        quoted = (f"`{choice}`" for choice in choices)
        self.mistakes.append(say.UnknownMode(_of(word), clause, str(word), listed(quoted, "or")))


def _word(token: Token) -> ast.Word:
    return ast.Word(str(token), span=_of(token))


def _nodes(c: _Children) -> tuple[Any, ...]:
    return tuple(child for child in c if not isinstance(child, Token))


def _part(c: _Children, rule: str) -> _Children:
    """Returns the matches inside an optional rule, for which `_Builder` has no method; empty if it does not occur."""
    return next((child.children for child in c if isinstance(child, Tree) and child.data == rule), [])


def _argument(c: _Children, rule: str) -> ast.Expression | None:
    return next(iter(_part(c, rule)[1:]), None)


def _of(node: Any) -> Span:
    if isinstance(node, Token):
        return span_of(node)
    span: Span = _around(node.children) if isinstance(node, Tree) else node.span
    return span


def _around(c: _Children) -> Span:
    return Span(_of(c[0]).start, _of(c[-1]).end)


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
        "scheme.lark", start="scheme", postlex=_KeepMistakes(), keep_all_tokens=True, maybe_placeholders=False
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
