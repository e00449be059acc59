"""The split of layers into stages whose slowest stage takes the least time, within the workers' memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

ATTEMPTS = 5_000
"""The most stages that a search for a split that fits tries before it gives up."""


def balanced(
    seconds: Sequence[float],
    workers: Sequence[Sequence[int]],
    needed: Callable[[int, int, int], float] | None = None,
    available: Sequence[float] = (),
    once: Callable[[int, int, int], float] = lambda _stage, _first, _end: 0.0,
    begins: Sequence[tuple[int, int]] = (),
) -> tuple[int, ...] | None:
    """The split whose slowest stage takes the least time, as the first layer of each stage; None if no split fits.

    ``seconds`` has the time of each layer, ``workers`` by stage the workers that hold it, ``available`` the bytes of
    each worker. ``needed(stage, first, end)`` gives the bytes of the layers from first to end (exclusive) on each
    worker that holds them as a stage; more layers never need fewer bytes. Without this function everything fits. Of
    ``once``, further bytes of a stage, a worker needs those of its largest stage. A pair (stage, layer) of ``begins``
    says with which layer that stage has to begin.
    """
    # Binary search for the smallest possible time of the slowest stage for which a split fits.
    search = _SplitSearch(seconds, workers, needed, available, once, begins)
    times = search.durations()
    low, high = 0, len(times) - 1
    best = search.within(times[high])
    while best is not None and low < high:
        middle = (low + high) // 2
        split = search.within(times[middle])
        if split is None:
            low = middle + 1
        else:
            best, high = split, middle
    return best


_Used = tuple[float, float]
"""The bytes of a worker: the sum over its stages, and of what it needs once the most of any stage."""

_Key = tuple[int | tuple[int, _Used], ...]


@dataclass(frozen=True)
class _PartialSplit:
    """A split of the first layers into the first stages.

    Its last stage begins with layer ``first``; ``ends`` yields the layers before which that stage may end. ``used`` has
    the bytes of workers before the last stage. Partial splits with equal ``key`` leave the same possibilities to the
    remaining stages.
    """

    first: int
    used: dict[int, _Used]
    ends: Iterator[int]
    key: _Key


class _SplitSearch:
    """Searches for splits without a stage above a time limit, stage by stage, the likeliest number of layers first."""

    def __init__(
        self,
        seconds: Sequence[float],
        workers: Sequence[Sequence[int]],
        needed: Callable[[int, int, int], float] | None,
        available: Sequence[float],
        once: Callable[[int, int, int], float],
        begins: Sequence[tuple[int, int]],
    ) -> None:
        self._layers = len(seconds)
        self._stages = len(workers)
        self._ends_of_runs = [*begins, (self._stages, self._layers)]
        self._until = [0.0, *accumulate(seconds)]
        self._workers = workers
        self._needed = needed
        self._available = available
        self._once = once
        self._last = {worker: stage for stage, held in enumerate(workers) for worker in held}

    def durations(self) -> list[float]:
        """All times that the slowest stage of a split can have, ascending."""
        layers, most = range(self._layers), self._layers - self._stages + 1
        longest = max(self._time(layer, layer + 1) for layer in layers)
        least = max(longest, self._time(0, self._layers) / self._stages * (1 - 1e-12))
        times = {self._time(i, j) for i in layers for j in range(i + 1, min(i + most, self._layers) + 1)}
        return sorted(time for time in times if time >= least)

    def _time(self, first: int, end: int) -> float:
        return self._until[end] - self._until[first]

    def within(self, limit: float) -> tuple[int, ...] | None:
        """A split that fits and has no stage that takes longer than ``limit``; None if none is found.

        The search is depth first; the key of a partial split that leads nowhere is kept, so that it is tried once.
        """
        self._limit = limit
        attempts, failed = 0, set[_Key]()
        path = [self._begin(0, 0, {})]
        while path:
            # The next end of the last stage; without one, the search goes back to the stage before.
            stage, end = path[-1], next(path[-1].ends, None)
            if end is None:
                failed.add(path.pop().key)
                continue
            # With this end: is there memory for the stage, is the split complete, else try the next stage.
            used = self._with(len(path) - 1, stage.first, end, stage.used)
            if used is None:
                continue
            if len(path) == self._stages:
                return tuple(begun.first for begun in path)
            following = self._begin(len(path), end, used)
            if following.key not in failed and attempts < ATTEMPTS:
                attempts += 1
                path.append(following)
        return None

    def _begin(self, stage: int, first: int, used: dict[int, _Used]) -> "_PartialSplit":
        later = ((worker, size) for worker, size in used.items() if self._last[worker] >= stage)
        return _PartialSplit(first, used, iter(self._ends(stage, first)), (stage, first, *sorted(later)))

    def _ends(self, stage: int, first: int) -> list[int]:
        """The ends (exclusive) to try for a stage from layer ``first`` on, the nearest to an equal share first."""
        # The stage shares the layers up to the next one that begins with a given layer.
        end_of_run, layers = next(end for end in self._ends_of_runs if end[0] > stage)
        left = end_of_run - stage - 1
        latest = layers - left
        if left == 0:
            return [latest] if first < latest and self._time(first, latest) <= self._limit else []
        # An end must leave to the remaining stages no more time than they can have.
        share = self._time(first, layers) / (left + 1)
        ends = []
        for end in range(first + 1, latest + 1):
            if self._time(first, end) > self._limit:
                break
            if self._time(end, layers) <= self._limit * left * (1 + 1e-12):
                ends.append(end)
        return sorted(ends, key=lambda end: (abs(self._time(first, end) - share), end))

    def _with(self, stage: int, first: int, end: int, used: dict[int, _Used]) -> dict[int, _Used] | None:
        """The bytes of each worker after ``stage`` gets the layers ``first`` to ``end``; None if a worker has too few.

        ``used`` has the bytes of each worker before that.
        """
        if self._needed is None:
            return used
        size, once = self._needed(stage, first, end), self._once(stage, first, end)
        before = {worker: used.get(worker, (0.0, 0.0)) for worker in self._workers[stage]}
        together = used | {worker: (sizes + size, max(most, once)) for worker, (sizes, most) in before.items()}
        fits = all(sum(together[worker]) <= self._available[worker] for worker in self._workers[stage])
        return together if fits else None
