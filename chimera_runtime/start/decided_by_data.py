"""Agreements of the ranks before an update on what its data decide: the stages without a part in a micro-batch, as it
has no input for them, and the counts by which several losses are divided.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from chimera_runtime.blame import UserCode
from chimera_runtime.data.feed import Feed
from chimera_runtime.data.micro_batch_source import MicroBatchSource
from chimera_runtime.errors import FAILED
from chimera_runtime.errors import data as mistakes
from chimera_runtime.errors.stage import count_of_target_is_impossible
from chimera_runtime.program.job import Job
from chimera_runtime.program.numbering import Round
from chimera_runtime.program.rank_facts import RankFacts, spread
from chimera_runtime.start.assemble import RankContext

_COUNTING = UserCode("the count of a loss", FAILED)


def agree_on_absence(context: RankContext, update: int, rounds: Sequence[Sequence[Round]] = ()) -> None:
    """Finds out, with the other ranks, which stages the micro-batches of an update lack, for `RankContext.absence`.
    Every rank calls it before the update, if micro-batches may lack inputs; else it does nothing. ``rounds`` are those
    of each copy, if an update may have other numbers of micro-batches than N.

    A micro-batch has an input for a source if it has one on any rank of its copy. Raises `Misuse`, on all ranks, if it
    has none at all, or the program cannot run without what it lacks.
    """
    job, absence, source = context.world.job, context.absence, context.source
    if absence is None or source is None or not context.may_lack_input:
        return
    control = context.world.control_group
    rounds, programs = _rounds_and_programs(context, rounds)
    largest = max(of_copy[-1].stop for of_copy in rounds)
    present = torch.zeros(control.place.copies, largest, len(job.sources), dtype=torch.uint8)
    for each in _begun(source, rounds[control.place.copy]):
        inputs = inputs_here(*programs[each.number], partial(source.input, update))
        present[control.place.copy, each.start : each.stop] = inputs
    control.reduce(present, "for the inputs that micro-batches have", dist.ReduceOp.MAX)

    def lacking_in(copy: int) -> list[frozenset[int]]:
        of_rounds = [
            lacking_stages(programs[each.number][0], copy, present[copy, each.start : each.stop], each.start)
            for each in rounds[copy]
            if each.number
        ]
        return [stages for of_round in of_rounds for stages in of_round]

    lacking = [*map(lacking_in, range(control.place.copies))]
    here = lacking[control.place.copy]
    absence.by_data = here if any(here) else ()
    absence.is_felt = bool(job.lacking) or any(map(any, lacking))


def agree_on_counts(context: RankContext, update: int, rounds: Sequence[Sequence[Round]] = ()) -> None:
    """Adds up the counts of the losses of an update, where several stages compute one, for `RankContext.loss_factors`.
    Every rank calls it before the update, after `agree_on_absence`, whose ``rounds`` these are.

    A micro-batch that lacks the stage of a loss counts 0 for it. Raises `BadModel`, on all ranks, if a count is
    negative or not finite.
    """
    job, absence, source = context.world.job, context.absence, context.source
    if not context.counts or source is None:
        return
    control, sinks = context.world.control_group, [*context.counts]
    rounds, programs = _rounds_and_programs(context, rounds)
    numbers = [of_copy[-1].stop for of_copy in rounds]
    counts = torch.zeros(control.place.copies, max(numbers) * job.parts, len(sinks), dtype=torch.float64)
    for each in _begun(source, rounds[control.place.copy]):
        program, facts = programs[each.number]
        for whole, part in product(spread(facts.targets), range(job.parts)):
            micro, number = whole * job.parts + part, each.start + whole
            lacking = absence.by_data[number] if absence is not None and absence.by_data else ()
            target, here = source.target(update, micro), counts[control.place.copy, number * job.parts + part]
            for place, stage in enumerate(sinks):
                if stage in facts.stages and stage not in lacking and not program.leaves_out(micro, stage):
                    here[place] = count_of(context.counts[stage], job.of_end(target, stage, job.sinks))
    # Pipes may share the targets of a micro-batch: what several ranks have counted is the same.
    control.reduce(counts, "for the counts of losses", dist.ReduceOp.MAX)
    for stage, count in zip(sinks, counts.sum((0, 1)).tolist(), strict=True):
        if count == math.inf:
            raise count_of_target_is_impossible(stage=job.stage_name(stage))
        context.loss_factors[stage] = sum(numbers) * job.parts / count if count else 0.0


def _rounds_and_programs(
    context: RankContext, rounds: Sequence[Sequence[Round]]
) -> tuple[Sequence[Sequence[Round]], Mapping[int, tuple[Job, RankFacts]]]:
    """Returns the rounds of each copy, by default one of N micro-batches, and the program for each number of these."""
    number, copies = context.world.job.micro_batches, context.world.control_group.place.copies
    return rounds or [(Round(number),)] * copies, {number: (context.world.job, context.facts), **context.programs}


def _begun(source: MicroBatchSource, rounds: Iterable[Round]) -> Iterator[Round]:
    """Yields the rounds that have micro-batches; ``source`` then counts from the first one of the round."""
    for each in rounds:
        if isinstance(source, Feed):
            source.start = each.start
        if each.number:
            yield each


def count_of(function: Callable[[Any], Any], target: Any) -> float:
    """Returns the count of a target, infinite if it is no possible count, and 0 of a target that is not there."""
    if target is None:
        return 0.0
    with _COUNTING:
        count = float(function(target))
    return count if count >= 0 else math.inf


def inputs_here(job: Job, facts: RankFacts, input_of: Callable[[int], Any]) -> torch.Tensor:
    """Returns 1 for each micro-batch and source of which this rank has an input, else 0, as ``[micro-batch, source]``.
    It looks at the inputs of sources that it holds; ``input_of`` returns that of a micro-batch, counted in parts.
    """
    present = torch.zeros(job.micro_batches, len(job.sources), dtype=torch.uint8)
    for micro in spread(facts.inputs):
        value = input_of(micro * job.parts)
        for place, stage in enumerate(job.sources):
            if stage in facts.stages:
                present[micro, place] = job.of_end(value, stage, job.sources) is not None
    return present


def lacking_stages(job: Job, copy: int, present: torch.Tensor, start: int = 0) -> list[frozenset[int]]:
    """Returns the stages that each micro-batch of a copy lacks; ``present`` is as of `inputs_here`, over all its ranks.
    The first of them is number ``start`` in messages. Errors are those of `agree_on_absence`.
    """
    return [_lacking(job, copy, micro, of_micro, start) for micro, of_micro in enumerate(present.tolist())]


def _lacking(job: Job, copy: int, micro: int, present: Sequence[int], start: int) -> frozenset[int]:
    number = micro * job.parts  # what the program leaves out is not missed
    micro += start
    expected = [
        (stage, here) for stage, here in zip(job.sources, present, strict=True) if not job.leaves_out(number, stage)
    ]
    missing = [stage for stage, is_there in expected if not is_there]
    if not missing:
        return frozenset()
    names, lacking = [*map(job.end_name, missing)], job.without(missing)
    if len(missing) == len(job.sources):
        raise mistakes.micro_batch_has_no_input(micro=micro, copy=copy, names=names)
    gone = {stage for stage in range(job.stages) if stage in lacking or job.leaves_out(number, stage)}
    for stage in range(job.stages):
        fed = job.fed[stage]
        if stage not in gone and fed and gone.issuperset(fed):
            raise mistakes.output_would_be_unread(micro=micro, copy=copy, names=names, stage=job.stage_name(stage))
        if stage in job.grouped and not lacking.isdisjoint((stage, *job.feeding[stage], *fed)):
            raise mistakes.block_lacks_a_stage(
                micro=micro, copy=copy, names=names, stage=job.stage_name(stage), scheme=job.name
            )
    return lacking
