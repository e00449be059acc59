"""Counts what a worker keeps of its stages at its fullest moments; with a profile, bytes follow from these numbers.

The rule "memory" adds up over stages, in M_a and M_theta, which is enough if all stages are equal. If they are not,
memory depends on which stages' activations are kept at the same time.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import groupby, product
from math import ceil, gcd
from operator import ge, itemgetter
from typing import NamedTuple, TypeVar, assert_never

from chimera_ir.diagnostics.catalogue import program as say
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.flow import live
from chimera_ir.flow.live import MoveStep, changes, highest_by_key, repeated
from chimera_ir.ir.kinds import ON_HOST_UNITS, Counted
from chimera_ir.ir.levels import Bound, Header, Program, Quantity, Schedule
from chimera_ir.ir.ops import NOWHERE, Crossing, LaneParts, Recv, Stage, WeightGroup, Worker, parts_of
from chimera_ir.ir.streams import ProgramStream
from chimera_ir.ir.text.printer import line
from chimera_ir.ir.turns import Ring
from chimera_ir.verify.versions import copies, stashes

# Rule "memory": no worker exceeds the bounds that the scheme declares.
#
# The units are the paper's (section 3.3). M_a is the activations of one micro-batch on one stage, alive from its
# forward to its backward; a stage may keep another share of M_a. M_theta is the weights of one stage; a worker has them
# once per stage it holds, however many pipes share them, and once more for every older version that it keeps.

Needs = Callable[[Program], Mapping[Quantity, Sequence[int]]]
"""A function from a program to the bytes that it needs of each kind of memory, as a number for each worker."""

_IN_BYTES = {Quantity.BYTES: say.BytesExceed, Quantity.HOST_BYTES: say.HostBytesExceed}


def memory(schedule: Schedule | Program) -> Iterator[Diagnostic]:
    """Yields a diagnostic for each declared bound that does not hold, at the worker that exceeds it most.

    Bounds in bytes, and without a flush those of weights, are left to `memory_of_program`: only a program shows bytes,
    and how many versions a worker keeps.
    """
    held = tuple(len(stages) for stages in schedule.header.stages_of)
    for bound in schedule.header.bounds:
        match bound.quantity:
            case Quantity.ACTIVATIONS:
                yield from _micros(say.BoundExceeded, schedule, bound, live.activations(schedule))
            case Quantity.HOST:
                yield from _micros(say.HostExceeds, schedule, bound, live.on_host(schedule))
            case Quantity.WEIGHTS:
                if not schedule.header.steps_inside:
                    yield from _weights(say.WeightsExceed, schedule, bound, held)
            case Quantity.BYTES | Quantity.HOST_BYTES:
                pass
            case _:
                assert_never(bound.quantity)


def memory_of_program(program: Program, needs: Needs | None) -> Iterator[Diagnostic]:
    """Yields the declared bounds that a program exceeds and that only a program can be compared with.

    These are bounds in bytes and, without a flush, of weights in all versions. Where memory moves to the host, the
    program's lines say when, so all other bounds are checked here as well. ``needs`` returns the bytes of a program;
    None if they are not known.
    """
    header = program.header
    if header.moves:
        yield from memory(program)
    in_bytes = any(bound.quantity.in_bytes for bound in header.bounds)
    needed = needs(program) if needs is not None and in_bytes else {}
    for bound in header.bounds:
        if bound.quantity is Quantity.WEIGHTS and header.steps_inside:
            yield from _weights(say.VersionsExceed, program, bound, copies(program))
        amounts = needed.get(bound.quantity, ())
        if amounts and (worker := bound.exceeded(amounts)) is not None:
            message = _IN_BYTES[bound.quantity]
            yield message(bound.origin, worker, amounts[worker], bound.limits[worker], _stages(header, worker))


def memory_unknown(header: Header) -> Iterator[Diagnostic]:
    """Yields a warning for each declared bound in bytes, for the case that no bytes are known."""
    yield from (say.BoundUnchecked(bound.origin) for bound in header.bounds if bound.quantity.in_bytes)


def _micros(
    message: type[say.BoundExceeded], schedule: Schedule | Program, bound: Bound, peaks: Sequence[live.Peak]
) -> Iterator[Diagnostic]:
    header, amounts = schedule.header, live.whole(schedule.header, peaks)
    # A worker that keeps nothing exceeds no limit.
    worker = bound.exceeded([amount or limit for amount, limit in zip(amounts, bound.limits, strict=True)])
    if worker is not None and (at := peaks[worker].at) is not None:
        peak = in_messages(header, amounts[worker])
        yield message(at.origin, worker, peak, bound.limits[worker], line(at, header))


def in_messages(header: Header, amount: Fraction) -> int | Fraction:
    """An amount in M_a as messages have it: rounded up to whole micro-batches, unless stages keep shares of M_a."""
    return amount if header.shares else ceil(amount)


def _weights(
    message: type[say.BoundExceeded], level: Schedule | Program, bound: Bound, weights: tuple[int, ...]
) -> Iterator[Diagnostic]:
    worker = bound.exceeded(weights)
    if worker is not None:
        first = next((operation.origin for operation in level.lanes[worker]), NOWHERE)
        yield message(first, worker, weights[worker], bound.limits[worker], _stages(level.header, worker))


def _stages(header: Header, worker: Worker) -> str:
    return ", ".join(map(str, header.stages_of[worker]))


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


class Holdings(NamedTuple):
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
        stashed = highest_by_key(repeated(stashes(parts, header.per_turn if period else 0)))
        ties = (group for group in groups if len(group) > 1)
        copies = [
            (group, 1 + stashed[group].amount if group in stashed else 1)
            for group in (*((stage,) for stage in stages), *ties)
        ]
        under_way = highest_by_key(repeated(_under_way(parts, period)))
        yield Holdings(
            fullest=fullest(header, stages, steps, period),
            on_host=_not_exceeded(OnHost, stages, _moments(header, stages, steps, period, ON_HOST_UNITS)),
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
    """The number of the turn of some micro-batches; of those of several turns the mean."""
    if not period:
        return 0
    return micros[0] // period if len(micros) == 1 else Fraction(sum(m // period for m in micros), len(micros))


def _not_exceeded(
    entry: type[Entry], stages: Sequence[Stage], moments: Iterable[_Counts]
) -> tuple[tuple[Entry, ...], ...]:
    # No two moments are equal, so one that covers another has a larger sum.
    front: list[_Counts] = []
    for _, several in groupby(sorted(moments, key=sum, reverse=True), key=sum):
        front += [moment for moment in several if not any(_covers(other, moment) for other in front)]
    starts = range(0, len(entry._fields[1:]) * len(stages), len(stages) or 1)
    return tuple(
        sorted(
            tuple(map(entry, stages, *(counts[start : start + len(stages)] for start in starts))) for counts in front
        )
    )


def _covers(larger: _Counts, smaller: _Counts) -> bool:
    return all(map(ge, larger, smaller))


def _under_way(parts: LaneParts, period: int) -> Iterator[tuple[Crossing, int, int | Fraction]]:
    """Yields a change for `flow.live.repeated` for each send, and one below 0 for each wait for a send."""
    posted = ((place, send.message, 1) for place, send in parts.sends)
    waited_for = ((place, wait.message, -1) for place, wait in parts.wait_sends)
    for _, message, sign in sorted([*posted, *waited_for], key=itemgetter(0)):
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
