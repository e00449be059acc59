"""Evaluates what a scheme defines outside of pipes: parameters as the user sets them, lets, functions, bounds.

It also checks the requirements.
"""

from collections import ChainMap
from collections.abc import Mapping
from functools import reduce
from itertools import islice
from operator import or_
from typing import NamedTuple, assert_never

from chimera_ir.diagnostics.catalogue import values as say
from chimera_ir.diagnostics.catalogue.values import Instance
from chimera_ir.diagnostics.model import Diagnostic, Rejected, closest
from chimera_ir.elaborate.evaluate import LIMIT, UNITS, CompiledFunction, Scope, compiled, evaluate, rejecting
from chimera_ir.errors import ParameterError
from chimera_ir.ir.levels import MAX_WORKERS, Bound
from chimera_ir.source import Span
from chimera_ir.syntax import ast

_NAMED = 8
"""The most parameters that are named when a requirement fails."""


class Globals(NamedTuple):
    """The values of the lines outside of pipes.

    ``left_out`` has the workers that the text leaves out, each with the place that says so. ``limits`` are the lines
    with memory bounds. ``per_update`` is the number of micro-batches of an update, None with a flush. ``frozen`` is the
    line that lists the frozen stages, None without one, ``feeds`` are the lines with edges of the graph of stages.
    """

    scope: Scope
    parameters: tuple[tuple[str, int], ...]
    workers: int | None
    workers_span: Span
    left_out: Mapping[int, Span]
    limits: tuple[ast.Memory, ...]
    per_update: int | None
    frozen: ast.Frozen | None
    feeds: tuple[ast.Feeds, ...]

    def bounds(self, workers: int) -> tuple[Bound, ...]:
        """The memory bounds of each of ``workers`` workers; raises ``Rejected`` if a formula has no value for one."""
        return tuple(Bound(line.quantity, self._limits(line, workers), line.span) for line in self.limits)

    def _limits(self, line: ast.Memory, workers: int) -> tuple[int, ...]:
        if line.worker is None:
            return (evaluate(line.limit, self.scope, Instance()),) * workers
        formula = compiled(line.limit, self.scope.with_variables(line.worker.text))
        with rejecting(Instance()):
            return tuple(formula((worker,)) for worker in range(workers))


def parameter_names(scheme: ast.Scheme) -> tuple[str, ...]:
    """The names of the parameters, in the order of the header."""
    return tuple(parameter.name.text for parameter in scheme.parameters)


def require_settable(scheme: ast.Scheme, settings: Mapping[str, int]) -> None:
    """Raises `ParameterError` for the first setting that names no parameter of the scheme, or is beyond 64 bits."""
    names = parameter_names(scheme)
    for name, value in settings.items():
        if name not in names:
            has = f"its parameters are {', '.join(names)}" if names else "it has none"
            near = closest(name, names)
            advice = f" (did you mean {near}?); {has}" if near else f"; {has}{_meaning(scheme, names)}"
            raise ParameterError(f"the scheme has no parameter {name}{advice}")
        if abs(value) > LIMIT:
            raise ParameterError(f"the value of {name} is beyond 2**63 - 1 in size")


def _meaning(scheme: ast.Scheme, names: tuple[str, ...]) -> str:
    """Which parameter is the number of workers, in words; empty if none is."""
    counts = (item.count for item in scheme.items if isinstance(item, ast.Workers))
    name = next((count.text for count in counts if isinstance(count, ast.Name) and count.text in names), "")
    return f"; {name} is the number of workers" if name else ""


def evaluate_globals(scheme: ast.Scheme, settings: Mapping[str, int]) -> Globals:
    """The values of all lines outside of the pipes; raises `Rejected` with all requirements that fail."""
    made = _GlobalsEvaluator(scheme, settings)
    parameters = tuple(made.values.items())
    for item in scheme.items:
        made.read(item)
    if made.failed:
        raise Rejected(made.failed)
    workers = made.workers, made.workers_span, made.left_out
    return Globals(
        made.scope, parameters, *workers, tuple(made.limits), made.per_update, made.frozen, tuple(made.feeds)
    )


