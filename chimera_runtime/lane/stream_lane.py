"""The lane of a stream: calls about what is not in the run do nothing, which makes warm-up and drain.

A script of a stream says what a turn of the steady state does. Before the first update is under way in all stages, and
after the last one, some of it is about micro-batches and versions of weights that there are not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, Self

from chimera_runtime.lane.lane import Lane, Load
from chimera_runtime.lane.message_links import Incoming, Outgoing
from chimera_runtime.program.numbering import Micros
from chimera_runtime.program.rank_facts import Route, Turns
from chimera_runtime.values.tensors import Tensors


@dataclass
class UpdateRange:
    """The length of a run: so many updates, of ``per_update`` micro-batches each."""

    per_update: int
    updates: int = 0

    def has(self, micros: Micros) -> bool:
        """Whether micro-batches are in the run; those of one operation are so together."""
        first = micros[0] if isinstance(micros, tuple) else micros
        return 0 <= first < self.updates * self.per_update

    def makes(self, version: int) -> bool:
        """Whether an update of the run makes a version of the weights; version 0 is there before."""
        return 0 < version <= self.updates


class MicroBatchRange(Protocol):
    """Which micro-batches there are."""

    def has(self, micros: Micros) -> bool:
        """Whether there are any of some micro-batches."""


class StreamWeights:
    """The weights of a stage or a tie in a run: calls about other versions than the run's do nothing.

    ``stashed`` and ``dropped`` are the versions, 0 or less, at whose places the initial weights are stashed and
    dropped: the first micro-batches read version 0 in place of versions below.
    """

    def __init__(self, weights: Any, run: UpdateRange, stashed: int, dropped: int) -> None:
        self._weights = weights
        self._run = run
        self._stashed = stashed
        self._dropped = dropped

    def all_reduce(self, version: int) -> None:
        """Launches the sum of the gradients that make a version."""
        if self._run.makes(version):
            self._weights.all_reduce()

    def wait_all_reduce(self, version: int) -> None:
        """Waits for the sum of the gradients that make a version."""
        if self._run.makes(version):
            self._weights.wait_all_reduce()

    def step(self, version: int) -> None:
        """Makes a version of the weights."""
        if self._run.makes(version):
            self._weights.step()

    def stash(self, version: int) -> None:
        """Keeps the newest weights, unless they are the last of the run, which no step replaces."""
        if version == self._stashed or 0 < version < self._run.updates:
            self._weights.stash(max(0, version))

    def drop(self, version: int) -> None:
        """Lets a version go that `stash` kept."""
        if version == self._dropped or 0 < version < self._run.updates:
            self._weights.drop(max(0, version))


class StreamStage(StreamWeights):
    """A stage in a run: calls about other micro-batches or versions than the run's do nothing."""

    def __init__(self, stage: Any, run: UpdateRange, stashed: int, dropped: int) -> None:
        super().__init__(stage, run, stashed, dropped)
        self._stage = stage
        self._version = 0

    def begin(self, update: int) -> None:
        """From now on micro-batches are counted from the first of an update."""
        self._stage.begin(update)

    def at(self, version: int) -> Self:
        """The stage with a version of its weights; those below 0 are version 0."""
        self._version = max(0, version)
        return self

    def forward(self, micros: Micros, inputs: Any, targets: Any = None) -> None:
        """Runs the forward of micro-batches of the run, on the version that `at` was told."""
        if self._run.has(micros):
            self._stage.at(self._version).forward(micros, inputs, targets)

    def outputs(self, micros: Micros) -> Tensors:
        """What the forward hands on; nothing for micro-batches outside the run."""
        return self._stage.outputs(micros) if self._run.has(micros) else ()

    def backward(self, micros: Micros, gradients: Tensors = ()) -> None:
        """Runs the backward of micro-batches of the run, on the version that `at` was told."""
        if self._run.has(micros):
            self._stage.at(self._version).backward(micros, gradients)

    def backward_input(self, micros: Micros, gradients: Tensors = ()) -> None:
        """Runs the first half of the backward of micro-batches of the run, on the version that `at` was told."""
        if self._run.has(micros):
            self._stage.at(self._version).backward_input(micros, gradients)

    def backward_weights(self, micros: Micros) -> None:
        """Runs the second half, on the version that `at` was told."""
        if self._run.has(micros):
            self._stage.at(self._version).backward_weights(micros)

    def input_gradients(self, micros: Micros) -> Tensors:
        """What the backward hands back; nothing for micro-batches outside the run."""
        return self._stage.input_gradients(micros) if self._run.has(micros) else ()


