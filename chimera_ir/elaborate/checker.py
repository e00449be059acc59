"""Checks a scheme before any number is known: what its lines define, and the formulas in them."""

from collections import ChainMap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import product
from typing import NamedTuple, assert_never

from chimera_ir.diagnostics.catalogue import names as say
from chimera_ir.diagnostics.catalogue import values
from chimera_ir.diagnostics.model import Diagnostic, closest, raise_errors
from chimera_ir.diagnostics.render import MAX_SHOWN
from chimera_ir.elaborate.evaluate import BUILTINS, UNITS
from chimera_ir.ir.kinds import KINDS, PAIR
from chimera_ir.ir.levels import Quantity, Strategy
from chimera_ir.source import Span
from chimera_ir.syntax import ast
from chimera_ir.syntax.mistakes import FOREIGN_NAMES

# Checks that a scheme has the lines it must have, and others at most once, or only together with certain lines.
#
# `suggest_workers` gives better help where a memory bound uses a name for its worker that it does not define.

_READS = "reads version"

_EXAMPLES = {
    "stages": "stages s in 0..D on s",
    "micros": "micros m in 0..N",
    "operation": "F(m, s) @ 2*m + s",
    _READS: "reads version max(0, m - (D-1 - s))",
}


def check_clauses(scheme: ast.Scheme) -> Iterator[Diagnostic]:
    """Yields diagnostics of lines that are missing, doubled, impossible next to others, or not supported."""
    updates = [item for item in scheme.items if isinstance(item, ast.Update)]
    if not scheme.pipes:
        yield say.NoPipes(scheme.name.span, scheme.name.text)
    yield from _once(scheme.items, ast.Workers, "the scheme", "workers")
    yield from _once(scheme.items, ast.Frozen, "the scheme", "frozen")
    if updates:
        yield from (say.FrozenNotSupported(item.span) for item in scheme.items if isinstance(item, ast.Frozen))
        edges = [item for item in scheme.items if isinstance(item, ast.Feeds)]
        lines = [line for pipe in scheme.pipes for line in pipe.lines(ast.Stages) if line.group is not None]
        yield from (say.GraphNotSupported(line.span) for line in (*edges, *lines)[:1])
    yield from _once(updates, ast.Update, "the scheme", "update")
    for quantity in Quantity:
        bounds = [item for item in scheme.items if isinstance(item, ast.Memory) and item.quantity is quantity]
        yield from _once(bounds, ast.Memory, "the scheme", f"memory {quantity.value}")
    names: dict[str, Span] = {}
    for pipe in scheme.pipes:
        first = names.setdefault(pipe.name.text, pipe.name.span)
        if first != pipe.name.span:
            yield say.DefinedTwice(pipe.name.span, pipe.name.text, first)
        yield from _lines(pipe)
        yield from _streaming(pipe, updates[0]) if updates else _flushed(pipe)


def suggest_workers(scheme: ast.Scheme, mistakes: Iterable[Diagnostic]) -> Iterator[Diagnostic]:
    """Yields the mistakes; for an unknown name in a memory bound without a worker, the help says how to name one."""
    quantities = {
        node.span: item.quantity.value
        for item in scheme.items
        if isinstance(item, ast.Memory) and item.worker is None
        for node in ast.walk(item.limit)
        if isinstance(node, ast.Name) and node.text not in UNITS
    }
    for mistake in mistakes:
        if isinstance(mistake, say.UnknownName) and mistake.closest is None and mistake.span in quantities:
            yield say.UnnamedNumber(mistake.span, mistake.name, None, mistake.known, quantities[mistake.span])
        else:
            yield mistake


def _lines(pipe: ast.PipeBlock) -> Iterator[Diagnostic]:
    for name, needed in (("stages", ast.Stages), ("micros", ast.Micros), ("operation", ast.Operation)):
        if not any(isinstance(line, needed) for line in pipe.clauses):
            yield say.MissingClause(pipe.name.span, pipe.name.text, name, _EXAMPLES[name])
    if any(line.group is None for line in pipe.lines(ast.Stages)):
        yield from _once(pipe.clauses, ast.Stages, f"the pipe `{pipe.name.text}`", "stages")
    single = (
        ("micros", ast.Micros),
        ("slices", ast.Slices),
        (_READS, ast.Reads),
        ("recompute", ast.Recompute),
    )
    for name, kind in single:
        yield from _once(pipe.clauses, kind, f"the pipe `{pipe.name.text}`", name)
    yield from _slices(pipe)
    again = next(iter(pipe.lines(ast.Recompute)), None)
    for line in pipe.clauses:
        match line:
            case ast.Operation(subjects=[subject]) if again and subject.kind.recomputes:
                yield say.RecomputesTwice(line.span, pipe.name.text, again.span)
                again = None
            case ast.Micros(range=ast.Endless(), halves=ast.Halves(span=span)):
                yield say.HalvesNotSupported(span)
            case ast.Operation(subjects=[first, second]) if {first.kind, second.kind} != {*PAIR.kinds}:
                yield say.OtherKinds(line.span, first.kind.letter, second.kind.letter)
            case _:
                pass


