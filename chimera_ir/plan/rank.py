"""All configurations in order: judged by equation 1 on all processors, the first ones replayed event by event.

A replay costs far more than equation 1, so only the first by equation 1 are replayed, as many as fit into a number of
operations. They come first, in the order of their replays, and the others follow in that of equation 1.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from chimera_ir import library
from chimera_ir.plan.judge import Judge, Judged, Verdict, distinct
from chimera_ir.plan.space import Choice, LeftOut, Question, configurations
from chimera_ir.source import Source
from chimera_ir.undisturbed import undisturbed

REPLAYED = 20
"""How many of the first are replayed, at most."""

WEIGHED_OPERATIONS = 30_000
"""How many compute operations those have together, at most, that are weighed to the byte though they fit anyway."""

REPLAYED_OPERATIONS = 20_000
"""How many compute operations the replayed ones have together, at most."""

ASYNCHRONOUS_OPERATIONS = 4
"""An operation of an asynchronous schedule counts so often: lowering one for a replay takes that much longer."""

_ALONE = 20_000
"""So few operations are judged in this process: starting others would take longer."""

_PARTS = 8
"""Into how many parts the work of a process is cut, so that all end at about the same time."""

Tell = Callable[[str], None]

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Ranking:
    """The configurations that fit, best first, those that were left out, and the baseline if that was not asked for.

    ``reference`` is the best configuration of the baseline scheme.
    """

    question: Question
    judge: Judge
    choices: tuple[Judged, ...]
    left_out: tuple[LeftOut, ...]
    reference: Judged | None


def rank(sources: Sequence[Source], question: Question, judge: Judge, greedy: bool, top: int, tell: Tell) -> Ranking:
    """Judges all configurations of the judge's schemes; those of ``sources`` are asked for, the first weighed."""
    baseline, _ = library.baseline(1, 1)
    families: list[tuple[Choice, ...]] = []
    found: list[Verdict] = []
    for source, scheme in judge.schemes.items():
        choices, out = _apart(configurations(source, scheme, judge.profile, question))
        families += _by_preference(choices) if greedy else distinct(choices)
        found += out
    with _workers(sum(map(_operations, families))) as executor:
        found += _judged(families, judge, greedy, executor, tell)
        judged = sorted((each for each in found if isinstance(each, Judged)), key=_order)
        asked = [each for each in judged if each.choice.source in sources]
        beside = [each for each in judged if each.choice.source == baseline and baseline not in sources]
        replayed = {each.choice: each for each in _replayed([*beside[:1], *asked], judge, executor, tell)}
        judged = sorted((replayed.get(each.choice, each) for each in judged), key=_order)
        judged, heavy = _weighed(judged, judge, top, executor, tell)
        found += heavy
    asked = [each for each in judged if each.choice.source in sources]
    left_out = (each for each in found if isinstance(each, LeftOut) and each.source in sources)
    reference = next((each for each in judged if each.choice.source == baseline), None)
    return Ranking(question, judge, tuple(asked), tuple(left_out), reference)


def _order(judged: Judged) -> tuple[object, ...]:
    """Those that were replayed, then the others: the two times of one configuration are not the same."""
    choice = judged.choice
    return (
        judged.replayed is None,
        -judged.throughput,
        choice.source.name,
        choice.settings,
        choice.micro_batch_size,
        repr(choice.change),
    )


def _apart(found: Iterable[Choice | LeftOut]) -> tuple[list[Choice], list[LeftOut]]:
    choices: list[Choice] = []
    left_out: list[LeftOut] = []
    for each in found:
        choices.append(each) if isinstance(each, Choice) else left_out.append(each)
    return choices, left_out


