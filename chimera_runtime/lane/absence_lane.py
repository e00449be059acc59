"""The lane of an update in which micro-batches lack stages because of their data.

The script has the lines of the whole program. Those about a stage that a micro-batch lacks do nothing, nor do those
about messages from such a stage or to one: the ranks at both ends know that.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from chimera_runtime.lane.lane import Lane, LaneComponents
from chimera_runtime.lane.stream_lane import StreamLink
from chimera_runtime.program.absence import Absence
from chimera_runtime.program.numbering import Micros
from chimera_runtime.program.operations import MOVES, OPERATIONS
from chimera_runtime.program.rank_facts import VALUES, Route


class PartlyAbsentStage:
    """A stage whose operations do nothing for micro-batches of which ``has`` is false; all else is as in ``stage``."""

    def __init__(self, stage: Any, has: Callable[[Micros], bool]) -> None:
        self.stage = stage
        self.has = has
        moves = (call for method in MOVES.values() for call in (method, f"wait_{method}"))
        for method in (*OPERATIONS.values(), *moves, *(value.made for value in VALUES.values())):
            setattr(self, method, partial(self._call, method))

    def __getattr__(self, name: str) -> Any:
        """What the stage has beside operations on micro-batches."""
        return getattr(self.stage, name)

    def _call(self, method: str, micros: Micros, *values: Any) -> Any:
        return getattr(self.stage, method)(micros, *values) if self.has(micros) else ()

    def pair(self, forward: tuple[Any, ...], other: "PartlyAbsentStage", backward: tuple[Any, ...]) -> None:
        """Runs a pair, or the one of both operations whose micro-batch has its stage."""
        if self.has(forward[0]) and other.has(backward[0]):
            self.stage.pair(forward, other.stage, backward)
            return
        self.forward(*forward)
        other.backward(*backward)


class LateGroup:
    """A stage or a tie whose sums are waited for, and whose steps are made, when the update has ended: it puts these
    calls into ``late``.
    """

    def __init__(self, group: Any, late: list[Callable[[], None]]) -> None:
        self.group = group
        self.wait_all_reduce = partial(late.append, lambda: group.wait_all_reduce())
        self.step = partial(late.append, lambda: group.step())

    def __getattr__(self, name: str) -> Any:
        """What the group has beside."""
        return getattr(self.group, name)


class AbsenceLane(Lane):
    """The lane of a program whose micro-batches may lack stages; where all have all, it is a plain `Lane`.

    With ``total``, which adds up a number over all ranks, a gradient is divided by the counts of all losses of an
    update, also of those that do not reach its stage: then sums are waited for when all losses are computed.
    """

    def __init__(
        self, components: LaneComponents, absence: Absence, total: Callable[[float], float] | None = None
    ) -> None:
        self._absence, self._total = absence, total
        self._late = list[Callable[[], None]]()
        self._plain = components
        if total is not None:
            late = self._late
            stages, ties = components.stages, components.ties
            components = components._replace(
                stages={number: LateGroup(stage, late) for number, stage in stages.items()},
                ties={group: LateGroup(tie, late) for group, tie in ties.items()},
            )
        super().__init__(components)
        has = absence.has

        def link_of(route: Route, link: Any) -> StreamLink:
            return StreamLink(link, lambda micros: has(micros, route.source) and has(micros, route.target))

        self._whole = components
        self._partly = components._replace(
            stages={
                number: PartlyAbsentStage(stage, partial(has, stage=number))
                for number, stage in components.stages.items()
            },
            incoming={route: link_of(route, link) for route, link in components.incoming.items()},
            outgoing={route: link_of(route, link) for route, link in components.outgoing.items()},
        )

    def begin(self, update: int) -> None:
        """Begins an update, as `Lane.begin`."""
        super().begin(update)
        self._components = self._partly if self._absence.by_data else self._whole
        self._components = self._components if self._absence.is_felt else self._plain

    def end(self) -> None:
        """Ends an update: waits for the sums of gradients, which are divided by the sum of all counts."""
        counts, self._absence.counts = self._absence.counts, []
        if self._total is not None and self._absence.is_felt:
            self._absence.count = self._total(float(sum(map(float, counts))))
            for call in self._late:
                call()
            self._late.clear()
