"""Checks of a scheme before any number is known: names, types, the size of formulas."""

from collections import ChainMap
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, assert_never

from chimera_ir.diagnostics.catalogue import names as say
from chimera_ir.diagnostics.model import Diagnostic, raise_errors
from chimera_ir.diagnostics.render import MAX_SHOWN
from chimera_ir.diagnostics.suggest import closest
from chimera_ir.elaborate.builtins import BUILTINS, UNITS
from chimera_ir.elaborate.clauses import check_clauses, suggest_workers
from chimera_ir.source import Span
from chimera_ir.syntax import ast
from chimera_ir.syntax.spelling import FOREIGN_NAMES

MAX_SIZE, MAX_DEPTH = 2_000, 200
"""The most operators and operands of a formula with its functions written out, and the most levels."""


class Type(Enum):
    """The type of a formula, in words."""

    INTEGER = "a number"
    TRUTH = "a condition"


@dataclass(frozen=True, slots=True)
class _ValueName:
    """A name for a value; ``type`` is None if a mistake keeps the type from being known."""

    type: Type | None
    span: Span


@dataclass(frozen=True, slots=True)
class _FunctionName:
    parameters: tuple[str, ...]
    result: Type | None
    span: Span

    def signature(self, name: str) -> str:
        """A call of the function with its parameters, as in ``f(a, b)``."""
        return f"{name}({', '.join(self.parameters)})"


class _FormulaSize(NamedTuple):
    """The number of operators and operands of a formula, and its levels."""

    operands: int
    levels: int


_Meaning = _ValueName | _FunctionName
_Scope = Mapping[str, _Meaning]
_Layers = ChainMap[str, _Meaning]
"""Scopes, the inner ones over the outer ones; nothing is copied, as a scheme may have thousands of names."""


def check(scheme: ast.Scheme) -> tuple[Diagnostic, ...]:
    """Returns the warnings about a scheme that do not depend on its parameters.

    Afterwards each name means one thing, and each formula has a type and is not too large to evaluate.

    Raises `Rejected` with all errors that do not depend on parameters.
    """
    checker = _Checker(scheme)
    checker.check_scheme()
    return raise_errors((*suggest_workers(scheme, checker.mistakes), *check_clauses(scheme)))


def _guess(text: str, known: Collection[str]) -> str | None:
    """The known name or the formula that may be meant by ``text``, a name that is undefined; None without a guess."""
    foreign = FOREIGN_NAMES.get(text.lower())
    return closest(text, known) if foreign is None or text.lower() in map(str.lower, known) else foreign


def _definitions(scheme: ast.Scheme) -> Iterator[tuple[str, ast.Word, ast.Expression]]:
    """Every parameter, value and function: which of the three it is, its name, and the formula of its definition."""
    for parameter in scheme.parameters:
        yield "the parameter", parameter.name, parameter.default
    for item in scheme.items:
        if isinstance(item, ast.Let):
            yield "the value", item.name, item.value
        elif isinstance(item, ast.Function):
            yield "the function", item.name, item.body


def _names_in(expression: ast.Expression) -> tuple[str, ...]:
    nodes = (node for node in ast.walk(expression) if isinstance(node, ast.Name | ast.Call))
    return tuple(node.text if isinstance(node, ast.Name) else node.function.text for node in nodes)


def _size_of(expression: ast.Expression, known: Mapping[str, _FormulaSize]) -> _FormulaSize:
    """The size of a formula if its names were replaced by the formulas they stand for, whose sizes are in ``known``."""
    nodes = list(ast.walk(expression))
    return _FormulaSize(len(nodes) + sum(_behind(node, known).operands for node in nodes), _levels(expression, known))


def _levels(expression: ast.Expression, known: Mapping[str, _FormulaSize]) -> int:
    within = max((_levels(operand, known) for operand in ast.operands(expression)), default=0)
    return 1 + max(within, _behind(expression, known).levels)


def _behind(node: ast.Expression, known: Mapping[str, _FormulaSize]) -> _FormulaSize:
    """The size of the formula that the name in a node stands for; 0 if there is none."""
    name = node.function if isinstance(node, ast.Call) else node
    return known.get(name.text if isinstance(name, ast.Name | ast.Word) else "", _FormulaSize(0, 0))


