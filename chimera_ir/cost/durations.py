"""Exact durations of operations: the interface that all levels use, and the costs that a user can set, by kind."""

import re
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from math import lcm
from typing import Protocol

from chimera_ir.cost.number_text import Unit, exact
from chimera_ir.ir.kinds import COSTED, KEPT, KINDS, PAIR
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Operation, Pair

COST_LETTERS = tuple(COSTED)
"""The letters of the kinds of compute operations and of pairs, in the order in which reports name them."""

_REPEATING = {letter for letter, kind in COSTED.items() if any(KEPT in part.reads for part in kind.kinds)}
"""The letters of the kinds whose operations run the forward again on a stage that recomputes."""

_NUMBER = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18}|/[0-9]{1,18})?|\.[0-9]{1,18}", re.ASCII)


class Durations(Protocol):
    """Durations of operations, and the way in which a report shows them."""

    def duration(self, operation: Operation, header: Header) -> Fraction:
        """The duration of an operation."""

    def tick(self, header: Header) -> Fraction:
        """A length of time of which the duration of every operation under the header is a multiple."""

    def recut(self, stages: int, into: int) -> "Durations":
        """The durations of the same model, cut into ``into`` stages instead of ``stages``."""

    def for_baseline(self, splits: bool) -> "Durations":
        """The durations for the baseline of a schedule; ``splits`` says whether the schedule has split backwards."""

    def report_costs(
        self, header: Header, path: Sequence[Operation], kinds: Collection[str]
    ) -> tuple[tuple[str, Fraction], ...]:
        """Each kind with its cost per micro-batch, such that these costs times C_f and C_b are the length of ``path``.

        ``kinds`` are the letters of the kinds that the schedule has.
        """

    def summary(self, header: Header, kinds: Collection[str]) -> str:
        """The costs of some kinds, by their letters, in one line."""

    def remarks(self, schedule: Schedule) -> tuple[str, ...]:
        """Remarks for the user on the durations of a schedule."""

    @property
    def unit(self) -> Unit:
        """The unit of the durations."""


DurationKey = Hashable
"""A key that is equal for operations that take equally long, whatever the costs."""


def duration_key(operation: Operation, header: Header) -> DurationKey:
    """The key of an operation: its kind, number of micro-batches and stage, and whether it recomputes."""
    if isinstance(operation, Pair):
        return duration_key(operation.forward, header), duration_key(operation.backward, header)
    if header.recomputing and header.recomputes(operation.micros[0], operation.stage):
        return operation.kind, len(operation.micros), operation.stage, True
    return operation.kind, len(operation.micros), operation.stage


class CostModel(Protocol):
    """A source of durations: the costs that a user sets, or a profile."""

    def durations(self, header: Header) -> Durations:
        """The durations of a schedule's operations, given its header; a profile that lacks them raises `Unfit`."""


