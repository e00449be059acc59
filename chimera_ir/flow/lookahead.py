"""The pace of a stream that is given its updates one by one, as a training loop does.

Given the mini-batches of updates 0 to u, a worker runs the turns that are about none after u. It must not wait in them
for what another worker does only once update u+1 is given: that worker's training loop may itself be waiting for this
one, for a loss for example. So a turn may have to wait for further updates than those that it is about.

worker 0:       worker 1:       Turn k of worker 1 waits for B k s2, in turn k+1 of worker 0: it has to wait for update
  F k s0          F k s1        k+1. Turn k of worker 0 waits for F k s1, in turn k of worker 1: however many updates
  B k-1 s2        F k s3        are given, the two never end. Then turns begin elsewhere, each before the first line
  F k s2          B k s3        that needs a later update, by itself or through what it waits for: that of worker 1
  B k-1 s0        B k s1        before B k-1 s1, or where a receive is posted before.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import (
    AllReduce,
    Instruction,
    Message,
    Recv,
    Send,
    Step,
    WaitAllReduce,
    WaitRecv,
    WaitSend,
)
from chimera_ir.ir.streams import ProgramStream
from chimera_ir.ir.turns import Turn, extent, in_slot, later, updates_a_turn

_Key = tuple[object, ...]


@dataclass(frozen=True)
class RunnableTurn:
    """A worker's turn, which is run once the update is given that is ``ahead`` after the turn's first."""

    turn: Turn
    ahead: int


class _Wait(NamedTuple):
    """A line that waits: its place in the turn, and the worker and the place of what it waits for.

    That stands in the other worker's turn with the same number, or ``later`` turns after it.
    """

    place: int
    other: int
    posted: int
    later: int


def runnable_turns(stream: ProgramStream) -> list[RunnableTurn]:
    """The pace of each worker; its turn is that of the stream, or the same beginning at another line.

    Parameters
    ----------
    stream
        Without errors by any rule.
    """
    header = stream.header
    lengths = [max(1, len(turn.instructions)) for turn in stream.turns]
    waits = _waits(stream)
    ends = [_own(header, turn) for turn in stream.turns]
    whole = _whole(waits, [place // length for place, length in zip(ends, lengths, strict=True)])
    if whole is not None:
        return [RunnableTurn(turn, _ahead(header, count)) for turn, count in zip(stream.turns, whole, strict=True)]
    counts = [divmod(end, length) for end, length in zip(_exact(waits, ends, lengths), lengths, strict=True)]
    return [
        RunnableTurn(_from(header, turn, place), _ahead(header, count))
        for turn, (count, place) in zip(stream.turns, counts, strict=True)
    ]


def runnable_stream(stream: ProgramStream) -> ProgramStream:
    """The stream with each turn as the worker runs it, beginning at another line where it has to."""
    return replace(stream, turns=tuple(runnable.turn for runnable in runnable_turns(stream)))


def lag(turns: Sequence[RunnableTurn]) -> int:
    """After how many further updates are given every worker has made all its steps of an update."""
    return max(
        runnable.ahead - extent(line).first
        for runnable in turns
        for line in runnable.turn.instructions
        if isinstance(line, Step)
    )


def _ahead(header: Header, turns: int) -> int:
    """Of a worker that runs so many turns, number 0 among them or not, when the updates of turn 0 are given."""
    return (2 - turns) * updates_a_turn(header) - 1


def _own(header: Header, turn: Turn) -> int:
    """The first line about an update after those of turn 0; lines are counted on from the first one of turn 0."""
    length = len(turn.instructions)
    return min(
        ((1 - _turn_of(header, line)) * length + place for place, line in enumerate(turn.instructions)), default=1
    )


def _turn_of(header: Header, line: Instruction) -> int:
    """The turn to which the micro-batches or the update of a line belong."""
    _, last, of_updates = extent(line)
    return last // (updates_a_turn(header) if of_updates else header.period)


def _waits(stream: ProgramStream) -> list[list[_Wait]]:
    """The waits of each worker."""
    header = stream.header
    posts: dict[_Key, list[tuple[int, int, int]]] = {}
    for worker, turn in enumerate(stream.turns):
        for place, line in enumerate(turn.instructions):
            for key, number in _posted(header, line):
                posts.setdefault(key, []).append((worker, place, number))
    return [
        [
            _Wait(place, other, posted, number - theirs)
            for place, line in enumerate(turn.instructions)
            for key, number in _awaited(header, line)
            for other, posted, theirs in posts[key]
        ]
        for turn in stream.turns
    ]


def _posted(header: Header, line: Instruction) -> Iterator[tuple[_Key, int]]:
    """What a line posts, the same in every turn, and the turn that it is about."""
    match line:
        case Send(message) | Recv(message):
            yield _message(header, type(line), message)
        case AllReduce():
            yield _sum(header, line)
        case _:
            pass


def _awaited(header: Header, line: Instruction) -> Iterator[tuple[_Key, int]]:
    """What a line waits for, as `_posted` says it."""
    match line:
        case WaitRecv(message):
            yield _message(header, Send, message)
        case WaitSend(message):
            yield _message(header, Recv, message)
        case WaitAllReduce():
            yield _sum(header, line)
        case _:
            pass


def _message(header: Header, end: type[Instruction], message: Message) -> tuple[_Key, int]:
    number, micro = divmod(message.micros[0], header.period)
    return (end, message.source, message.target, micro), number


def _sum(header: Header, line: AllReduce | WaitAllReduce) -> tuple[_Key, int]:
    number, version = divmod(line.version or 0, updates_a_turn(header))
    return (AllReduce, line.group, version), number


def _whole(waits: Sequence[Sequence[_Wait]], turns: Sequence[int]) -> list[int] | None:
    """How many turns each worker runs of those that its own lines allow, if workers run whole turns alone."""
    turns = [*turns]
    for _ in range(len(turns) + 1):
        before = [*turns]
        for worker, of_worker in enumerate(waits):
            turns[worker] = min((turns[wait.other] - wait.later for wait in of_worker), default=turns[worker])
            turns[worker] = min(turns[worker], before[worker])
        if turns == before:
            return turns
    return None


def _exact(waits: Sequence[Sequence[_Wait]], ends: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """The lines that each worker runs of those that its own lines allow: those before the first that waits for ever."""
    ends, changed = [*ends], True
    while changed:
        before = [*ends]
        for worker, of_worker in enumerate(waits):
            for place, other, posted, turns in of_worker:
                runs = (ends[other] - 1 - posted) // lengths[other]
                ends[worker] = min(ends[worker], (runs - turns + 1) * lengths[worker] + place)
        changed = ends != before
    return ends


def _from(header: Header, turn: Turn, place: int) -> Turn:
    """The turn that begins at a place of another one: with what came before that place a turn later."""
    again = [in_slot(turn, later(header, line, 1), 1) for line in turn.instructions[:place]]
    return replace(turn, instructions=(*turn.instructions[place:], *again))
