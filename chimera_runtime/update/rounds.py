"""Rounds: the runs of programs of which an update consists, if a directory has programs for several numbers N.

Before an update the ranks agree on how many micro-batches each copy has. A number without a program is made of several
rounds, one after the other; gradients are summed over the ranks after the last one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from chimera_runtime.data.feed import UNKNOWN
from chimera_runtime.errors import Misuse
from chimera_runtime.errors import data as mistakes
from chimera_runtime.program.job import Place
from chimera_runtime.program.numbering import Round
from chimera_runtime.ranks.agreement import ControlGroup


def agree_on_numbers(control: ControlGroup, number: int) -> tuple[int, ...]:
    """Returns the number of micro-batches of each copy in an update; every rank calls it with that of its own copy, or
    `UNKNOWN`.

    Raises `RanksDiffer`, on all ranks, if ranks of a copy have different numbers, and `Misuse` if no rank of a copy
    knows one, or no copy has any micro-batch.
    """
    place = control.place
    told = torch.zeros(len(place.ranks), dtype=torch.int64)
    told[place.rank] = number - UNKNOWN
    control.reduce(told, "for the number of micro-batches of an update")
    numbers = [_of_copy(copy, dict(zip(ranks, told[ranks].tolist(), strict=True))) for copy, ranks in _copies(place)]
    if not any(numbers):
        raise Misuse(mistakes.NO_MICRO_BATCHES)
    return (*numbers,)


def _copies(place: Place) -> Iterator[tuple[int, list[int]]]:
    workers = range(place.workers)
    return ((copy, [place.rank_of(copy, worker) for worker in workers]) for copy in range(place.copies))


def _of_copy(copy: int, told: Mapping[int, int]) -> int:
    """The number of a copy, from what each rank has ``told``: 0 if that is unknown, else one more."""
    known = {rank: number + UNKNOWN for rank, number in told.items() if number}
    if not known:
        raise mistakes.number_is_unknown(copy=copy)
    (first, number), *others = known.items()
    if other := next(((rank, n) for rank, n in others if n != number), None):
        raise mistakes.numbers_differ(copy=copy, ranks=(first, other[0]), numbers=(number, other[1]))
    return number


class SumsAlone:
    """A lane, or a part of it, of which all calls but those of sums of gradients and steps do nothing.

    A script that is called with it is a round without micro-batches: it launches the sums in the order that the ranks
    of other copies have.
    """

    def __init__(self, part: Any) -> None:
        self._part = part

    def stage(self, number: int) -> "SumsAlone":
        """Returns a stage, as `Lane.stage`."""
        return SumsAlone(self._part.stage(number))

    def tie(self, *stages: int) -> "SumsAlone":
        """Returns a weight group, as `Lane.tie`."""
        return SumsAlone(self._part.tie(*stages))

    def __iter__(self) -> Iterator[Any]:
        """Yields none of the values that a call would return: scripts of graphs put those of several together."""
        return iter(())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        is_made = name in ("all_reduce", "wait_all_reduce", "step")
        return getattr(self._part, name) if is_made else self._nothing

    def _nothing(self, *_arguments: Any, **_named: Any) -> "SumsAlone":
        return self


def remarks_on(rounds_of_copies: Iterable[Sequence[Round]]) -> list[str]:
    """A remark on the first number of micro-batches of a copy that no program has, so that it is made of several."""
    several = ([each.number for each in rounds] for rounds in rounds_of_copies if len(rounds) > 1)
    return [mistakes.number_has_no_program(numbers=numbers, total=sum(numbers)) for numbers in several][:1]
