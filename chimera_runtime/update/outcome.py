"""`Outcome` of an update: the loss of its mini-batch, summed over all ranks while the next step runs."""

import json
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from chimera_runtime.errors import PeerLost, RanksDiffer
from chimera_runtime.errors.update import cleared_in_part
from chimera_runtime.program.job import Job
from chimera_runtime.ranks.agreement import Fact, FactComparison, Facts, Key
from chimera_runtime.ranks.control_group import ControlGroup
from chimera_runtime.ranks.device_to_host import Reader
from chimera_runtime.values.losses import Tally, added

_AT_ONCE = 16
"""The largest number of sums of losses under way at once, if updates overlap; with a flush there is one."""


class Clearings(NamedTuple):
    """What a loop did to gradients between two steps: it ``cleared`` some that no optimizer stepped, or ``kept`` some.

    A parameter without a gradient counts as cleared if some were cleared and none was kept. If both happened, it is
    ``unknown`` whether steps before count for a parameter that has got its first gradient now.
    """

    cleared: bool
    kept: bool
    unknown: bool


NOTHING_CLEARED = Clearings(False, False, False)


@dataclass
class Outcome:
    """The outcome of update number ``update``, counted from 0; ``computed_here`` is this rank's part of the losses.

    ``_numbers`` is summed over the ranks: ``[loss, count, auxiliary losses, reports, ranks with new reports, request to
    stop, clearings, facts]``. Reports whose names the ranks do not know of each other yet are in the store, under
    ``_key`` and the number of a rank that has some, from 1; `settle` reads them into ``new_reports``.
    """

    update: int
    computed_here: Tally
    _control_group: ControlGroup
    _counted: bool
    _names: Sequence[str]
    _numbers: "array[float]"
    _work: dist.Work | None
    _compare: Callable[[Sequence[float]], None] | None = None
    _reported: Sequence[str] = ()
    _key: str = ""
    new_reports: Tally = field(default_factory=Tally, init=False)

    @property
    def loss(self) -> float:
        """The loss of the mini-batch on the weights that it was computed with: the same number on every rank.

        Where ``loss`` returns sums and counts, it is their quotient: NaN if the count is 0. The sum over the ranks is
        under way since the end of the step; reading the loss waits for it.

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
        """Each auxiliary loss of the mini-batch, by its name; ``loss`` does not include them. Errors as in `loss`."""
        return self._tally.auxiliary_means

    @property
    def reports(self) -> dict[str, float]:
        """Numbers that stages and loss have reported, averaged over micro-batches and copies; errors as in `loss`."""
        return (self._tally + self.new_reports).report_means

    @property
    def weight(self) -> float:
        """Weight of the mini-batch among others: its count, or 1 if ``loss`` returns means. Errors as in `loss`."""
        return self._tally.count if self._counted else 1.0

    @property
    def is_last(self) -> bool:
        """Whether any rank called `Pipeline.ask_to_stop` before this update's sum; errors as in `loss`."""
        self.settle()
        return bool(self._numbers[self._losses + 1])

    @property
    def clearings(self) -> Clearings:
        """What the loop did to gradients before the update, on any rank; errors as in `loss`."""
        self.settle()
        return Clearings(*map(bool, self._numbers[self._losses + 2 : self._losses + 5]))

    def settle(self) -> None:
        """Waits for the sum, and compares the facts that came with it; errors as in `loss`."""
        self._control_group.check()
        if self._work is not None:
            self._control_group.settle(self._work, "for the loss of a step")
            self._work = None
        if self._compare is not None:
            self._compare(self._numbers[self._losses + 2 :])
            self._compare = None
            ranks, store = range(1, 1 + int(self._numbers[self._losses])), self._control_group.store
            messages = [json.loads(store.get(f"{self._key}/{number}")) for number in ranks]
            self.new_reports = added(Tally(reports={name: (*sums,) for name, sums in new.items()}) for new in messages)

    @property
    def _losses(self) -> int:
        return 2 + len(self._names) + 2 * len(self._reported)

    @property
    def is_there(self) -> bool:
        """Whether the sum has arrived, so that reading it does not wait."""
        return self._work is None or self._work.is_completed()

    @property
    def _tally(self) -> Tally:
        self.settle()
        return Tally.of(self._numbers[: self._losses], self._names, self._reported)


