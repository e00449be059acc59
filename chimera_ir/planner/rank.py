"""The ranking of all configurations: by equation 1 on all processors, then the best by a replay event by event.

The best by equation 1 are replayed, then those that can still be faster than the best of these, because their
operations alone take less time; a limit on their operations may end this. The replayed ones come first.
"""

import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import TypeVar

from chimera_ir import library
from chimera_ir.garbage import uncollected
from chimera_ir.planner.judge import MODES, Judge, Judged, Verdict
from chimera_ir.planner.space import Configuration, LeftOut, Roles, Space, roles
from chimera_ir.plural import counted
from chimera_ir.profile.costs import merged
from chimera_ir.source import Source

REPLAYED = 20
"""The most configurations that are replayed in addition to the first of each name."""

REPLAYED_OPERATIONS = 20_000
"""The most compute operations, in total, of the configurations that are replayed."""

CONTENDING_OPERATIONS = 100_000
"""The most compute operations, in total, of the configurations that are replayed because they can still be faster."""

ERROR = 0.1
"""The default error of equation 1: within 10 % of the measured time (section 4.2.2)."""

_CONTENDERS = 8
"""How many contenders are replayed before it is seen again which ones are left."""

_ALONE = 20_000
"""The compute operations for which a further process is worth its start: with fewer, it would save no time."""

_PARTS = 8
"""Parts of the work for each process, so that all processes end at about the same time."""

Progress = Callable[[str], None]
"""A function that gets words for what is being done, and shows them to the user."""

_Thing = TypeVar("_Thing")
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Ranking:
    """The configurations that fit, best first, and those that were left out.

    Of configurations that compile to the same program only one is listed. ``reference`` is the best configuration of
    the baseline scheme, asked for or not. ``searched`` has a sentence on each search for a better order.
    """

    judge: Judge
    roles: Mapping[Source, Roles]
    choices: tuple[Judged, ...]
    left_out: tuple[LeftOut, ...]
    reference: Judged | None
    searched: tuple[str, ...] = ()

    def rows(self, everything: bool = False) -> tuple[Judged, ...]:
        """The configurations that people are shown: the best of each name, or all."""
        return self.choices if everything else _first_of_each_name(self.choices)


def rank(sources: Sequence[Source], judge: Judge, greedy: bool, progress: Progress) -> Ranking:
    """Ranks the configurations of ``sources``.

    With ``greedy``, only one counts of configurations that differ in nothing but B and N: the first that fits, in the
    order of `_by_preference`. The judge knows the schemes of ``sources`` and the baseline.
    """
    baseline, _ = library.baseline(1, 1)
    families: list[list[Configuration]] = []
    verdicts: list[Verdict] = []
    limit = judge.question.max_operations
    roles_of = {source: roles(source, scheme, limit) for source, scheme in judge.schemes.items()}
    # All configurations of all schemes, in families that are judged together.
    for source, scheme in judge.schemes.items():
        candidates = list(Space(source, scheme, roles_of[source], judge.profile, judge.question).configurations())
        choices = [candidate for candidate in candidates if isinstance(candidate, Configuration)]
        # Without the greedy rule, a family differs in B alone, and in N with it.
        if greedy:
            families += _by_preference(choices, roles_of[source])
        else:
            families += grouped(choices, lambda choice: (choice.settings, choice.change))
        verdicts += [candidate for candidate in candidates if isinstance(candidate, LeftOut)]
    with _pool(judge, sum(map(_operations, families))) as pool:
        # Every configuration by equation 1; equal programs become one entry.
        verdicts += _judged(families, greedy, pool, progress)
        fitting = [verdict for verdict in verdicts if isinstance(verdict, Judged)]
        asked = _merged((judged for judged in fitting if judged.choice.source in sources), baseline)
        unasked = _merged((judged for judged in fitting if judged.choice.source not in sources), baseline)
        # The first ones are replayed event by event, which may change their order.
        replayed = {judged.choice.unjudged: judged for judged in _replayed([*unasked[:1], *asked], pool, progress)}
        asked, unasked = (
            by_throughput((replayed.get(j.choice.unjudged, j) for j in ranked), baseline) for ranked in (asked, unasked)
        )
        left = CONTENDING_OPERATIONS
        while chosen := [*islice(affordable(contenders(asked), lambda judged: judged.operations, left), _CONTENDERS)]:
            left -= sum(judged.operations for judged in chosen)
            progress(f"replaying {counted(len(contenders(asked)), 'configuration')} that may be faster")
            results = chain.from_iterable(pool.do(Judge.replayed, _families(chosen)))
            replayed = {judged.choice.unjudged: judged for judged in results}
            asked = by_throughput((replayed.get(judged.choice.unjudged, judged) for judged in asked), baseline)
    # The refusals of the schemes that the user asked for, and the baseline for comparison.
    discarded = (verdict for verdict in verdicts if isinstance(verdict, LeftOut) and verdict.source in sources)
    of_baseline = (j for j in [*asked, *unasked] if baseline in {choice.source for choice in (j.choice, *j.equal)})

    def place(left_out: LeftOut) -> tuple[object, ...]:
        settings = roles_of[left_out.source].without_micro_batches(left_out.settings)
        return left_out.source.name, settings, left_out.micro_batch_size or 0, left_out.recompute

    left_out = sorted(discarded, key=place)
    return Ranking(judge, roles_of, tuple(asked), tuple(left_out), next(of_baseline, None))


