"""Finds the schedule that a report compares with: the library's baseline, or the text that the request names.

It is compiled for the same number of workers and of micro-batches.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import chain, permutations
from typing import TYPE_CHECKING

from chimera_ir import library
from chimera_ir.diagnostics.model import Rejected, titles
from chimera_ir.errors import AboveMaxOperations, Incomparable, ParameterError, TextError, TooLarge
from chimera_ir.ir.levels import Header, Plan, Schedule
from chimera_ir.ir.ops import Compute, Pair, Planned, Unclocked
from chimera_ir.plural import counted
from chimera_ir.request import Request
from chimera_ir.source import Source

if TYPE_CHECKING:
    from chimera_ir.syntax.ast import Scheme


def workers_with_stages(header: Header) -> int:
    """The number of workers that hold a stage."""
    return sum(map(bool, header.stages_of))


def opposing(request: Request, like: Header) -> Request:
    """The request for what the report compares with, on as many workers with stages and micro-batches as ``like`` has.

    Raises `AboveMaxOperations` if the library's baseline would have more operations than ``request`` allows,
    `Incomparable` if no parameters of the text to compare with give it this size, and `TextError` for its mistakes.
    """
    limit, special = request.max_operations, like if like.weights or like.frozen or like.shares else None
    if not request.opposes:
        workers, micros = _sizes(like)
        if (operations := 2 * workers * micros) > limit:
            raise AboveMaxOperations(f"the baseline of the report, {_size(like)},", operations, limit)
        source, settings = library.baseline(workers, micros)
        return Request(source, settings, max_operations=limit, like=special)
    against, costs = request.against, request.costs.on_stages(like).of_model_in(like.stages)
    if against is None:
        return replace(request, search=None, limits=(), forecast=None, require_fit=False, like=special, keep=())
    fitted = _fitting(against, like, limit) if against.is_scheme else {}
    return Request(against, fitted, costs, limit, communicators=request.communicators, like=special)


def weighed(header: Header, like: Header | None) -> Header:
    """The header with the mean weights that micro-batches have in ``like``, so that both compare fairly.

    Unchanged if it has its own, or ``like`` is None, has none, or has another number of micro-batches per update.
    """
    if like is None:
        return header
    count, parts = like.whole_micro_batches, like.parts
    if header.weights or not like.weights or header.whole_micro_batches != count:
        return header
    totals = [Fraction(0)] * count
    for micro, weight in enumerate(like.weights):
        totals[micro // parts % count] += weight
    means = [total / (parts * like.updates) for total in totals]
    return replace(header, weights=tuple(means[m // header.parts % count] for m in range(header.micro_batches)))


def frozen_as(header: Header, like: Header | None) -> Header:
    """The header with the frozen stages of ``like``.

    Unchanged if it has frozen stages of its own, another number of stages, or no flush.
    """
    if like is None or not like.frozen or header.frozen or header.stages != like.stages or header.asynchronous:
        return header
    return replace(header, frozen=like.frozen).recomputing_for_backwards()


def of_frozen(plan: Plan) -> Plan:
    """The plan without the operations that its frozen stages lack; a backward of one becomes its input gradient.

    Raises `Incomparable` if a pair loses its backward.
    """
    header, kept = plan.header, list[Planned | Unclocked]()
    for planned in plan.operations:
        operation = planned.operation
        parts = [part for part in map(partial(_of_frozen, header), operation.parts) if part]
        if not isinstance(operation, Pair):
            kept += [planned._replace(operation=part) for part in parts]
        elif [part.kind for part in parts] == [part.kind for part in operation.parts]:
            kept.append(planned)
        else:
            lost = f"the frozen stage {operation.backward.stage} has no `{operation.backward.kind}`"
            raise Incomparable("against", f" {header.scheme}: it has pairs, and {lost}")
    return Plan(header, tuple(kept))


def _of_frozen(header: Header, operation: Compute) -> Compute | None:
    """The operation as its stage has it, a backward of a frozen stage as its input gradient; None if it has none."""
    kinds = header.kinds_of[operation.stage]
    if any(kind.letter == operation.kind.letter for kind in kinds):
        return operation
    alone = next((kind for kind in kinds if kind.reads == operation.kind.reads), None)
    return None if alone is None else replace(operation, kind=alone)


def _fitting(against: Source, like: Header, max_operations: int) -> Mapping[str, int]:
    from chimera_ir.elaborate.checker import check
    from chimera_ir.syntax.parser import parse

    try:
        scheme = parse(against)
        check(scheme)
    except Rejected as rejected:
        raise TextError([(against, rejected.diagnostics)]) from None
    settings = fitting(scheme, like, max_operations)
    if isinstance(settings, Rejected):
        raise Incomparable(
            "against", f" {against.name}: it does not compile {_size(like)}: {titles(settings.diagnostics)}"
        )
    if settings is None:
        raise Incomparable(
            "against", f" {against.name}: with no values of its parameters is it a schedule {_size(like)}"
        )
    return settings


def fitting(
    scheme: "Scheme", like: Header, max_operations: int, fixed: Mapping[str, int] | None = None
) -> Mapping[str, int] | Rejected | None:
    """Finds settings with which ``scheme`` has as many workers with stages, and as many micro-batches, as ``like``.

    The result has the ``fixed`` settings, and sets at most two more parameters to a wanted size, as few as possible.
    Parameters that both schemes have keep their value in ``like``, if that is possible. If no settings fit, the result
    is the first rejection of the scheme at one of the tried sizes, or None if it was never rejected.

    Examples
    --------
    >>> from chimera_ir.ir.ops import Worker
    >>> from chimera_ir.ir.levels import Pipe
    >>> from chimera_ir.source import Source
    >>> from chimera_ir.syntax.parser import parse
    >>> text = "scheme a(P = 2, M = 1) workers P pipe p { stages s in 0..P on s  micros m in 0..M  F(m, s) @ m + s }"
    >>> workers = tuple(map(Worker, range(4)))
    >>> fitting(parse(Source("", text)), Header("other", (), 4, 4, 6, (Pipe("p", workers, ()),)), 1000)
    {'P': 4, 'M': 6}
    """
    from chimera_ir.elaborate.elaborate import outline, parameter_names

    refused = None
    unchanged = fixed or {}
    for chosen in _candidates([name for name in parameter_names(scheme) if name not in unchanged], like):
        settings = {**unchanged, **chosen}
        try:
            header = outline(scheme, settings, max_operations).header
        except Rejected as rejected:
            refused = refused or rejected
            continue
        except ParameterError:
            continue
        if _sizes(header) == _sizes(like):
            return settings
    return refused


def same_placement(request: Request, schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Yields name and schedule of each library scheme that has the same pipes on the same workers as ``schedule``."""
    from chimera_ir.elaborate.elaborate import outline
    from chimera_ir.lower.lower import order
    from chimera_ir.syntax.parser import parse

    header = schedule.header
    for name in library.names():
        scheme = request.change.of(parse(library.source(name)))
        settings = fitting(scheme, header, request.max_operations)
        if settings is None or isinstance(settings, Rejected):
            continue
        outlined = outline(scheme, settings, request.max_operations)
        placements = [
            (of.graph, [(pipe.workers, pipe.micros, pipe.recompute, pipe.recomputed) for pipe in of.pipes])
            for of in (outlined.header, header)
        ]
        if placements[0] != placements[1]:
            continue
        plan = outlined.level() if outlined.header.parts == header.parts else None
        if isinstance(plan, Plan) and plan.is_clocked:
            if header.frozen:
                with suppress(Incomparable):  # for a pair without its backward, the plan stays as it is
                    plan = of_frozen(replace(plan, header=frozen_as(plan.header, header)))
            yield name, order(plan)