def _slices(pipe: ast.PipeBlock) -> Iterator[Diagnostic]:
    cut = next(iter(pipe.lines(ast.Slices)), None)
    for line in pipe.clauses:
        if isinstance(line, ast.Micros) and line.halves and cut:
            yield say.SlicesAlone(line.halves.span, cut.span)
        for subject in line.subjects if isinstance(line, ast.Operation) else ():
            if cut is None and subject.slice is not None:
                yield say.SliceNamed(subject.slice.span, pipe.name.text)
            elif cut and subject.slice is None:
                yield say.SliceNotNamed(subject.span, subject.kind.letter, cut.variable.text)
            elif cut and isinstance(subject.micro, ast.Range):
                yield say.SlicesUngrouped(subject.micro.span, cut.span)


def _once(lines: Iterable[ast.SyntaxNode], kind: type[ast.SyntaxNode], owner: str, name: str) -> Iterator[Diagnostic]:
    spans = [line.span for line in lines if isinstance(line, kind)]
    for span in spans[1:]:
        yield say.SecondClause(span, owner, name, spans[0])


def _flushed(pipe: ast.PipeBlock) -> Iterator[Diagnostic]:
    for clause in pipe.clauses:
        match clause:
            case ast.Micros(range=ast.Endless(span=span)):
                yield values.UpdateMissing(span, pipe.name.text)
            case ast.Reads(span=span):
                yield values.NeedlessReads(span)
            case _:
                pass


def _streaming(pipe: ast.PipeBlock, update: ast.Update) -> Iterator[Diagnostic]:
    for clause in pipe.clauses:
        match clause:
            case ast.Micros(range=ast.Range(span=span)):
                yield values.PipeEnds(span, pipe.name.text, update.span)
            case ast.Sync(mode=Strategy.LAZY, span=span):
                yield values.NeverLazy(span)
            case ast.Operation(subjects=[_, second]):
                yield say.NotSupported(second.span)
            case _:
                pass
    if not pipe.lines(ast.Reads):
        yield say.MissingClause(pipe.name.span, pipe.name.text, f"`{_READS}`", _EXAMPLES[_READS])


# Checks single formulas before any number is known: what their names mean, their types, their sizes.

MAX_SIZE, MAX_DEPTH = 2_000, 200
"""The most operators and operands of a formula with its functions written out, and the most levels of nesting."""


class Type(Enum):
    """The type of a formula; the values are the words for it in messages."""

    INTEGER = "a number"
    TRUTH = "a condition"


class ValueName(NamedTuple):
    """A name for a value; ``type`` is None if a mistake keeps the type from being known.

    ``variables`` are those of a pipe that the value depends on: a formula may use it only where all of them are known.
    """

    type: Type | None
    span: Span
    variables: tuple[str, ...] = ()


class FunctionName(NamedTuple):
    """A name for a function of numbers; ``result`` is None if a mistake keeps its type from being known."""

    parameters: tuple[str, ...]
    result: Type | None
    span: Span

    def signature(self, name: str) -> str:
        """A call of the function with its parameters, as in ``f(a, b)``."""
        return f"{name}({', '.join(self.parameters)})"


class TableName(NamedTuple):
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
    name = node.function if isinstance(node, ast.Call) else node
    return known.get(name.text if isinstance(name, ast.Name | ast.Word) else "", FormulaSize(0, 0))


def _guess(text: str, known: Collection[str]) -> str | None:
    foreign = FOREIGN_NAMES.get(text.lower())
    return closest(text, known) if foreign is None or text.lower() in map(str.lower, known) else foreign


