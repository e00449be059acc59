"""Checks the graph of stages: which stages feed which."""

from collections.abc import Iterator, Sequence

import networkx

from chimera_ir.diagnostics.catalogue import values as say
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.ir.levels import Header
from chimera_ir.source import Span


def graph_mistakes(header: Header, origins: Sequence[Span]) -> Iterator[Diagnostic]:
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