@dataclass(eq=False)
class Outcomes:
    """Launches the sum of the losses of each update over the ranks, and waits for it while later sums are launched.

    Facts and the request to stop are added up together with the losses. All ranks wait for a sum at the same point of
    the program: so all learn of a request to stop after the same update, and raise an error together.

    ``read`` reads numbers from the device of this rank. ``counted`` says that ``loss`` returns sums and counts;
    ``names`` are the auxiliary losses of all stages, ``reported`` the reports that all ranks know of. If
    ``asked_to_stop`` is set, the next sum asks all ranks to stop. ``facts_of`` returns the facts of an update that must
    be equal on all ranks.
    """

    control_group: ControlGroup
    job: Job
    read: Reader
    _: KW_ONLY
    counted: bool
    names: Sequence[str] = ()
    reported: tuple[str, ...] = ()
    asked_to_stop: bool = False
    facts_of: Callable[[int], dict[Key, Fact]] = lambda _update: {}

    def __post_init__(self) -> None:
        self.agreement = FactComparison(self.control_group, self.job)
        self._difference: RanksDiffer | None = None
        self._at_once = min(self.job.lag + 1, _AT_ONCE)
        self._under_way: deque[Outcome] = deque()

    def require_agreement(self) -> None:
        """Raises `RanksDiffer` if a sum has shown that ranks differ."""
        if self._difference is not None:
            raise self._difference

    def explain(self) -> None:
        """Raises RanksDiffer if a sum that has arrived shows that ranks differ: another rank may have ended for it."""
        with suppress(PeerLost):  # a sum that failed with the lost rank counts as arrived
            while self._under_way and self._under_way[0].is_there:
                self._under_way.popleft().settle()

    def settle(self) -> None:
        """Waits for all sums under way. Call it before connections close, as other ranks need them for these sums."""
        while self._under_way:
            self._settle_first()

    def compare(self, facts: Facts, where: str) -> None:
        """Raises RanksDiffer on all ranks if any two have different facts; every rank calls it."""
        numbers = array("d", self.agreement.numbers(facts))
        if numbers:
            self.control_group.reduce(_tensor(numbers), "to compare replicas")
            self._compare(self.agreement.number(), where, facts, numbers)

    def launch(self, update: int, tally: Tally, clearings: Clearings = NOTHING_CLEARED) -> Outcome:
        """Launches the sum of the losses of an update and returns the outcome.

        ``tally`` has this rank's losses; ``clearings`` says what its loop did to gradients before the update.
        """
        facts = self.facts_of(update)
        number = self.agreement.number()
        key, store = f"reports/{number}", self.control_group.store
        new = {name: sums for name, sums in tally.reports.items() if name not in self.reported}
        if new:
            store.set(f"{key}/{store.add(key, 1)}", json.dumps(new))
        losses = [*tally.numbers(self.names, self.reported), float(bool(new)), float(self.asked_to_stop)]
        numbers = array("d", [*losses, *map(float, clearings), *self.agreement.numbers(facts)])
        compare = partial(self._compare_update, number, f"update {update + 1}", facts)
        work, reported = self.control_group.post_reduce(_tensor(numbers), "for the loss of a step"), self.reported
        while len(self._under_way) >= self._at_once:
            self._settle_first()
        whose = self.control_group, self.counted, self.names
        outcome = Outcome(update, tally, *whose, numbers, work, compare, reported, key)
        self._under_way.append(outcome)
        return outcome

    def _settle_first(self) -> None:
        """Waits for the oldest sum. All ranks do so at the same point, and know its reports from then on."""
        first = self._under_way.popleft()
        first.settle()
        self.reported += tuple(sorted(first.new_reports.reports.keys() - {*self.reported}))

    def _compare_update(self, number: int, where: str, facts: Facts, sums: Sequence[float]) -> None:
        self._compare(number, where, facts, sums[len(NOTHING_CLEARED) :])
        if all(sums[: len(NOTHING_CLEARED)]):
            self._difference = cleared_in_part(where)
            raise self._difference

    def _compare(self, number: int, where: str, facts: Facts, sums: Sequence[float]) -> None:
        self.require_agreement()
        if differing := self.agreement.differing(sums):
            self._difference = self.agreement.error(number, where, differing, facts)
            raise self._difference


def _tensor(numbers: "array[float]") -> torch.Tensor:
    """Returns the numbers as a tensor in the same memory: a sum into the tensor is a sum into the numbers."""
    return torch.frombuffer(numbers, dtype=torch.float64)
