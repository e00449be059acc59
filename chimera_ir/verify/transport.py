"""The two transports of the rule "channels", and the lanes that run on them.

Directed queues (NCCL)
    One in-order queue per directed pair of workers. A transfer happens when its send and its receive are both at the
    head.
Tagged (gloo)
    A transfer happens once both ends are posted, in any order.

On both, posting never blocks a lane; a wait blocks it until the transfer has happened. A sum is done once every worker
that holds the stage has launched it; every stage has its own communicator.

Where every pair of workers sends and receives in the same order the two are one: if both ends of a message are posted,
so are both ends of all before it in its queue, none of which is there any more. So lanes need to be run only once; that
the orders agree is what the rule looks at first.
"""

from collections.abc import Sequence
from enum import Enum
from itertools import accumulate

from chimera_ir.flow.run import Played, play
from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import AllReduce, WaitAllReduce
from chimera_ir.verify.index import keys, sum_key


class Transport(Enum):
    """How messages find their receivers; the value is how diagnostics call it."""

    DIRECTED = "in-order queues (NCCL)"
    TAGGED = "tagged messages (gloo)"


def awaited(program: Program) -> list[Sequence[int]]:
    """What the instructions of a program wait for, beside the one before them; numbered lane by lane.

    A wait of a message waits for the posting of both its ends, a wait of a sum for every launch of it.
    """
    header = program.header
    first_sum = 2 * header.stages * header.micro_batches
    starts = [*accumulate((parts.length for parts in program.parts), initial=0)]
    posts: list[list[int]] = [[] for _ in range(first_sum + header.stages * header.updates)]
    before: list[Sequence[int]] = [()] * starts[-1]
    for start, parts in zip(starts, program.parts, strict=False):
        for lines in (parts.sends, parts.recvs):
            for place, number in zip(lines.places, keys(header, lines.lines), strict=True):
                posts[number].append(start + place)
        for waits in (parts.wait_sends, parts.wait_recvs):
            for place, number in zip(waits.places, keys(header, waits.lines), strict=True):
                before[start + place] = posts[number]
        for place, instruction in parts.updates:
            if isinstance(instruction, AllReduce):
                posts[first_sum + sum_key(header, instruction)].append(start + place)
            elif isinstance(instruction, WaitAllReduce):
                before[start + place] = posts[first_sum + sum_key(header, instruction)]
    return before


def replay(program: Program, until: Sequence[int] | None = None) -> Played:
    """Runs the lanes as far as they come.

    Posting never blocks and what has happened stays so: the lanes come equally far whatever the order they run in.

    Parameters
    ----------
    program
        Without errors by the rules "messages" and "gradients". On directed queues it must also send and receive in the
        same orders.
    until
        The place at which each lane ends, if it is not its end.
    """
    starts = accumulate((len(lane) for lane in program.lanes), initial=0)
    lengths = until or [len(lane) for lane in program.lanes]
    lanes = [range(start, start + length) for start, length in zip(starts, lengths, strict=False)]
    return play(lanes, awaited(program))
