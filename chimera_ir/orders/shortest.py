"""Several list schedules, forwards and backwards in time, of which the shortest is kept.

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
"""The most jobs that all rules order; the most of which the better of two orders is run backwards and forwards."""

_ROUNDS = 2
"""The most times that few jobs are run backwards and forwards."""


def shortest(jobs: Jobs, first: Placed) -> Placed:
    """The shortest order that is found; ``first``, the list schedule of the jobs, if none is shorter."""
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
    """The shortest of some orders that have all jobs; the first of equal ones."""
    return min((result for result in results if not result.waiting), key=lambda result: result.end)


def _back_and_forth(jobs: Jobs, result: Placed, rounds: int) -> Iterator[Placed]:
    """Yields list schedules, in each direction of time by turns, as long as they improve."""
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
    """The jobs with the place of each in an order as its rank."""
    ranks = [0] * len(jobs.machines)
    for rank, job in enumerate(order):
        ranks[job] = rank
    return replace(jobs, ranks=ranks)


def _most_urgent_first(jobs: Jobs) -> Sequence[int]:
    """The jobs by the longest way to the end; last those that nothing waits for."""
    tails, ranks = jobs.tails, jobs.ranks
    return sorted(range(len(tails)), key=lambda job: (-tails[job], ranks[job]))