class _GlobalsEvaluator:
    """Evaluates the lines from top to bottom; ``scope`` refers to ``values``, ``tables`` and ``functions``, which grow.

    Units are in it, too: the checker allows them only in bounds in bytes.
    """

    def __init__(self, scheme: ast.Scheme, settings: Mapping[str, int]) -> None:
        self.values: dict[str, int] = {}
        self.functions: dict[str, CompiledFunction] = {}
        self.tables: dict[str, tuple[int, ...]] = {}
        self.scope = Scope(ChainMap(self.values, UNITS), self.functions, {}, tables=self.tables)
        self.workers: int | None = None
        self.workers_span = scheme.name.span
        self.left_out: dict[int, Span] = {}
        self.limits: list[ast.Memory] = []
        self.per_update: int | None = None
        self.frozen: ast.Frozen | None = None
        self.feeds: list[ast.Feeds] = []
        self.failed: list[Diagnostic] = []
        # The parameters that each value depends on, as a set of bits: one for each parameter.
        self._bits = {name: 1 << number for number, name in enumerate(parameter_names(scheme))}
        self._parameters_of = {**self._bits}
        for parameter in scheme.parameters:
            name = parameter.name.text
            self.values[name] = settings[name] if name in settings else self._value(parameter.default)

    def read(self, item: ast.Item) -> None:
        match item:
            case ast.Let(name, value):
                if isinstance(value, ast.NumberTable):
                    self.tables[name.text] = tuple(map(self._value, value.entries))
                else:
                    self.values[name.text] = self._value(value)
                self._parameters_of[name.text] = reduce(or_, map(self._depends, item.formulas))
            case ast.Function(name, parameters, body):
                inner = self.scope.with_variables(*(word.text for word in parameters))
                self.functions[name.text] = CompiledFunction(item, compiled(body, inner))
            case ast.Require():
                self._require(item)
            case ast.Workers(count, left_out):
                self.workers, self.workers_span = self._value(count), count.span
                where = count.span, self.scope.values_in((), count), Instance()
                if self.workers < 1:
                    self.failed.append(say.NoWorkers(*where, self.workers))
                elif self.workers > MAX_WORKERS:
                    self.failed.append(say.TooMany(*where, "worker", self.workers, MAX_WORKERS))
                else:
                    self._leave_out(left_out, self.workers)
            case ast.Frozen():
                self.frozen = item
            case ast.Feeds():
                self.feeds.append(item)
            case ast.Memory(_, worker, limit):
                if worker is None:  # without a value it fails here, with the lines around it
                    self._value(limit)
                self.limits.append(item)
            case ast.Update(count):
                self.per_update = self._value(count)
                if self.per_update < 1:
                    values = self.scope.values_in((), count)
                    self.failed.append(say.BadUpdate(count.span, values, Instance(), self.per_update))
            case ast.PipeBlock():
                return
            case _:
                assert_never(item)

    def _leave_out(self, parts: tuple[ast.Expression | ast.Range, ...], workers: int) -> None:
        """Records the workers that the text leaves out; a mistake at numbers beyond ``workers``.

        Ranges may overlap: a worker costs work once, not once for each range.
        """
        present = bytearray(b"\1") * workers
        for part in parts:
            ends = part.ends if isinstance(part, ast.Range) else (part,)
            start, *more = map(self._value, ends)
            stop = more[0] if more else start + 1
            if not 0 <= start <= stop <= workers:
                values = self.scope.values_in((), *ends)
                self.failed.append(say.NoSuchWorker(part.span, values, Instance(), start, stop, workers))
                return
            while (worker := present.find(1, start, stop)) >= 0:
                present[worker] = 0
                self.left_out[worker] = part.span

    def _require(self, item: ast.Require) -> None:
        if not self._value(item.condition):
            values, bits = self.scope.values_in((), item.condition), self._depends(item.condition)
            parameters = tuple(islice((name for name, bit in self._bits.items() if bit & bits), _NAMED))
            message = say.RequirementFails if parameters else say.NeverMet
            self.failed.append(message(item.condition.span, item.message, values, parameters))

    def _depends(self, expression: ast.Expression) -> int:
        """The parameters that an expression depends on, also through names, as a set of bits."""
        return reduce(or_, (self._parameters_of.get(name, 0) for name in ast.names_in(expression)), 0)

    def _value(self, expression: ast.Expression) -> int:
        """The value of an expression; without one, raises the mistakes found so far, else the reason."""
        try:
            return evaluate(expression, self.scope, Instance())
        except Rejected as rejected:
            raise Rejected(self.failed or rejected.diagnostics) from None
