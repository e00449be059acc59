"""Checks single formulas before any number is known: what their names mean, their types, their sizes."""

from collections import ChainMap
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, assert_never

from chimera_ir.diagnostics.catalogue import names as say
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.diagnostics.render import MAX_SHOWN
from chimera_ir.diagnostics.suggest import closest
from chimera_ir.elaborate.builtins import BUILTINS
from chimera_ir.ir.kinds import KINDS
from chimera_ir.source import Span
from chimera_ir.syntax import ast
from chimera_ir.syntax.spelling import FOREIGN_NAMES

MAX_SIZE, MAX_DEPTH = 2_000, 200
"""The most operators and operands of a formula with its functions written out, and the most levels of nesting."""


class Type(Enum):
    """The type of a formula; the values are the words for it in messages."""

    INTEGER = "a number"
    TRUTH = "a condition"


@dataclass(frozen=True, slots=True)
class ValueName:
    """A name for a value; ``type`` is None if a mistake keeps the type from being known.

    ``variables`` are those of a pipe that the value depends on: a formula may use it only where all of them are known.
    """

    type: Type | None
    span: Span
    variables: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FunctionName:
    """A name for a function of numbers; ``result`` is None if a mistake keeps its type from being known."""

    parameters: tuple[str, ...]
    result: Type | None
    span: Span

    def signature(self, name: str) -> str:
        """A call of the function with its parameters, as in ``f(a, b)``."""
        return f"{name}({', '.join(self.parameters)})"


@dataclass(frozen=True, slots=True)
class TableName:
    """A name for a table of numbers."""

    span: Span


class FormulaSize(NamedTuple):
    """The number of operators and operands of a formula, and its levels of nesting."""

    operands: int
    levels: int


Meaning = ValueName | FunctionName | TableName
NameScope = Mapping[str, Meaning]
NameLayers = ChainMap[str, Meaning]
"""The names known at a place, in layers: an inner name hides an outer one.

Nothing is copied for a new layer, as a scheme may have thousands of names.
"""


