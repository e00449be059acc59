"""Finds how many updates a training loop must have given before a worker may run a turn of a stream.

On every worker a training loop gives the mini-batch of one update after the other, and the worker runs the turns that
are about the updates given so far. In such a turn it must never wait for what another worker does only when a further
update is given: the training loop there may itself be waiting for this worker, for example for a loss. So a turn may
need updates that it is not about. In 1F1B with D = 2 and an update for each micro-batch:

worker 0:                           worker 1:
  recv m-1 s1->s0 from w1             wait recv m s0->s1
  F m s0 v-1                          F m s1 v
  send m s0->s1 to w1                 recv m+1 s0->s1 from w0                turn k needs update k+1, by this line
  wait recv m-1 s1->s0                B m s1 v
  B m-1 s0 v-2                        send m s1->s0 to w0

Turn k of worker 0 waits for gradients from turn k-1 of worker 1, so it needs update k, which it is about anyway.

Where the last whole turns would wait for one another in a cycle, turns begin elsewhere: each right before the first
line that needs a later update, by itself or through what it waits for. Operations alone:

worker 0:           worker 1:           worker 0:           worker 1:
  F m s0 v-2          F m s1 v-2          F m s0 v-2          B m s3 v-2
  B m-1 s2 v-3        F m s3 v-2          B m-1 s2 v-3        B m s1 v-2
  F m s2 v-2          B m s3 v-2          F m s2 v-2          F m+1 s1 v-1
  B m-1 s0 v-3        B m s1 v-2          B m-1 s0 v-3        F m+1 s3 v-1

On the left, `B m s1` in turn k of worker 1 waits for turn k+1 of worker 0, in which `F m s2` waits for turn k+1 of
worker 1. However many updates are given, the last turns never end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import AllReduce, Instruction, Recv, Send, Step, WaitAllReduce, WaitRecv, WaitSend
from chimera_ir.ir.streams import ProgramStream
from chimera_ir.ir.turns import Turn, extent, in_slot, in_turn, later

_Key = tuple[object, ...]


@dataclass(frozen=True)
class RunnableTurn:
    """A worker's turn, which can run once ``ahead`` updates after the first update of the turn have been given."""

    turn: Turn
    ahead: int


class _Wait(NamedTuple):
    """A wait of a worker's line number ``place`` in a turn for line number ``posted`` in a turn of worker ``other``.

    If the first line is in turn k, the awaited line is in turn k + ``later`` of the other worker; ``later`` may be
    negative.
    """

    place: int
    other: int
    posted: int
    later: int


