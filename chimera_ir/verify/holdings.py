"""The holdings of a worker, that is how much it keeps of each stage; bytes follow from them and a profile.

The rule "memory" adds up over stages, in M_a and M_theta, which is enough if all stages are equal. If they are not, the
memory depends on which stages' activations are alive at the same time.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import product
from operator import ge, itemgetter
from typing import NamedTuple, TypeVar

from chimera_ir.flow.live import changes, highest_by_key
from chimera_ir.ir.ids import Slot, Stage, WeightGroup
from chimera_ir.ir.kinds import Counted
from chimera_ir.ir.levels import Header, LaneParts, Program
from chimera_ir.ir.ops import Compute, Crossing, Recv, singles
from chimera_ir.verify.copies import copy_peaks


class Kept(NamedTuple):
    """Numbers of micro-batches of which a stage keeps something, in the header's micro-batches (a half counts as one).

    ``activations`` counts micro-batches whose activations the stage keeps, ``inputs`` those of which it keeps the input
    alone, and ``begun`` those between the two halves of a split backward. During a backward that runs the forward
    again, its micro-batches count in ``activations`` and in ``inputs``.
    """

    stage: Stage
    activations: int
    inputs: int
    begun: int


class OnHost(NamedTuple):
    """The number of micro-batches of which a stage keeps the activations in the memory of the worker's host."""

    stage: Stage
    activations: int


Moment = tuple[Kept, ...]
"""The activations alive at once: an entry for each stage that a worker holds, ascending."""

_UNITS = (Counted.ACTIVATIONS, Counted.INPUT, Counted.OPERANDS)
"""The units of the numbers of a `Kept`, in their order."""

_Counts = tuple[int, ...]
"""The numbers of a moment: those of all stages in the first unit, then in the next one, and so on."""

Entry = TypeVar("Entry", Kept, OnHost)


class Sending(NamedTuple):
    """The most micro-batches whose messages over an edge are on their way to another worker at once."""

    edge: Crossing
    micros: int


class Receiving(NamedTuple):
    """The buffers for messages that cross an edge: for each slot the most micro-batches of a message in it."""

    edge: Crossing
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Holdings:
    """The memory that a worker uses, as numbers of micro-batches and of copies of weights.

    Attributes
    ----------
    fullest
        The moments that no other moment exceeds in every number.
    on_host
        The moments in host memory that no other exceeds in every number; none if nothing is ever there.
    copies
        For each stage the copies of its weights, the newest included.
    tied
        For each tie the copies of the parameters that its stages share.
    sending
        For each edge the most micro-batches on their way at once.
    receiving
        The receive buffers.
    """

    fullest: tuple[Moment, ...]
    on_host: tuple[tuple[OnHost, ...], ...]
    copies: tuple[tuple[Stage, int], ...]
    tied: tuple[tuple[WeightGroup, int], ...]
    sending: tuple[Sending, ...]
    receiving: tuple[Receiving, ...]


def holdings(program: Program) -> Iterator[Holdings]:
    """The holdings of each worker of a program without errors."""
    header = program.header
    for stages, groups, parts in zip(header.stages_of, header.groups_of, program.parts, strict=True):
        peaks = copy_peaks(parts)
        copies = [(group, peaks[group].copies if group in peaks else 1) for group in groups]
        yield Holdings(
            fullest=fullest(header, stages, singles(parts.computes.lines)),
            on_host=on_host(header, stages, singles(parts.computes.lines)),
            copies=tuple((group[0], count) for group, count in copies if len(group) == 1),
            tied=tuple((group, count) for group, count in copies if len(group) > 1),
            sending=sending(_under_way(parts)),
            receiving=_receiving(parts.recvs.lines),
        )


def fullest(header: Header, stages: Sequence[Stage], lane: Iterable[Compute]) -> tuple[Moment, ...]:
    """The fullest moments (see `Holdings`) of a worker that holds ``stages``; ``lane`` are its compute operations."""
    return _not_exceeded(Kept, stages, _moments(header, stages, lane, _UNITS))


def on_host(header: Header, stages: Sequence[Stage], lane: Iterable[Compute]) -> tuple[tuple[OnHost, ...], ...]:
    """The fullest moments in the memory of the host of a worker that holds ``stages``; arguments as in `fullest`."""
    return _not_exceeded(OnHost, stages, _moments(header, stages, lane, (Counted.HOST,)))


def sending(changes: Iterable[tuple[Crossing, int]]) -> tuple[Sending, ...]:
    """The most micro-batches on their way over each edge at once.

    ``changes`` are, in the order of time, an edge and how many more micro-batches (or fewer, if negative) are on it.
    """
    return tuple(Sending(edge, peak.amount) for edge, peak in highest_by_key(changes).items())


def _moments(
    header: Header, stages: Sequence[Stage], lane: Iterable[Compute], units: Sequence[Counted]
) -> Iterator[_Counts]:
    """Yields what is kept before anything is freed, if anything was added since the last moment; equal ones once."""
    places = {key: place for place, key in enumerate(product(units, stages))}
    counts, yielded, grown = [0] * len(places), set[_Counts](), False
    for operation, unit, amount in changes(header, lane, units):
        if amount < 0 and grown and (moment := tuple(counts)) not in yielded:
            yielded.add(moment)
            yield moment
        grown = amount > 0
        counts[places[unit, operation.stage]] += amount


def _not_exceeded(
    entry: type[Entry], stages: Sequence[Stage], moments: Iterable[_Counts]
) -> tuple[tuple[Entry, ...], ...]:
    """The moments that no other moment exceeds in every number, each once, in the order of their numbers."""
    front: list[_Counts] = []
    for moment in moments:
        if any(_covers(other, moment) for other in front):
            continue
        front = [other for other in front if not _covers(moment, other)]
        front.append(moment)
    starts = range(0, len(entry._fields[1:]) * len(stages), len(stages) or 1)
    return tuple(
        sorted(
            tuple(map(entry, stages, *(counts[start : start + len(stages)] for start in starts))) for counts in front
        )
    )


def _covers(larger: _Counts, smaller: _Counts) -> bool:
    return all(map(ge, larger, smaller))


def _under_way(parts: LaneParts) -> Iterator[tuple[Crossing, int]]:
    posted = ((place, send.message, 1) for place, send in parts.sends)
    waited_for = ((place, wait.message, -1) for place, wait in parts.wait_sends)
    for _, message, sign in merge(posted, waited_for, key=itemgetter(0)):
        yield message.edge, sign * len(message.micros)


def _receiving(receives: Iterable[Recv]) -> tuple[Receiving, ...]:
    """The receive buffers of a lane, by edge and, for each, in the order of the slots."""
    rooms: dict[Crossing, dict[Slot, int]] = defaultdict(lambda: defaultdict(int))
    for receive in receives:
        slots = rooms[receive.message.edge]
        slots[receive.slot] = max(slots[receive.slot], len(receive.message.micros))
    return tuple(Receiving(edge, tuple(slots[slot] for slot in sorted(slots))) for edge, slots in rooms.items())
