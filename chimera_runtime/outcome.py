"""What a step tells: the loss of the mini-batch, summed over all ranks while the next step runs."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from chimera_runtime.losses import Tally
from chimera_runtime.messages import unrecorded
from chimera_runtime.world import World

_AT_ONCE = 16
"""How many sums may be under way: a rank that holds no stage waits for nothing else and would run ahead for ever."""


@dataclass
class Outcome:
    """The outcome of an update, which counts from 0; ``computed_here`` is the part of its losses from this rank."""

    update: int
    computed_here: Tally
    _world: World
    _counted: bool
    _names: Sequence[str]
    _numbers: torch.Tensor
    _work: dist.Work | None

    @property
    def loss(self) -> float:
        """The loss of the mini-batch on the weights that it was computed with: the same number on every rank.

        Where ``loss`` returns sums and counts, it is their quotient, and not a number if the count is 0.
        The sum over ranks is under way since the end of the step; reading it waits for it, and starts nothing.

        Raises
        ------
        PeerLost
            If that takes longer than the time-out, or a rank has ended.
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
        return bool(self._numbers[-1])

    def settle(self) -> None:
        """Returns when the sum is over; errors as in `loss`."""
        self._world.check()
        if self._work is not None:
            self._world.settle(self._work, "for the loss of a step")
            self._work = None

    @property
    def is_there(self) -> bool:
        """Whether the sum is over, so that reading it does not wait."""
        return self._work is None or self._work.is_completed()

    @property
    def _tally(self) -> Tally:
        self.settle()
        return Tally.of(self._numbers[:-1].tolist(), self._names)


class Outcomes:
    """Launches the sums, and holds them until they are over: nobody has to read an outcome.

    ``counted`` says that ``loss`` returns sums and counts; ``names`` are the auxiliary losses of all stages.
    ``asked_to_stop`` is added up with the losses, so that all ranks hear of it after the same update.
    """

    def __init__(self, world: World, counted: bool, names: Sequence[str] = ()) -> None:
        self._world = world
        self._names = names
        self._counted = counted
        self.asked_to_stop = False
        self._under_way: deque[Outcome] = deque()

    def settle(self) -> None:
        """Waits for all sums that are under way: who closes a connection before stops those of other ranks."""
        while self._under_way:
            self._under_way.popleft().settle()

    def launch(self, update: int, tally: Tally) -> Outcome:
        """The outcome of an update, of which this rank has computed a part."""
        numbers = self._numbers(tally)
        with self._world.waiting("for the loss of a step"):
            work = unrecorded(dist.all_reduce, numbers, group=self._world.chat, async_op=True)
        while self._under_way and (self._under_way[0].is_there or len(self._under_way) == _AT_ONCE):
            self._under_way.popleft().settle()
        self._under_way.append(Outcome(update, tally, self._world, self._counted, self._names, numbers, work))
        return self._under_way[-1]

    def _numbers(self, tally: Tally) -> torch.Tensor:
        return torch.tensor([*tally.numbers(self._names), float(self.asked_to_stop)], dtype=torch.float64)
