"""The links of a worker: each sends, or receives, the messages with one value from one stage to another."""

from typing import Any

from chimera_runtime.errors.values import memory_was_written
from chimera_runtime.program.job import Job
from chimera_runtime.program.numbering import Micros
from chimera_runtime.program.rank_facts import Route
from chimera_runtime.program.stage_graph import VALUES
from chimera_runtime.ranks.messages import tag_of
from chimera_runtime.values.shared_memory import Slots, versions
from chimera_runtime.values.tensors import Tensors, part


class _MessageLink:
    """A link on which a value of one stage goes to a stage on another worker, in messages.

    A message is known by its micro-batches.
    """

    def __init__(self, peer: Any, route: Route, job: Job) -> None:
        self._peer = peer
        self._route = route
        self._value = job.value_of(route)
        self._stages = job.stages
        self._under_way: dict[Micros, Any] = {}

    def _tag(self, micros: Micros) -> int:
        return tag_of(micros, self._route.source, self._value, self._stages)


class Outgoing(_MessageLink):
    """Link on which a stage of this worker sends messages."""

    def isend(self, micros: Micros, tensors: Tensors) -> None:
        """Posts the sending of a message; keeps ``tensors`` until `wait`."""
        self._under_way[micros] = self._peer.isend(tensors, self._tag(micros)), versions(tensors)

    def wait(self, micros: Micros) -> None:
        """Returns when the peer has taken a message; errors as in `MessageTransfer.wait`.

        Raises `BadModel` if the tensors were written while the message was under way, because the peer may have got
        the old or the new values.
        """
        transfer, before = self._under_way.pop(micros)
        if versions(transfer.tensors) != before:
            verb = "handed on" if VALUES[self._value].onward else "handed back"
            raise memory_was_written(self._route.source, f"stage {self._route.target}", micros, verb)
        transfer.wait()


class Incoming(_MessageLink):
    """Link on which a stage of this worker receives messages into its buffers, the ``slots``."""

    def __init__(self, peer: Any, route: Route, job: Job, slots: Slots) -> None:
        super().__init__(peer, route, job)
        self._slots = slots

    def irecv(self, micros: Micros, into: int) -> None:
        """Posts the receive of a message into a slot."""
        self._under_way[micros] = self._peer.irecv(self._buffers(micros, into), self._tag(micros))

    def wait(self, micros: Micros) -> None:
        """Returns when a message has arrived; errors as in `MessageTransfer.wait`."""
        self._under_way[micros].wait()

    def take(self, micros: Micros) -> Tensors:
        """Returns the tensors of a message that has arrived, which lie in the slot."""
        tensors: Tensors = self._under_way.pop(micros).tensors
        return tensors

    def _buffers(self, micros: Micros, into: int) -> Tensors:
        """The part of a slot that a message with the given micro-batches needs."""
        count, first = (len(micros), micros[0]) if isinstance(micros, tuple) else (1, micros)
        buffers, room = self._slots.vacant(into, first), self._slots.rooms[into]
        return part(buffers, 0, count, room) if count < room else buffers