def _by_preference(choices: Iterable[Choice]) -> Iterator[tuple[Choice, ...]]:
    """The configurations among which the greedy rule takes the first that fits: those that differ in B and N only.

    The largest B comes first, as long as there are D micro-batches or more; of those that leave a pipeline less than
    full the smallest B does.
    """
    letter = library.letters().micro_batches
    alike: dict[object, list[Choice]] = {}
    for each in choices:
        rest = tuple(setting for setting in each.settings if setting[0] != letter)
        alike.setdefault((each.source, rest, each.change), []).append(each)
    for family in alike.values():
        yield tuple(sorted(family, key=_preference))


def _preference(choice: Choice) -> tuple[bool, int]:
    full = choice.micro_batches >= choice.stages or not any(
        name == library.letters().micro_batches for name, _ in choice.settings
    )
    return not full, -choice.micro_batch_size if full else choice.micro_batch_size


def _operations(family: Sequence[Choice]) -> int:
    """About how much work a family is."""
    return sum(2 * each.stages * max(each.micro_batches, each.stages) for each in family)


@contextmanager
def _workers(operations: int) -> Iterator[Executor | None]:
    """Processes to share the work with, if it is worth it."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if operations < _ALONE or count < 2:
        yield None
        return
    with ProcessPoolExecutor(count) as executor:
        try:
            yield executor
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise


def _judged(
    families: Sequence[tuple[Choice, ...]], judge: Judge, greedy: bool, executor: Executor | None, tell: Tell
) -> Iterator[Verdict]:
    ordered = sorted(families, key=_operations, reverse=True)
    parts = [ordered[start :: _PARTS * 2] for start in range(_PARTS * 2)] if executor else [[each] for each in ordered]
    tasks = [(judge, part, greedy) for part in parts if part]
    for done, verdicts in enumerate(_spread(executor, _judge_part, tasks), 1):
        tell(f"judging configurations: {done} of {len(tasks)} parts")
        yield from verdicts


def _judge_part(judge: Judge, families: Iterable[tuple[Choice, ...]], greedy: bool) -> list[Verdict]:
    with undisturbed():
        decide = judge.first_of if greedy else judge.all_of
        return [verdict for family in families for verdict in decide(family)]


def _replayed(judged: Sequence[Judged], judge: Judge, executor: Executor | None, tell: Tell) -> list[Judged]:
    """The first ones, replayed."""
    left, chosen = REPLAYED_OPERATIONS, list[Judged]()
    for each in judged:
        cost = each.operations * (ASYNCHRONOUS_OPERATIONS if each.asynchronous else 1)
        if len(chosen) < REPLAYED and cost <= left:
            chosen.append(each)
            left -= cost
    tell("replaying the first choices")
    return list(_spread(executor, _replay_one, [(judge, each) for each in chosen]))


def _weighed(
    judged: list[Judged], judge: Judge, top: int, executor: Executor | None, tell: Tell
) -> tuple[list[Judged], list[LeftOut]]:
    """All in order, the first ones with their bytes; and those that turn out not to fit."""
    left, chosen = WEIGHED_OPERATIONS, list[Judged]()
    for each in judged[:top]:
        if not each.memory and each.operations <= left:
            chosen.append(each)
            left -= each.operations
    tell("weighing the first choices")
    verdicts = list(_spread(executor, _weigh_one, [(judge, each) for each in chosen]))
    light = [verdict for verdict in verdicts if isinstance(verdict, Judged)]
    heavy = [verdict for verdict in verdicts if isinstance(verdict, LeftOut)]
    return sorted((*light, *(each for each in judged if each not in chosen)), key=_order), heavy


def _weigh_one(judge: Judge, judged: Judged) -> Verdict:
    with undisturbed():
        return judge.weighed(judged)


def _replay_one(judge: Judge, judged: Judged) -> Judged:
    with undisturbed():
        return judge.replayed(judged)


def _spread(
    executor: Executor | None, work: Callable[..., _Result], tasks: Sequence[tuple[object, ...]]
) -> Iterator[_Result]:
    """What the work gives for each task, as soon as it is done."""
    if executor is None:
        yield from (work(*task) for task in tasks)
        return
    for future in as_completed([executor.submit(work, *task) for task in tasks]):
        yield future.result()
