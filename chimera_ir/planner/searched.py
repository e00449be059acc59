"""Searches for better orders of the first choices of a ranking, and ranks the choices again.

A search counts a choice's measured costs, its messages and the memory of its workers. An order is kept if its bytes fit
and its replay is shorter; a replay also counts that messages share links, and that gradients are summed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import sub

from chimera_ir import library
from chimera_ir.orders.search import Ended, SearchBudget, improvement
from chimera_ir.planner.judge import Judge, Judged
from chimera_ir.planner.listing import percent, scheme_argument
from chimera_ir.planner.rank import Progress, Ranking, by_throughput
from chimera_ir.predict.memory_need import bounded
from chimera_ir.predict.setting import Measured

SEARCHED = 3
"""The most configurations whose orders are searched: the first of each name."""


LEAST_GAIN = 0.005
"""The least share of the time that an order must gain: with less, the scheme's own order stays."""


@dataclass(frozen=True, slots=True)
class _SearchResult:
    judged: Judged
    ended: Ended


def searched(ranking: Ranking, budget: SearchBudget, progress: Progress) -> Ranking:
    """The ranking with better orders for its first choices, where a search with this budget finds them.

    Not searched are schedules without a flush, those that move activations, and single workers.
    """
    results = list(_results(ranking, budget, progress))
    judged_of = {result.judged.choice: result.judged for result in results}
    baseline, _ = library.baseline(1, 1)
    choices = by_throughput((judged_of.get(judged.choice, judged) for judged in ranking.choices), baseline)
    reference = ranking.reference and judged_of.get(ranking.reference.choice, ranking.reference)
    return replace(ranking, choices=tuple(choices), reference=reference, searched=tuple(map(_sentence, results)))


def _results(ranking: Ranking, budget: SearchBudget, progress: Progress) -> Iterator[_SearchResult]:
    judge = ranking.judge
    candidates = (judged for judged in ranking.rows() if _is_searchable(judge, judged))
    for number, judged in zip(range(1, 1 + SEARCHED), candidates, strict=False):

        def tell(words: str, name: str = f"searching {judged.name} ({number} of {SEARCHED})") -> None:
            progress(f"{name}: {words}")

        result = _result(judge, judged, budget, tell)
        yield result
        if result.ended is Ended.INTERRUPTED:
            return


def _is_searchable(judge: Judge, judged: Judged) -> bool:
    if judged.asynchronous or judged.replayed is None or judged.choice.workers == 1:
        return False
    return not judge.variant(judged).header.moves


def _result(judge: Judge, judged: Judged, budget: SearchBudget, tell: Progress) -> _SearchResult:
    """Searches for an order in which a configuration is faster and still fits; keeps the old order if there is none.

    First each worker may fill its free bytes with activations; if the order needs too many bytes nevertheless, each may
    keep only what it keeps in the scheme's order.
    """
    setting, variant = judge.setting(judged.choice), judge.variant(judged)
    measured = Measured.of(setting)
    free = list(map(sub, judge.room(variant.header), judged.memory))
    for room in dict.fromkeys((tuple(free), (0,) * len(free))):
        better = improvement(bounded(variant.schedule, setting, room), measured, {}, {}, budget, tell)
        reordered = judge.in_order(judged, better)
        if reordered is not None or better.result.ended is Ended.INTERRUPTED:
            break
    if reordered is None or reordered.over(judged) < 1 + LEAST_GAIN:
        return _SearchResult(judged, better.result.ended)
    return _SearchResult(reordered, better.result.ended)


def _sentence(result: _SearchResult) -> str:
    judged, order = result.judged, result.judged.order
    name = scheme_argument(judged.choice.source)
    why = {
        Ended.CLOCK: " (the clock ended the search; another one may find another order)",
        Ended.INTERRUPTED: " (the search was interrupted)",
    }.get(result.ended, "")
    if order is None:
        return f"no order was found that makes {name} faster by {percent(LEAST_GAIN)}{why}"
    gain = percent(1 - judged.seconds / order.before)
    return f"the order that was found for {name} takes {gain} less time than its own{why}"
