"""Counts what a worker keeps of its stages at its fullest moments; with a profile, bytes follow from these numbers.

The rule "memory" adds up over stages, in M_a and M_theta, which is enough if all stages are equal. If they are not,
memory depends on which stages' activations are kept at the same time.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import merge
from itertools import product
from math import gcd
from operator import ge, itemgetter
from typing import NamedTuple, TypeVar

from chimera_ir.flow.host_moves import MoveStep
from chimera_ir.flow.live import changes, highest_by_key, repeated
from chimera_ir.ir.ids import Stage, WeightGroup
from chimera_ir.ir.kinds import ON_HOST_UNITS, Counted
from chimera_ir.ir.lane_parts import LaneParts, parts_of
from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.ops import Crossing, Drop, Recv, Stash
from chimera_ir.ir.streams import ProgramStream
from chimera_ir.ir.turns import Ring


class Kept(NamedTuple):
    """Numbers of micro-batches of which ``stage`` keeps something at one moment; a half or a slice counts as one.

    ``activations`` counts micro-batches of which the stage keeps the activations, ``inputs`` those of which it keeps
    the input alone, and ``begun`` those between the two halves of a split backward. A micro-batch whose forward is run
    again counts in both ``activations`` and ``inputs`` until its backward ends. ``carries`` counts slices whose carry
    is kept, and ``carry_gradients`` carries whose gradient waits for the backward of their slice. ``on_host`` counts
    micro-batches whose activations are on the host, or on their way there or back, and ``operands_on_host`` those whose
    operands, which the second half of a split backward needs, are there or on their way.
    """

    stage: Stage
    activations: int
    inputs: int
    begun: int
    carries: int = 0
    carry_gradients: int = 0
    on_host: int = 0
    operands_on_host: int = 0


class OnHost(NamedTuple):
    """Numbers of micro-batches of which ``stage`` has something in the memory of the worker's host at one moment.

    ``activations`` counts micro-batches whose activations are there. ``operands`` counts micro-batches whose operands,
    what the second half of a split backward needs, are there.
    """

    stage: Stage
    activations: int
    operands: int


Moment = tuple[Kept, ...]
"""All that a worker keeps at one time: an entry for each stage that it holds, ascending."""

KEPT_UNITS = (
    Counted.ACTIVATIONS,
    Counted.INPUT,
    Counted.OPERANDS,
    Counted.CARRIES,
    Counted.CARRY_GRADIENTS,
    *ON_HOST_UNITS,
)
"""The units of the numbers of a `Kept`, in their order; those of an `OnHost` are the last ones."""

_Counts = tuple[int, ...]
"""The numbers of a moment in one row: those of all stages in the first unit, then those in the next unit, and so on."""

Entry = TypeVar("Entry", Kept, OnHost)


class Sending(NamedTuple):
    """The most micro-batches that are at once on their way to another worker over ``edge``.

    An edge has the sending stage, the receiving stage and the value.
    """

    edge: Crossing
    micros: int


class Receiving(NamedTuple):
    """The receive buffers of ``edge``: the message in slot k has at most ``slots[k]`` micro-batches."""

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


def holdings(level: Program | ProgramStream) -> Iterator[Holdings]:
    """Yields the holdings of each worker of a program without errors; of a stream, the holdings in its steady state.

    Warm-up and drain keep no more: there a lane has only some of the lines of each turn.
    """
    header = level.header
    if isinstance(level, Program):
        period, lanes = 0, [(parts, dict[Crossing, Ring]()) for parts in level.parts]
    else:
        period, lanes = header.period, [(parts_of(turn.instructions), dict(turn.rings)) for turn in level.turns]
    for stages, groups, (parts, rings) in zip(header.stages_of, header.groups_of, lanes, strict=True):
        steps = list(parts.steps)
        stashed = highest_by_key(repeated(_stashed(parts, header.per_turn if period else 0)))
        copies = [(group, 1 + stashed[group].amount if group in stashed else 1) for group in groups]
        under_way = highest_by_key(repeated(_under_way(parts, period)))
        yield Holdings(
            fullest=fullest(header, stages, steps, period),
            on_host=on_host(header, stages, steps, period),
            copies=tuple((group[0], count) for group, count in copies if len(group) == 1),
            tied=tuple((group, count) for group, count in copies if len(group) > 1),
            sending=tuple(Sending(edge, peak.amount) for edge, peak in under_way.items()),
            receiving=tuple(_receiving(parts.recvs.lines, rings)),
        )


def fullest(header: Header, stages: Sequence[Stage], lane: Iterable[MoveStep], period: int = 0) -> tuple[Moment, ...]:
    """Returns the fullest moments of a worker: see ``fullest`` in `Holdings`.

    Parameters
    ----------
    stages
        The stages that the worker holds.
    lane
        The compute operations of the worker, one by one, and the waits for moves between worker and host.
    period
        The period of the stream of which ``lane`` is one turn; 0 if ``lane`` has all operations of a program.
    """
    return _not_exceeded(Kept, stages, _moments(header, stages, lane, period, KEPT_UNITS))


def on_host(
    header: Header, stages: Sequence[Stage], lane: Iterable[MoveStep], period: int = 0
) -> tuple[tuple[OnHost, ...], ...]:
    """Returns the fullest moments (see `Holdings`) in the memory of the worker's host; arguments as in `fullest`."""
    return _not_exceeded(OnHost, stages, _moments(header, stages, lane, period, ON_HOST_UNITS))


