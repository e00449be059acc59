"""Makes several list schedules, forwards and backwards in time, and keeps the shortest.

They prefer jobs by their ranks, by the longest way to the end, and by a timetable. Then time is reversed: what started
last comes first in a list schedule from the end, and so on as long as the makespan falls (Li and Willis 1992).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from chimera_ir.orders.list_schedule import Jobs, Placed
from chimera_ir.orders.reserve import list_schedule
from chimera_ir.orders.timetable import timetable

_FEW, _MANY = 5_000, 50_000
"""The most jobs for which everything is tried; the most for which the better of two orders is still improved.

More jobs than `_MANY` get the better of the list schedule by ranks and the timetable.
"""

_ROUNDS = 2
"""The most times that an order of few jobs (`_FEW` or less) is run backwards and then forwards."""


def shortest(jobs: Jobs, first: Placed) -> Placed:
    """Returns the shortest of several list schedules of the jobs.

    ``first`` is the one by ranks. It is returned if some of its jobs never start, or if no other one is shorter.
    """
    count = len(jobs.machines)
    if len(first.started) < count:
        return first
    results = [first]
    regular = timetable(jobs)
    if regular is not None:
        results.append(regular)
    if count <= _FEW:
        results.append(list_schedule(_preferring(jobs, _most_urgent_first(jobs))))
        return _first_to_end(chain(results, *(_back_and_forth(jobs, result, _ROUNDS) for result in results)))
    best = _first_to_end(results)
    return _first_to_end([best, *_back_and_forth(jobs, best, 1)]) if count <= _MANY else best


def _first_to_end(results: Iterable[Placed]) -> Placed:
    """The order that ends first, of those in which no job waits for ever; of equal ones the first."""
    return min((result for result in results if not result.waiting), key=lambda result: result.end)


def _back_and_forth(jobs: Jobs, result: Placed, rounds: int) -> Iterator[Placed]:
    """Yields list schedules by turns backwards and forwards in time, as long as they get shorter than ``result``.

    Each prefers the jobs that came last in the one before. There are at most ``rounds`` times two schedules.
    """
    for _ in range(rounds):
        end = result.end
        backwards = list_schedule(_preferring(jobs.backwards, result.started[::-1]))
        if backwards.waiting:
            return
        yield Placed(backwards.started[::-1], backwards.end, ())
        result = list_schedule(_preferring(jobs, backwards.started[::-1]))
        yield result
        if result.waiting or min(result.end, backwards.end) >= end:
            return


def _preferring(jobs: Jobs, order: Iterable[int]) -> Jobs:
    """A copy of the jobs, which prefers them in this order: the rank of each is its place there."""
    ranks = [0] * len(jobs.machines)
    for rank, job in enumerate(order):
        ranks[job] = rank
    return replace(jobs, ranks=ranks)


def _most_urgent_first(jobs: Jobs) -> Sequence[int]:
    """The jobs, the one with the longest way from its end to the end of all first; equal ones by rank."""
    tails, ranks = jobs.tails, jobs.ranks
    return sorted(range(len(tails)), key=lambda job: (-tails[job], ranks[job]))