class _Checker:
    """A walk over a scheme from top to bottom that collects names, sizes of formulas, and mistakes."""

    def __init__(self, scheme: ast.Scheme) -> None:
        self.mistakes: list[Diagnostic] = []
        self._scheme = scheme
        self._defined: dict[str, _Meaning] = {}
        self._used: set[str] = set()
        self._definitions = list(_definitions(scheme))
        self._uses = {word.text: _names_in(formula) for _, word, formula in self._definitions}
        self._spans: dict[str, Span] = {}
        for _, word, _ in self._definitions:
            self._spans.setdefault(word.text, word.span)
        self._sizes: ChainMap[str, _FormulaSize] = ChainMap()

    def check_scheme(self) -> None:
        for parameter in self._scheme.parameters:
            self._formula(parameter.default, Type.INTEGER, "the default of a parameter", self._defined, parameter.name)
            self._define(parameter.name, _ValueName(Type.INTEGER, parameter.name.span))
        for item in self._scheme.items:
            self._item(item)
        unused = ((kind, word) for kind, word, _ in self._definitions if word.text not in self._used)
        self.mistakes += [say.Unused(word.span, kind, word.text) for kind, word in unused]

    def _item(self, item: ast.Item) -> None:
        match item:
            case ast.Let(name, value):
                self._define(name, _ValueName(self._formula(value, None, "", self._defined, name), name.span))
            case ast.Function():
                self._function(item)
            case ast.Workers(count):
                self._formula(count, Type.INTEGER, "`workers`", self._defined)
            case ast.Require(condition):
                self._formula(condition, Type.TRUTH, "`require`", self._defined)
            case ast.Update(count):
                self._formula(count, Type.INTEGER, "`update every`", self._defined)
            case ast.Memory(quantity, worker, limit):
                scope = self._with(self._variables([] if worker is None else [worker]))
                if quantity in (ast.MemoryQuantity.BYTES, ast.MemoryQuantity.HOST_BYTES):
                    units = {name: _ValueName(Type.INTEGER, item.span) for name in UNITS if name not in self._spans}
                    scope = ChainMap(*scope.maps, {**units})
                self._formula(limit, Type.INTEGER, "`memory`", scope)
            case ast.PipeBlock():
                self._pipe(item)
            case _:
                assert_never(item)

    def _define(self, name: ast.Word, meaning: _Meaning) -> None:
        if name.text in BUILTINS:
            self.mistakes.append(say.RedefinesBuiltin(name.span, name.text))
        elif name.text in self._defined:
            self.mistakes.append(say.DefinedTwice(name.span, name.text, self._defined[name.text].span))
        else:
            self._defined[name.text] = meaning

    def _variables(self, words: Iterable[ast.Word]) -> dict[str, _ValueName]:
        """Returns local variables by name, and records a mistake for each with the name of something else."""
        variables: dict[str, _ValueName] = {}
        for word in words:
            if word.text in BUILTINS:
                self.mistakes.append(say.RedefinesBuiltin(word.span, word.text))
            elif word.text in variables:
                self.mistakes.append(say.DefinedTwice(word.span, word.text, variables[word.text].span))
            elif word.text in self._spans:
                self.mistakes.append(say.Shadows(word.span, word.text, self._spans[word.text]))
            variables.setdefault(word.text, _ValueName(Type.INTEGER, word.span))
        return variables

    def _with(self, variables: Mapping[str, _ValueName]) -> _Layers:
        """A scope of all names known so far and ``variables``."""
        return ChainMap({**variables}, self._defined)

    def _function(self, function: ast.Function) -> None:
        scope = self._with(self._variables(function.parameters))
        result = self._type(function.body, scope, function.name)
        names = tuple(word.text for word in function.parameters)
        self._sizes.setdefault(function.name.text, self._size(function.body))
        self._define(function.name, _FunctionName(names, result, function.name.span))

    def _pipe(self, pipe: ast.PipeBlock) -> None:
        # The names that the pipe's lines define. A guard may use all but the micro-batch.
        index = [] if pipe.index is None else [pipe.index.variable]
        stages = [clause for clause in pipe.clauses if isinstance(clause, ast.Stages)][:1]
        micros = [clause for clause in pipe.clauses if isinstance(clause, ast.Micros)][:1]
        slices = [clause for clause in pipe.clauses if isinstance(clause, ast.Slices)][:1]
        places = {clause.worker: _size_of(clause.place, self._sizes) for clause in stages if clause.worker is not None}
        of_stage = [*(clause.variable for clause in stages), *places]
        of_slice = {clause.variable.text for clause in slices}
        of_micro = [*(clause.variable for clause in micros), *(clause.variable for clause in slices)]
        variables = self._variables([*index, *of_stage, *of_micro])
        outside = self._with({word.text: variables[word.text] for word in index})
        if pipe.index is not None:
            self._range(pipe.index.range, self._defined)
        inside = self._with(variables)
        by_stage = outside.new_child({word.text: variables[word.text] for word in of_stage})
        self._sizes = self._sizes.new_child({word.text: place for word, place in places.items()})
        for clause in pipe.clauses:
            match clause:
                case ast.Stages(variable, stage_range, _, place):
                    self._range(stage_range, outside)
                    scope = outside.new_child({variable.text: _ValueName(Type.INTEGER, variable.span)})
                    self._formula(place, Type.INTEGER, "`on`", scope)
                case ast.Micros():
                    self._micros(clause, outside)
                case ast.Slices():
                    self._range(clause.range, outside)
                case ast.Operation() if not (stages and micros):
                    pass  # a missing line is reported once, not for every name that it would have defined
                case ast.Operation():
                    self._operation(clause, inside)
                case ast.Reads(version):
                    without_slice = self._with({text: kind for text, kind in variables.items() if text not in of_slice})
                    self._formula(version, Type.INTEGER, "`reads version`", without_slice)
                case ast.Recompute(guard) | ast.Sync(guard=guard):
                    self._guard(guard, by_stage)
                case _:
                    assert_never(clause)
        self._sizes = self._sizes.parents

    def _micros(self, clause: ast.Micros, outside: _Layers) -> None:
        self._range(clause.range, outside)
        if clause.step is not None:
            self._formula(clause.step, Type.INTEGER, "`by`", outside)
        if clause.number is not None:
            inside = outside.new_child({clause.variable.text: _ValueName(Type.INTEGER, clause.variable.span)})
            self._formula(clause.number, Type.INTEGER, "`as`", inside)

    def _operation(self, operation: ast.Operation, inside: _Scope) -> None:
        for subject in operation.subjects:
            if isinstance(subject.micro, ast.Range):
                self._range(subject.micro, inside)
            else:
                self._formula(subject.micro, Type.INTEGER, "a micro-batch number", inside)
            self._formula(subject.stage, Type.INTEGER, "a stage number", inside)
            if subject.slice is not None:
                self._formula(subject.slice, Type.INTEGER, "a slice number", inside)
            if subject.pipe is not None and subject.pipe.index is not None:
                self._formula(subject.pipe.index, Type.INTEGER, "the index of a pipe", inside)
        self._formula(operation.clock, Type.INTEGER, "a clock", inside)
        self._guard(operation.guard, inside)

    def _guard(self, guard: ast.Expression | None, scope: _Scope) -> None:
        if guard is not None:
            self._formula(guard, Type.TRUTH, "`when`", scope)

    def _range(self, range_: ast.Range | ast.Endless, scope: _Scope) -> None:
        for end in (range_.start, range_.stop) if isinstance(range_, ast.Range) else (range_.start,):
            self._formula(end, Type.INTEGER, "a range", scope)

    def _formula(
        self,
        expression: ast.Expression,
        expected: Type | None,
        place: str,
        scope: _Scope,
        defining: ast.Word | None = None,
    ) -> Type | None:
        """Checks a whole formula and returns its type; None if a mistake keeps the type from being known.

        The type must be ``expected``, unless that is None. ``place`` is the formula's place, in words for messages;
        ``defining`` is the name that the formula defines, if any.
        """
        inferred = self._type(expression, scope, defining)
        self._expect(expression, inferred, expected, place)
        self._size(expression)
        return inferred

    def _expect(self, node: ast.Expression, actual: Type | None, expected: Type | None, place: str) -> None:
        if actual is not None and expected is not None and actual is not expected:
            message = {Type.INTEGER: say.NumberAsCondition, Type.TRUTH: say.WrongType}[actual]
            self.mistakes.append(message(node.span, place, expected.value, actual.value))

    def _type(self, node: ast.Expression, scope: _Scope, defining: ast.Word | None) -> Type | None:
        match node:
            case ast.Integer():
                return Type.INTEGER
            case ast.Name(text, span=span):
                return self._name(text, span, scope, defining)
            case ast.Call():
                return self._call(node, scope, defining)
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
                types = (self._type(then, scope, defining), self._type(otherwise, scope, defining))
                if None not in types and types[0] is not types[1]:
                    self.mistakes.append(say.BranchesDiffer(node.span, *(str(kind and kind.value) for kind in types)))
                return types[0] if types[0] is types[1] else None
            case _:
                assert_never(node)

    def _operands(
        self, nodes: Iterable[ast.Expression], expected: Type, place: str, scope: _Scope, defining: ast.Word | None
    ) -> Type:
        for node in nodes:
            self._expect(node, self._type(node, scope, defining), expected, place)
        return expected

    def _name(self, text: str, span: Span, scope: _Scope, defining: ast.Word | None) -> Type | None:
        self._used.add(text)
        entry = scope.get(text)
        match entry:
            case _ValueName(type=known_type):
                return known_type
            case _FunctionName() as function:
                self.mistakes.append(say.FunctionAsValue(span, text, function.signature(text)))
            case None if text in BUILTINS:
                self.mistakes.append(say.FunctionAsValue(span, text, BUILTINS[text].signature))
            case None:
                self._unknown(text, span, scope, defining)
            case _:
                assert_never(entry)
        return None

    def _unknown(self, text: str, span: Span, scope: _Scope, defining: ast.Word | None) -> None:
        shown = len(self.mistakes) < MAX_SHOWN  # a guess takes time, so only a mistake that is shown gets one
        cycle = None if defining is None else self._way(text, defining.text, far=shown)
        if defining is not None and cycle is not None:
            self.mistakes.append(say.DefinedByItself(span, defining.text, cycle))
        elif text in self._spans:
            self.mistakes.append(say.UsedTooEarly(span, text, self._spans[text]))
        else:
            known = list(scope) or list(BUILTINS) if shown else []
            listed = ", ".join(f"`{name}`" for name in known[:12]) + (", .." if len(known) > 12 else "")
            guess = _guess(text, [*known, *BUILTINS]) if shown else None
            self.mistakes.append(say.UnknownName(span, text, guess, listed))

    def _way(self, start: str, goal: str, *, far: bool) -> tuple[str, ...] | None:
        """The shortest chain of definitions from ``start`` to ``goal``, at most one long unless ``far``; or None."""
        came_from = {start: ""}
        pending = [start] if far else []
        for name in pending:
            fresh = [used for used in dict.fromkeys(self._uses.get(name, ())) if used not in came_from]
            came_from.update(dict.fromkeys(fresh, name))
            pending += fresh
        if goal not in came_from:
            return None
        way: list[str] = []
        while goal != start:
            goal = came_from[goal]
            way.append(goal)
        return tuple(reversed(way))

    def _call(self, node: ast.Call, scope: _Scope, defining: ast.Word | None) -> Type | None:
        name, count = node.function.text, len(node.arguments)
        self._used.add(name)
        self._operands(node.arguments, Type.INTEGER, f"`{name}(..)`", scope, defining)
        entry = scope.get(name)
        match entry:
            case _ValueName():
                self.mistakes.append(say.NotAFunction(node.function.span, name))
                return None
            case _FunctionName(parameters=parameters, result=result) as function:
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
            case None:
                self._unknown(name, node.function.span, scope, defining)
                return None
            case _:
                assert_never(entry)

    def _size(self, expression: ast.Expression) -> _FormulaSize:
        """Returns the size of a formula. A formula that is too large is reported, and counts as small from then on."""
        size = _size_of(expression, self._sizes)
        if size.operands > MAX_SIZE:
            self.mistakes.append(say.FormulaTooLarge(expression.span, MAX_SIZE, "operations"))
            return _FormulaSize(1, 1)
        if size.levels > MAX_DEPTH:
            self.mistakes.append(say.FormulaTooDeep(expression.span, MAX_DEPTH, "levels"))
            return _FormulaSize(1, 1)
        return size
