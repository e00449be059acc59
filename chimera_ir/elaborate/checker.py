"""Checks a scheme before any number is known: what its lines define, and the formulas in them."""

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from typing import assert_never

from chimera_ir.diagnostics.catalogue import names as say
from chimera_ir.diagnostics.model import Diagnostic, raise_errors
from chimera_ir.elaborate.builtins import BUILTINS, UNITS
from chimera_ir.elaborate.clauses import check_clauses, suggest_workers
from chimera_ir.elaborate.formula_checker import (
    Definition,
    FormulaChecker,
    FunctionName,
    Meaning,
    NameLayers,
    NameScope,
    TableName,
    Type,
    ValueName,
    definitions,
    definitions_among,
    size_of,
)
from chimera_ir.syntax import ast


def check(scheme: ast.Scheme) -> tuple[Diagnostic, ...]:
    """Returns the warnings about a scheme that do not depend on its parameters.

    Afterwards each name means one thing, and each formula has a type and is not too large to evaluate.

    Raises `Rejected` with all errors that do not depend on parameters.
    """
    checker = _Checker(scheme)
    checker.check_scheme()
    return raise_errors((*suggest_workers(scheme, checker.mistakes), *check_clauses(scheme)))


class _Checker:
    """A walk over a scheme from top to bottom that collects names, and mistakes in lines and formulas."""

    def __init__(self, scheme: ast.Scheme) -> None:
        self._scheme = scheme
        self._definitions = list(definitions(scheme))
        self._formulas = FormulaChecker(self._definitions)
        self._defined: dict[str, Meaning] = {}

    @property
    def mistakes(self) -> list[Diagnostic]:
        """All mistakes so far."""
        return self._formulas.mistakes

    def check_scheme(self) -> None:
        """Checks the parameters, declarations and pipes of the scheme; `mistakes` has what is wrong."""
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
                self._formulas.formula(count, Type.INTEGER, "`workers`", self._defined)
                for part in left_out:
                    if isinstance(part, ast.Range):
                        self._range(part, self._defined)
                    else:
                        self._formulas.formula(part, Type.INTEGER, "`except`", self._defined)
            case ast.Require(condition):
                self._formulas.formula(condition, Type.TRUTH, "`require`", self._defined)
            case ast.Update(count):
                self._formulas.formula(count, Type.INTEGER, "`update every`", self._defined)
            case ast.Memory(quantity, worker, limit):
                scope = self._with(self._variables([] if worker is None else [worker]))
                if quantity in (ast.MemoryQuantity.BYTES, ast.MemoryQuantity.HOST_BYTES):
                    units = {
                        name: ValueName(Type.INTEGER, item.span) for name in UNITS if name not in self._formulas.spans
                    }
                    scope = ChainMap(*scope.maps, {**units})
                self._formulas.formula(limit, Type.INTEGER, "`memory`", scope)
            case ast.PipeBlock():
                self._pipe(item)
            case _:
                assert_never(item)

    def _define(self, name: ast.Word, meaning: Meaning) -> None:
        if name.text in BUILTINS:
            self.mistakes.append(say.RedefinesBuiltin(name.span, name.text))
        elif name.text in self._defined:
            self.mistakes.append(say.DefinedTwice(name.span, name.text, self._defined[name.text].span))
        else:
            self._defined[name.text] = meaning

    def _variables(self, words: Iterable[ast.Word]) -> dict[str, ValueName]:
        """Returns the variables ``words`` of a pipe or a function, each by its name, as names for integers.

        Records a mistake for each variable whose name already stands for something else.
        """
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
        """Returns a scope with all names known so far and, over them, ``variables``."""
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
        stages = [clause for clause in pipe.clauses if isinstance(clause, ast.Stages)][:1]
        micros = [clause for clause in pipe.clauses if isinstance(clause, ast.Micros)][:1]
        slices = [clause for clause in pipe.clauses if isinstance(clause, ast.Slices)][:1]
        lets = [clause for clause in pipe.clauses if isinstance(clause, ast.Let)]
        of_stage = [*(line.variable for line in stages), *(line.worker for line in stages if line.worker is not None)]
        of_slice = {clause.variable.text for clause in slices}
        of_micro = [*(clause.variable for clause in micros), *(clause.variable for clause in slices)]
        words = [*index, *of_stage, *of_micro]
        meanings = self._variables([*words, *(let.name for let in lets)])
        variables = {word.text: meanings[word.text] for word in words}
        # Scopes see the names that lines `let` define so far.
        named: dict[str, Meaning] = {}
        outside: NameLayers = ChainMap({word.text: variables[word.text] for word in index}, named, self._defined)
        if pipe.index is not None:
            self._range(pipe.index.range, self._defined)
        inside = outside.new_child({**variables})
        by_stage = outside.new_child({word.text: variables[word.text] for word in of_stage})
        self._formulas.announce(definitions_among(lets))
        self._definitions_of(stages, lets, variables, named, outside)
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
                    without_slice = outside.new_child({v: kind for v, kind in variables.items() if v not in of_slice})
                    self._formulas.formula(version, Type.INTEGER, "`reads version`", without_slice)
                case ast.Recompute(guard):
                    without_slice = outside.new_child({v: kind for v, kind in variables.items() if v not in of_slice})
                    self._guard(guard, without_slice)
                case ast.Sync(guard=guard):
                    self._guard(guard, by_stage)
                case _:
                    assert_never(clause)

    def _definitions_of(
        self,
        stages: Sequence[ast.Stages],
        lets: Sequence[ast.Let],
        variables: Mapping[str, ValueName],
        named: dict[str, Meaning],
        outside: NameLayers,
    ) -> None:
        """Checks what the lines ``stages`` and ``let`` of a pipe define, and adds the names in ``lets`` to ``named``.

        ``variables`` are the variables of the pipe; ``outside`` has the names from outside the pipe. The formula that
        gives the worker of a stage may use names of ``lets``, and a name of ``lets`` may use the worker. So first the
        names that do not use the worker are checked, then the formula of the worker, then the names that use the
        worker.
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
            scope = outside.new_child(waiting).new_child(
                {line.variable.text: ValueName(Type.INTEGER, line.variable.span)}
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
        """Checks a line ``let`` of a pipe, and adds its name to ``named``.

        ``variables`` has for each name of the pipe the variables that it depends on. A formula may use the names known
        ``inside`` the pipe, the entries of a table only those known ``outside``.
        """
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
        if clause.step is not None:
            self._formulas.formula(clause.step, Type.INTEGER, "`by`", outside)
        inside = outside.new_child({clause.variable.text: ValueName(Type.INTEGER, clause.variable.span)})
        for word, formula in (("`as`", clause.number), ("`weigh`", clause.weight)):
            if formula is not None:
                self._formulas.formula(formula, Type.INTEGER, word, inside)

    def _operation(self, operation: ast.Operation, inside: NameScope) -> None:
        for subject in operation.subjects:
            if isinstance(subject.micro, ast.Range):
                self._range(subject.micro, inside)
            else:
                self._formulas.formula(subject.micro, Type.INTEGER, "a micro-batch number", inside)
            self._formulas.formula(subject.stage, Type.INTEGER, "a stage number", inside)
            if subject.slice is not None:
                self._formulas.formula(subject.slice, Type.INTEGER, "a slice number", inside)
            if subject.pipe is not None and subject.pipe.index is not None:
                self._formulas.formula(subject.pipe.index, Type.INTEGER, "the index of a pipe", inside)
        if operation.clock is not None:
            self._formulas.formula(operation.clock, Type.INTEGER, "a clock", inside)
        if operation.preference is not None:
            self._formulas.formula(operation.preference, Type.INTEGER, "`prefer`", inside)
        self._guard(operation.guard, inside)

    def _guard(self, guard: ast.Expression | None, scope: NameScope) -> None:
        if guard is not None:
            self._formulas.formula(guard, Type.TRUTH, "`when`", scope)

    def _range(self, range_: ast.Range | ast.Endless, scope: NameScope) -> None:
        for end in (range_.start, range_.stop) if isinstance(range_, ast.Range) else (range_.start,):
            self._formulas.formula(end, Type.INTEGER, "a range", scope)