def runnable_turns(stream: ProgramStream) -> list[RunnableTurn]:
    """Returns the turn of each worker with the number of updates that it needs (``ahead``).

    A turn may begin at another line than in the stream. The stream is a program without errors by any rule.
    """
    header = stream.header
    lengths = [max(1, len(turn.instructions)) for turn in stream.turns]
    waits = _program_waits(stream)
    # Lines are counted on from the first line of turn 0. Given the updates of turn 0, how far does each worker get by
    # its own lines alone?
    ends = [_own_end(header, turn) for turn in stream.turns]
    # How many of these turns may each worker run, if a worker runs whole turns only?
    turns = _whole_turns(waits, [end // length for end, length in zip(ends, lengths, strict=True)])
    if turns is not None:
        return [RunnableTurn(turn, _ahead(header, count)) for turn, count in zip(stream.turns, turns, strict=True)]
    # None of them ends. How many lines may each worker run? Its turns begin behind these.
    counts = [divmod(end, length) for end, length in zip(_lines_run(waits, ends, lengths), lengths, strict=True)]
    return [
        RunnableTurn(_beginning_at(header, turn, place), _ahead(header, count))
        for turn, (count, place) in zip(stream.turns, counts, strict=True)
    ]


def runnable_stream(stream: ProgramStream) -> ProgramStream:
    """Returns the stream with its turns as `runnable_turns` cuts them: the same lines, but begun elsewhere."""
    return replace(stream, turns=tuple(runnable.turn for runnable in runnable_turns(stream)))


def lag(turns: Sequence[RunnableTurn]) -> int:
    """Returns how many more updates must be given before an update is complete: stepped on every worker."""
    return max(
        runnable.ahead - extent(line).first
        for runnable in turns
        for line in runnable.turn.instructions
        if isinstance(line, Step)
    )


def _ahead(header: Header, turns: int) -> int:
    """Converts a number of turns into the ``ahead`` of a `RunnableTurn`.

    ``turns`` is the number of the first turn that a worker cannot run when just the updates of turn 0 have been given.
    """
    return (2 - turns) * header.per_turn - 1


def _own_end(header: Header, turn: Turn) -> int:
    """Counts the lines that a worker can run, from turn 0 on, when the updates of turn 0 have been given.

    The next line is about a later update. Waits for other workers are not regarded.
    """
    length = len(turn.instructions)
    return min(
        ((1 - _turn_of(header, line)) * length + place for place, line in enumerate(turn.instructions)), default=1
    )


def _turn_of(header: Header, line: Instruction) -> int:
    """Returns the number of the turn to which the last micro-batch of a line, or the update of the line, belongs."""
    _, last, of_updates = extent(line)
    return last // (header.per_turn if of_updates else header.period)


def _program_waits(stream: ProgramStream) -> list[list[_Wait]]:
    """Returns for each worker the waits in its turn for lines of other workers."""
    header = stream.header
    posts: dict[_Key, list[tuple[int, int, int]]] = {}
    for worker, turn in enumerate(stream.turns):
        for place, line in enumerate(turn.instructions):
            if isinstance(line, Send | Recv | AllReduce):
                key, number = _key(header, type(line), line)
                posts.setdefault(key, []).append((worker, place, number))
    return [
        [
            _Wait(place, other, posted, number - other_number)
            for place, line in enumerate(turn.instructions)
            if isinstance(line, WaitSend | WaitRecv | WaitAllReduce)
            for key, number in [_key(header, _AWAITED[type(line)], line)]
            for other, posted, other_number in posts[key]
        ]
        for turn in stream.turns
    ]


_AWAITED: dict[type[Instruction], type[Instruction]] = {WaitRecv: Send, WaitSend: Recv, WaitAllReduce: AllReduce}
"""Maps each type of wait to the type of the line, on another worker, that ends the wait."""


def _key(header: Header, posted: type[Instruction], line: Instruction) -> tuple[_Key, int]:
    """Returns a key of the message or the sum of a line, and the number of the turn to which that belongs.

    The key is the same in every turn. ``posted`` is the type of the line that sends, receives or launches, and is a
    part of the key.
    """
    first, number = in_turn(header, line)
    if isinstance(first, AllReduce | WaitAllReduce):
        return (posted, first.group, first.version), number
    assert isinstance(first, Send | Recv | WaitSend | WaitRecv)
    return (posted, first.message), number


def _whole_turns(waits: Sequence[Sequence[_Wait]], turns: Sequence[int]) -> list[int] | None:
    """Returns for each worker the number of the first turn that it cannot end; None if workers wait in a cycle.

    ``turns`` has these numbers as far as each worker's own lines decide. Each pass lowers them to what the waits for
    other workers allow, until nothing changes. In a cycle they would fall without end.
    """
    turns = [*turns]
    for _ in range(len(turns) + 1):
        before = [*turns]
        for worker, worker_waits in enumerate(waits):
            turns[worker] = min([turns[worker], *(turns[wait.other] - wait.later for wait in worker_waits)])
        if turns == before:
            return turns
    return None


def _lines_run(waits: Sequence[Sequence[_Wait]], ends: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Returns how many lines each worker can run before the first line that waits for ever, counted from turn 0 on.

    ``ends`` has these numbers as far as each worker's own lines decide, ``waits`` the waits of each worker for others,
    ``lengths`` the number of lines in a turn of each worker.
    """
    ends, changed = [*ends], True
    while changed:
        before = [*ends]
        for worker, worker_waits in enumerate(waits):
            for place, other, posted, later_turns in worker_waits:
                last = (ends[other] - 1 - posted) // lengths[other]  # the last turn in which the other worker posts it
                ends[worker] = min(ends[worker], (last - later_turns + 1) * lengths[worker] + place)
        changed = ends != before
    return ends


def _beginning_at(header: Header, turn: Turn, place: int) -> Turn:
    """A turn that begins at ``place`` of another turn, and ends with the lines before that place, one turn later."""
    again = [in_slot(turn.rings, later(header, line, 1), 1) for line in turn.instructions[:place]]
    return replace(turn, instructions=(*turn.instructions[place:], *again))
