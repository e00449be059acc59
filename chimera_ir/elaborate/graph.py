"""Evaluates what a scheme says of stages outside of pipes: which are frozen, and which feed which."""

from collections.abc import Sequence
from itertools import chain

from chimera_ir.diagnostics.catalogue import values as say
from chimera_ir.diagnostics.catalogue.values import Instance
from chimera_ir.diagnostics.model import Rejected
from chimera_ir.elaborate.evaluate import Scope, evaluate
from chimera_ir.elaborate.pipes import range_of
from chimera_ir.elaborate.settings import Globals
from chimera_ir.ir.graph import Feed, NamedStages
from chimera_ir.ir.levels import MAX_STAGES
from chimera_ir.ir.ops import Stage
from chimera_ir.source import Span
from chimera_ir.syntax import ast


def _with_groups(scope: Scope, groups: Sequence[NamedStages]) -> Scope:
    """The scope with the name of each group as a table of the numbers of its stages."""
    return scope.with_names({}, {name: tuple(range(start, stop)) for name, start, stop in groups})


def frozen_stages(values: Globals, groups: Sequence[NamedStages]) -> tuple[Stage, ...]:
    """The frozen stages, ascending; ``groups`` are all stages, whether they have names or not.

    Raises ``Rejected`` at a number that no stage has, and if all stages are frozen.
    """
    if values.frozen is None:
        return ()
    scope, stages = _with_groups(values.scope, groups), groups[-1].stop
    frozen = {*chain.from_iterable(_numbers(part, scope, stages) for part in values.frozen.stages)}
    if len(frozen) == stages:
        raise Rejected([say.AllFrozen(values.frozen.span, stages)])
    return tuple(map(Stage, sorted(frozen)))


def _numbers(part: ast.Expression | ast.Range | ast.Several, scope: Scope, stages: int) -> Sequence[int]:
    match part:
        case ast.Name(text) if text in scope.tables:
            return scope.tables[text]
        case ast.Several():
            return [stage for _, stage in _named(part, scope)]
        case _:
            ends = part.ends if isinstance(part, ast.Range) else (part,)
            start, *more = (evaluate(end, scope, Instance()) for end in ends)
            stop = more[0] if more else start + 1
            if not 0 <= start <= stop <= stages:
                where = part.span, scope.values_in((), *ends), Instance()
                raise Rejected([say.NoSuchFrozenStage(*where, start, stop, stages)])
            return range(start, stop)


def _named(part: ast.Several, scope: Scope) -> list[tuple[int, int]]:
    """The values of the variable of ``part``, each with the number of its stage."""
    table, numbers = part.group.text, range_of(part.index.range, scope, Instance(), MAX_STAGES, "stage")
    entries = scope.tables[table]
    for number in {*numbers[:1], *numbers[-1:]} - {*range(len(entries))}:
        where = part.span, scope.values_in((), *part.index.range.ends), Instance(), ()
        raise Rejected([say.NoSuchEntry(*where, table, number, len(entries))])
    return [(number, entries[number]) for number in numbers]


def feeds(values: Globals, groups: Sequence[NamedStages]) -> tuple[tuple[Feed, ...], tuple[Span, ...]]:
    """The edges of the lines ``feeds``, each with the place of its line; raises ``Rejected`` at no stage."""
    scope, edges = _with_groups(values.scope, groups), list[tuple[Feed, Span]]()
    for line in values.feeds:
        several = next((end for end in (line.source, line.target) if isinstance(end, ast.Several)), None)
        for variable, number in _named(several, scope) if several else [(0, 0)]:
            inside = scope.with_value(several.index.variable.text, variable) if several else scope
            ends = (number if end is several else _stage(end, inside, groups) for end in (line.source, line.target))
            source, target = map(Stage, ends)
            edges.append((Feed(source, target, line.keyword.text if line.keyword else ""), line.span))
    return tuple(edge for edge, _ in edges), tuple(span for _, span in edges)


def _stage(end: ast.Expression | ast.Several, scope: Scope, groups: Sequence[NamedStages]) -> int:
    assert not isinstance(end, ast.Several), "one side alone has several stages, see `checker`"
    stage, last = evaluate(end, scope, Instance()), groups[-1].stop - 1
    if not 0 <= stage <= last:
        raise Rejected([say.NoSuchFeed(end.span, scope.values_in((), end), Instance(), stage, last)])
    return stage
