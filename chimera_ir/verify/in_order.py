"""In-order streams, played: what becomes of a program whose operations of a communicator start one after the other.

A communicator has one stream on each of its workers. Sends and receives start in it in the order in which they were
posted, each after the one before is over; one is over when its other end has started as well. A wait waits until both
ends have started. `Communicators` says which operations share a stream.

worker 0:                  its stream to and from worker 1:
  recv m0 s1->s0 from w1     recv m0 s1->s0     starts at once
  send m1 s0->s1 to w1       send m1 s0->s1     starts when m0 s1->s0 has been sent
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from chimera_ir.flow.engine import Played, play
from chimera_ir.ir.ids import Worker
from chimera_ir.ir.levels import Parts, Program
from chimera_ir.ir.sharing import Communicators
from chimera_ir.verify.transport import awaited


@dataclass(frozen=True)
class Streams:
    """A program played in streams: the lanes of its workers, and behind them a lane of starts for each stream.

    ``before`` are the events that each event waits for, beside the one before it in its lane: first the instructions
    lane by lane, then the starts, of which ``posts`` has the instructions.
    """

    played: Played
    before: Sequence[Sequence[int]]
    posts: Sequence[int]


def posts_of(parts: Parts) -> list[tuple[int, Worker, bool]]:
    """The posts of a lane in their order: the place, the peer, and whether it is a send."""
    sends = ((place, send.to, True) for place, send in parts.sends)
    return sorted([*sends, *((place, recv.source, False) for place, recv in parts.recvs)])


def replay_in_streams(program: Program, communicators: Communicators, until: Sequence[int] | None = None) -> Streams:
    """Plays the lanes and their streams as far as they come.

    Parameters
    ----------
    program
        Without errors by the rules "messages" and "gradients", and with sends and receives in the same orders.
    until
        The place at which to cut each lane; without it, lanes are played to their ends.
    """
    starts = [*accumulate((len(lane) for lane in program.lanes), initial=0)]
    before = awaited(program)
    posts: list[int] = []
    streams: dict[tuple[int, ...], list[int]] = {}
    for worker, parts in enumerate(program.parts):
        for place, peer, sends in posts_of(parts):
            streams.setdefault(communicators.stream(Worker(worker), peer, sends), []).append(starts[-1] + len(posts))
            posts.append(starts[worker] + place)
    start_of = {post: starts[-1] + number for number, post in enumerate(posts)}
    other_end: dict[int, int] = {}
    for begin, parts in zip(starts, program.parts, strict=False):
        for place in (*parts.wait_sends.places, *parts.wait_recvs.places):
            send, recv = (start_of[post] for post in before[begin + place])
            other_end[send], other_end[recv] = recv, send
            before[begin + place] = send, recv
    before += [(post,) for post in posts]
    for stream in streams.values():
        for previous, start in pairwise(stream):
            before[start] += (other_end[previous],)
    lengths = until or [len(lane) for lane in program.lanes]
    lanes = [range(begin, begin + length) for begin, length in zip(starts, lengths, strict=False)]
    return Streams(play([*lanes, *streams.values()], before), before, posts)
