"""Exact durations of operations: the interface that all levels use, and the costs that a user can set, by kind."""

import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor, lcm
from types import MappingProxyType
from typing import Protocol, TypeVar, assert_never

from chimera_ir.errors import WrongOption
from chimera_ir.ir.kinds import COSTED, KEPT, KINDS, PAIR, RECOMPUTATION
from chimera_ir.ir.levels import Header, Schedule, weighed
from chimera_ir.ir.ops import Operation, Pair, Stage
from chimera_ir.plural import counted, listed

# Exact numbers and times as text for people.

_Content = TypeVar("_Content")

_TIMES = ((1, "s"), (1000, "ms"), (1_000_000, "us"))
"""The number of each unit in a second, the largest unit first."""


def decimal(value: Fraction) -> str:
    """A number for people: an integer in full, otherwise six significant digits.

    Examples
    --------
    >>> decimal(Fraction(33)), decimal(Fraction(1, 8)), decimal(Fraction(100, 3))
    ('33', '0.125', '33.3333')
    """
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"


def exact(value: Fraction) -> str:
    """A number as a user would write it: a decimal if six digits show it exactly, else a fraction.

    Examples
    --------
    >>> exact(Fraction(1, 8)), exact(Fraction(5, 3))
    ('0.125', '5/3')
    """
    return decimal(value) if Fraction(decimal(value)) == value else str(value)


def seconds(value: float) -> str:
    """A time in seconds as text, with four digits and a fitting unit.

    Examples
    --------
    >>> seconds(1.9618), seconds(0.0004344), seconds(0.0)
    ('1.962 s', '434.4 us', '0')
    """
    factor, unit = time_unit(value)
    return f"{value * factor:.4g} {unit}" if value else "0"


def rounded(content: _Content) -> _Content:
    """Rounds all floats in the content of a JSON file to twelve digits; further ones are rounding errors of sums.

    Examples
    --------
    >>> rounded({"T": 1.3970000000000011, "counts": [1, 0.1 + 0.2]})
    {'T': 1.397, 'counts': [1, 0.3]}
    """
    match content:
        case float():
            return float(f"{content:.12g}")  # type: ignore[return-value]
        case dict():
            return {name: rounded(value) for name, value in content.items()}  # type: ignore[return-value]
        case list():
            return [rounded(value) for value in content]  # type: ignore[return-value]
        case _:
            return content


def number(value: Fraction) -> int | float:
    """A number of a JSON file: an integer where it is integral, else a float."""
    return value.numerator if value.denominator == 1 else float(value)


def time_unit(value: float) -> tuple[int, str]:
    """The largest unit not longer than ``value`` seconds, else microseconds: how many make a second, and its name."""
    return next((unit for unit in _TIMES if value * unit[0] >= 1), _TIMES[-1])


class Unit(Enum):
    """The unit of times: the unit of the costs, which is the user's choice, or seconds."""

    COST = None
    SECOND = "s"

    def show(self, time: Fraction) -> str:
        """A time in this unit as text."""
        match self:
            case Unit.COST:
                return decimal(time)
            case Unit.SECOND:
                return seconds(float(time))
            case _:
                assert_never(self)

    def show_range(self, times: Collection[Fraction]) -> str:
        """The smallest and the largest of some times as text; one text if both are equal."""
        least, most = self.show(min(times)), self.show(max(times))
        return least if least == most else f"{least} to {most}"

    def axis(self, span: Fraction) -> tuple[int, str]:
        """The unit of a picture's time axis for times up to ``span``: how many make one of this unit, and its name."""
        match self:
            case Unit.COST:
                return 1, ""
            case Unit.SECOND:
                return time_unit(float(span))
            case _:
                assert_never(self)


def percent(ratio: Fraction) -> str:
    """A share as a percentage with one decimal."""
    return f"{float(100 * ratio):.1f}%"


# A model cut into another number of stages: the parts of the old stages of which each new one consists.

StagePart = tuple[Stage, Fraction]
"""A stage of the old cut, and the share of it that is in a stage of the new cut."""


