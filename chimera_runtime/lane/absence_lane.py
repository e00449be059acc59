"""The lane of a program whose micro-batches may lack stages because of their data.

The script has the lines of the whole program. In an update in which a micro-batch lacks a stage, the lines about it do
nothing, nor do those about messages from the stage or to it: the ranks at both ends know that.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from chimera_runtime.lane.lane import Lane, LaneComponents
from chimera_runtime.program.absence import Absence
from chimera_runtime.program.numbering import Micros
from chimera_runtime.program.operations import MOVES, OPERATIONS, PAIRED
from chimera_runtime.program.rank_facts import VALUES, Route

_ON_MICROS = (
    *OPERATIONS.values(),
    *(call for method in MOVES.values() for call in (method, f"wait_{method}")),
    *(value.made for value in VALUES.values()),
    *("isend", "irecv", "wait", "take"),
)
"""Methods of stages and links whose first argument are micro-batches."""

_LATE = ("wait_all_reduce", "step")
"""Methods of weight groups that need the count of all losses."""


class PartAtTimes:
    """A stage, a tie or a link whose calls about micro-batches of which ``has`` is false do nothing, while some lack
    something; else its methods are those of ``part``. Calls that need the count of all losses wait in ``late``, if it
    is given, until the end of an update in which something lacks.
    """

    def __init__(
        self, part: Any, has: Callable[[Micros], bool], absence: Absence, late: list[Callable[[], None]] | None
    ) -> None:
        self.part = part
        self.has = has
        self._absence = absence
        present = {name for name in dir(part) if not name.startswith("_")}
        self._guards: dict[str, Callable[..., Any]] = {
            name: partial(self._call, name) for name in _ON_MICROS if name in present
        }
        if PAIRED in present:
            self._guards[PAIRED] = self._pair
        self._late = {
            name: partial(self._put_off, late, name) for name in _LATE if name in present and late is not None
        }
        vars(self).update(self._guards | self._late)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the part that is not about micro-batches."""
        return getattr(self.part, name)

    def __dir__(self) -> Sequence[str]:
        return dir(self.part)

    def switch(self) -> None:
        """Takes the methods of the part itself, unless something lacks in the update that begins."""
        for guards, is_used in ((self._guards, bool(self._absence.by_data)), (self._late, self._absence.is_felt)):
            vars(self).update(guards if is_used else {name: getattr(self.part, name) for name in guards})

    def _call(self, name: str, micros: Micros, *values: Any, **slot: int) -> Any:
        return getattr(self.part, name)(micros, *values, **slot) if self.has(micros) else ()

    def _put_off(self, late: list[Callable[[], None]], name: str) -> None:
        call = getattr(self.part, name)
        if self._absence.is_felt:
            late.append(call)
        else:
            call()

    def _pair(self, forward: tuple[Any, ...], other: "PartAtTimes", backward: tuple[Any, ...]) -> None:
        """Runs a pair, or the one of both operations whose micro-batch has its stage."""
        if self.has(forward[0]) and other.has(backward[0]):
            self.part.pair(forward, other.part, backward)
            return
        self.forward(*forward)
        other.backward(*backward)


def at_times(components: LaneComponents, absence: Absence, *, counted: bool) -> LaneComponents:
    """Returns components for an `AbsenceLane`, whose calls about what a micro-batch lacks do nothing. If losses are
    ``counted``, gradients are divided by the counts of all of them, also of those that do not reach a stage.
    """

    def wrapped(part: Any, has: Callable[[Micros], bool]) -> PartAtTimes:
        part_at_times = PartAtTimes(part, has, absence, absence.late if counted else None)
        absence.parts.append(part_at_times)
        return part_at_times

    def of(route: Route) -> Callable[[Micros], bool]:
        return lambda micros: absence.is_sent(micros, route)

    return components._replace(
        stages={n: wrapped(stage, partial(absence.has, stage=n)) for n, stage in components.stages.items()},
        incoming={route: wrapped(link, of(route)) for route, link in components.incoming.items()},
        outgoing={route: wrapped(link, of(route)) for route, link in components.outgoing.items()},
        ties={group: wrapped(tie, lambda _micros: True) for group, tie in components.ties.items()},
    )


class AbsenceLane(Lane):
    """The lane of a program whose micro-batches may lack stages, over components of `at_times`, which a tool may have
    wrapped since. If losses are counted, ``total`` adds up a number over all ranks: then sums of gradients are waited
    for when all losses are computed.
    """

    def __init__(
        self, components: LaneComponents, absence: Absence, total: Callable[[float], float] | None = None
    ) -> None:
        super().__init__(components)
        self._absence, self._total = absence, total
        self._is_last_round = True

    def begin(self, update: int) -> None:
        """Begins an update, as `Lane.begin`."""
        for part in self._absence.parts:
            part.switch()
        super().begin(update)

    def begin_round(self, start: int, is_last: bool) -> None:
        """Begins a round of an update, as `Lane.begin_round`."""
        super().begin_round(start, is_last)
        self._absence.start, self._is_last_round = start, is_last

    def end(self) -> None:
        """Ends a round: after the last one waits for the sums of gradients, which are divided by the sum of counts."""
        absence = self._absence
        if not self._is_last_round:
            absence.late.clear()
            return
        counts, absence.counts = absence.counts, []
        if self._total is not None and absence.is_felt:
            absence.count = self._total(float(sum(map(float, counts))))
            for call in absence.late:
                call()
            absence.late.clear()
