"""``--trace``: a lane that records what is done on it, in front of the plain one. Without the option nothing is here.

On a GPU compute and NCCL only post: what is recorded is then how long that took the host.
"""

from collections.abc import Callable, Sequence
from time import monotonic_ns as now
from typing import Any, Self

from runtime import GradientSum, Peer, Tensors, Transfer
from support import recorder as to
from support.recorder import Recorder
from support.setting import Parts


class RecordedTransfer:
    """Messages under way."""

    __slots__ = ("_recorder", "_tag", "_transfer", "_verb")

    def __init__(self, transfer: Transfer, recorder: Recorder, verb: int, tag: int) -> None:
        self._transfer = transfer
        self._recorder = recorder
        self._verb = verb
        self._tag = tag

    @property
    def tensors(self) -> Tensors:
        """What was received."""
        return self._transfer.tensors

    def wait(self) -> None:
        """Waits, and notes for how long."""
        start = now()
        self._transfer.wait()
        self._recorder.talked(self._verb, self._tag, start)


class RecordedPeer:
    """Another worker."""

    def __init__(self, peer: Peer, recorder: Recorder) -> None:
        self._peer = peer
        self._recorder = recorder

    def isend(self, tensors: Tensors, tag: int) -> RecordedTransfer:
        """Posts a message."""
        start = now()
        transfer = self._peer.isend(tensors, tag)
        self._recorder.talked(to.SEND, tag, start)
        return RecordedTransfer(transfer, self._recorder, to.WAIT_SEND, tag)

    def irecv(self, buffers: Tensors, tag: int) -> RecordedTransfer:
        """Posts the receipt of a message."""
        start = now()
        transfer = self._peer.irecv(buffers, tag)
        self._recorder.talked(to.RECV, tag, start)
        return RecordedTransfer(transfer, self._recorder, to.WAIT_RECV, tag)


class RecordedSum:
    """A sum of gradients under way."""

    def __init__(self, gradients: GradientSum, recorder: Recorder, update: int, stage: int) -> None:
        self._gradients = gradients
        self._recorder = recorder
        self._update = update
        self._stage = stage

    def wait(self) -> None:
        """Waits, and notes for how long."""
        start = now()
        self._gradients.wait()
        self._recorder.note(to.WAIT_ALL_REDUCE, self._update, self._stage, start)


