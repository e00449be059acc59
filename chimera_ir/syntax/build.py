"""Builds the tree of ``ast`` from the tree of lark."""

from dataclasses import replace
from typing import Any, NamedTuple

from lark import Token, Tree
from lark.visitors import Transformer_NonRecursive

from chimera_ir.diagnostics.catalogue.foreign import UNSAYABLE, CannotSay
from chimera_ir.diagnostics.catalogue.syntax import UnknownLetter, UnknownMode
from chimera_ir.diagnostics.catalogue.tokens import NumberTooLarge
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.source import Span
from chimera_ir.syntax import ast

MAX_INTEGER = 2**63 - 1
"""The largest number that a scheme may write or compute."""


class _Parameters(NamedTuple):
    all: tuple[ast.Parameter, ...]
    span: Span


class _By(NamedTuple):
    expression: ast.Expression


class _As(NamedTuple):
    expression: ast.Expression


class _When(NamedTuple):
    expression: ast.Expression


def build(tree: Tree[Token]) -> tuple[ast.Scheme, tuple[Diagnostic, ...]]:
    """The scheme in a tree of lark, and the mistakes that the grammar lets through; with mistakes it is incomplete."""
    builder = _Builder()
    return builder.transform(tree), tuple(builder.mistakes)


_Children = list[Any]
"""Matches of a grammar rule in the order of the text: tokens, and nodes that are already built."""