class StreamOutgoing:
    """An outgoing link on which messages outside the run are neither sent nor waited for."""

    def __init__(self, link: Outgoing, run: MicroBatchRange) -> None:
        self._link = link
        self._run = run

    def isend(self, micros: Micros, tensors: Tensors) -> None:
        """Posts the sending of a message of the run."""
        if self._run.has(micros):
            self._link.isend(micros, tensors)

    def wait(self, micros: Micros) -> None:
        """Returns when the peer has taken a message of the run; at once for another."""
        if self._run.has(micros):
            self._link.wait(micros)


class StreamIncoming:
    """An incoming link on which messages outside the run are neither received nor waited for."""

    def __init__(self, link: Incoming, run: MicroBatchRange) -> None:
        self._link = link
        self._run = run

    def irecv(self, micros: Micros, into: int) -> None:
        """Posts the receive of a message of the run into a slot."""
        if self._run.has(micros):
            self._link.irecv(micros, into)

    def wait(self, micros: Micros) -> None:
        """Returns when a message of the run has come; at once for another."""
        if self._run.has(micros):
            self._link.wait(micros)

    def take(self, micros: Micros) -> Tensors:
        """The tensors of a message that has come; none for micro-batches outside the run."""
        return self._link.take(micros) if self._run.has(micros) else ()


class StreamLane(Lane):
    """A lane whose calls about micro-batches that are not in ``run`` do nothing.

    ``initial`` has, for each weight group, the versions at whose places its initial weights are stashed and dropped.
    """

    def __init__(
        self,
        stages: Mapping[int, Any],
        incoming: Mapping[Route, Incoming],
        outgoing: Mapping[Route, Outgoing],
        load_input: Load,
        load_target: Load,
        run: UpdateRange,
        initial: Mapping[tuple[int, ...], tuple[int, int]],
        ties: Mapping[tuple[int, ...], Any] = MappingProxyType({}),
    ) -> None:
        super().__init__(
            {number: StreamStage(stage, run, *initial[number,]) for number, stage in stages.items()},
            {route: StreamIncoming(link, run) for route, link in incoming.items()},
            {route: StreamOutgoing(link, run) for route, link in outgoing.items()},
            load_input,
            load_target,
            {stages: StreamWeights(tie, run, *initial[stages]) for stages, tie in ties.items()},
        )
        self.run = run

    def _loaded(self, load: Load, micros: Micros) -> Any:
        return super()._loaded(load, micros) if self.run.has(micros) else None

    def begin(self, update: int) -> None:
        """A run begins, of no update yet: micro-batches and versions are counted from the first of it."""
        super().begin(update)
        self.run.updates = 0


class Driver:
    """Runs a stream whose updates are given one by one; a turn runs as soon as all that it needs has been given.

    After n updates and a drain it has made the same calls in the same order as a loop over n updates.
    """

    def __init__(self, turn: Callable[[Lane, int], None], lane: StreamLane, turns: Turns) -> None:
        self._turn = turn
        self._lane = lane
        self._turns = turns
        self._next = turns.first

    @property
    def updates(self) -> int:
        """How many updates of the run have been given."""
        return self._lane.run.updates

    def begin(self, update: int) -> None:
        """A run begins, at an update and on the newest weights; the one before, if there was any, is drained."""
        self._lane.begin(update)
        self._next = self._turns.first

    def give(self) -> None:
        """One more update: runs the turns that end without any other rank being given a later one."""
        self._lane.run.updates += 1
        self._run(self._turns.given(self.updates))

    def drain(self) -> None:
        """No more updates: runs the turns that are left."""
        if self.updates:
            self._run(self._turns.of(self.updates))

    def _run(self, turns: range) -> None:
        """The turns up to the end of a range of which some have been run."""
        for number in range(self._next, turns.stop, turns.step):
            self._turn(self._lane, number)
            self._next = number + turns.step