class RecordedStage:
    """A stage. A micro-batch is known again in its backward by what its forward returned."""

    def __init__(self, stage: Any, recorder: Recorder, streams: bool) -> None:
        self._stage = stage
        self._recorder = recorder
        self._streams = streams
        self._micros: dict[int, int] = {}
        self._sums = 0
        self.inputs = stage.inputs
        self.gradients = stage.gradients

    def begin(self, update: int) -> None:
        """From now on micro-batches are counted from the first of an update; what is recorded is written before."""
        self._recorder.spill()
        self._recorder.first = update
        self._stage.begin(update)

    def at(self, version: int) -> Self:
        """The stage with a version of its weights."""
        self._stage.at(version)
        return self

    def stash(self, version: int) -> None:
        """Keeps the newest weights."""
        start = now()
        self._stage.stash(version)
        self._recorder.note(to.STASH, version, self._versioned(version), start)

    def drop(self, version: int) -> None:
        """Lets a stashed version go."""
        start = now()
        self._stage.drop(version)
        self._recorder.note(to.DROP, version, self._versioned(version), start)

    def _versioned(self, version: int) -> int:
        return version * self._recorder.stages + int(self._stage.number)

    def forward(self, micro: int, inputs: Any) -> Any:
        """A forward."""
        start = now()
        return self._forward(micro, start, self._stage.forward(micro, inputs))

    def forward_loss(self, micro: int, inputs: Any, target: Any) -> Any:
        """A forward of the last stage."""
        start = now()
        return self._forward(micro, start, self._stage.forward_loss(micro, inputs, target))

    def forward_keep_input(self, micro: int, inputs: Any) -> Any:
        """A forward that keeps its input."""
        start = now()
        state, outputs = self._stage.forward_keep_input(micro, inputs)
        return self._forward(micro, start, state), outputs

    def forward_loss_keep_input(self, micro: int, inputs: Any, target: Any) -> Any:
        """A forward of the last stage that keeps its input."""
        start = now()
        return self._forward(micro, start, self._stage.forward_loss_keep_input(micro, inputs, target))

    def forward_keep_inputs(self, micros: Sequence[int], inputs: Any) -> Any:
        """A forward over several micro-batches, noted as one over the first."""
        start = now()
        states, outputs = self._stage.forward_keep_inputs(micros, inputs)
        return self._forwards(micros, start, states), outputs

    def forward_loss_keep_inputs(self, micros: Sequence[int], inputs: Any, targets: Sequence[Any]) -> Any:
        """The same of the last stage."""
        start = now()
        return self._forwards(micros, start, self._stage.forward_loss_keep_inputs(micros, inputs, targets))

    def _forward(self, micro: int, start: int, state: Any) -> Any:
        self._recorder.ran(to.FORWARD, micro, self._stage.number, start)
        self._micros[id(state)] = micro
        return state

    def _forwards(self, micros: Sequence[int], start: int, states: Any) -> Any:
        self._recorder.ran(to.FORWARD, micros[0], self._stage.number, start)
        self._micros |= {id(state): micro for micro, state in zip(micros, states, strict=True)}
        return states

    def backward(self, state: Any, gradients: Tensors) -> Any:
        """A backward."""
        start = now()
        return self._backward(state, start, self._stage.backward(state, gradients))

    def backward_recompute(self, state: Any, gradients: Tensors) -> Any:
        """A backward that runs the forward again."""
        start = now()
        return self._backward(state, start, self._stage.backward_recompute(state, gradients))

    def backward_loss(self, state: Any) -> Any:
        """A backward of the last stage."""
        start = now()
        return self._backward(state, start, self._stage.backward_loss(state))

    def backward_loss_recompute(self, state: Any) -> Any:
        """A backward of the last stage that runs the forward again."""
        start = now()
        return self._backward(state, start, self._stage.backward_loss_recompute(state))

    def _backward(self, state: Any, start: int, gradients: Any) -> Any:
        self._recorder.ran(to.BACKWARD, self._micros.pop(id(state)), self._stage.number, start)
        return gradients

    def all_reduce(self) -> RecordedSum:
        """Launches the sum of the gradients."""
        start = now()
        gradients = self._stage.all_reduce()
        self._recorder.note(to.ALL_REDUCE, self._sums, self._stage.number, start)
        self._sums += 1
        return RecordedSum(gradients, self._recorder, self._sums - 1, self._stage.number)

    def step(self) -> None:
        """The optimizer's step. Where updates overlap, what is recorded is written after one."""
        start = now()
        self._stage.step()
        self._recorder.note(to.STEP, self._stage.updates - 1, self._stage.number, start)
        if self._streams:
            self._recorder.spill()


def recorded(parts: Parts, recorder: Recorder, streams: bool) -> Parts:
    """What a lane is made of, every call timed; ``streams`` if updates overlap."""
    stages, peers, load_input, load_target = parts
    return (
        {number: RecordedStage(stage, recorder, streams) for number, stage in stages.items()},
        {worker: RecordedPeer(peer, recorder) for worker, peer in peers.items()},
        _loading(to.LOAD_INPUT, load_input, recorder),
        _loading(to.LOAD_TARGET, load_target, recorder),
    )


def _loading(verb: int, load: Callable[[int, int], Any], recorder: Recorder) -> Callable[[int, int], Any]:
    def timed(update: int, micro: int) -> Any:
        start = now()
        loaded = load(update, micro)
        recorder.note(verb, recorder.update_of(micro), micro, start)
        return loaded

    return timed
