"""Moves of memory to the host and back, which stand between the operations of a lane, with the waits for them.

    worker 0:                    worker 0:
      F m0 s0                      F m0 s0
      offload m0 s0                send m0 s0->s1 to w1
      F m1 s0                      offload m0 s0
      F m2 s0                      F m1 s0
                                   wait offload m0 s0
                                   F m2 s0

The other passes lower the lane without its moves, so that these change nothing about messages and sums. A move is
launched after everything that belongs to the operation before it; `flow.host_moves` says where the lane waits for it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from chimera_ir.flow.host_moves import waited, waits_in_turn, waits_of
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Compute, Instruction, Operation, WaitMove
from chimera_ir.ir.streams import ScheduleStream, computes
from chimera_ir.ir.turns import Turn

Moves = Mapping[int, Sequence[Instruction]]
"""The moves and the waits for them before each operation of the lane without moves; its length is the lane's end."""


def without_moves(schedule: Schedule) -> Schedule:
    """The schedule of the operations that occupy the lanes."""
    lanes = (tuple(operation for operation in lane if not operation.kind.moves) for lane in schedule.lanes)
    return replace(schedule, lanes=tuple(lanes))


def stream_without_moves(stream: ScheduleStream) -> ScheduleStream:
    """The stream of the operations that occupy the lanes."""
    lanes = ((line for line in computes(turn.instructions) if not line.kind.moves) for turn in stream.turns)
    return replace(stream, turns=tuple(Turn(tuple(lane)) for lane in lanes))


def moves_between(header: Header, lane: Sequence[Operation]) -> Moves:
    """The moves of a lane."""
    return _between(lane, {place: [*waited(lane, moves)] for place, moves in waits_of(header, lane).items()})


def moves_in_turn(header: Header, lane: Sequence[Compute]) -> Moves:
    """The moves of a turn of a stream."""
    return _between(lane, waits_in_turn(header, lane))


def _between(lane: Sequence[Operation], waits: Mapping[int, Sequence[WaitMove]]) -> Moves:
    lines, following = defaultdict[int, list[Instruction]](list), 0
    for place, operation in enumerate(lane):
        lines[following] += waits.get(place, ())
        if operation.kind.moves:
            lines[following].append(operation)
        else:
            following += 1
    lines[following] += waits.get(len(lane), ())
    return lines
