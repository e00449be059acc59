"""The lane of a worker in a schedule with a flush: the argument of a rank's script."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from chimera_runtime.program.numbering import Micros
from chimera_runtime.program.rank_facts import Route
from chimera_runtime.program.weight_groups import Group

Load = Callable[[int, int], Any]
"""Function (update, number) that loads the input or target of a micro-batch, counted from the first of the update."""


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
        self.first = 0

    def begin(self, update: int) -> None:
        """Begins an update; the script counts micro-batches from the first one of the update."""
        self.first = update
        for stage in self._components.stages.values():
            stage.begin(update)

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

    def input(self, micros: Micros) -> Any:
        """Returns the input of a micro-batch, for stage 0; for several micro-batches, a tuple of inputs."""
        return self._loaded(self._components.load_input, micros)

    def target(self, micros: Micros) -> Any:
        """Returns the target of a micro-batch, for the loss; for several micro-batches, a tuple of targets."""
        return self._loaded(self._components.load_target, micros)

    def _loaded(self, load: Load, micros: Micros) -> Any:
        if isinstance(micros, tuple):
            return tuple([load(self.first, micro) for micro in micros])
        return load(self.first, micros)
