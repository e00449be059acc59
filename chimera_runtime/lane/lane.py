"""The lane of a worker in a schedule with a flush: the argument of a rank's script."""

from collections.abc import Callable, Container, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from chimera_runtime.errors.stage import memory_was_written
from chimera_runtime.program.job import Job
from chimera_runtime.program.numbering import Micros
from chimera_runtime.program.rank_facts import VALUES, Group, Route
from chimera_runtime.ranks.messages import tag_of
from chimera_runtime.values.nested import Tensors, join
from chimera_runtime.values.shared_memory import VERSION, Slots, versions

# The links of a worker: each sends, or receives, the messages with one value from one stage to another.


class _MessageLink:
    """A link to a stage on another worker; a message is known by its micro-batches."""

    def __init__(self, peer: Any, route: Route, job: Job) -> None:
        self._peer = peer
        self._route = route
        self._value = job.value_of(route)
        # The tag of a message is that of micro-batch 0, and that of each later micro-batch is larger by `_step`.
        self._base = tag_of(0, route.source, route.target, self._value, job.stages)
        self._step = tag_of(1, route.source, route.target, self._value, job.stages) - self._base
        self._under_way: dict[Micros, Any] = {}


class Outgoing(_MessageLink):
    """Link on which a stage of this worker sends messages."""

    def isend(self, micros: Micros, tensors: Tensors) -> None:
        """Posts the sending of a message; keeps ``tensors`` until `wait`."""
        tag = (micros[0] if isinstance(micros, tuple) else micros) * self._step + self._base
        try:
            before = [*map(VERSION, tensors)]
        except RuntimeError:  # in an evaluation, whose tensors have no versions
            before = []
        self._under_way[micros] = self._peer.isend(tensors, tag), before

    def wait(self, micros: Micros) -> None:
        """Returns when the peer has taken a message; errors as in `MessageTransfer.wait`. Raises `BadModel` if the
        tensors were written in the meantime.
        """
        transfer, before = self._under_way.pop(micros)
        if before and [*map(VERSION, transfer.tensors)] != before:
            verb = "handed on" if VALUES[self._value].onward else "handed back"
            raise memory_was_written(self._route.source, f"stage {self._route.target}", micros, verb)
        transfer.wait()


class Incoming(_MessageLink):
    """Link on which a stage of this worker receives messages into its buffers, the ``slots``."""

    def __init__(self, peer: Any, route: Route, job: Job, slots: Slots) -> None:
        super().__init__(peer, route, job)
        self._vacant = slots.vacant

    def irecv(self, micros: Micros, into: int) -> None:
        """Posts the receive of a message into a slot."""
        tag = (micros[0] if isinstance(micros, tuple) else micros) * self._step + self._base
        self._under_way[micros] = self._peer.irecv(self._vacant(into, micros), tag)

    def wait(self, micros: Micros) -> None:
        """Returns when a message has arrived; errors as in `MessageTransfer.wait`."""
        self._under_way[micros].wait()

    def take(self, micros: Micros) -> Tensors:
        """Returns the tensors of a message that has arrived, which lie in the slot."""
        tensors: Tensors = self._under_way.pop(micros).tensors
        return tensors


class SharedIncoming:
    """An `Incoming` link whose messages several stages of this worker take: one stays until its slot is used again."""

    def __init__(self, link: Incoming, source: int) -> None:
        self._link, self._source = link, source
        self._slots: dict[Micros, int] = {}
        self._arrived: dict[Micros, tuple[Tensors, list[int]]] = {}

    def irecv(self, micros: Micros, into: int) -> None:
        """Posts the receive of a message into a slot, and forgets the one that was there."""
        for earlier in [earlier for earlier, slot in self._slots.items() if slot == into]:
            del self._slots[earlier]
            self._arrived.pop(earlier, None)
        self._slots[micros] = into
        self._link.irecv(micros, into)

    def wait(self, micros: Micros) -> None:
        """Returns when a message has arrived; errors as in `MessageTransfer.wait`."""
        self._link.wait(micros)
        tensors = self._link.take(micros)
        self._arrived[micros] = tensors, versions(tensors)

    def take(self, micros: Micros) -> Tensors:
        """Returns the tensors of a message that has arrived. Raises `BadModel` if a stage has written into them."""
        tensors, before = self._arrived[micros]
        if versions(tensors) != before:
            raise memory_was_written(self._source, "another stage", micros)
        return tensors


