"""What a rank knows before it builds its stages."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from chimera_runtime.blame import LaneOperation, ModelError
from chimera_runtime.data.batches import MicroBatchSource
from chimera_runtime.lane.lane import Lane, Load
from chimera_runtime.lane.message_links import Incoming, Outgoing
from chimera_runtime.lane.profiler_ranges import Unranged
from chimera_runtime.lane.stream_lane import Driver, StreamLane, UpdateRange
from chimera_runtime.model.model import Model
from chimera_runtime.model.ties import Tie, declared
from chimera_runtime.program.compiled_program import RankScript
from chimera_runtime.program.rank_facts import RankFacts
from chimera_runtime.program.weight_groups import Group
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.stage import Stage
from chimera_runtime.start.probe import Findings
from chimera_runtime.values.keywords import Keywords
from chimera_runtime.values.nested import to_device
from chimera_runtime.values.tensors import all_generators_kept, generators_kept


class Parts(NamedTuple):
    """What a lane is made of: stages, other workers by their number, how inputs and targets are loaded, and ties."""

    stages: Mapping[int, Any]
    peers: Mapping[int, Any]
    load_input: Load
    load_target: Load
    ties: Mapping[Group, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Setting:
    """The same for the check and for the training that follows it; without a ``source`` no data are loaded."""

    world: World
    script: RankScript
    facts: RankFacts
    model: Model
    findings: Findings
    seed: int
    source: MicroBatchSource | None
    ranges: Unranged = field(default_factory=Unranged)

    @property
    def share(self) -> float:
        """The weight of one micro-batch's loss in the loss of its update, over all copies: backwards begin with it.

        Where ``loss`` returns sums and counts, it is 1 / `losses.expected_count`; the sum of the gradients is corrected
        by what the update has counted.
        """
        return 1 / (self.findings.expected_count or self.world.job.passes * self.world.place.copies)

    @cached_property
    def generators_kept(self) -> Callable[[], AbstractContextManager[None]]:
        """A context after which the generators that stages draw from are as before."""
        return all_generators_kept if any(t.seeds_all for t in self.findings.traits) else generators_kept

    def parts(self, stages: dict[int, Stage]) -> Parts:
        """What a lane is made of."""
        ties = {tie.group: self.ranges.tie(tie.group, tie) for stage in stages.values() for tie in stage.ties}
        ranged = {number: self.ranges.stage(number, stage) for number, stage in stages.items()}
        return Parts(ranged, {worker: self.world.peer(worker) for worker in self.facts.peers}, *self.loads(), ties)

    @cached_property
    def ties(self) -> tuple[Tie, ...]:
        """The parameters that stages share; the model is asked once."""
        return declared(self.model, self.world.job)

    def loads(self) -> tuple[Load, Load]:
        """How inputs and targets are loaded."""
        source = self.source
        if source is None:
            return (lambda _update, _micro: None), (lambda _update, _micro: None)
        last = self.world.job.stages - 1
        return self._load("load input", source.input, 0), self._load("load target", source.target, last)

    def _load(self, kind: str, load: Load, stage: int) -> Load:
        device, passes = self.world.device, self.world.job.passes

        def loaded(update: int, micro: int) -> Any:
            try:
                return to_device(load(update, micro), device)
            except ModelError as error:
                later, number = divmod(micro, passes)
                error.during(LaneOperation(kind, stage, (number,), update + later))
                raise

        return loaded

    def keywords(self, update: int, micro: int) -> Keywords:
        """The keyword arguments of a micro-batch, counted from the first of an update."""
        if self.source is None:
            return {}
        keywords: Keywords = to_device(self.source.keywords(update, micro), self.world.device)
        return keywords

    def lane(self, parts: Parts) -> Lane:
        """What the rank's script is called with."""
        job, facts = self.world.job, self.facts
        outgoing = {
            (source, target, worker): self.ranges.outgoing(
                Outgoing(parts.peers[worker], source, target, job.stages), source, target, worker
            )
            for source, target, worker in facts.outgoing
        }
        incoming = {route: self.ranges.incoming(self._incoming(parts, *route), *route) for route in facts.incoming}
        loads = parts.load_input, parts.load_target
        if not job.period:
            return Lane(parts.stages, incoming, outgoing, *loads, parts.ties)
        return StreamLane(parts.stages, incoming, outgoing, *loads, UpdateRange(job.passes), facts.initial, parts.ties)

    def _incoming(self, parts: Parts, source: int, target: int, worker: int) -> Incoming:
        stage = parts.stages[target]
        slots = stage.inputs if source < target else stage.gradients
        return Incoming(parts.peers[worker], source, target, self.world.job.stages, slots)

    def driver(self, lane: Lane) -> Driver:
        """What runs the turns of a stream."""
        assert isinstance(lane, StreamLane)
        assert self.facts.turns is not None
        return Driver(self.script.turn, lane, self.facts.turns)

    def run(self, lane: Lane, updates: int) -> None:
        """So many updates of a stream, from the first to the last."""
        driver = self.driver(lane)
        for _ in range(updates):
            driver.add_update()
        driver.drain()