class Definition(NamedTuple):
    """The definition of a name: ``kind`` says in words what the name is, such as "the parameter".

    ``formulas`` are those that give its value; a table has one for each entry.
    """

    kind: str
    name: ast.Word
    formulas: tuple[ast.Expression, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names that the formulas use."""
        return tuple(name for formula in self.formulas for name in ast.names_in(formula))


def definitions(scheme: ast.Scheme) -> Iterator[Definition]:
    """Yields every parameter, value, table and function outside of pipes."""
    for parameter in scheme.parameters:
        yield Definition("the parameter", parameter.name, (parameter.default,))
    yield from definitions_among(scheme.items)


def definitions_among(lines: Iterable[ast.Item | ast.Clause]) -> Iterator[Definition]:
    """Yields the definitions among lines of a scheme or of a pipe."""
    for line in lines:
        match line:
            case ast.Let():
                yield Definition(
                    "the table" if isinstance(line.value, ast.NumberTable) else "the value", line.name, line.formulas
                )
            case ast.Function(name, _, body):
                yield Definition("the function", name, (body,))
            case _:
                pass


def size_of(expression: ast.Expression, known: Mapping[str, FormulaSize]) -> FormulaSize:
    """Returns the size that a formula has once each of its names is replaced by the formula for which it stands.

    ``known`` has the sizes of the formulas for which names stand.
    """
    nodes = list(ast.walk(expression))
    return FormulaSize(len(nodes) + sum(_behind(node, known).operands for node in nodes), _levels(expression, known))


def _levels(expression: ast.Expression, known: Mapping[str, FormulaSize]) -> int:
    within = max((_levels(operand, known) for operand in ast.operands(expression)), default=0)
    return 1 + max(within, _behind(expression, known).levels)


def _behind(node: ast.Expression, known: Mapping[str, FormulaSize]) -> FormulaSize:
    """Returns the size of the formula behind ``node``, a name or a call of a function; zero for any other node."""
    name = node.function if isinstance(node, ast.Call) else node
    return known.get(name.text if isinstance(name, ast.Name | ast.Word) else "", FormulaSize(0, 0))


def _guess(text: str, known: Collection[str]) -> str | None:
    """Returns what the undefined name ``text`` may stand for: a known name, or a formula; None without a guess."""
    foreign = FOREIGN_NAMES.get(text.lower())
    return closest(text, known) if foreign is None or text.lower() in map(str.lower, known) else foreign


class FormulaChecker:
    """Finds the types and sizes of formulas; collects their ``mistakes``, and all names that they have ``used``.

    For each name that is defined anywhere, ``spans`` has the place of the definition, ``uses`` the names in its
    formulas, and ``sizes`` the size of its formula. The names of a pipe are an inner layer.
    """

    def __init__(self, defined: Iterable[Definition]) -> None:
        self.mistakes: list[Diagnostic] = []
        self.used: set[str] = set()
        self.spans: ChainMap[str, Span] = ChainMap()
        self.uses: ChainMap[str, tuple[str, ...]] = ChainMap()
        self.sizes: ChainMap[str, FormulaSize] = ChainMap()
        self.announce(defined)

    def announce(self, defined: Iterable[Definition]) -> None:
        """Records that names are defined further down, before their lines are checked.

        So the use of such a name is reported as too early, not as unknown. The names are those of the innermost layer.
        """
        for definition in defined:
            self.uses[definition.name.text] = definition.names
            self.spans.maps[0].setdefault(definition.name.text, definition.name.span)

    def open_layer(self) -> None:
        """Begins a layer of names, over those that are known."""
        self.spans, self.uses, self.sizes = self.spans.new_child(), self.uses.new_child(), self.sizes.new_child()

    def close_layer(self) -> None:
        """Forgets the names of the innermost layer."""
        self.spans, self.uses, self.sizes = self.spans.parents, self.uses.parents, self.sizes.parents

    def formula(
        self,
        expression: ast.Expression,
        expected: Type | None,
        place: str,
        scope: NameScope,
        defining: ast.Word | None = None,
    ) -> Type | None:
        """Checks a whole formula and returns its type; None if a mistake keeps the type from being known.

        The type must be ``expected``, unless that is None. ``place`` is the formula's place, in words for messages;
        ``defining`` is the name that the formula defines, if any.
        """
        inferred = self.type_of(expression, scope, defining)
        self._expect(expression, inferred, expected, place)
        self.size(expression)
        return inferred

    def _expect(self, node: ast.Expression, actual: Type | None, expected: Type | None, place: str) -> None:
        if actual is not None and expected is not None and actual is not expected:
            message = {Type.INTEGER: say.NumberAsCondition, Type.TRUTH: say.WrongType}[actual]
            self.mistakes.append(message(node.span, place, expected.value, actual.value))

    def type_of(self, node: ast.Expression, scope: NameScope, defining: ast.Word | None) -> Type | None:
        """The type of a formula, which defines the name ``defining``, if any; None if a mistake keeps it unknown."""
        match node:
            case ast.Integer():
                return Type.INTEGER
            case ast.Name(text, span=span):
                return self._name(text, span, scope, defining)
            case ast.Call():
                return self._call(node, scope, defining)
            case ast.Lookup():
                return self._lookup(node, scope, defining)
            case ast.Minus(operand):
                return self._operands((operand,), Type.INTEGER, "`-`", scope, defining)
            case ast.Binary(operator, left, right):
                return self._operands((left, right), Type.INTEGER, f"`{operator.value}`", scope, defining)
            case ast.Comparison(operands, comparators):
                self._operands(operands, Type.INTEGER, f"`{comparators[0].value}`", scope, defining)
                return Type.TRUTH
            case ast.Not(operand):
                return self._operands((operand,), Type.TRUTH, "`not`", scope, defining)
            case ast.Logical(operator, left, right):
                return self._operands((left, right), Type.TRUTH, f"`{operator.value}`", scope, defining)
            case ast.Choice(condition, then, otherwise):
                self._operands((condition,), Type.TRUTH, "`if`", scope, defining)
                types = (self.type_of(then, scope, defining), self.type_of(otherwise, scope, defining))
                if None not in types and types[0] is not types[1]:
                    self.mistakes.append(say.BranchesDiffer(node.span, *(str(kind and kind.value) for kind in types)))
                return types[0] if types[0] is types[1] else None
            case _:
                assert_never(node)

    def _operands(
        self, nodes: Iterable[ast.Expression], expected: Type, place: str, scope: NameScope, defining: ast.Word | None
    ) -> Type:
        for node in nodes:
            self._expect(node, self.type_of(node, scope, defining), expected, place)
        return expected

    def _name(self, text: str, span: Span, scope: NameScope, defining: ast.Word | None) -> Type | None:
        self.used.add(text)
        entry = scope.get(text)
        match entry:
            case ValueName(type=known_type, variables=variables):
                lacking = next((variable for variable in variables if variable not in scope), None)
                if lacking is not None:
                    self.mistakes.append(say.VariableLacking(span, text, lacking, self.spans[text]))
                return known_type
            case FunctionName() as function:
                self.mistakes.append(say.FunctionAsValue(span, text, function.signature(text)))
            case TableName():
                self.mistakes.append(say.TableAsValue(span, text))
            case None if text in BUILTINS:
                self.mistakes.append(say.FunctionAsValue(span, text, BUILTINS[text].signature))
            case None:
                self._unknown(text, span, scope, defining)
            case _:
                assert_never(entry)
        return None

    def _unknown(self, text: str, span: Span, scope: NameScope, defining: ast.Word | None) -> None:
        shown = len(self.mistakes) < MAX_SHOWN  # a guess takes time, so only a mistake that is shown gets one
        cycle = None if defining is None else self._way(text, defining.text, far=shown)
        if defining is not None and cycle is not None:
            self.mistakes.append(say.DefinedByItself(span, defining.text, cycle))
        elif text in self.spans:
            self.mistakes.append(say.UsedTooEarly(span, text, self.spans[text]))
        else:
            known = list(scope) or list(BUILTINS) if shown else []
            listed = ", ".join(f"`{name}`" for name in known[:12]) + (", .." if len(known) > 12 else "")
            guess = _guess(text, [*known, *BUILTINS]) if shown else None
            self.mistakes.append(say.UnknownName(span, text, guess, listed))

    def _way(self, start: str, goal: str, *, far: bool) -> tuple[str, ...] | None:
        """Returns the chain of names that leads from ``start`` to ``goal``, without ``goal`` itself.

        Each name is used in the definition of the name before it. The shortest chain is returned, None if there is
        none. Only with ``far`` set are chains longer than one name looked for, from ``start`` to any ``goal``.
        """
        came_from = {start: ""}
        pending = [start] if far else []
        for name in pending:
            fresh = [used for used in dict.fromkeys(self.uses.get(name, ())) if used not in came_from]
            came_from.update(dict.fromkeys(fresh, name))
            pending += fresh
        if goal not in came_from:
            return None
        way: list[str] = []
        while goal != start:
            goal = came_from[goal]
            way.append(goal)
        return tuple(reversed(way))

    def _call(self, node: ast.Call, scope: NameScope, defining: ast.Word | None) -> Type | None:
        name, count = node.function.text, len(node.arguments)
        self.used.add(name)
        self._operands(node.arguments, Type.INTEGER, f"`{name}(..)`", scope, defining)
        entry = scope.get(name)
        match entry:
            case ValueName():
                self.mistakes.append(say.NotAFunction(node.function.span, name))
                return None
            case TableName():
                self.mistakes.append(say.TableCalled(node.function.span, name))
                return Type.INTEGER
            case FunctionName(parameters=parameters, result=result) as function:
                if count != len(parameters):
                    arity = len(parameters)
                    self.mistakes.append(say.WrongArity(node.span, function.signature(name), arity, arity, count))
                return result
            case None if name in BUILTINS:
                builtin = BUILTINS[name]
                if not builtin.least <= count <= (builtin.most or count):
                    limits = builtin.least, builtin.most
                    self.mistakes.append(say.WrongArity(node.span, builtin.signature, *limits, count))
                return Type.INTEGER
            case None if name in KINDS:
                self.mistakes.append(say.OperationInFormula(node.function.span, name))
                return None
            case None:
                self._unknown(name, node.function.span, scope, defining)
                return None
            case _:
                assert_never(entry)

    def _lookup(self, node: ast.Lookup, scope: NameScope, defining: ast.Word | None) -> Type | None:
        name = node.table.text
        self.used.add(name)
        self._operands((node.position,), Type.INTEGER, f"`{name}[..]`", scope, defining)
        entry = scope.get(name)
        match entry:
            case TableName():
                return Type.INTEGER
            case ValueName():
                self.mistakes.append(say.NotATable(node.table.span, name))
            case FunctionName():
                self.mistakes.append(say.FunctionIndexed(node.table.span, name))
            case None if name in BUILTINS:
                self.mistakes.append(say.FunctionIndexed(node.table.span, name))
            case None:
                self._unknown(name, node.table.span, scope, defining)
            case _:
                assert_never(entry)
        return None

    def size(self, expression: ast.Expression) -> FormulaSize:
        """Returns the size of a formula. A formula that is too large is reported, and counts as small from then on."""
        size = size_of(expression, self.sizes)
        if size.operands > MAX_SIZE:
            self.mistakes.append(say.FormulaTooLarge(expression.span, MAX_SIZE, "operations"))
            return FormulaSize(1, 1)
        if size.levels > MAX_DEPTH:
            self.mistakes.append(say.FormulaTooDeep(expression.span, MAX_DEPTH, "levels"))
            return FormulaSize(1, 1)
        return size
