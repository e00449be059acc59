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
    sums = 2 * header.stages * header.micro_batches
    posts: list[list[int]] = [[] for _ in range(sums + header.stages * header.updates)]
    waits: list[tuple[int, int]] = []
    first = 0
    for parts in program.parts:
        for posted in (parts.sends, parts.recvs):
            for place, number in zip(posted.places, keys(header, posted.lines), strict=True):
                posts[number].append(first + place)
        for waiting in (parts.wait_sends, parts.wait_recvs):
            numbers = keys(header, waiting.lines)
            waits += [(first + place, number) for place, number in zip(waiting.places, numbers, strict=True)]
        for place, each in parts.updates:
            if isinstance(each, AllReduce):
                posts[sums + sum_key(header, each)].append(first + place)
            elif isinstance(each, WaitAllReduce):
                waits.append((first + place, sums + sum_key(header, each)))
        first += parts.length
    before: list[Sequence[int]] = [()] * first
    for place, number in waits:
        before[place] = posts[number]
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
