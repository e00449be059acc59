"""The two transports of the rule "channels", and the replay of lanes on them.

Directed queues (NCCL)
    One in-order queue per directed pair of workers. A transfer happens when its send and its receive are both at the
    head.
Tagged (gloo)
    A transfer happens once both ends are posted, in any order.

On both, posting never blocks a lane; a wait blocks it until the transfer has happened. A sum is done once every worker
that holds any stage of its group has launched it; every weight group has its own communicator.

If every pair of workers sends and receives in the same order, the two transports behave the same: once both ends of a
message are posted, so are both ends of all messages before it in its queue, which have left the queue. So the rule
checks first that the orders agree, and then plays the lanes only once.
"""

from collections.abc import Sequence
from enum import Enum
from itertools import accumulate, chain

from chimera_ir.flow.engine import Played, play
from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import AllReduce, Recv, Send, WaitAllReduce, WaitRecv, WaitSend
from chimera_ir.verify.index import key, sum_key


class Transport(Enum):
    """The way in which messages find their receivers; the value is its name in diagnostics."""

    DIRECTED = "in-order queues (NCCL)"
    TAGGED = "tagged messages (gloo)"


def awaited(program: Program) -> list[tuple[int, ...]]:
    """Returns, for each instruction, the instructions of any lane that must have run before it can go on.

    Instructions are numbered lane by lane. A wait for a message needs its send and its receive to be posted; a wait for
    a sum needs the launch of every worker of the sum. The instruction before it in its own lane is not listed.
    """
    # The posts of each message, by its key, and behind them the launches of each sum.
    header = program.header
    first_sum = 2 * header.stages * header.micro_batches
    starts = [*accumulate((parts.length for parts in program.parts), initial=0)]
    posts: list[tuple[int, ...]] = [()] * (first_sum + len(header.groups) * header.updates)
    for start, parts in zip(starts, program.parts, strict=False):
        for place, post in chain[tuple[int, Send | Recv]](parts.sends, parts.recvs):
            posts[key(header, post.message)] += (start + place,)
        for place, instruction in parts.updates:
            if isinstance(instruction, AllReduce):
                posts[first_sum + sum_key(header, instruction)] += (start + place,)
    # Each wait waits for all posts of its message, or all launches of its sum.
    before: list[tuple[int, ...]] = [()] * starts[-1]
    for start, parts in zip(starts, program.parts, strict=False):
        for place, wait in chain[tuple[int, WaitSend | WaitRecv]](parts.wait_sends, parts.wait_recvs):
            before[start + place] = posts[key(header, wait.message)]
        for place, instruction in parts.updates:
            if isinstance(instruction, WaitAllReduce):
                before[start + place] = posts[first_sum + sum_key(header, instruction)]
    return before


def replay(program: Program, until: Sequence[int] | None = None) -> Played:
    """Plays the lanes as far as they get; with ``until``, each lane stops before that place at the latest.

    Posting never blocks and no event is undone, so each lane gets equally far in whatever order lanes are played. The
    program has no errors by the rules "messages" and "gradients". On directed queues, its workers must also send and
    receive in the same orders.
    """
    starts = accumulate((len(lane) for lane in program.lanes), initial=0)
    lengths = until or [len(lane) for lane in program.lanes]
    lanes = [range(start, start + length) for start, length in zip(starts, lengths, strict=False)]
    return play(lanes, awaited(program))