@lru_cache(maxsize=2**8)
def stage_shares(stages: int, into: int) -> tuple[tuple[StagePart, ...], ...]:
    """Cuts a model of ``stages`` stages into ``into`` new stages of equal size; returns the parts of each new stage.

    Examples
    --------
    >>> stage_shares(2, 4)[3], stage_shares(4, 2)[0]
    (((1, Fraction(1, 2)),), ((0, Fraction(1, 1)), (1, Fraction(1, 1))))
    """
    size = Fraction(stages, into)
    return tuple(
        tuple(
            (Stage(stage), min((number + 1) * size, Fraction(stage) + 1) - max(number * size, Fraction(stage)))
            for stage in range(floor(number * size), ceil((number + 1) * size))
        )
        for number in range(into)
    )


COST_LETTERS = tuple(COSTED)
"""The letters of the kinds of compute operations and of pairs, in the order in which reports name them."""

SINGLE_LETTERS = tuple(KINDS)
"""The letters of all kinds but pairs, whose two operations may be on two stages."""

_PARTS = tuple(part.letter for part in PAIR.kinds)

IN_FULL = 8
"""The most stages whose costs a line names one by one."""

_NUMBER = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18}|/[0-9]{1,18})?|\.[0-9]{1,18}", re.ASCII)


def positive(name: str, text: str, reason: str) -> Fraction:
    """The exact number that a user wrote; raises `ValueError`, in words for the user, if it is no positive number.

    The words call the number ``name``, and give the ``reason`` why it is not 0.
    """
    if not _NUMBER.fullmatch(text) or re.search(r"/0+$", text):
        raise ValueError(f"{name} is an integer, a decimal or a fraction (2, 0.5, 1/3), not '{text[:40]}'")
    value = Fraction(text)
    if value == 0:
        raise ValueError(f"{name} is greater than 0: {reason}")
    return value


class Durations(Protocol):
    """Durations of operations, and the way in which a report shows them."""

    def duration(self, operation: Operation, header: Header) -> Fraction:
        """The duration of an operation."""

    def tick(self, header: Header) -> Fraction:
        """A length of time of which the duration of every operation under the header is a multiple."""

    def recut(self, stages: int, into: int) -> "Durations":
        """The durations of operations if the same model is cut into ``into`` stages instead of ``stages``."""

    def for_baseline(self, splits: bool) -> "Durations":
        """Returns the durations for the baseline of a schedule that has split backwards (``splits``) or whole ones."""

    def report_costs(self, header: Header, path: Sequence[Operation]) -> tuple[tuple[str, Fraction], ...]:
        """Kinds with their costs per micro-batch; where operations cost unequally, their mean on ``path``."""

    def summary(self, header: Header, kinds: Collection[str]) -> str:
        """One line of text with the cost of each of ``kinds``, which are letters."""

    def remarks(self, schedule: Schedule) -> tuple[str, ...]:
        """Remarks for the user on the durations of a schedule."""

    @property
    def unit(self) -> Unit:
        """The unit of the durations."""


def mean_costs(
    durations: Durations, header: Header, path: Sequence[Operation], kinds: Iterable[str]
) -> dict[str, Fraction]:
    """The mean cost per micro-batch (of weight 1) of the operations of each of ``kinds`` that ``path`` has.

    The sum of these means, each times the kind's number of micro-batches on ``path``, is the length of its operations.
    """
    means = {}
    for kind in kinds:
        if operations := [operation for operation in path if operation.kind.letter == kind]:
            total = sum((durations.duration(operation, header) for operation in operations), Fraction(0))
            means[kind] = total * header.parts / sum(map(header.weight, operations))
    return means


DurationKey = Hashable
"""A key that is equal for operations that take equally long, whatever the costs."""


def duration_key(operation: Operation, header: Header) -> DurationKey:
    """The key of an operation: its kind, its stage, its slice, and the number and weight of its micro-batches."""
    if isinstance(operation, Pair):
        return duration_key(operation.forward, header), duration_key(operation.backward, header)
    key = operation.kind.letter, len(operation.micros), operation.stage, operation.micros[0] % header.slices
    return (*key, header.weight(operation)) if header.weights else key


