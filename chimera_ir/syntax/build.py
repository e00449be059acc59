"""Builds the tree of ``chimera_ir.syntax.ast`` from the parse tree of lark."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from lark import Token, Tree
from lark.visitors import Transformer_NonRecursive

from chimera_ir.diagnostics.catalogue.foreign import UNSAYABLE, CannotSay
from chimera_ir.diagnostics.catalogue.syntax import UnknownLetter, UnknownMode
from chimera_ir.diagnostics.catalogue.tokens import NumberTooLarge
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.ir.kinds import KINDS
from chimera_ir.plural import listed
from chimera_ir.source import Span
from chimera_ir.syntax import ast
from chimera_ir.syntax.stop import LETTERS, span_of

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


class _Builder(Transformer_NonRecursive[Token, ast.Scheme]):
    """Builds the tree, with a method for each rule of the grammar that makes a node and is not in `_PLAIN`."""

    def __init__(self) -> None:
        super().__init__()
        self.mistakes: list[Diagnostic] = []

    def __default__(self, data: str, children: _Children, meta: object) -> Any:
        if data not in _PLAIN:
            return Tree(data, children)
        return _PLAIN[data](*_nodes(children), span=_around(children))

    def scheme(self, c: _Children) -> ast.Scheme:
        parameters = tuple(child for child in _part(c, "parameters") if isinstance(child, ast.Parameter))
        items = (child for child in _nodes(c) if not isinstance(child, Tree))
        return ast.Scheme(_word(c[1]), parameters, tuple(items), span=_around(c))

    def workers(self, c: _Children) -> ast.Workers:
        return ast.Workers(c[1], _nodes(_part(c, "except")), span=_around(c))

    def parameter(self, c: _Children) -> ast.Parameter:
        return ast.Parameter(_word(c[0]), c[2], span=_around(c))

    def let(self, c: _Children) -> ast.Let:
        return ast.Let(_word(c[1]), c[3], span=_around(c))

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

    def index(self, c: _Children) -> ast.Index:
        return ast.Index(_word(c[1]), c[3], span=_around(c))

    def stages(self, c: _Children) -> ast.Stages:
        worker = _word(c[5]) if len(c) > 6 else None
        return ast.Stages(_word(c[1]), c[3], worker, c[-1], span=_around(c))

    def micros(self, c: _Children) -> ast.Micros:
        halves = next((child for child in c if isinstance(child, ast.Halves)), None)
        step, number, weight = (_argument(c, rule) for rule in ("by", "numbered", "weighed"))
        return ast.Micros(_word(c[1]), c[3], halves, step, number, weight, span=_around(c))

    def slices(self, c: _Children) -> ast.Slices:
        return ast.Slices(_word(c[1]), c[3], span=_around(c))

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
            self.mistakes.append(UnknownLetter(_of(c[0]), str(c[0]), listed(LETTERS, "or"), operations))
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
            self.mistakes.append(NumberTooLarge(_of(c[0])))
            digits = "0"
        return ast.Integer(int(digits), span=_of(c[0]))

    def name(self, c: _Children) -> ast.Name:
        return ast.Name(str(c[0]), span=_of(c[0]))

    def call(self, c: _Children) -> ast.Call:
        return ast.Call(_word(c[0]), _nodes(c), span=_around(c))

    def lookup(self, c: _Children) -> ast.Lookup:
        return ast.Lookup(_word(c[0]), c[2], span=_around(c))

    def group(self, c: _Children) -> Any:
        return replace(c[1], span=_around(c))

    def _unknown(self, word: Token, clause: str, choices: list[str]) -> None:
        quoted = (f"`{choice}`" for choice in choices)
        self.mistakes.append(UnknownMode(_of(word), clause, str(word), listed(quoted, "or")))


def _word(token: Token) -> ast.Word:
    return ast.Word(str(token), span=_of(token))


def _nodes(c: _Children) -> tuple[Any, ...]:
    """Returns those of the matches that are nodes, not tokens."""
    return tuple(child for child in c if not isinstance(child, Token))


def _part(c: _Children, rule: str) -> _Children:
    """Returns the matches inside an optional rule, for which `_Builder` has no method; empty if it does not occur."""
    return next((child.children for child in c if isinstance(child, Tree) and child.data == rule), [])


def _argument(c: _Children, rule: str) -> ast.Expression | None:
    """The expression of an optional rule such as ``by step``; None if the rule does not occur."""
    return next(iter(_part(c, rule)[1:]), None)


def _of(node: Any) -> Span:
    if isinstance(node, Token):
        return span_of(node)
    span: Span = _around(node.children) if isinstance(node, Tree) else node.span
    return span


def _around(c: _Children) -> Span:
    return Span(_of(c[0]).start, _of(c[-1]).end)
