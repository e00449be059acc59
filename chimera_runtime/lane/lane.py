"""The lane of a worker in a schedule with a flush: the argument of a rank's script."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from chimera_runtime.program.numbering import Micros
from chimera_runtime.program.rank_facts import Route

Load = Callable[[int, int], Any]
"""Loads a micro-batch, counted from the first of an update."""


class Lane:
    """A worker's stages, ties and links, and the micro-batches of an update.

    Links are known by the stage that sends, the stage that receives, and the other worker.
    """

    def __init__(
        self,
        stages: Mapping[int, Any],
        incoming: Mapping[Route, Any],
        outgoing: Mapping[Route, Any],
        load_input: Load,
        load_target: Load,
        ties: Mapping[tuple[int, ...], Any] = MappingProxyType({}),
    ) -> None:
        self._stages = stages
        self._incoming = incoming
        self._outgoing = outgoing
        self._load_input = load_input
        self._load_target = load_target
        self._ties = ties
        self._first = 0

    def begin(self, update: int) -> None:
        """Begins an update, from whose first micro-batch a script counts."""
        self._first = update
        for stage in self._stages.values():
            stage.begin(update)

    def stage(self, number: int) -> Any:
        """A stage that this worker holds."""
        return self._stages[number]

    def tie(self, *stages: int) -> Any:
        """The weight group of the parameters that some stages share."""
        return self._ties[stages]

    def incoming(self, source: int, target: int, worker: int) -> Any:
        """The link on which a stage of this worker receives from a stage of another one."""
        return self._incoming[source, target, worker]

    def outgoing(self, source: int, target: int, worker: int) -> Any:
        """The link on which a stage of this worker sends to a stage of another one."""
        return self._outgoing[source, target, worker]

    def input(self, micros: Micros) -> Any:
        """The inputs of a micro-batch, for stage 0; of several a tuple."""
        return self._loaded(self._load_input, micros)

    def target(self, micros: Micros) -> Any:
        """The targets of a micro-batch, for the loss; of several a tuple."""
        return self._loaded(self._load_target, micros)

    def _loaded(self, load: Load, micros: Micros) -> Any:
        if isinstance(micros, tuple):
            return tuple([load(self._first, micro) for micro in micros])
        return load(self._first, micros)