class Costs(Mapping[str, Fraction]):
    """The duration of an operation over one micro-batch, by the letter of its kind, in a unit of the user's choice.

    ``Costs(B=Fraction(5, 2))`` gives the cost of a B; other kinds have the cost of their row (`Kind.cost`), and a pair
    takes as long as its two operations one after the other. Recomputation adds ``again`` to the cost of a B, an I or a
    pair (section 3.4), except for the kinds whose costs the user has set, ``user_set``.

    Raises
    ------
    TypeError
        If there is no such kind.
    """

    def __init__(self, *, again: Fraction = Fraction(1), user_set: tuple[str, ...] = (), **costs: Fraction) -> None:
        if unknown := costs.keys() - COSTED.keys():
            raise TypeError(f"no kind of operation is called {', '.join(sorted(unknown))}")
        self.again, self.user_set, self._given = again, user_set, costs
        rows = {letter: costs.get(letter, Fraction(kind.cost)) for letter, kind in KINDS.items()}
        joint = sum((rows[kind.letter] for kind in PAIR.kinds), Fraction(0))
        self._costs = {**rows, PAIR.letter: joint, **costs}

    def __getitem__(self, kind: str) -> Fraction:
        return self._costs[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._costs)

    def __len__(self) -> int:
        return len(self._costs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Costs) and self._facts == other._facts

    def __hash__(self) -> int:
        return hash(self._facts)

    @property
    def _facts(self) -> tuple[object, ...]:
        return tuple(self._costs.items()), self.again, self.user_set

    def __repr__(self) -> str:
        costs = (f"{kind}={cost!r}" for kind, cost in self._costs.items())
        return f"Costs({', '.join(costs)}, again={self.again!r}, user_set={self.user_set!r})"

    @staticmethod
    def parse(kind: str, text: str) -> Fraction:
        """The exact duration that a user wrote for a kind: ``"0.1"`` is one tenth and ``"1/3"`` one third.

        Raises
        ------
        ValueError
            If there is no such kind, or the text is not a positive integer, decimal or fraction; the message is for the
            user.

        Examples
        --------
        >>> Costs.parse("B", "0.1")
        Fraction(1, 10)
        """
        if kind not in COST_LETTERS:
            *kinds, last = COST_LETTERS
            raise ValueError(f"no kind of operation is called '{kind}': the kinds are {', '.join(kinds)} and {last}")
        if not _NUMBER.fullmatch(text) or re.search(r"/0+$", text):
            raise ValueError(
                f"the cost of {kind} is an integer, a decimal or a fraction (2, 0.5, 1/3), not '{text[:40]}'"
            )
        value = Fraction(text)
        if value == 0:
            raise ValueError(f"the cost of {kind} is greater than 0: an operation that takes no time is no operation")
        return value

    def using(self, kind: str, text: str) -> "Costs":
        """The costs with the cost of one kind replaced by the text that a user wrote; raises errors like `parse`."""
        return self.changed({kind: self.parse(kind, text)}, (*self.user_set, kind))

    def changed(self, costs: Mapping[str, Fraction], user_set: tuple[str, ...] | None = None) -> "Costs":
        """The costs with those of some kinds replaced and, if given, other kinds ``user_set``."""
        chosen = self.user_set if user_set is None else user_set
        return Costs(again=self.again, user_set=chosen, **{**self._given, **costs})

    def durations(self, _: Header) -> "Costs":
        """The costs themselves, whatever the header."""
        return self

    def report_costs(
        self, header: Header, _: Sequence[Operation], kinds: Collection[str]
    ) -> tuple[tuple[str, Fraction], ...]:
        """Each kind with its cost, as a report shows it.

        If all stages recompute, the costs are those of operations that recompute. If only some do, a report has both
        costs of a kind where they differ.
        """
        repeating = {kind: cost for kind, cost in self.recomputing.items() if kind in kinds and cost != self[kind]}
        if all(len(pipe.recompute) == header.stages for pipe in header.pipes):
            return tuple((self._costs | repeating).items())
        further = {f"{kind}_recomputing": cost for kind, cost in repeating.items() if header.recomputing}
        return tuple((self._costs | further).items())

    def summary(self, header: Header, kinds: Collection[str]) -> str:
        """The costs of some kinds in one line; with B, also the cost of a backward that recomputes, and so on."""
        costs = ((kind, cost) for kind, cost in self.report_costs(header, (), kinds) if kind.split("_")[0] in kinds)
        return ", ".join(f"{kind.replace('_', ' ')} = {exact(cost)}" for kind, cost in costs)

    def recut(self, stages: int, into: int) -> "Costs":
        """The costs of ``into`` stages: with half as many stages, each is twice as large."""
        kinds = [kind for kind in self if kind in KINDS or kind in self._given]
        costs = {kind: self[kind] * stages / into for kind in kinds}
        return Costs(again=self.again * stages / into, user_set=self.user_set, **costs)

    def for_baseline(self, splits: bool) -> "Costs":
        """The costs for a baseline whose backwards may be whole where the schedule's are split, or the other way round.

        If the schedule has split backwards (``splits``) and the user has set I or W but not B, B becomes I + W. If the
        schedule has whole backwards and the user has set B alone, each of I and W becomes half of B.
        """
        halves_set = not {"I", "W"}.isdisjoint(self.user_set)
        if splits and halves_set and "B" not in self.user_set:
            user_set = (*self.user_set, "B") if "I" in self.user_set else self.user_set
            return self.changed({"B": self["I"] + self["W"]}, user_set)
        if not splits and not halves_set and "B" in self.user_set:
            return self.changed(dict.fromkeys("IW", self["B"] / 2), (*self.user_set, "I", "W"))
        return self

    def tick(self, header: Header) -> Fraction:
        """The longest time of which the costs of a micro-batch, and of each part of one, are multiples."""
        costs = (*self.values(), self.again)
        return Fraction(1, lcm(*(cost.denominator for cost in costs)) * header.parts)

    def remarks(self, schedule: Schedule) -> tuple[str, ...]:
        """A remark on each cost that the user has set for a kind of operation that the schedule lacks."""
        letters = {operation.kind.letter for lane in schedule.lanes for operation in lane}
        return tuple(
            f"--cost {letter}={exact(cost)} changes nothing: no operation of this schedule is of kind {letter}"
            for letter, cost in ((letter, self[letter]) for letter in self.user_set)
            if letter not in letters
        )

    @property
    def unit(self) -> Unit:
        """The unit of the costs, which is the user's choice."""
        return Unit.COST

    @cached_property
    def recomputing(self) -> dict[str, Fraction]:
        """The cost of each kind on a stage that recomputes; user-set costs stay, that of pairs also if B is set."""
        fixed = {*self.user_set, *([PAIR.letter] if "B" in self.user_set else [])}
        return {kind: cost + (self.again if kind in _REPEATING - fixed else 0) for kind, cost in self.items()}

    def duration(self, operation: Operation, header: Header) -> Fraction:
        """The duration of an operation, in proportion to its number of micro-batches; a half counts as a half.

        An operation that reads the values its forward kept takes longer where it has to run the forward again.
        """
        readers = (part for part in operation.parts if KEPT in part.kind.reads)
        again = any(header.recomputes(part.micros[0], part.stage) for part in readers)
        costs = self.recomputing if again else self._costs
        return costs[operation.kind.letter] * Fraction(operation.size, header.parts)
