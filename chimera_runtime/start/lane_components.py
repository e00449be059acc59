"""The lane of a rank: its stages, its links to other workers, and the loading of inputs and targets."""

from collections.abc import Mapping
from typing import Any

import torch

from chimera_runtime.blame import LaneOperation, during
from chimera_runtime.data.micro_batch_source import MicroBatchSource
from chimera_runtime.lane.lane import Lane, LaneComponents, Load
from chimera_runtime.lane.message_links import Incoming, Outgoing
from chimera_runtime.lane.profiler_ranges import ranged, ranges_on
from chimera_runtime.lane.stream_lane import Driver, StreamLane, UpdateRange
from chimera_runtime.program.job import Job
from chimera_runtime.program.rank_facts import Route
from chimera_runtime.program.stage_graph import VALUES
from chimera_runtime.stage.stage import Stage
from chimera_runtime.start.rank_context import RankContext
from chimera_runtime.values.nested import to_device


def components_of(context: RankContext, stages: Mapping[int, Stage]) -> LaneComponents:
    """Returns the components of this rank's lane; with ``context.ranges`` they are wrapped for a profiler."""
    world, job, facts = context.world, context.world.job, context.facts

    def incoming(route: Route) -> Incoming:
        slots = getattr(stages[route.target], VALUES[job.value_of(route)].slots)
        return Incoming(world.peer(route.worker), route, job, slots)

    load_input, load_target = loads(context.source, job, world.device)
    components = LaneComponents(
        stages=stages,
        incoming={route: incoming(route) for route in facts.incoming},
        outgoing={route: Outgoing(world.peer(route.worker), route, job) for route in facts.outgoing},
        load_input=load_input,
        load_target=load_target,
        ties={tie.group: tie for stage in stages.values() for tie in stage.ties},
    )
    return ranged(components, ranges_on(world.device), job.slices) if context.ranges else components


def lane_of(context: RankContext, components: LaneComponents) -> Lane:
    """Makes the lane, the argument with which the functions of a rank's script are called."""
    job = context.world.job
    return StreamLane(components, UpdateRange(job.passes), context.facts.initial) if job.period else Lane(components)


def driver_of(context: RankContext, lane: Lane) -> Driver:
    """Returns the driver, which runs the turns of a stream: the lane of this rank must be a `StreamLane`."""
    assert isinstance(lane, StreamLane)
    assert context.facts.turns is not None
    return Driver(context.script.turn, lane, context.facts.turns)


def run_stream(context: RankContext, lane: Lane, updates: int) -> None:
    """Runs the first ``updates`` updates of a stream, to the end of the last one."""
    driver = driver_of(context, lane)
    for _ in range(updates):
        driver.add_update()
    driver.drain()


def loads(source: MicroBatchSource | None, job: Job, device: torch.device) -> tuple[Load, Load]:
    """Returns two functions, of an update and a micro-batch, that load its input and its target onto the device.

    Without a source both return None. A `ModelError` in one of them names the stage and the micro-batch.
    """
    if source is None:
        return (lambda _update, _micro: None), (lambda _update, _micro: None)

    def located(kind: str, load: Load, stage: int) -> Load:
        def loaded(update: int, micro: int) -> Any:
            later, number = divmod(micro, job.passes)
            with during(lambda: LaneOperation(kind, stage, (number,), update + later, job.slices)):
                return to_device(load(update, micro), device)

        return loaded

    return located("load input", source.input, job.sources[0]), located("load target", source.target, job.sinks[-1])