def of_stages(values: Sequence[Fraction]) -> str:
    """The numbers of all stages as text: ``[4, 4, 5]``, or ``4 to 5`` if there are many."""
    many = len(values) > IN_FULL
    return f"{exact(min(values))} to {exact(max(values))}" if many else f"[{', '.join(map(exact, values))}]"


def weighing(header: Header) -> str:
    """Returns the words behind a list of costs that say how much micro-batches weigh; empty if none has a weight."""
    if not header.weights:
        return ""
    least, most = (exact(Fraction(weight)) for weight in (min(header.weights), max(header.weights)))
    return f" for a micro-batch of weight 1; weights {least} to {most}" if least != most else f"; all weigh {most}"


def sharing(header: Header) -> str:
    """Returns the words behind a list of costs that say what stages keep of M_a; empty if every stage keeps 1."""
    return f"; stages keep {of_stages(header.shares)} M_a" if header.shares else ""


class Costs(Mapping[str, Fraction]):
    """The duration of an operation over one micro-batch, by the letter of its kind, in a unit of the user's choice.

    ``Costs(B=Fraction(5, 2))`` gives the cost of a B; other kinds have the cost of their row (`Kind.cost`), and a pair
    takes as long as its two operations one after the other. If the user has set the cost of B, I or pair
    (``user_set``), it includes recomputation, which then takes no time unless it is set as well.

    ``shares`` has, for kinds whose slices cost unequally, the share of each slice of a micro-batch in the cost.
    ``factors`` has, for kinds whose stages cost unequally, the cost of each stage as a multiple of the mean, which is
    then the cost of the kind. ``groups`` has, by group of stages and kind, the costs of groups with names, until
    `on_stages` replaces them by ``factors``. If ``stages`` is given, the costs are those of the model cut into that
    many stages, and `durations` converts them to the stages of a schedule.

    Raises `TypeError` if there is no such kind.
    """

    def __init__(
        self,
        *,
        user_set: tuple[str, ...] = (),
        shares: Mapping[str, tuple[Fraction, ...]] = MappingProxyType({}),
        factors: Mapping[str, tuple[Fraction, ...]] = MappingProxyType({}),
        groups: Mapping[tuple[str, str], Fraction] = MappingProxyType({}),
        stages: int | None = None,
        **costs: Fraction,
    ) -> None:
        if unknown := costs.keys() - COSTED.keys():
            raise TypeError(f"no kind of operation is called {', '.join(sorted(unknown))}")
        self.user_set, self.shares, self.factors, self.stages = user_set, shares, factors, stages
        self.groups = groups
        self._given = costs
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
        by_part = tuple(self.shares.items()), tuple(self.factors.items()), tuple(self.groups.items())
        return tuple(self._costs.items()), self.user_set, by_part, self.stages

    def __repr__(self) -> str:
        costs = (f"{kind}={cost!r}" for kind, cost in self._costs.items())
        shares = f", shares={dict(self.shares)!r}" if self.shares else ""
        factors = f", factors={dict(self.factors)!r}" if self.factors else ""
        factors += f", groups={dict(self.groups)!r}" if self.groups else ""
        stages = f", stages={self.stages}" if self.stages else ""
        return f"Costs({', '.join(costs)}, user_set={self.user_set!r}{shares}{factors}{stages})"

    @staticmethod
    def parse(kind: str, text: str) -> Fraction:
        """The exact duration that a user wrote for a kind: ``"0.1"`` is one tenth and ``"1/3"`` one third.

        Raises `ValueError`, in words for the user, if there is no such kind or the text is no positive number.

        Examples
        --------
        >>> Costs.parse("B", "0.1")
        Fraction(1, 10)
        """
        if kind not in COST_LETTERS:
            raise ValueError(f"no kind of operation is called '{kind}': the kinds are {listed(COST_LETTERS)}")
        return positive(f"the cost of {kind}", text, "an operation that takes no time is no operation")

    def using(self, kind: str, text: str) -> "Costs":
        """The costs with that of one kind as a user wrote it, or a list of those of its slices; errors as `parse`.

        Examples
        --------
        >>> Costs().using("F", "1,3").shares["F"]
        (Fraction(1, 4), Fraction(3, 4))
        """
        by_slice = [self.parse(kind, cost) for cost in text.split(",")]
        whole = sum(by_slice, Fraction(0))
        if len(by_slice) > 1:
            shares = tuple(cost / whole for cost in by_slice)
            return self._using(kind, whole)._with(shares={**self.shares, kind: shares})
        return self._using(kind, whole)

    def using_stages(self, kind: str, text: str) -> "Costs":
        """The costs with that of one kind replaced by a user's list of its cost on each stage.

        Raises errors like `parse`, and `ValueError` for a pair, whose operations may be on two stages.

        Examples
        --------
        >>> costs = Costs().using_stages("F", "4,4,5,7")
        >>> costs["F"], costs.factors["F"][3]
        (Fraction(5, 1), Fraction(7, 5))
        """
        if kind in COSTED and kind not in KINDS:
            raise ValueError(f"a {kind} is on two stages: give the costs of {listed(_PARTS)}")
        by_stage = [self.parse(kind, cost) for cost in text.split(",")]
        mean = sum(by_stage, Fraction(0)) / len(by_stage)
        factors = tuple(cost / mean for cost in by_stage)
        return self._using(kind, mean)._with(factors={**self.factors, kind: factors})

    def using_group(self, group: str, kind: str, text: str) -> "Costs":
        """The costs with that of one kind on the stages of a group, as a user wrote it; errors as `using_stages`.

        Examples
        --------
        >>> Costs().using_group("image", "F", "1/4").groups
        {('image', 'F'): Fraction(1, 4)}
        """
        if kind in COSTED and kind not in KINDS:
            raise ValueError(f"a {kind} is on two stages: give the costs of {listed(_PARTS)}")
        return self._with(groups={**self.groups, (group, kind): self.parse(kind, text)})

    def on_stages(self, header: Header) -> "Costs":
        """The costs with those of groups as costs of stages; raises `WrongOption` for a group that there is not."""
        costs = self._with(groups={})
        runs = {group.name: range(group.start, group.stop) for group in header.named}
        for kind in dict.fromkeys(kind for _, kind in self.groups):
            by_stage = [self[kind]] * header.stages
            for group in (group for group, of in self.groups if of == kind):
                if group not in runs:
                    known = f"the groups {listed(runs)}" if runs else "no groups of stages with names"
                    raise WrongOption("costs", f" {group}.{kind}: {header.title} has {known}")
                for stage in runs[group]:
                    by_stage[stage] = self.groups[group, kind]
            costs = costs.using_stages(kind, ",".join(map(str, by_stage)))
        return costs

    def _with(
        self,
        costs: Mapping[str, Fraction] | None = None,
        user_set: tuple[str, ...] | None = None,
        shares: Mapping[str, tuple[Fraction, ...]] | None = None,
        factors: Mapping[str, tuple[Fraction, ...]] | None = None,
        groups: Mapping[tuple[str, str], Fraction] | None = None,
        stages: int | None = None,
    ) -> "Costs":
        """A copy in which each argument replaces its field; ``stages`` becomes None without one."""
        return Costs(
            user_set=self.user_set if user_set is None else user_set,
            shares=self.shares if shares is None else shares,
            factors=self.factors if factors is None else factors,
            groups=self.groups if groups is None else groups,
            stages=stages,
            **(self._given if costs is None else costs),
        )

    def _using(self, kind: str, cost: Fraction) -> "Costs":
        costs = {kind: cost}
        frees = any(KEPT in part.reads and not part.moves for part in COSTED[kind].kinds)
        if RECOMPUTATION.letter not in self.user_set and frees:
            costs[RECOMPUTATION.letter] = Fraction(0)
        return self.changed(costs, (*self.user_set, kind))

    def changed(self, costs: Mapping[str, Fraction], user_set: tuple[str, ...] | None = None) -> "Costs":
        """A copy with these ``costs`` for some kinds; ``user_set`` replaces the kinds that the user has set."""
        return self._with({**self._given, **costs}, user_set)

    def durations(self, header: Header) -> "Costs":
        """Returns the costs for the stages of a header, converted where they are those of another number of stages.

        Raises `WrongOption` if lists of costs are for another number of slices or stages than the header has.
        """
        if self.groups:
            return self.on_stages(header).durations(header)
        if self.stages is not None:
            return self.recut(self.stages, header.stages).durations(header)
        for kind, shares in self.shares.items():
            if len(shares) != header.slices:
                costs, cut = counted(len(shares), "slice"), counted(header.slices, "slice")
                wrong = f" {kind}: it has costs for {costs}, and a micro-batch of {header.title} has {cut}"
                raise WrongOption("costs", wrong)
        for kind, factors in self.factors.items():
            if len(factors) != header.stages:
                costs, has = counted(len(factors), "stage"), counted(header.stages, "stage")
                raise WrongOption("stage_costs", f" {kind}: it has costs for {costs}, and {header.title} has {has}")
        return self

    def report_costs(self, header: Header, path: Sequence[Operation]) -> tuple[tuple[str, Fraction], ...]:
        """Each kind with its cost, as a report shows it; the mean on ``path`` where slices or stages cost unequally."""
        costs = dict(self)
        unequal = [*(self.shares if header.slices > 1 else ()), *self.factors]
        if unequal and PAIR.letter not in self._given:
            unequal.append(PAIR.letter)
        costs |= mean_costs(self, header, path, unequal)
        special = (kind for kind in KINDS.values() if kind.recomputes or kind.moves)
        absent = {kind.letter for kind in special if kind not in header.kinds}
        return tuple((kind, cost) for kind, cost in costs.items() if kind not in absent)

    def summary(self, header: Header, kinds: Collection[str]) -> str:
        """One line of text with the cost of each of ``kinds``, such as ``F = 1, B = 2``."""
        costs = self.report_costs(header, ())
        return ", ".join(f"{kind} = {self._in_words(header, kind, cost)}" for kind, cost in costs if kind in kinds)

    def _in_words(self, header: Header, kind: str, cost: Fraction) -> str:
        """A cost: ``4 (1, 3)`` where slices cost unequally, ``[4, 4, 5]`` or ``4 to 5`` where stages do."""
        if kind in self.factors:
            return of_stages([self[kind] * factor for factor in self.factors[kind]])
        shares = self.shares.get(kind, ()) if header.slices > 1 else ()
        return exact(cost) + (f" ({', '.join(exact(self[kind] * share) for share in shares)})" if shares else "")

    def of_model_in(self, stages: int) -> "Costs":
        """A copy of the costs, marked as those of a model cut into ``stages`` stages, for `durations` to convert."""
        return self._with(stages=stages)

    def recut(self, stages: int, into: int) -> "Costs":
        """The costs of the same model in ``into`` stages: with half as many stages, each is twice as large."""
        kinds = [kind for kind in self if kind in KINDS or kind in self._given]
        costs = {kind: self[kind] * stages / into for kind in kinds}
        factors = self.factors
        if stages != into:
            cut = stage_shares(stages, into)
            factors = {
                kind: tuple(sum(of[old] * part for old, part in parts) * Fraction(into, stages) for parts in cut)
                for kind, of in self.factors.items()
            }
        return self._with(costs, factors=factors)

    def for_baseline(self, splits: bool) -> "Costs":
        """The costs for a baseline whose backwards may be whole where the schedule's are split, or the other way round.

        If the schedule's are split (``splits``) and the user has set I or W but not B, B becomes I + W. If they are
        whole and the user has set B alone, each of I and W becomes half of B.
        """
        halves_set = not {"I", "W"}.isdisjoint(self.user_set)
        if splits and halves_set and "B" not in self.user_set:
            user_set = (*self.user_set, "B") if "I" in self.user_set else self.user_set
            return self.changed({"B": self["I"] + self["W"]}, user_set)._with(factors=self._factors_and("B", "IW"))
        if not splits and not halves_set and "B" in self.user_set:
            halved = self.changed(dict.fromkeys("IW", self["B"] / 2), (*self.user_set, "I", "W"))
            return halved._with(factors=halved._factors_and("I", "B"))._with(factors=halved._factors_and("W", "B"))
        return self

    def _factors_and(self, joint: str, kinds: str) -> Mapping[str, tuple[Fraction, ...]]:
        """The ``factors`` with those of the kind ``joint``, which costs as much as ``kinds`` together on each stage."""
        stages = max(len(self.factors.get(kind, ())) for kind in kinds)
        whole = sum((self[kind] for kind in kinds), Fraction(0))
        equal = (Fraction(1),) * stages
        costs = [[self[kind] * factor for factor in self.factors.get(kind, equal)] for kind in kinds]
        factors = tuple(sum(of_stage) / whole for of_stage in zip(*costs, strict=True))
        return {**self.factors, **({joint: factors} if factors else {})}

    def tick(self, header: Header) -> Fraction:
        """A length of time of which every operation's duration is a multiple, on every stage."""
        derived = {PAIR.letter} - {*self._given}
        costs = [cost for kind, cost in self.items() if kind not in self.factors and kind not in derived]
        costs += [self[kind] * factor for kind, factors in self.factors.items() for factor in factors]
        whole = lcm(*(cost.denominator for cost in costs)) * header.parts
        shared = ((self[kind] * share).denominator for kind, shares in self.shares.items() for share in shares)
        return Fraction(1, lcm(whole, *shared) * header.weight_unit)

    def remarks(self, schedule: Schedule) -> tuple[str, ...]:
        """Remarks for the user on costs of kinds that a schedule lacks, and on default costs beside those of slices."""
        letters = {operation.kind.letter for lane in schedule.lanes for operation in lane}
        needless = (
            f"{words} changes nothing: no operation of this schedule is of kind {letter}"
            for letter in self.user_set
            if letter not in letters
            for words in [self._as_written(letter)]
        )
        return (*needless, *self._default_slices(schedule.header, letters))

    def _default_slices(self, header: Header, letters: Collection[str]) -> Iterator[str]:
        """Yields a remark if the user has set costs of slices for some kinds, while others keep a default cost.

        A listed cost is that of a slice, a default cost that of the whole micro-batch: the two are easily mixed up.
        """
        unset = [letter for letter in SINGLE_LETTERS if letter in letters and letter not in self._given]
        if header.slices > 1 and unset and not self.shares.keys().isdisjoint(letters):
            costs = listed([f"{letter} = {exact(self[letter])}" for letter in unset])
            together = f"for the {header.slices} slices of a micro-batch together"
            yield f"{costs} by default, {together}: give {listed(unset)} the costs of slices as well"

    def _as_written(self, kind: str) -> str:
        """The option that set the cost of a kind."""
        costs = ",".join(exact(self[kind] * factor) for factor in self.factors.get(kind, (Fraction(1),)))
        return f"--{'stage-cost' if kind in self.factors else 'cost'} {kind}={costs}"

    @property
    def unit(self) -> Unit:
        """The unit of the costs, which is the user's choice."""
        return Unit.COST

    def duration(self, operation: Operation, header: Header) -> Fraction:
        """The duration of an operation, in proportion to its number of micro-batches; half a micro-batch counts as 1/2.

        Where slices, stages or micro-batches cost unequally, a pair without a cost of its own takes as long as its
        parts.
        """
        letter = operation.kind.letter
        if (self.shares or self.factors or header.loads) and isinstance(operation, Pair) and letter not in self._given:
            return sum((self.duration(part, header) for part in operation.parts), Fraction(0))
        return self._costs[letter] * self.share(operation, header)

    def share(self, operation: Operation, header: Header) -> Fraction:
        """Returns the number by which the cost of its kind is multiplied to give an operation's duration."""
        shares = self.shares.get(operation.kind.letter, ()) if header.slices > 1 else ()
        if shares:
            share = shares[operation.parts[0].micros[0] % header.slices] * weighed(operation, header.weights)
        else:
            share = Fraction(header.weight(operation), header.parts)
        factors = self.factors.get(operation.kind.letter)
        return share * factors[operation.parts[0].stage] if factors else share