def _moments(
    header: Header, stages: Sequence[Stage], lane: Iterable[MoveStep], period: int, units: Sequence[Counted]
) -> Iterator[_Counts]:
    """Yields what a worker keeps right before something is freed, as a count for each unit in ``units`` and each stage.

    These are the moments that can be the fullest. A moment is left out if nothing was added since the last one, or if
    an equal one was yielded before. ``lane`` and ``period`` are as in `fullest`.
    """
    places = {key: place for place, key in enumerate(product(units, stages))}
    counts, yielded, grown = [0] * len(places), set[_Counts](), False
    added = (
        (places[unit, operation.stage], amount, _turn_of(operation.micros, period))
        for operation, unit, amount in changes(header, lane, units)
    )
    for place, amount in repeated(added):
        if amount < 0 and grown and (moment := tuple(counts)) not in yielded:
            yielded.add(moment)
            yield moment
        grown = amount > 0
        counts[place] += amount


def _turn_of(micros: Sequence[int], period: int) -> int | Fraction:
    """Returns the number of the turn that micro-batches belong to, or the mean if they are of several turns.

    The result is 0 if ``period`` is 0.
    """
    if not period:
        return 0
    return micros[0] // period if len(micros) == 1 else Fraction(sum(m // period for m in micros), len(micros))


def _not_exceeded(
    entry: type[Entry], stages: Sequence[Stage], moments: Iterable[_Counts]
) -> tuple[tuple[Entry, ...], ...]:
    """Returns the moments that no other moment exceeds in every number, each once, as entries for each of ``stages``.

    ``entry`` is the type of the entries. The moments are ordered by their numbers.
    """
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


def _stashed(parts: LaneParts, updates: int) -> Iterator[tuple[WeightGroup, int, int]]:
    """Yields a change for `flow.live.repeated` for each line that stashes or drops a version: (group, 1 or -1, turn).

    ``updates`` is the number of updates in a turn of a stream; 0 if the lane has all operations, which count as turn 0.
    """
    for _, line in parts.updates:
        if isinstance(line, Stash | Drop):
            yield line.group, 1 if isinstance(line, Stash) else -1, line.version // updates if updates else 0


def _under_way(parts: LaneParts, period: int) -> Iterator[tuple[Crossing, int, int | Fraction]]:
    """Yields a change for `flow.live.repeated` for each send and each wait for a send: (edge, micro-batches, turn).

    A wait for a send takes its micro-batches away: their number is negative.
    """
    posted = ((place, send.message, 1) for place, send in parts.sends)
    waited_for = ((place, wait.message, -1) for place, wait in parts.wait_sends)
    for _, message, sign in merge(posted, waited_for, key=itemgetter(0)):
        yield message.edge, sign * len(message.micros), _turn_of(message.micros, period)


def _receiving(receives: Iterable[Recv], rings: Mapping[Crossing, Ring]) -> Iterator[Receiving]:
    """Yields the receive buffers of each edge on which a lane receives.

    The slots of a ring, the buffers of an edge of a stream, are used round and round. With n messages a turn and k
    slots, the message in slot i has slot (i + n) % k in the next turn. In the long run it is in all slots whose number
    leaves the same remainder as i when divided by the greatest common divisor of n and k, and in no other.
    """
    rooms: dict[Crossing, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for receive in receives:
        edge = receive.message.edge
        slots, ring = rooms[edge], rings.get(edge)
        slot = receive.slot % gcd(ring.step, ring.slots) if ring else receive.slot
        slots[slot] = max(slots[slot], len(receive.message.micros))
    for edge, slots in rooms.items():
        size = rings[edge].slots if edge in rings else len(slots)
        yield Receiving(edge, tuple(slots[slot % len(slots)] for slot in range(size)))
