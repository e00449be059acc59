"""``--trace``: wrappers of the parts of a lane, which record the begin and the end of each call.

On a GPU calls only put work into a CUDA stream; the times are then those of events in the stream (`event_clock`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Self

from chimera_runtime.program.numbering import Micros
from chimera_runtime.program.operations import OPERATIONS
from chimera_runtime.ranks.messages import MessageTransfer, Peer
from chimera_runtime.start.lane_components import LaneComponents
from chimera_runtime.tools.record import recorder as to
from chimera_runtime.tools.record.recorder import Recorder
from chimera_runtime.values.tensors import Tensors


class TracedTransfer:
    """Message under way; records the wait for it."""

    __slots__ = ("_recorder", "_tag", "_transfer", "_verb")

    def __init__(self, transfer: MessageTransfer, recorder: Recorder, verb: int, tag: int) -> None:
        self._transfer = transfer
        self._recorder = recorder
        self._verb = verb
        self._tag = tag

    @property
    def tensors(self) -> Tensors:
        """The buffers of the message, as of `MessageTransfer`."""
        return self._transfer.tensors

    def wait(self) -> None:
        """Waits for the message, and records that."""
        start = self._recorder.now()
        self._transfer.wait()
        self._recorder.message(self._verb, self._tag, start)


class TracedPeer:
    """Another worker; records when messages to and from it are posted."""

    def __init__(self, peer: Peer, recorder: Recorder) -> None:
        self._peer = peer
        self._recorder = recorder

    def isend(self, tensors: Tensors, tag: int) -> TracedTransfer:
        """Posts a message like `Peer.isend`."""
        start = self._recorder.now()
        transfer = self._peer.isend(tensors, tag)
        self._recorder.message(to.SEND, tag, start)
        return TracedTransfer(transfer, self._recorder, to.WAIT_SEND, tag)

    def irecv(self, buffers: Tensors, tag: int) -> TracedTransfer:
        """Posts the receipt of a message."""
        start = self._recorder.now()
        transfer = self._peer.irecv(buffers, tag)
        self._recorder.message(to.RECV, tag, start)
        return TracedTransfer(transfer, self._recorder, to.WAIT_RECV, tag)


class TracedWeights:
    """Weights of a stage or a tie; records calls, with the number of the weight group."""

    def __init__(self, weights: Any, recorder: Recorder, streams: bool, group: int) -> None:
        self._weights = weights
        self._recorder = recorder
        self._streams = streams
        self._group = group
        self._sums = 0

    def stash(self, version: int) -> None:
        """Keeps the newest weights."""
        self._of_version(to.STASH, self._weights.stash, version)

    def drop(self, version: int) -> None:
        """Releases a stashed version."""
        self._of_version(to.DROP, self._weights.drop, version)

    def _of_version(self, verb: int, call: Callable[[int], None], version: int) -> None:
        start = self._recorder.now()
        call(version)
        self._recorder.note(verb, version, version * self._recorder.groups + self._group, start)

    def all_reduce(self) -> None:
        """Launches the sum of the gradients."""
        start = self._recorder.now()
        self._weights.all_reduce()
        self._recorder.note(to.ALL_REDUCE, self._sums, self._group, start)
        self._sums += 1

    def wait_all_reduce(self) -> None:
        """Waits for the sum of the gradients."""
        start = self._recorder.now()
        self._weights.wait_all_reduce()
        self._recorder.note(to.WAIT_ALL_REDUCE, self._sums - 1, self._group, start)

    def step(self) -> None:
        """Steps the optimizer. If updates overlap, writes the records afterwards."""
        start = self._recorder.now()
        self._weights.step()
        self._recorder.note(to.STEP, self._weights.updates - 1, self._group, start)
        if self._streams:
            self._recorder.spill()


class TracedStage(TracedWeights):
    """Stage that records the begin and the end of its operations."""

    def __init__(self, stage: Any, recorder: Recorder, streams: bool) -> None:
        super().__init__(stage, recorder, streams, int(stage.number))
        self._stage = stage
        self.inputs = stage.inputs
        self.gradients = stage.gradients
        self.outputs = stage.outputs
        self.input_gradients = stage.input_gradients
        for letter, method in OPERATIONS.items():
            setattr(self, method, partial(self._run, to.VERB_OF[letter], getattr(stage, method)))

    def _run(self, verb: int, method: Callable[..., None], micros: Micros, *values: Any) -> None:
        """Runs an operation; one over several micro-batches is recorded as one over the first."""
        start = self._recorder.now()
        method(micros, *values)
        self._recorder.ran(verb, micros, self._stage.number, start)

    def begin(self, update: int) -> None:
        """Begins an update, whose first micro-batch has number 0; before that, writes the records."""
        self._recorder.spill()
        self._recorder.first = update
        self._stage.begin(update)

    def at(self, version: int) -> Self:
        """The stage with a version of its weights."""
        self._stage.at(version)
        return self

    def pair(self, forward: tuple[Any, ...], other: Self, backward: tuple[Any, ...]) -> None:
        """Runs a forward, and a backward of this or another stage, recorded as one operation."""
        start = self._recorder.now()
        self._stage.pair(forward, other._stage, backward)
        self._recorder.ran_pair(forward[0], self._stage.number, backward[0], other._stage.number, start)


def traced(parts: LaneComponents, recorder: Recorder, streams: bool) -> LaneComponents:
    """Wraps the components of a lane to record every call; ``streams`` says that the schedule has no flush."""
    stages, peers, load_input, load_target, ties = parts
    return LaneComponents(
        {number: TracedStage(stage, recorder, streams) for number, stage in stages.items()},
        {worker: TracedPeer(peer, recorder) for worker, peer in peers.items()},
        _loading(to.LOAD_INPUT, load_input, recorder),
        _loading(to.LOAD_TARGET, load_target, recorder),
        {group: TracedWeights(tie, recorder, streams, recorder.number_of(group)) for group, tie in ties.items()},
    )


def _loading(verb: int, load: Callable[[int, int], Any], recorder: Recorder) -> Callable[[int, int], Any]:
    def timed(update: int, micro: int) -> Any:
        start = recorder.now()
        loaded = load(update, micro)
        recorder.note(verb, recorder.update_of(micro), micro, start)
        return loaded

    return timed
