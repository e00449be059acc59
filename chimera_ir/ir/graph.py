"""Defines the graph of stages: groups with names, the edges between stages, the micro-batches that groups lack."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import networkx

from chimera_ir.diagnostics.catalogue import values as say
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.ir.ops import Micro, Stage
from chimera_ir.source import Span

if TYPE_CHECKING:
    from chimera_ir.ir.levels import Header


class NamedStages(NamedTuple):
    """A group of stages with a name: those from ``start`` to ``stop - 1``, of which each feeds the next one."""

    name: str
    start: Stage
    stop: Stage


class Feed(NamedTuple):
    """An edge of the graph of stages: ``target`` gets the output of ``source``, as the argument ``keyword`` if any."""

    source: Stage
    target: Stage
    keyword: str = ""


class Absence(NamedTuple):
    """The micro-batches that a group of stages does not have: no operation of them is on any of its stages."""

    group: str
    micros: tuple[Micro, ...]


def stages_called(text: str, stages: int, named: Sequence[NamedStages] = ()) -> range:
    """The stages that a user calls ``2``, ``0..2``, ``first``, ``image`` or ``image[1]``, if there are any.

    Examples
    --------
    >>> groups = (NamedStages("image", Stage(0), Stage(2)), NamedStages("text", Stage(2), Stage(5)))
    >>> stages_called("text", 5, groups), stages_called("image[1]", 5, groups), stages_called("3..9", 5, groups)
    (range(2, 5), range(1, 2), range(0, 0))
    """
    group, bracket, place = text.partition("[")
    runs = {name: range(start, stop) for name, start, stop in named}
    if group in runs:
        of_group = runs[group]
        return of_group[int(place[:-1]) :][:1] if bracket else of_group
    start, dots, stop = text.partition("..")
    ends = {"first": 0, "last": stages - 1}
    if not (start in ends or start.isdecimal()):
        return range(0)
    first = ends[start] if start in ends else int(start)
    end = int(stop) if dots else first + 1
    return range(first, end) if first < end <= stages else range(0)


def graph_mistakes(header: "Header", origins: Sequence[Span]) -> Iterator[Diagnostic]:
    """Yields the mistakes in the edges of ``header.feeds``, each of which stands at one of the ``origins``."""
    inside = len(header.graph) - len(header.feeds)
    seen, keywords = {edge[:2] for edge in header.graph[:inside]}, set[tuple[int, str]]()
    for feed, span in zip(header.feeds, origins, strict=True):
        source, target, keyword = feed
        ends = header.stage_name(source), header.stage_name(target)
        if source >= target:
            yield say.FeedsBack(span, *ends)
        elif (source, target) in seen:
            yield say.FedTwice(span, *ends)
        elif keyword and (target, keyword) in keywords:
            yield say.FedByName(span, ends[1], keyword)
        seen.add((source, target))
        keywords.add((target, keyword))
    if header.feeds:
        graph: networkx.Graph[int] = networkx.Graph()
        graph.add_nodes_from(range(header.stages))
        graph.add_edges_from(edge[:2] for edge in header.graph)
        first, *others = networkx.connected_components(graph)
        for part in others:
            yield say.NotConnected(origins[0], header.stage_name(min(part)), header.stage_name(min(first)))