def grouped(things: Iterable[_Thing], key: Callable[[_Thing], Hashable]) -> list[list[_Thing]]:
    """Groups of things with equal keys; the groups, and the things of each, are in the order of their first ones.

    Examples
    --------
    >>> grouped(["stage", "layer", "split"], lambda word: word[0])
    [['stage', 'split'], ['layer']]
    """
    groups: dict[Hashable, list[_Thing]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return list(groups.values())


def affordable(candidates: Iterable[_Thing], cost: Callable[[_Thing], int], limit: int) -> Iterator[_Thing]:
    """Yields candidates in order, as long as their costs add up to no more than ``limit``; dearer ones are skipped."""
    for candidate in candidates:
        if cost(candidate) <= limit:
            limit -= cost(candidate)
            yield candidate


def contenders(ranked: Sequence[Judged]) -> list[Judged]:
    """Configurations without a replay which one may show to be faster than the first; the most promising first."""
    if not ranked or ranked[0].replayed is None:
        return []
    best = ranked[0].throughput
    others = (judged for judged in ranked if judged.replayed is None and judged.most_throughput > best)
    return sorted(others, key=lambda judged: -judged.most_throughput)


def by_throughput(configurations: Iterable[Judged], baseline: Source) -> list[Judged]:
    """Sorts configurations: first the replayed ones, then the others, in each part the fastest first.

    Equally fast ones stand in the order of `_plain`. Data parallelism in another form than the plainest one counts as
    equally fast if it is faster by `ERROR` or less: its pieces, or its order on a single worker, gain nothing certain.
    """
    configurations = list(configurations)
    plainest: dict[bool, Judged] = {}
    for judged in sorted(configurations, key=lambda judged: (*_plain(judged.choice, baseline), -judged.throughput)):
        if judged.is_plain:
            plainest.setdefault(judged.replayed is None, judged)

    def order(judged: Judged) -> tuple[object, ...]:
        choice, first = judged.choice, plainest.get(judged.replayed is None)
        speed, is_other = judged.throughput, judged.is_alone and not judged.is_plain
        if first and judged.is_alone and first.throughput <= speed <= (1 + ERROR) * first.throughput:
            speed = first.throughput
        same = choice.settings, choice.micro_batch_size, repr(choice.change), choice.offload
        return judged.replayed is None, -speed, is_other, *_plain(choice, baseline), *same

    return sorted(configurations, key=order)


def _plain(choice: Configuration, baseline: Source) -> tuple[object, ...]:
    """Sort key of equally fast configurations: the fewest parameters and equal slices first, then the baseline."""
    return len(choice.settings), bool(choice.lengths), choice.source != baseline, choice.source.name


def _merged(configurations: Iterable[Judged], baseline: Source) -> list[Judged]:
    """Merges configurations that compile to the same program into the plainest of them (`_plain`), and sorts them."""
    equal = grouped(configurations, lambda judged: judged.identity)
    plainest = (sorted(same, key=lambda judged: _plain(judged.choice, baseline)) for same in equal)
    return by_throughput((replace(first, equal=tuple(j.choice for j in rest)) for first, *rest in plainest), baseline)


def _first_of_each_name(ranked: Iterable[Judged]) -> tuple[Judged, ...]:
    return tuple(same[0] for same in grouped(ranked, lambda judged: judged.name))


def _by_preference(choices: Iterable[Configuration], of_scheme: Roles) -> Iterator[list[Configuration]]:
    """Yields families of configurations that differ in B and N only, in the order in which to try them.

    Those with at least as many micro-batches as workers come first, the largest B first; then those that leave a
    pipeline partly empty, the smallest B first.
    """

    def preference(choice: Configuration) -> tuple[bool, int]:
        full = choice.micro_batches >= choice.workers or of_scheme.micro_batches is None
        return not full, -choice.micro_batch_size if full else choice.micro_batch_size

    families = grouped(
        choices, lambda choice: (of_scheme.without_micro_batches(choice.settings), choice.change, choice.lengths)
    )
    for family in families:
        yield sorted(family, key=preference)


def _operations(family: Sequence[Configuration]) -> int:
    return sum(choice.operations for choice in family)


@dataclass(frozen=True, slots=True)
class _Pool:
    """Runs work on ``count`` processes, each with a judge; without an executor, in this process."""

    count: int = 1
    executor: Executor | None = None

    def do(self, work: Callable[[Judge, _Task], _Result], tasks: Iterable[_Task]) -> Iterator[_Result]:
        do = partial(_with_kept_judge, work)
        return map(do, tasks) if self.executor is None else self.executor.map(do, tasks)


_judges: list[Judge] = []
"""The judge that this process keeps for all of its work; empty until it has got one."""


def _keep_judge(judge: Judge) -> None:
    _judges[:] = [judge]


def _with_kept_judge(work: Callable[[Judge, _Task], _Result], task: _Task) -> _Result:
    with uncollected():
        return work(_judges[0], task)


@contextmanager
def _pool(judge: Judge, operations: int) -> Iterator[_Pool]:
    """Yields a pool with as many processes as are worth starting to judge ``operations`` compute operations."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(count, operations // _ALONE + 1)
    if count < 2:
        _keep_judge(judge)
        yield _Pool()
        return
    with ProcessPoolExecutor(count, initializer=_keep_judge, initargs=(judge,)) as executor:
        try:
            yield _Pool(count, executor)
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise


def _judged(families: list[list[Configuration]], greedy: bool, pool: _Pool, progress: Progress) -> Iterator[Verdict]:
    # Parts that take about equally long: every so many-th of the families, from long to short.
    long_first = sorted(families, key=_operations, reverse=True)
    count = len(families) if pool.executor is None else min(_PARTS * pool.count, len(families))
    parts = [long_first[start::count] for start in range(count)]
    work = Judge.first_of if greedy else Judge.all_of
    for done, verdicts in enumerate(pool.do(partial(_judge_part, work), parts), 1):
        progress(f"judging configurations: {done} of {len(parts)} parts")
        yield from verdicts


def _judge_part(
    work: Callable[[Judge, list[Configuration]], list[Verdict]], judge: Judge, families: Iterable[list[Configuration]]
) -> list[Verdict]:
    return [verdict for family in families for verdict in work(judge, family)]


def _replayed(candidates: Sequence[Judged], pool: _Pool, progress: Progress) -> Iterator[Judged]:
    """Replays candidates within `REPLAYED` and `REPLAYED_OPERATIONS`: first the best of each name."""
    left, chosen = REPLAYED_OPERATIONS, list[Judged]()
    first = [*_first_of_each_name(candidates), *islice((judged for judged in candidates if judged.is_plain), 1)]
    for judged in dict.fromkeys([*first, *candidates]):
        if (judged in first or len(chosen) < REPLAYED) and judged.operations <= left:
            chosen.append(judged)
            left -= judged.operations
    progress("replaying the first choices")
    return chain.from_iterable(pool.do(Judge.replayed, _families(chosen)))


def _families(candidates: Iterable[Judged]) -> list[list[Judged]]:
    """Groups candidates by scheme and parameters, so that a scheme is compiled once; the largest first."""
    families = grouped(candidates, lambda judged: (judged.choice.source, judged.choice.settings))
    return sorted(families, key=lambda family: -family[0].operations)


# Memory of configurations that do not fit: plain data parallelism, and the one that is nearest to fitting.

WEIGHED_OPERATIONS = 30_000
"""The most compute operations, in total, of configurations whose exact bytes are computed for this."""

_WEIGHED = 20
"""The most configurations whose exact bytes are computed to find the one that is nearest to fitting."""


@dataclass(frozen=True, slots=True)
class Need:
    """A configuration, and the bytes that its fullest worker needs."""

    choice: Configuration
    size: int


def plain_need(ranking: Ranking) -> Need | None:
    """The least memory of plain data parallelism, with the model as one stage; None if it cannot be configured.

    The scheme is the baseline, whatever the user asked for. A worker keeps one micro-batch at a time, so one is
    compiled. If the profile has no depth of 1, the stages of its smallest depth are merged.
    """
    profile, (baseline, _) = ranking.judge.profile, library.baseline(1, 1)
    if profile.depths and 1 not in profile.depths:
        whole = merged(profile.depths[min(profile.depths)], opens=True)
        profile = replace(profile, depths={**profile.depths, 1: (whole,)})
    judge = replace(ranking.judge, options=replace(ranking.judge.options, tied=()), profile=profile)
    of_baseline = ranking.roles[baseline]
    single = dict.fromkeys(of_baseline.sizes, 1)
    question = replace(judge.question, settings=single)
    space = Space(baseline, judge.schemes[baseline], of_baseline, profile, question)
    settings = tuple({**single, of_baseline.micro_batches: 1}.items()) if of_baseline.micro_batches else ()
    choices = (
        replace(choice, settings=settings, micro_batches=1, others=(), split=(0,) if profile.layers else None)
        for choice in space.configurations()
        if isinstance(choice, Configuration)
    )
    return _least(judge, (choice.recomputing(again) for choice in choices for again in MODES[question.recomputation]))


def nearest(ranking: Ranking) -> Need | None:
    """The configuration that is nearest to fitting, of those with the least lower bounds on their memory."""
    unfit = [(left_out.needed, left_out.choice) for left_out in ranking.left_out if left_out.needed and left_out.choice]
    unfit.sort(key=lambda pair: (pair[0], pair[1].micro_batch_size, pair[1].operations))
    candidates = affordable((choice for _, choice in unfit), lambda choice: choice.operations, WEIGHED_OPERATIONS)
    return _least(ranking.judge, islice(candidates, _WEIGHED))


def _least(judge: Judge, choices: Iterable[Configuration]) -> Need | None:
    needs = (Need(choice, max(judge.needed(choice))) for choice in choices)
    return min(needs, key=lambda need: need.size, default=None)
