"""Proof that a program finishes with fewer communicators than the rule "channels" asks for.

With one communicator for each direction between two workers, every program finishes that passes the rule. With one for
both directions, the sends and receives between two workers share a CUDA stream on each of them. They start in the order
in which they are posted, each after the one before is over, and each is over only when its other end has started as
well.

Then the two workers must post the messages between them in the same order. If one worker posts x before y and the other
one y before x, each waits for the other. If the orders agree, then once both ends of a message are posted, so are both
ends of all messages before it in its CUDA stream, and these are over. So a wait blocks exactly where it does with
tagged messages (see `transport`), and what is proven for tagged messages holds here.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from chimera_ir.flow.engine import Played
from chimera_ir.ir.ids import Worker
from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import Recv, Send
from chimera_ir.ir.sharing import Communicators
from chimera_ir.ir.streams import ProgramStream
from chimera_ir.ir.text.printer import line
from chimera_ir.ir.turns import extent


@dataclass(frozen=True, slots=True)
class Communication:
    """The result for a choice of ``communicators``: whether a program finishes with them, and why or why not.

    ``count`` is the number of communicators for the messages of one copy of the workers. ``played`` is a global order
    in which the program finishes, None if it does not. In that case ``blocked`` names in a few words the operations
    that wait for each other.
    """

    communicators: Communicators
    count: int
    played: Played | None
    blocked: str = ""

    @property
    def finishes(self) -> bool:
        """Whether the program is proven to finish with these communicators."""
        return self.played is not None


def communications(level: Program | ProgramStream, program: Program, played: Played) -> Iterator[Communication]:
    """Yields for each choice of communicators whether the program finishes, from the most communicators to the fewest.

    The level has no errors by any rule; ``program`` is the part of it that is proven (`ir.streams.view_of`), ``played``
    the certificate of the rule "channels".
    """
    peers = ({send.to for send in parts.sends.lines} for parts in program.parts)
    links = [(worker, peer) for worker, of_worker in enumerate(peers) for peer in of_worker]
    yield Communication(Communicators.DIRECTED, len(links), played)
    crossing = _crossing(_shown(level, program))
    pairs = {frozenset(link) for link in links}
    yield Communication(Communicators.PAIR, len(pairs), None if crossing else played, crossing)


def _shown(level: Program | ProgramStream, program: Program) -> Program:
    """Returns the program or, of a stream, as many updates as it takes to show any two messages in different orders.

    Such messages are posted in one order by their sender and in the other order by their receiver. Two posts of them
    are at most one turn further apart than the lines of one turn that post messages.
    """
    if isinstance(level, Program):
        return program
    header = level.header
    turns = [
        extent(instruction).first // header.period
        for turn in level.turns
        for instruction in turn.instructions
        if isinstance(instruction, Send | Recv)
    ]
    updates = (max(turns, default=0) - min(turns, default=0) + 2) * header.per_turn
    return program if updates <= program.header.updates else level.view(updates)


def _crossing(program: Program) -> str:
    """The first two messages that two workers post in different orders, in a few words; empty if there are none."""
    posts = [_posts(program, Worker(number)) for number in range(program.header.workers)]
    for worker, by_peer in enumerate(posts):
        for peer in sorted(other for other in by_peer if other > worker):
            for mine, theirs in zip(by_peer[peer], posts[peer][Worker(worker)], strict=True):
                if mine.message != theirs.message:
                    texts = line(mine, program.header), line(theirs, program.header)
                    return f"`{texts[0]}` on worker {worker} and `{texts[1]}` on worker {peer} wait for each other"
    return ""


def _posts(program: Program, worker: Worker) -> dict[Worker, list[Send | Recv]]:
    """The sends and receives of a worker in the order of its lane, by the worker at the other end."""
    parts = program.parts[worker]
    places = [
        *((place, send.to) for place, send in parts.sends),
        *((place, recv.source) for place, recv in parts.recvs),
    ]
    posts: dict[Worker, list[Send | Recv]] = {}
    for place, peer in sorted(places):
        post = program.lanes[worker][place]
        assert isinstance(post, Send | Recv)
        posts.setdefault(peer, []).append(post)
    return posts