def _candidates(names: Sequence[str], like: Header) -> Iterator[Mapping[str, int]]:
    """Settings of ``names`` to try for the size of ``like``: of no parameter, then of one, then of two, to its numbers.

    Each is tried first with the values of other parameters in ``like``, if it has such.
    """
    sizes = _sizes(like)
    shared = {name: value for name, value in like.parameters if name in names}
    both = (dict(zip(pair, sizes, strict=True)) for pair in permutations(names, 2))
    alone = ({name: size} for size in sizes for name in names)
    for settings in chain([{}], alone, both):
        yield from ({**shared, **settings}, settings) if shared else (settings,)


def require_same_size(header: Header, like: Header, name: str) -> None:
    """Raises `Incomparable` if the text ``name`` has another size than ``like``."""
    if _sizes(header) != _sizes(like):
        raise Incomparable("against", f" {name}: it is a schedule {_size(header)}, and the one at hand {_size(like)}")


@contextmanager
def refusing(name: str, like: Header) -> Iterator[None]:
    """Context that turns a `TooLarge` into an `Incomparable`: text ``name`` is too large at the size of ``like``."""
    try:
        yield
    except TooLarge as error:
        excess = error.excess if isinstance(error, AboveMaxOperations) else str(error)
        raise Incomparable("against", f" {name}: it does not compile {_size(like)}: {excess}") from None


def _sizes(header: Header) -> tuple[int, int]:
    return workers_with_stages(header), header.whole_micro_batches


def _size(header: Header) -> str:
    workers, micros = _sizes(header)
    return f"on {counted(workers, 'worker')} with {counted(micros, 'micro-batch')}"