class _Builder(Transformer_NonRecursive[Token, ast.Scheme]):
    """One method for each rule of the grammar."""

    def __init__(self) -> None:
        super().__init__()
        self.mistakes: list[Diagnostic] = []

    def scheme(self, c: _Children) -> ast.Scheme:
        parameters = next((child.all for child in c if isinstance(child, _Parameters)), ())
        items = [child for child in c[2:] if not isinstance(child, Token | _Parameters)]
        return ast.Scheme(_word(c[1]), parameters, tuple(items), _around(c))

    def parameters(self, c: _Children) -> _Parameters:
        return _Parameters(tuple(child for child in c if isinstance(child, ast.Parameter)), _around(c))

    def parameter(self, c: _Children) -> ast.Parameter:
        return ast.Parameter(_word(c[0]), c[2], _around(c))

    def workers(self, c: _Children) -> ast.Workers:
        return ast.Workers(c[1], _around(c))

    def let(self, c: _Children) -> ast.Let:
        return ast.Let(_word(c[1]), c[3], _around(c))

    def function(self, c: _Children) -> ast.Function:
        names = tuple(_word(child) for child in c[3:-2] if child.type == "NAME")
        return ast.Function(_word(c[1]), names, c[-1], _around(c))

    def require(self, c: _Children) -> ast.Require:
        return ast.Require(c[1], str(c[3])[1:-1], _around(c))

    def update(self, c: _Children) -> ast.Update:
        return ast.Update(c[2], _around(c))

    def memory(self, c: _Children) -> ast.Memory:
        quantities = {quantity.value: quantity for quantity in ast.MemoryQuantity}
        if c[1] not in quantities:
            self._unknown(c[1], "memory", list(quantities))
        return ast.Memory(quantities.get(c[1], ast.MemoryQuantity.WEIGHTS), c[3], _around(c))

    def pipe(self, c: _Children) -> ast.PipeBlock:
        index = c[2] if isinstance(c[2], ast.Index) else None
        clauses = [child for child in c[3:] if not isinstance(child, Token)]
        return ast.PipeBlock(_word(c[1]), index, tuple(clauses), _around(c))

    def index(self, c: _Children) -> ast.Index:
        return ast.Index(_word(c[1]), c[3], _around(c))

    def stages(self, c: _Children) -> ast.Stages:
        worker = _word(c[5]) if len(c) > 6 else None
        return ast.Stages(_word(c[1]), c[3], worker, c[-1], _around(c))

    def micros(self, c: _Children) -> ast.Micros:
        halves = next((child for child in c if isinstance(child, ast.Halves)), None)
        step = next((child.expression for child in c if isinstance(child, _By)), None)
        number = next((child.expression for child in c if isinstance(child, _As)), None)
        last = c[-1].expression if isinstance(c[-1], _By | _As) else c[-1]
        return ast.Micros(_word(c[1]), c[3], halves, step, number, _around([c[0], last]))

    def halves(self, c: _Children) -> ast.Halves:
        return ast.Halves(_around(c))

    def by(self, c: _Children) -> _By:
        return _By(c[1])

    def numbered(self, c: _Children) -> _As:
        return _As(c[1])

    def operation(self, c: _Children) -> ast.Operation:
        subjects = [child for child in c if isinstance(child, ast.Subject)]
        pipe = next((child for child in c if isinstance(child, ast.PipeName)), None)
        if pipe is not None:
            subjects[-1] = replace(subjects[-1], pipe=pipe, span=_around([subjects[-1], pipe]))
        clock = c[-2] if _guard(c) else c[-1]
        return ast.Operation(tuple(subjects), clock, _guard(c), _around([c[0], _guard(c) or clock]))

    def subject(self, c: _Children) -> ast.Subject:
        letters = {letter.value: letter for letter in ast.Letter}
        if c[0] in UNSAYABLE:
            self.mistakes.append(CannotSay(_of(c[0]), str(c[0])))
        elif c[0] not in letters:
            self.mistakes.append(UnknownLetter(_of(c[0]), str(c[0])))
        return ast.Subject(letters.get(c[0], ast.Letter.FORWARD), c[2], c[4], None, _around(c))

    def of(self, c: _Children) -> ast.PipeName:
        return ast.PipeName(_word(c[1]), c[3] if len(c) > 2 else None, _around(c))

    def reads(self, c: _Children) -> ast.Reads:
        return ast.Reads(c[2], _around(c))

    def recompute(self, c: _Children) -> ast.Recompute:
        return ast.Recompute(_guard(c), _around([c[0], _guard(c) or c[0]]))

    def sync(self, c: _Children) -> ast.Sync:
        modes = {mode.value: mode for mode in ast.SyncMode}
        if c[1] not in modes:
            self._unknown(c[1], "sync", list(modes))
        return ast.Sync(modes.get(c[1], ast.SyncMode.LAZY), _guard(c), _around([c[0], _guard(c) or c[1]]))

    def when(self, c: _Children) -> _When:
        return _When(c[1])

    def range(self, c: _Children) -> ast.Range:
        return ast.Range(c[0], c[2], _around(c))

    def endless(self, c: _Children) -> ast.Endless:
        return ast.Endless(c[0], _around(c))

    def choice(self, c: _Children) -> ast.Choice:
        return ast.Choice(c[1], c[3], c[5], _around(c))

    def either(self, c: _Children) -> ast.Logical:
        return ast.Logical(ast.Logic.OR, c[0], c[2], _around(c))

    def both(self, c: _Children) -> ast.Logical:
        return ast.Logical(ast.Logic.AND, c[0], c[2], _around(c))

    def negation(self, c: _Children) -> ast.Not:
        return ast.Not(c[1], _around(c))

    def comparison(self, c: _Children) -> ast.Comparison:
        return ast.Comparison(tuple(c[::2]), tuple(ast.Comparator(str(token)) for token in c[1::2]), _around(c))

    def sum(self, c: _Children) -> ast.Binary:
        return ast.Binary(ast.Arithmetic(str(c[1])), c[0], c[2], _around(c))

    def product(self, c: _Children) -> ast.Binary:
        return ast.Binary(ast.Arithmetic(str(c[1])), c[0], c[2], _around(c))

    def minus(self, c: _Children) -> ast.Minus:
        return ast.Minus(c[1], _around(c))

    def integer(self, c: _Children) -> ast.Integer:
        digits = str(c[0]).lstrip("0") or "0"
        if len(digits) > len(str(MAX_INTEGER)) or int(digits) > MAX_INTEGER:
            self.mistakes.append(NumberTooLarge(_of(c[0])))
            digits = "0"
        return ast.Integer(int(digits), _of(c[0]))

    def name(self, c: _Children) -> ast.Name:
        return ast.Name(str(c[0]), _of(c[0]))

    def call(self, c: _Children) -> ast.Call:
        arguments = [child for child in c[2:] if not isinstance(child, Token)]
        return ast.Call(_word(c[0]), tuple(arguments), _around(c))

    def group(self, c: _Children) -> Any:
        return replace(c[1], span=_around(c))

    def _unknown(self, word: Token, clause: str, choices: list[str]) -> None:
        listed = ", ".join(f"`{choice}`" for choice in choices[:-1]) + f" or `{choices[-1]}`"
        self.mistakes.append(UnknownMode(_of(word), clause, str(word), listed))


def _word(token: Token) -> ast.Word:
    return ast.Word(str(token), _of(token))


def _guard(c: _Children) -> ast.Expression | None:
    return c[-1].expression if isinstance(c[-1], _When) else None


def _of(node: Any) -> Span:
    if isinstance(node, Token):
        return Span(node.start_pos or 0, node.end_pos or 0)
    span: Span = node.span
    return span


def _around(c: _Children) -> Span:
    return Span(_of(c[0]).start, _of(c[-1]).end)
