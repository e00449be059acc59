"""Takes moves of memory to the host and back out of a lane, and gives them back together with the waits for them.

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

from chimera_ir.flow.host_moves import MoveWaits, waited
from chimera_ir.ir.levels import Schedule
from chimera_ir.ir.ops import Instruction, Operation
from chimera_ir.ir.streams import ScheduleStream, stream_with

Moves = Mapping[int, Sequence[Instruction]]
"""Maps a place of the lane without moves to the moves, and the waits for moves, that come right before it.

The length of that lane stands for its end.
"""


def without_moves(level: Schedule | ScheduleStream) -> Schedule | ScheduleStream:
    """Returns the schedule without its moves of memory: with those operations alone that occupy the lanes."""
    lanes = tuple(tuple(line for line in lane if not line.kind.moves) for lane in level.lanes)
    return replace(level, lanes=lanes) if isinstance(level, Schedule) else stream_with(level.header, lanes)


def moves_between(lane: Sequence[Operation], waits: MoveWaits, period: int) -> Moves:
    """Returns the moves of a lane and the waits for them, by place in the lane without moves.

    ``waits`` says where the lane waits for which moves; ``period`` is that of a stream, else 0.
    """
    lines, following = defaultdict[int, list[Instruction]](list), 0
    for place, operation in enumerate(lane):
        lines[following] += waited(lane, waits.get(place, ()), period)
        if operation.kind.moves:
            lines[following].append(operation)
        else:
            following += 1
    lines[following] += waited(lane, waits.get(len(lane), ()), period)
    return lines