def _reaches(formula: ast.Expression, lets: Iterable[ast.Let], variable: str) -> bool:
    """Whether a formula of a pipe depends on a variable, directly or through its names."""
    behind = {let.name.text: let.formulas for let in lets}
    used, pending = set[str](), [formula]
    while pending:
        fresh = {*ast.names_in(pending.pop())} - used
        used |= fresh
        pending += [further for name in fresh for further in behind.get(name, ())]
    return variable in used


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
        """Records names of the innermost layer that are defined further down: using them is too early, not unknown."""
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

        The type must be ``expected``, if given. ``place`` is where the formula stands, in words; it defines the name
        ``defining``, if any.
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
            case ValueName(type=known_type, span=defined, variables=variables):
                lacking = next((variable for variable in variables if variable not in scope), None)
                if lacking is not None:
                    self.mistakes.append(say.VariableLacking(span, text, lacking, defined))
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
        """The shortest chain of names from ``start`` to ``goal``, without ``goal``: each is used by the one before.

        Chains of more than one name, from ``start`` to any ``goal``, are looked for only if ``far`` is set.
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


def check(scheme: ast.Scheme) -> tuple[Diagnostic, ...]:
    """Returns the warnings about a scheme that do not depend on its parameters.

    Afterwards each name means one thing, and each formula has a type and is not too large to evaluate.

    Raises `Rejected` with all errors that do not depend on parameters.
    """
    checker = _Checker(scheme)
    checker.check_scheme()
    return raise_errors((*suggest_workers(scheme, checker.mistakes), *check_clauses(scheme)))


class _Checker:
    def __init__(self, scheme: ast.Scheme) -> None:
        self._scheme = scheme
        self._definitions = list(definitions(scheme))
        self._formulas = FormulaChecker(self._definitions)
        self._defined: dict[str, Meaning] = {}
        lines = (line for pipe in scheme.pipes for line in pipe.lines(ast.Stages) if line.group is not None)
        self._groups = {line.group.text: TableName(line.group.span) for line in lines if line.group is not None}

    @property
    def mistakes(self) -> list[Diagnostic]:
        return self._formulas.mistakes

    def check_scheme(self) -> None:
        for parameter in self._scheme.parameters:
            self._formulas.formula(
                parameter.default, Type.INTEGER, "the default of a parameter", self._defined, parameter.name
            )
            self._define(parameter.name, ValueName(Type.INTEGER, parameter.name.span))
        for item in self._scheme.items:
            self._item(item)
        self._warn_of_unused(self._definitions)

    def _warn_of_unused(self, defined: Iterable[Definition]) -> None:
        unused = (definition for definition in defined if definition.name.text not in self._formulas.used)
        self.mistakes.extend([say.Unused(name.span, kind, name.text) for kind, name, _ in unused])

    def _item(self, item: ast.Item) -> None:
        match item:
            case ast.Let(name, value):
                if isinstance(value, ast.NumberTable):
                    self._define(name, self._table(value, name, self._defined))
                else:
                    kind = self._formulas.formula(value, None, "", self._defined, name)
                    self._define(name, ValueName(kind, name.span))
            case ast.Function():
                self._function(item)
            case ast.Workers(count, left_out):
                self._number(count, "`workers`", self._defined)
                self._numbers(left_out, "`except`")
            case ast.Frozen(stages):
                groups = [part for part in stages if isinstance(part, ast.Name) and part.text in self._groups]
                self._stages([part for part in stages if part not in groups], "`frozen`", self._with_groups(stages))
            case ast.Feeds():
                self._feeds(item)
            case ast.Require(condition):
                self._formulas.formula(condition, Type.TRUTH, "`require`", self._defined)
            case ast.Update(count):
                self._number(count, "`update every`", self._defined)
            case ast.Memory(quantity, worker, limit):
                scope = self._with(self._variables([] if worker is None else [worker]))
                if quantity.in_bytes:
                    units = {
                        name: ValueName(Type.INTEGER, item.span) for name in UNITS if name not in self._formulas.spans
                    }
                    scope = ChainMap(*scope.maps, {**units})
                self._number(limit, "`memory`", scope)
            case ast.PipeBlock():
                self._pipe(item)
            case _:
                assert_never(item)

    def _numbers(self, parts: Iterable[ast.Expression | ast.Range], place: str) -> None:
        for part in parts:
            if isinstance(part, ast.Range):
                self._range(part, self._defined)
            else:
                self._number(part, place, self._defined)

    def _feeds(self, edge: ast.Feeds) -> None:
        ends = edge.source, edge.target
        scope, several = self._with_groups(ends), [end for end in ends if isinstance(end, ast.Several)]
        if several:
            scope = scope.new_child({**self._variables([several[0].index.variable])})
        if len(several) > 1:
            self.mistakes.append(say.SeveralBoth(several[1].span))
        self._stages(ends, "`feeds`", scope)

    def _with_groups(self, parts: Iterable[ast.Expression | ast.Range | ast.Several]) -> NameLayers:
        """Checks the stages of groups among ``parts``; returns a scope in which groups are tables of their stages."""
        scope: NameLayers = ChainMap({**self._groups}, self._defined)
        for some in (part for part in parts if isinstance(part, ast.Several)):
            position = ast.Integer(0, span=some.group.span)
            self._formulas.type_of(ast.Lookup(some.group, position, span=some.span), scope, None)
            self._range(some.index.range, self._defined)
        return scope

    def _stages(self, parts: Iterable[ast.Expression | ast.Range | ast.Several], place: str, scope: NameLayers) -> None:
        for part in parts:
            if isinstance(part, ast.Range):
                self._range(part, scope)
            elif not isinstance(part, ast.Several):
                self._number(part, place, scope)

    def _define(self, name: ast.Word, meaning: Meaning) -> None:
        if name.text in BUILTINS:
            self.mistakes.append(say.RedefinesBuiltin(name.span, name.text))
        elif name.text in self._defined:
            self.mistakes.append(say.DefinedTwice(name.span, name.text, self._defined[name.text].span))
        else:
            self._defined[name.text] = meaning

    def _variables(self, words: Iterable[ast.Word]) -> dict[str, ValueName]:
        """The variables as names for integers; records a mistake for a name that already stands for something else."""
        variables: dict[str, ValueName] = {}
        for word in words:
            if word.text in BUILTINS:
                self.mistakes.append(say.RedefinesBuiltin(word.span, word.text))
            elif word.text in variables:
                self.mistakes.append(say.DefinedTwice(word.span, word.text, variables[word.text].span))
            elif word.text in self._formulas.spans:
                self.mistakes.append(say.Shadows(word.span, word.text, self._formulas.spans[word.text]))
            variables.setdefault(word.text, ValueName(Type.INTEGER, word.span))
        return variables

    def _with(self, variables: Mapping[str, ValueName]) -> NameLayers:
        return ChainMap({**variables}, self._defined)

    def _function(self, function: ast.Function) -> None:
        scope = self._with(self._variables(function.parameters))
        result = self._formulas.type_of(function.body, scope, function.name)
        names = tuple(word.text for word in function.parameters)
        self._formulas.sizes.setdefault(function.name.text, self._formulas.size(function.body))
        self._define(function.name, FunctionName(names, result, function.name.span))

    def _pipe(self, pipe: ast.PipeBlock) -> None:
        defined = list(definitions_among(pipe.clauses))
        used, self._formulas.used = self._formulas.used, set()
        self._formulas.open_layer()
        self._lines(pipe)
        self._warn_of_unused(defined)
        self._formulas.close_layer()
        self._formulas.used |= used

    def _lines(self, pipe: ast.PipeBlock) -> None:
        # The names that the pipe's lines define. A guard may use all but the micro-batch.
        index = [] if pipe.index is None else [pipe.index.variable]
        stages, micros, slices = pipe.lines(ast.Stages), pipe.lines(ast.Micros)[:1], pipe.lines(ast.Slices)[:1]
        groups = [line.group for line in stages if line.group is not None]
        stages = stages if len(groups) == len(stages) else stages[:1]
        lets = pipe.lines(ast.Let)
        of_stage = [*(line.variable for line in stages), *(line.worker for line in stages if line.worker is not None)]
        of_slice = {clause.variable.text for clause in slices}
        of_micro = [*(clause.variable for clause in micros), *(clause.variable for clause in slices)]
        words = [*index, *of_stage, *of_micro]
        meanings = self._variables([*words, *(let.name for let in lets), *groups])
        variables = {word.text: meanings[word.text] for word in words}
        for line, micro in product(stages, of_micro[:1]):
            if line.worker is not None and _reaches(line.place, lets, micro.text):
                known = variables[line.worker.text]
                variables[line.worker.text] = known._replace(variables=(micro.text,))
        # Scopes see the names that lines `let` define so far.
        named: dict[str, Meaning] = {word.text: TableName(word.span) for word in groups}
        outside: NameLayers = ChainMap({word.text: variables[word.text] for word in index}, named, self._defined)
        if pipe.index is not None:
            self._range(pipe.index.range, self._defined)
        inside = outside.new_child({**variables})
        by_stage = outside.new_child({word.text: variables[word.text] for word in of_stage})
        without_slice = outside.new_child({name: kind for name, kind in variables.items() if name not in of_slice})
        self._formulas.announce(definitions_among(lets))
        self._definitions_of(stages, micros, lets, variables, named, outside)
        for clause in pipe.clauses:
            match clause:
                case ast.Stages(range=stage_range):
                    self._range(stage_range, outside)
                case ast.Let():
                    pass
                case ast.Micros():
                    self._micros(clause, outside)
                case ast.Slices():
                    self._range(clause.range, outside)
                case ast.Operation() if not (stages and micros):
                    pass  # a missing line is reported once, not for every name that it would have defined
                case ast.Operation():
                    self._operation(clause, inside)
                case ast.Reads(version):
                    self._number(version, "`reads version`", without_slice)
                case ast.Recompute(guard):
                    self._guard(guard, without_slice)
                case ast.Sync(guard=guard):
                    self._guard(guard, by_stage)
                case _:
                    assert_never(clause)

    def _definitions_of(
        self,
        stages: Sequence[ast.Stages],
        micros: Sequence[ast.Micros],
        lets: Sequence[ast.Let],
        variables: Mapping[str, ValueName],
        named: dict[str, Meaning],
        outside: NameLayers,
    ) -> None:
        """Checks the lines ``stages`` and ``let`` of a pipe, and adds the names in ``lets`` to ``named``.

        The worker's formula may use names of ``lets``, and these may use the worker. So names without the worker are
        checked first, then the formula of the worker, then the other names.
        """
        inside = outside.new_child({**variables})
        of_name: dict[str, tuple[str, ...]] = {}
        for let in lets:
            used = [name for formula in let.formulas for name in ast.names_in(formula)]
            of_name[let.name.text] = tuple(
                dict.fromkeys(v for name in used for v in ([name] if name in variables else of_name.get(name, ())))
            )
        workers = {line.worker.text for line in stages if line.worker is not None}
        early: list[ast.Let] = []
        late: list[ast.Let] = []
        for let in lets:
            (early if workers.isdisjoint(of_name[let.name.text]) else late).append(let)
        for let in early:
            self._local(let, of_name, named, outside, inside)
        waiting: dict[str, Meaning] = {
            let.name.text: ValueName(None, let.name.span, of_name[let.name.text]) for let in late
        }
        for line in stages:
            words = (line.variable, *(clause.variable for clause in micros))
            scope = outside.new_child(waiting).new_child(
                {word.text: ValueName(Type.INTEGER, word.span) for word in words}
            )
            self._formulas.formula(line.place, Type.INTEGER, "`on`", scope)
            if line.worker is not None:
                self._formulas.sizes[line.worker.text] = size_of(line.place, self._formulas.sizes)
        for let in late:
            self._local(let, of_name, named, outside, inside)

    def _local(
        self,
        let: ast.Let,
        variables: Mapping[str, tuple[str, ...]],
        named: dict[str, Meaning],
        outside: NameLayers,
        inside: NameLayers,
    ) -> None:
        """Checks a line ``let``; a table may use only names from ``outside`` the pipe."""
        name = let.name.text
        if isinstance(let.value, ast.NumberTable):
            named.setdefault(name, self._table(let.value, let.name, outside))
        else:
            kind = self._formulas.type_of(let.value, inside, let.name)
            self._formulas.sizes.setdefault(name, self._formulas.size(let.value))
            named.setdefault(name, ValueName(kind, let.name.span, variables[name]))

    def _table(self, table: ast.NumberTable, name: ast.Word, scope: NameScope) -> TableName:
        for entry in table.entries:
            self._formulas.formula(entry, Type.INTEGER, "a table", scope, name)
        return TableName(name.span)

    def _micros(self, clause: ast.Micros, outside: NameLayers) -> None:
        self._range(clause.range, outside)
        self._number(clause.step, "`by`", outside)
        inside = outside.new_child({clause.variable.text: ValueName(Type.INTEGER, clause.variable.span)})
        self._number(clause.number, "`as`", inside)
        self._number(clause.weight, "`weigh`", inside)

    def _operation(self, operation: ast.Operation, inside: NameScope) -> None:
        for subject in operation.subjects:
            for end in subject.ends:
                self._number(end, "a range" if subject.ends[1:] else "a micro-batch number", inside)
            self._number(subject.stage, "a stage number", inside)
            self._number(subject.slice, "a slice number", inside)
            index = None if subject.pipe is None else subject.pipe.index
            self._number(index, "the index of a pipe", inside)
        self._number(operation.clock, "a clock", inside)
        self._number(operation.preference, "`prefer`", inside)
        self._guard(operation.guard, inside)

    def _number(self, formula: ast.Expression | None, place: str, scope: NameScope) -> None:
        if formula is not None:
            self._formulas.formula(formula, Type.INTEGER, place, scope)

    def _guard(self, guard: ast.Expression | None, scope: NameScope) -> None:
        if guard is not None:
            self._formulas.formula(guard, Type.TRUTH, "`when`", scope)

    def _range(self, range_: ast.Range | ast.Endless, scope: NameScope) -> None:
        for end in range_.ends:
            self._number(end, "a range", scope)
