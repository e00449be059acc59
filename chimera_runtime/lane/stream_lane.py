"""The lane of a stream, a schedule without a flush.

The script of a stream has the lines of one turn of the steady state. In the first and last turns of a run, some lines
name micro-batches or versions of weights that are not in the run: the calls of these lines do nothing. So the same
lines also make the warm-up and the drain.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from chimera_runtime.lane.lane import Lane, LaneComponents
from chimera_runtime.program.numbering import Micros
from chimera_runtime.program.operations import MOVES, OPERATIONS
from chimera_runtime.program.rank_facts import VALUES, Group, Turns


@dataclass
class UpdateRange:
    """A run of a stream so far: the number of ``updates`` started, each with ``per_update`` micro-batches."""

    per_update: int
    updates: int = 0

    def has(self, micros: Micros) -> bool:
        """Whether the micro-batches of an operation are in the run; either all of them are, or none."""
        first = micros[0] if isinstance(micros, tuple) else micros
        return 0 <= first < self.updates * self.per_update

    def makes(self, version: int) -> bool:
        """Whether the step that makes this version of the weights is in the run; no step makes version 0."""
        return 0 < version <= self.updates


class StreamWeights:
    """The weights of a stage or a tie in a run of a stream: calls for versions that no update of it makes do nothing.

    The first micro-batches would read versions below 0, and read the initial weights instead. So the call that stashes
    version ``stashed`` keeps version 0, and the call that drops version ``dropped`` frees it; both numbers are 0 or
    less.
    """

    def __init__(self, weights: Any, run: UpdateRange, stashed: int, dropped: int) -> None:
        self._weights = weights
        self._run = run
        self._stashed = stashed
        self._dropped = dropped
        for method in ("all_reduce", "wait_all_reduce", "step"):
            setattr(self, method, partial(self._make, method))

    def _make(self, method: str, version: int) -> None:
        """Calls ``method`` (launch of a sum, wait for it, step) if the step that makes ``version`` is in the run."""
        if self._run.makes(version):
            getattr(self._weights, method)()

    def stash(self, version: int) -> None:
        """Keeps the newest weights; those of the last version of a run are not kept, as no step follows."""
        if version == self._stashed or 0 < version < self._run.updates:
            self._weights.stash(max(0, version))

    def drop(self, version: int) -> None:
        """Frees a version that `stash` kept."""
        if version == self._dropped or 0 < version < self._run.updates:
            self._weights.drop(max(0, version))


class StreamStage(StreamWeights):
    """A stage in a run. Calls with micro-batches or versions that are not in the run do nothing."""

    def __init__(self, stage: Any, run: UpdateRange, stashed: int, dropped: int) -> None:
        super().__init__(stage, run, stashed, dropped)
        self._stage = stage
        self._version = 0
        for method in OPERATIONS.values():
            setattr(self, method, partial(self._operate, method))
        moves = (call for method in MOVES.values() for call in (method, f"wait_{method}"))
        for method in (*moves, *(value.made for value in VALUES.values())):
            setattr(self, method, partial(self._call, method))

    def _operate(self, method: str, micros: Micros, *values: Any) -> None:
        """Runs an operation with the version of the weights that `at` has chosen, if the run has its micro-batches."""
        if self._run.has(micros):
            getattr(self._stage.at(self._version), method)(micros, *values)

    def _call(self, method: str, micros: Micros, *reader: int) -> Any:
        """Calls a method that reads no weights; returns no tensors for micro-batches outside the run."""
        return getattr(self._stage, method)(micros, *reader) if self._run.has(micros) else ()

    def begin(self, update: int) -> None:
        """Begins a run: its micro-batches are counted from the first one of ``update``."""
        self._stage.begin(update)

    def at(self, version: int) -> Self:
        """Chooses the version of the weights for the next operation; negative versions are version 0."""
        self._version = max(0, version)
        return self


class StreamLink:
    """An `Incoming` or `Outgoing` link; its calls do nothing for micro-batches of which ``is_run`` is false."""

    def __init__(self, link: Any, is_run: Callable[[Micros], bool]) -> None:
        self._is_run = is_run
        for method in ("isend", "irecv", "wait", "take"):
            if hasattr(link, method):
                setattr(self, method, partial(self._call, getattr(link, method)))

    def _call(self, method: Callable[..., Any], micros: Micros, *values: Any, **slot: int) -> Any:
        """Returns what a method of the link returns; no tensors for micro-batches that are not run."""
        return method(micros, *values, **slot) if self._is_run(micros) else ()


class StreamLane(Lane):
    """The lane of a stream: calls about micro-batches or versions that are not of the updates in ``run`` do nothing.

    ``run`` counts the updates started since `begin`; `Driver` adds to it. ``initial`` has for each weight group the
    pair (``stashed``, ``dropped``) of `StreamWeights`.
    """

    def __init__(self, components: LaneComponents, run: UpdateRange, initial: Mapping[Group, tuple[int, int]]) -> None:
        stages, incoming, outgoing, load_input, load_target, ties = components
        super().__init__(
            LaneComponents(
                stages={number: StreamStage(stage, run, *initial[number,]) for number, stage in stages.items()},
                incoming={route: StreamLink(link, run.has) for route, link in incoming.items()},
                outgoing={route: StreamLink(link, run.has) for route, link in outgoing.items()},
                load_input=lambda first, micro, *stage: load_input(first, micro, *stage) if run.has(micro) else None,
                load_target=lambda first, micro, *stage: load_target(first, micro, *stage) if run.has(micro) else None,
                ties={group: StreamWeights(tie, run, *initial[group]) for group, tie in ties.items()},
            )
        )
        self.run = run

    def begin(self, update: int) -> None:
        """Begins a run that has no updates yet; micro-batches and versions are counted from ``update`` on."""
        super().begin(update)
        self.run.updates = 0


class Driver:
    """Runs a stream whose updates are added one by one; a turn runs as soon as all updates that it needs are there.

    After n updates and a drain, the same calls were made in the same order as by a loop over all turns of n updates.
    """

    def __init__(self, turn: Callable[[Lane, int], None], lane: StreamLane, turns: Turns) -> None:
        self._turn = turn
        self._lane = lane
        self._turns = turns
        self._next = turns.first

    @property
    def updates(self) -> int:
        """Number of updates of the run so far."""
        return self._lane.run.updates

    def begin(self, update: int) -> None:
        """Begins a run at an update, on the newest weights; an earlier run must have been drained."""
        self._lane.begin(update)
        self._next = self._turns.first

    def add_update(self) -> None:
        """Adds an update to the run, and runs all turns that can run to their end without a later update."""
        self._lane.run.updates += 1
        self._run(self._turns.safe(self.updates))

    def drain(self) -> None:
        """Ends the run: runs the turns that are left."""
        if self.updates:
            self._run(self._turns.of(self.updates))

    def _run(self, turns: range) -> None:
        for number in range(self._next, turns.stop, turns.step):
            self._turn(self._lane, number)
            self._next = number + turns.step
