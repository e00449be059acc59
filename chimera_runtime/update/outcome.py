"""What a step tells: the loss of the mini-batch, summed over all ranks while the next step runs."""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from chimera_runtime.errors import PeerLost, RanksDiffer
from chimera_runtime.ranks.agreement import Fact, FactComparison, Facts, Key
from chimera_runtime.ranks.messages import unrecorded
from chimera_runtime.ranks.world import World
from chimera_runtime.values.losses import Tally

_AT_ONCE = 16
"""How many sums may be under way at most, where updates overlap; where they do not, one."""


@dataclass
class Outcome:
    """The outcome of an update, which counts from 0; ``computed_here`` is the part of its losses from this rank."""

    update: int
    computed_here: Tally
    _world: World
    _counted: bool
    _names: Sequence[str]
    _numbers: "array[float]"
    _work: dist.Work | None
    _compare: Callable[[Sequence[float]], None] | None = None

    @property
    def loss(self) -> float:
        """The loss of the mini-batch on the weights that it was computed with: the same number on every rank.

        Where ``loss`` returns sums and counts, it is their quotient, and not a number if the count is 0.
        The sum over ranks is under way since the end of the step; reading it waits for it, and starts nothing.

        Raises
        ------
        PeerLost
            If that takes longer than the time-out, or a rank has ended.
        RanksDiffer
            If ranks differ in something that must be the same on them.
        """
        return self._tally.mean

    @property
    def auxiliary(self) -> dict[str, float]:
        """Each auxiliary loss in the same way, by its name; ``loss`` is without them. Errors as in `loss`."""
        return self._tally.auxiliary_means

    @property
    def weight(self) -> float:
        """What the mini-batch weighs beside others: its count, or 1 if ``loss`` returns means; errors as in `loss`."""
        return self._tally.count if self._counted else 1.0

    @property
    def is_last(self) -> bool:
        """Whether a rank had called `Pipeline.ask_to_stop` by then: the same on every rank. Errors as in `loss`."""
        self.settle()
        return bool(self._numbers[self._losses])

    def settle(self) -> None:
        """Returns when the sum is over; errors as in `loss`."""
        self._world.control_group.check()
        if self._work is not None:
            self._world.control_group.settle(self._work, "for the loss of a step")
            self._work = None
        if self._compare is not None:
            self._compare(self._numbers[self._losses + 1 :])
            self._compare = None

    @property
    def _losses(self) -> int:
        """How many numbers are losses: one that is added up with them follows, and then those of facts."""
        return 2 + len(self._names)

    @property
    def is_there(self) -> bool:
        """Whether the sum is over, so that reading it does not wait."""
        return self._work is None or self._work.is_completed()

    @property
    def _tally(self) -> Tally:
        self.settle()
        return Tally.of(self._numbers[: self._losses], self._names)


class Outcomes:
    """Launches the sums, and holds them until they are over: nobody has to read an outcome.

    ``counted`` says that ``loss`` returns sums and counts; ``names`` are the auxiliary losses of all stages.
    ``asked_to_stop`` is added up with the losses, so that all ranks hear of it after the same update. So are the facts
    that ``facts_of`` returns for an update: a sum is looked at when the next ones are launched, at the same point on
    all ranks, so that all of them raise an error together.
    """

    def __init__(self, world: World, counted: bool, names: Sequence[str] = ()) -> None:
        self._world = world
        self._names = names
        self._counted = counted
        self.asked_to_stop = False
        self.facts_of: Callable[[int], dict[Key, Fact]] = lambda _update: {}
        self.agreement = FactComparison(world.control_group, world.job)
        self._difference: RanksDiffer | None = None
        self._at_once = min(world.job.lag + 1, _AT_ONCE)
        self._under_way: deque[Outcome] = deque()

    def require_agreement(self) -> None:
        """Passes if no sum has shown a difference between ranks."""
        if self._difference is not None:
            raise self._difference

    def explain(self) -> None:
        """After the loss of another rank: raises RanksDiffer if the sums that are over show that it left for that."""
        with suppress(PeerLost):  # one that failed with the loss is over as well
            while self._under_way and self._under_way[0].is_there:
                self._under_way.popleft().settle()

    def settle(self) -> None:
        """Waits for all sums that are under way: who closes a connection before stops those of other ranks."""
        while self._under_way:
            self._under_way.popleft().settle()

    def compare(self, facts: Facts, where: str) -> None:
        """Raises RanksDiffer on all ranks if these facts differ between any; every rank calls it."""
        numbers = array("d", self.agreement.numbers(facts))
        if numbers:
            with self._world.control_group.waiting("to compare replicas"):
                work = unrecorded(
                    dist.all_reduce, _tensor(numbers), group=self._world.control_group.group, async_op=True
                )
            self._world.control_group.settle(work, "to compare replicas")
            self._compare(self.agreement.number(), where, facts, numbers)

    def launch(self, update: int, tally: Tally) -> Outcome:
        """The outcome of an update, of which this rank has computed a part."""
        facts = self.facts_of(update)
        losses = [*tally.numbers(self._names), float(self.asked_to_stop)]
        numbers = array("d", losses + self.agreement.numbers(facts))
        compare = partial(self._compare, self.agreement.number(), f"update {update + 1}", facts)
        with self._world.control_group.waiting("for the loss of a step"):
            work = unrecorded(dist.all_reduce, _tensor(numbers), group=self._world.control_group.group, async_op=True)
        while len(self._under_way) >= self._at_once:
            self._under_way.popleft().settle()
        self._under_way.append(Outcome(update, tally, self._world, self._counted, self._names, numbers, work, compare))
        return self._under_way[-1]

    def _compare(self, number: int, where: str, facts: Facts, sums: Sequence[float]) -> None:
        self.require_agreement()
        if differing := self.agreement.differing(sums):
            self._difference = self.agreement.error(number, where, differing, facts)
            raise self._difference


def _tensor(numbers: "array[float]") -> torch.Tensor:
    """A tensor in the memory of numbers: a sum is read there."""
    return torch.frombuffer(numbers, dtype=torch.float64)