def shared(link: Incoming, route: Route, job: Job, stages: Container[int]) -> Incoming | SharedIncoming:
    """Returns the link itself or, if several of the ``stages`` of this worker read its messages, one for all."""
    is_onward = VALUES[job.value_of(route)].onward
    are_several = is_onward and sum(stage in stages for stage in job.fed[route.source]) > 1
    return SharedIncoming(link, route.source) if are_several else link


Load = Callable[..., Any]
"""Function (update, number) that loads the input or target of a micro-batch, counted from the first of the update.

Where several stages get an input or a target, a third argument is the number of the stage.
"""


class LaneComponents(NamedTuple):
    """Objects that a lane is made from; a tool may wrap each of them, to note its calls."""

    stages: Mapping[int, Any]
    incoming: Mapping[Route, Any]
    outgoing: Mapping[Route, Any]
    load_input: Load
    load_target: Load
    ties: Mapping[Group, Any] = MappingProxyType({})


class Lane:
    """The lane of a worker, for its script: gives the script the stages, ties and links, and inputs and targets.

    ``first`` is the update from whose first micro-batch on the script counts micro-batches.
    """

    def __init__(self, components: LaneComponents) -> None:
        self._components = components
        self._load_input, self._load_target = components.load_input, components.load_target
        self.first = 0

    def begin(self, update: int) -> None:
        """Begins an update; the script counts micro-batches from the first one of the update."""
        self.first = update
        for stage in self._components.stages.values():
            stage.begin(update)

    def begin_round(self, start: int, is_last: bool) -> None:
        """Begins a round of an update that may have several, at its micro-batch ``start``, counted in parts."""
        for group in (*self._components.stages.values(), *self._components.ties.values()):
            group.begin_round(start, is_last)

    def end(self) -> None:
        """Ends a round of an update, all of whose calls the script has made."""

    def stage(self, number: int) -> Any:
        """Returns a stage that this worker holds."""
        return self._components.stages[number]

    def tie(self, *stages: int) -> Any:
        """Returns the weight group of the parameters that the given stages share."""
        return self._components.ties[stages]

    def incoming(self, source: int, target: int, worker: int, value: str = "") -> Any:
        """Returns the link on which stage ``target`` receives a value from stage ``source`` of another worker."""
        return self._components.incoming[Route(source, target, worker, value)]

    def outgoing(self, source: int, target: int, worker: int, value: str = "") -> Any:
        """Returns the link on which stage ``source`` sends a value to stage ``target`` of another worker."""
        return self._components.outgoing[Route(source, target, worker, value)]

    def input(self, micros: Micros, *stage: int) -> Any:
        """Returns the input of a micro-batch; for several micro-batches, a tuple of inputs. If several stages get an
        input, ``stage`` says which of them.
        """
        if isinstance(micros, tuple):
            return tuple([self.input(micro, *stage) for micro in micros])
        return self._load_input(self.first, micros, *stage)

    def join(self, *messages: Tensors) -> Tensors:
        """Joins values of successive micro-batches, which were made apart and are read together, along dimension 0; in
        an evaluation those of micro-batches that have items.
        """
        return join([message for message in messages if message])

    def target(self, micros: Micros, *stage: int) -> Any:
        """Returns the target of a micro-batch, for a loss; other arguments are those of `input`."""
        if isinstance(micros, tuple):
            return tuple([self.target(micro, *stage) for micro in micros])
        return self._load_target(self.first, micros, *stage)
