"""Lists all configurations: schemes, their parameters, and the ways to split the mini-batch (section 2, Table 1).

W copies of a pipeline take the P workers; what is left stays idle. With N micro-batches of B items in each copy, the
mini-batch is B N W items; it may be smaller where a scheme fixes N.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from functools import cache
from itertools import count, product
from pathlib import Path
from typing import TypeVar

from chimera_ir import library
from chimera_ir.diagnostics.catalogue.program import BoundExceeded
from chimera_ir.diagnostics.catalogue.values import RepeatsTooLate, TooMany, TooManyInTurns, TooManyOperations
from chimera_ir.diagnostics.model import Rejected
from chimera_ir.elaborate.elaborate import outline, parameter_names
from chimera_ir.elaborate.evaluate import LIMIT
from chimera_ir.errors import ParameterError, UnreadableText
from chimera_ir.ir.graph import NamedStages
from chimera_ir.ir.levels import Header, Strategy
from chimera_ir.plural import counted, listed
from chimera_ir.profile import document
from chimera_ir.profile.costs import ModelProfile, StageCosts
from chimera_ir.request import EqualTimes
from chimera_ir.source import Source
from chimera_ir.syntax.ast import Operation, Scheme
from chimera_ir.syntax.formatter import Change

# The roles of a scheme's parameters in the planner, found by trying values.
#
# Each parameter in turn gets another value, while the others keep their defaults, and the scheme is compiled to a
# header. If the number of stages or workers changes, the parameter is a *size*. If the parameter equals the number of
# micro-batches, it is N. If it equals the number of slices, the planner tries `SLICES` for it; for any other parameter
# the planner tries the divisors of the sizes. A ``library.toml`` next to the scheme may state other roles.

SIZE, MICRO_BATCHES, DIVISOR, DEFAULT = "size", "micro_batches", "divisor", "default"
"""Roles that a ``library.toml`` may give to a parameter; it may also list values to try."""

SLICES = (2, 4, 8)
"""The numbers of slices that the planner tries."""


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of a scheme's parameters: ``sizes`` give stages and workers, ``micro_batches`` is N, if there is one.

    For ``divisors`` the planner tries the divisors of the sizes, for ``listed`` these values; others keep their
    default.
    """

    sizes: tuple[str, ...] = ()
    micro_batches: str | None = None
    divisors: tuple[str, ...] = ()
    listed: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def without_micro_batches(self, settings: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
        """The settings of all parameters but N."""
        return tuple(setting for setting in settings if setting[0] != self.micro_batches)


def roles(source: Source, scheme: Scheme, max_operations: int) -> Roles:
    """The roles of a scheme's parameters, as the ``library.toml`` beside it states or else its headers show.

    Raises `UnreadableText` if the ``library.toml`` names an unknown parameter or an impossible role.
    """
    stated = _stated(source, scheme)
    derived = _derived(scheme, max_operations) if set(parameter_names(scheme)) - stated.keys() else {}
    by_name = {name: stated.get(name, derived.get(name, DIVISOR)) for name in parameter_names(scheme)}
    counters = [name for name, role in by_name.items() if role == MICRO_BATCHES]
    return Roles(
        tuple(name for name, role in by_name.items() if role == SIZE),
        counters[0] if counters else None,
        tuple(name for name, role in by_name.items() if role == DIVISOR or name in counters[1:]),
        tuple((name, role) for name, role in by_name.items() if isinstance(role, tuple)),
    )


def _stated(source: Source, scheme: Scheme) -> dict[str, str | tuple[int, ...]]:
    stated: dict[str, str | tuple[int, ...]] = {}
    for name, role in library.stated(source).items():
        where = f"library.toml beside {source.name}: {name}"
        if name not in parameter_names(scheme):
            raise UnreadableText(f"{where}: {Path(source.name).stem} has no such parameter")
        values = isinstance(role, list) and role and all(type(value) is int and abs(value) <= LIMIT for value in role)
        if not values and role not in (SIZE, MICRO_BATCHES, DIVISOR, DEFAULT):
            words = ", ".join(f'"{word}"' for word in (SIZE, MICRO_BATCHES, DIVISOR, DEFAULT))
            raise UnreadableText(
                f"{where}: write a list of whole numbers of at most 64 bits to try, as in [2, 4], or one of {words}"
            )
        stated[name] = tuple(role) if isinstance(role, list) else str(role)
    return stated


def _derived(scheme: Scheme, max_operations: int) -> Mapping[str, str | tuple[int, ...]]:
    """The role of each parameter by the scheme's headers; empty if it refuses its own defaults."""
    header = _header(scheme, {}, max_operations)
    if header is None:
        return {}
    defaults = dict(header.parameters)
    return {name: _role(name, defaults, header, scheme, max_operations) for name in defaults}


def _role(
    name: str, defaults: Mapping[str, int], header: Header, scheme: Scheme, max_operations: int
) -> str | tuple[int, ...]:
    for settings in _variations(name, defaults):
        other = _header(scheme, settings, max_operations)
        if other is None:
            continue
        if (header.stages, header.workers) != (other.stages, other.workers):
            return SIZE
        if header.slices != other.slices == settings[name]:
            return SLICES
        counted = header.whole_micro_batches, other.whole_micro_batches
        return MICRO_BATCHES if counted == (defaults[name], settings[name]) else DIVISOR
    return DIVISOR


def _variations(name: str, defaults: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yields settings that give a parameter another value; the last ones leave all other parameters unset."""
    value = defaults[name]
    values = [2 * value, value + 1, value + 2, 3 * value, 4 * value, value // 2, value - 1]
    for fixed in (dict(defaults), {}):
        yield from ({**fixed, name: other} for other in values if other != value and other >= 1)


def _header(scheme: Scheme, settings: Mapping[str, int], max_operations: int) -> Header | None:
    try:
        return outline(scheme, settings, max_operations).header
    except (Rejected, ParameterError):
        return None


# Deterministic sample of a space that is too large to be tried as a whole.

_Value = TypeVar("_Value")

_GOLDEN = (math.sqrt(5) - 1) / 2


def sample(columns: Sequence[Sequence[_Value]], most: int) -> Iterator[tuple[_Value, ...]]:
    """Yields every combination of a value from each column, or ``most`` of them if there are more.

    The sample is spread evenly: it goes round all combinations in steps of about the golden ratio, without repetition,
    from the first value of each column.

    Examples
    --------
    >>> list(sample([[1, 2], [10, 20]], 4))
    [(1, 10), (1, 20), (2, 10), (2, 20)]
    >>> list(sample([[1, 2, 3], [10, 20, 30]], 4))
    [(1, 10), (3, 20), (2, 30), (2, 10)]
    """
    size = math.prod(map(len, columns))
    if size <= most:
        yield from product(*columns)
        return
    step = next(number for number in count(round(size * _GOLDEN)) if math.gcd(number, size) == 1)
    for number in range(most):
        # The combination with this number, in the order of `itertools.product`.
        rest, values = number * step % size, list[_Value]()
        for column in reversed(columns):
            rest, place = divmod(rest, len(column))
            values.append(column[place])
        yield tuple(reversed(values))


_CHANGED = {None: None, Strategy.LAZY: Strategy.LAZY, Strategy.EAGER: Strategy.EAGER, Strategy.EAGER_OPT: None}
"""The strategy that all stages are changed to for each that is considered; eager_opt leaves every scheme its own."""

MAX_OPERATIONS = 100_000
"""The most compute operations of a schedule that is considered, unless the user sets another limit."""

MOST = 10_000
"""The most combinations of the parameters of a scheme that are tried, without the number of micro-batches."""

_IDLE = 4
"""Depths for layers that leave this part of the workers idle, or more, are not tried."""

_STALE = "its gradients are of older weights; --asynchronous considers it"
_SAME = "without a flush all updates have as many micro-batches"
_MOVED = "it moves activations to the host, and recomputes none"

_SLICED = "the model must hand on a carry of its slices; --scheme, or a profile with slices, considers it"

_HOST = "it moves activations to the host, and the cluster has no [host] to tell how long that takes"

_Setting = tuple[str, int]


class Recomputation(Enum):
    """Whether every stage recomputes: only where the configuration does not fit without, always, or never."""

    WHERE_NEEDED = "where needed"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Question:
    """The question that a plan answers: how many workers, how many items in an update, and what to consider.

    Updates may have different numbers of items: ``mini_batch`` is the largest one, ``others`` are the others, each with
    the share of all updates that has it. ``settings`` are fixed parameters, ``syncs`` strategies for gradient sums.
    ``asynchronous`` and ``sliced`` admit schemes without a flush and with slices; ``hosted`` says whether the cluster
    has a link to the host, without which schemes that off-load are left out.
    """

    workers: int
    mini_batch: int
    settings: Mapping[str, int]
    recomputation: Recomputation
    syncs: tuple[Strategy, ...]
    asynchronous: bool
    max_operations: int
    sliced: bool = False
    hosted: bool = False
    others: tuple[tuple[int, Fraction], ...] = ()

    @property
    def mini_batches(self) -> tuple[tuple[int, Fraction], ...]:
        """All numbers of items, the largest first, each with its share of all updates."""
        return ((self.mini_batch, 1 - sum((share for _, share in self.others), Fraction(0))), *self.others)


@dataclass(frozen=True, slots=True)
class Configuration:
    """A scheme with its parameters, D stages, the workers of a copy, W copies, N micro-batches of B items.

    ``change`` is applied to the scheme. ``split`` is the first layer of each stage; None if the profile has no layers,
    or until the `Judge` has chosen one. ``lengths`` are the relative lengths of the ``slices``, empty if all are equal;
    the judge puts numbers in place of `EqualTimes`. With ``offload`` activations move as with `--offload auto`.
    ``named`` are the groups of the stages, if they have names, and ``sources`` the stages that no other feeds.

    Updates may have different numbers of micro-batches. Then N is the largest one, and ``others`` have the settings of
    each other one, the number, and the share of all updates that has it.
    """

    source: Source
    settings: tuple[tuple[str, int], ...]
    stages: int
    workers: int
    copies: int
    micro_batches: int
    micro_batch_size: int
    change: Change
    split: tuple[int, ...] | None = None
    slices: int = 1
    lengths: tuple[int, ...] | EqualTimes = ()
    offload: bool = False
    named: tuple[NamedStages, ...] = ()
    sources: tuple[int, ...] = (0,)
    others: tuple[tuple[tuple[_Setting, ...], int, Fraction], ...] = ()

    @property
    def known_lengths(self) -> tuple[int, ...]:
        """The relative lengths of the slices; empty if they are equal, or not computed yet."""
        return () if isinstance(self.lengths, EqualTimes) else self.lengths

    @property
    def unjudged(self) -> "Configuration":
        """The configuration as it was before it was judged."""
        return replace(self, split=None, lengths=EqualTimes.EQUAL_TIMES if self.lengths else ())

    @property
    def mini_batch(self) -> int:
        """The items of an update with N micro-batches: B N W."""
        return self.micro_batch_size * self.micro_batches * self.copies

    @property
    def sizes(self) -> "tuple[tuple[Configuration, Fraction], ...]":
        """The configuration with each number of micro-batches alone, N first, and the share of updates that has it."""
        rest = 1 - sum((share for _, _, share in self.others), Fraction(0))
        smaller = ((replace(self, settings=of, micro_batches=n, others=()), share) for of, n, share in self.others)
        return (replace(self, others=()), rest), *smaller

    @property
    def items(self) -> int | Fraction:
        """The mean number of items of an update."""
        return sum(share * sized.mini_batch for sized, share in self.sizes) if self.others else self.mini_batch

    @property
    def operations(self) -> int:
        """An estimate of the compute operations."""
        return 2 * self.stages * max(self.micro_batches * self.slices, self.stages)

    def idle(self, workers: int) -> int:
        """The number of ``workers`` that the configuration leaves idle."""
        return workers - self.workers * self.copies

    def recomputing(self, again: bool) -> "Configuration":
        """The configuration, with recomputation of every stage if ``again``."""
        return replace(self, change=self.change._replace(recompute=True)) if again else self

    @property
    def offloading(self) -> "Configuration":
        """The configuration with moves to the host."""
        return replace(self, offload=True)


class Reason(Enum):
    """The reason why a configuration was left out."""

    MEMORY = "out of memory"
    SPLIT = "no such split"
    REFUSED = "refused by the scheme"
    PROFILE = "not in the profile"
    SIZE = "too many operations"
    SPACE = "sampled"
    STALE = "without a flush"
    SLICED = "in slices"
    HOST = "without a link to the host"
    GROUPS = "for another kind of model"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A configuration that was left out, and the reason.

    ``choice`` is None if it was left out before it was complete; ``settings`` are those chosen so far. ``needed`` is a
    lower bound on the bytes of the fullest worker, 0 if memory is not the reason.
    """

    source: Source
    settings: tuple[tuple[str, int], ...]
    micro_batch_size: int | None
    reason: Reason
    detail: str
    recompute: bool = False
    needed: int = 0
    choice: Configuration | None = None

    @staticmethod
    def of(choice: Configuration, reason: Reason, detail: str, needed: int = 0) -> "LeftOut":
        """The refusal of a complete configuration, whose fullest worker needs at least ``needed`` bytes."""
        size, recompute = choice.micro_batch_size, choice.change.recompute
        return LeftOut(choice.source, choice.settings, size, reason, detail, recompute, needed, choice)


def refusal(
    refused: Rejected | ParameterError, source: Source, settings: Iterable[tuple[str, int]], size: int | None
) -> LeftOut:
    """Makes a `LeftOut` of the first error of a scheme; ``size`` is B, or None if it was not chosen yet."""
    if isinstance(refused, ParameterError):
        return LeftOut(source, tuple(settings), size, Reason.REFUSED, str(refused))
    first = refused.diagnostics[0]
    reason = Reason.MEMORY if isinstance(first, BoundExceeded) else Reason.REFUSED
    if isinstance(first, TooMany | TooManyOperations | TooManyInTurns | RepeatsTooLate):
        reason = Reason.SIZE
    return LeftOut(source, tuple(settings), size, reason, first.fill(first.title))


@dataclass
class Space:
    """The configurations of a scheme for a question and the depths of a profile."""

    source: Source
    scheme: Scheme
    roles: Roles
    profile: ModelProfile
    question: Question

    def __post_init__(self) -> None:
        self._names = parameter_names(self.scheme)
        self._fixed = {name: value for name, value in self.question.settings.items() if name in self._names}
        self._depths = _depths(self.profile, self.question.workers)
        self._fitting = {
            name: _depths_of_group(part, self.question.workers) for name, part in self.profile.groups.items()
        }
        clauses = (clause for pipe in self.scheme.pipes for clause in pipe.clauses)
        self._moves = any(isinstance(clause, Operation) and clause.subjects[0].kind.moves for clause in clauses)
        self._unmet = Change(self.question.recomputation is Recomputation.ALWAYS).unmet_by(self.scheme)

    def configurations(self) -> Iterator[Configuration | LeftOut]:
        """Yields every configuration once, or a `LeftOut` in its place if the header alone rules it out."""
        header = _header(self.scheme, self._fixed, self.question.max_operations)
        if header and (other := self._other_model(header)):
            yield self._out(self._fixed, None, Reason.GROUPS, other)
            return
        # Sizes first, from all divisors of the depths; each combination of sizes has values of the further parameters.
        depths = sorted({part for depth in self._depths for part in _divisors(depth)})
        tried = [self._values(name, depths) for name in self.roles.sizes]
        columns = [(sizes, self._others(sizes)) for sizes in sample(tried, MOST)]
        # Too many: sizes that no depth fits are dropped, then each combination of sizes gets its share of the sample.
        if _count(columns) > MOST:
            columns = [(sizes, others) for sizes, others in columns if self._may_fit(sizes)]
        count, tries = _count(columns), 0
        for sizes, others in columns:
            share = MOST if count <= MOST else max(1, math.prod(map(len, others)) * MOST // count)
            for rest in sample(others, share):
                tries += 1
                yield from self._with(dict((*sizes, *rest)))
        of = max(count, math.prod(map(len, tried)))
        if of > MOST:
            text = f"{tries:,} of {of:,} combinations of its parameters were tried, spread evenly; fix some with --set"
            yield self._out(self._fixed, None, Reason.SPACE, text)

    def _other_model(self, outlined: Header) -> str:
        """What the scheme is for, if that is another kind of model than the profile's; else empty."""
        names, groups = [name for name, *_ in outlined.named], [*self.profile.groups]
        if {*names} == {*groups} and (names == groups or not self.profile.groups[names[0]].layers):
            return ""
        model = f"is of {listed(groups)}" if groups else "is a chain of stages or layers"
        return f"it is for {listed(names) if names else 'a chain of stages'}, and the model of the profile {model}"

    def _others(self, sizes: Sequence[_Setting]) -> list[list[_Setting]]:
        """For each parameter that is neither a size nor N, the settings to try with these sizes."""
        divisors = _divisors(math.prod(value for _, value in sizes) if sizes else max(self._depths))
        tried = [self._values(name, divisors) for name in self.roles.divisors]
        return [*tried, *(self._values(name, values) for name, values in self.roles.listed), *self._defaults()]

    def _may_fit(self, sizes: Sequence[_Setting]) -> bool:
        """Whether a scheme with these sizes may have a number of stages that is to be tried."""
        fixed = [setting for values in self._defaults() for setting in values]
        outlined = self._outlined(dict((*sizes, *fixed)))
        return isinstance(outlined, LeftOut) or self._has(outlined)

    def _with(self, settings: dict[str, int]) -> Iterator[Configuration | LeftOut]:
        outlined = self._outlined(settings)
        if isinstance(outlined, LeftOut):
            yield from [outlined] if self._is_missed(settings) else []
        elif other := self._other_model(outlined):
            yield self._out(settings, None, Reason.GROUPS, other)
        elif self._has(outlined):
            if outlined.asynchronous and not self.question.asynchronous:
                yield self._out(settings, None, Reason.STALE, _STALE)
            elif outlined.asynchronous and self.question.others:
                yield self._out(settings, None, Reason.STALE, _SAME)
            elif outlined.slices > 1 and not (self.question.sliced or self.profile.has_slices):
                yield self._out(settings, None, Reason.SLICED, _SLICED)
            elif self._moves and not self.question.hosted:
                yield self._out(settings, None, Reason.HOST, _HOST)
            elif self._unmet:
                yield self._out(settings, None, Reason.REFUSED, _MOVED)
            else:
                yield from self._split(settings, outlined)
        elif self._is_fixed or (len(self.roles.sizes) == 1 and self._is_missed(settings)):
            stages = ", ".join(f"{stop - start} of {name}" for name, start, stop in outlined.named)
            groups = (f"{_known(group)} of {name}" for name, group in self.profile.groups.items())
            known = ", ".join(groups) or _known(self.profile)
            text = f"depth {stages or outlined.stages}; the profile has {known}"
            yield self._out(settings, None, Reason.PROFILE, text)

    def _has(self, outlined: Header) -> bool:
        """Whether so many stages are considered: the depths to try or, where all sizes are fixed, up to all layers."""
        parts = [(self.profile, self._depths, outlined.stages)]
        if self.profile.groups:
            sizes = ((name, stop - start) for name, start, stop in outlined.named)
            parts = [(self.profile.groups[name], self._fitting[name], stages) for name, stages in sizes]
        return all(
            stages in depths or (self._is_fixed and stages <= len(part.layers)) for part, depths, stages in parts
        )

    def _is_missed(self, settings: Mapping[str, int]) -> bool:
        """Whether the user may miss a combination: its sizes give a depth to try, or the user fixed them."""
        sizes = self.roles.sizes
        return math.prod(settings[name] for name in sizes) in self._depths or self._is_fixed

    @property
    def _is_fixed(self) -> bool:
        return self._fixed.keys() >= set(self.roles.sizes)

    def _values(self, name: str, values: Iterable[int]) -> list[_Setting]:
        return [(name, value) for value in ([self._fixed[name]] if name in self._fixed else values)]

    def _defaults(self) -> list[list[_Setting]]:
        """The settings that the user fixed for parameters that the planner does not vary, each in a list of its own."""
        tried = {*self.roles.sizes, *self.roles.divisors, *dict(self.roles.listed), self.roles.micro_batches}
        return [[(name, value)] for name, value in self._fixed.items() if name not in tried]

    def _outlined(self, settings: dict[str, int]) -> Header | LeftOut:
        """The header of the scheme with these settings, or the refusal of them."""
        name = self.roles.micro_batches
        # A scheme may refuse its default N for these sizes, as where N must be a multiple of D; their product is one.
        tries = [settings]
        if name is not None:
            count = self._fixed.get(name, math.prod(settings[size] for size in self.roles.sizes))
            tries = [*([] if name in self._fixed else tries), {**settings, name: count}]
        failed: Rejected | ParameterError | None = None
        for attempt in tries:
            try:
                return outline(self.scheme, attempt, self.question.max_operations).header
            except (Rejected, ParameterError) as refused:
                failed = failed or refused
        assert failed
        return refusal(failed, self.source, settings.items(), None)

    def _split(self, settings: dict[str, int], outlined: Header) -> Iterator[Configuration | LeftOut]:
        question, workers = self.question, outlined.workers
        # As many workers are used as W copies of the pipeline take; fewer than for another copy stay idle.
        copies = question.workers // workers
        if not copies:
            text = f"it takes {counted(workers, 'worker')}, and there {'is' if question.workers == 1 else 'are'} "
            text += str(question.workers)
            yield self._out(settings, None, Reason.SPLIT, text)
            return
        # B is any size for which all stages have costs, N follows from the mini-batch.
        costs = self._costs(outlined)
        for size in sorted(set.intersection(*(set(part.at) for part in costs))):
            together = copies * size
            numbers = [self._micro_batches(outlined, together, items) for items, _ in self.question.mini_batches]
            if refused := [number for number in numbers if isinstance(number, str)]:
                yield self._out(settings, size, Reason.SPLIT, refused[0])
            elif outlined.halves and size % outlined.parts:
                yield self._out(settings, size, Reason.SPLIT, f"a micro-batch of {size} cannot be halved")
            else:
                counts = [number for number in numbers if isinstance(number, int)]
                yield from self._choices(settings, outlined, copies, counts, size)

    def _costs(self, outlined: Header) -> tuple[StageCosts, ...]:
        profile = self.profile.joined(outlined.named, _sources(outlined))
        return profile.layers or profile.depths[outlined.stages]

    def _micro_batches(self, outlined: Header, together: int, mini_batch: int) -> int | str:
        """How many micro-batches N a copy needs, or why no N fits; ``together`` is W B."""
        name = self.roles.micro_batches
        if name is None and self.question.others:
            return "no parameter is the number of micro-batches"
        if name is None:
            count = outlined.whole_micro_batches
            least = count * together
            return count if least <= mini_batch else f"the items of an update are at least {least}"
        count, rest = divmod(mini_batch, together)
        if rest or not count:
            return f"the number of items, {mini_batch}, is no multiple of W B = {together}"
        if self._fixed.get(name, count) != count:
            return f"{name} would be {count}"
        return count

    def _choices(
        self, settings: dict[str, int], outlined: Header, copies: int, counts: Sequence[int], size: int
    ) -> Iterator[Configuration]:
        name = self.roles.micro_batches

        def given(count: int) -> tuple[_Setting, ...]:
            whole = {**settings, **({name: count} if name else {})}
            return tuple((parameter, whole[parameter]) for parameter in self._names if parameter in whole)

        first, *smaller = counts
        shares = (share for _, share in self.question.others)
        others = tuple((given(count), count, share) for count, share in zip(smaller, shares, strict=True))
        syncs = (None,) if outlined.steps_inside else self.question.syncs
        # Slices are tried with equal lengths and, where the profile has their times, with equal times.
        costs = self._costs(outlined)
        timed = 1 < outlined.slices <= self.profile.positions and all(part.at[size].slices for part in costs)
        tried: tuple[tuple[int, ...] | EqualTimes, ...] = ((), EqualTimes.EQUAL_TIMES) if timed else ((),)
        for lengths, sync in product(tried, syncs):
            change = Change(self.question.recomputation is Recomputation.ALWAYS, _CHANGED[sync])
            sizes = outlined.stages, outlined.workers, copies, first, size
            named, sources = outlined.named, _sources(outlined)
            yield Configuration(
                self.source,
                given(first),
                *sizes,
                change,
                slices=outlined.slices,
                lengths=lengths,
                named=named,
                sources=sources,
                others=others,
            )

    def _out(self, settings: dict[str, int], size: int | None, reason: Reason, detail: str) -> LeftOut:
        return LeftOut(self.source, tuple(settings.items()), size, reason, detail)


def _count(columns: Iterable[tuple[object, Sequence[Sequence[_Setting]]]]) -> int:
    return sum(math.prod(map(len, others)) for _, others in columns)


def _sources(outlined: Header) -> tuple[int, ...]:
    return tuple(stage for stage, feeding in enumerate(outlined.feeding) if not feeding)


def _known(profile: ModelProfile) -> str:
    return ", ".join(map(str, sorted(profile.depths))) or counted(len(profile.layers), "layer")


def _depths(profile: ModelProfile, workers: int) -> frozenset[int]:
    """The numbers of stages to try; of a model of several parts, those to try for any of them.

    Of a profile of layers: each divisor of P, and twice each divisor, for two stages on a worker; and other numbers
    that leave less than a `_IDLE`-th of the workers idle, if fewer stages would have more layers.
    """
    if profile.groups:
        return frozenset().union(*(_depths_of_group(group, workers) for group in profile.groups.values()))
    if not profile.layers:
        return frozenset(profile.depths)
    layers = len(profile.layers)
    others = (
        stages
        for stages in range(2, min(workers, layers) + 1)
        if workers % stages * _IDLE < workers and -(-layers // stages) < -(-layers // (stages - 1))
    )
    several = {stages * count for stages in (*_divisors(workers), *others) for count in (1, 2)}
    return frozenset(stages for stages in several if stages <= layers)


def _depths_of_group(group: ModelProfile, workers: int) -> frozenset[int]:
    """The numbers of stages to try for a group: other groups may have the workers that it leaves."""
    return frozenset(range(1, 1 + min(workers, len(group.layers)))) if group.layers else frozenset(group.depths)


@cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, min(number, document.MOST) + 1) if number % divisor == 0)
