"""Which communicators a program finishes with, beyond those that the rule "channels" asks for.

With one communicator per directed pair of workers every program finishes that passes the rule. With one for both
directions of a pair, or a single one, operations wait for others that they share a stream with (`in_order`).

One for both directions
    The two workers post the messages between them in the same order, or the program cannot finish: where x is posted
    before y at one end and behind it at the other, each waits for the other in a stream. If the orders agree, then once
    both ends of a message are posted, so are both ends of all before it in its stream, which are over. So a wait blocks
    exactly where it does with tagged messages, whatever has been posted: what is proven there holds here.
A single one
    Whatever crosses between two workers crosses here. Otherwise lanes and streams are played.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from chimera_ir.flow.engine import Played
from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import Instruction, Recv, Send
from chimera_ir.ir.sharing import Communicators
from chimera_ir.ir.streams import ProgramStream
from chimera_ir.ir.text.printer import line
from chimera_ir.ir.turns import extent, lines_before, updates_a_turn
from chimera_ir.verify.circles import shortest_circle
from chimera_ir.verify.in_order import Streams, posts_of, replay_in_streams


@dataclass(frozen=True, slots=True)
class Communication:
    """What is known of a program with some communicators: the proof that it finishes, or what stops it.

    Attributes
    ----------
    communicators
        Which messages share one.
    count
        How many there are for one copy of the workers, those of sums aside.
    played
        A global order in which the program finishes; None if it does not.
    blocked
        Where it stops: the shortest circle of operations that wait for each other, in a few words. Empty if it does
        not stop.
    """

    communicators: Communicators
    count: int
    played: Played | None
    blocked: str = ""

    @property
    def finishes(self) -> bool:
        """Whether the program is proven to finish with them."""
        return self.played is not None


def communications(level: Program | ProgramStream, program: Program, played: Played) -> Iterator[Communication]:
    """What is known of a program with each choice of communicators, from the most to the fewest.

    Parameters
    ----------
    level
        Without errors by any rule.
    program
        What is proven of it (`ir.streams.view_of`).
    played
        The certificate of the rule "channels".
    """
    peers = ({send.to for send in parts.sends.lines} for parts in program.parts)
    links = [(worker, peer) for worker, of_worker in enumerate(peers) for peer in of_worker]
    directed, pair, single = ((choice, choice.count(links)) for choice in Communicators)
    yield Communication(*directed, played)
    crossing = _crossing(_shown(level, program))
    yield Communication(*pair, None if crossing else played, crossing)
    yield Communication(*single, None, crossing) if crossing else _played(level, program, single[1])


def _shown(level: Program | ProgramStream, program: Program) -> Program:
    """As many updates of a stream as show any two messages whose posts may be in either order.

    These are less than a turn further apart than lines of a turn are that post messages.
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
    updates = (max(turns, default=0) - min(turns, default=0) + 2) * updates_a_turn(header)
    return program if updates <= program.header.updates else level.view(updates)


def _crossing(program: Program) -> str:
    """Two messages that a pair of workers posts in different orders: what each posts first. Empty if there are none."""
    posted: dict[int, dict[int, list[Send | Recv]]] = {}

    def of(worker: int) -> dict[int, list[Send | Recv]]:
        if worker not in posted:
            lines: dict[int, list[Send | Recv]] = {}
            for place, peer, _ in posts_of(program.parts[worker]):
                post = program.lanes[worker][place]
                assert isinstance(post, Send | Recv)
                lines.setdefault(peer, []).append(post)
            posted[worker] = lines
        return posted[worker]

    for worker in range(program.header.workers):
        for peer in sorted(other for other in of(worker) if other > worker):
            for mine, theirs in zip(of(worker)[peer], of(peer)[worker], strict=True):
                if mine.message != theirs.message:
                    return _circle([(worker, mine), (peer, theirs)])
    return ""


def _played(level: Program | ProgramStream, program: Program, count: int) -> Communication:
    """With a single communicator, where every pair of workers posts its messages in one order."""
    streams = replay_in_streams(program, Communicators.SINGLE)
    lanes, places = streams.played.lanes, streams.played.places
    if any(place < len(lane) for place, lane in zip(places, lanes, strict=True)):
        return Communication(Communicators.SINGLE, count, None, _circle(_standing(program, streams)))
    if isinstance(level, ProgramStream) and not _repeats(level, program):
        return Communication(Communicators.SINGLE, count, None, "the workers' streams do not go round together")
    return Communication(Communicators.SINGLE, count, streams.played)


def _standing(program: Program, streams: Streams) -> Iterator[tuple[int, Instruction]]:
    """The shortest circle of lanes and streams: what each of its workers cannot end."""
    played, workers = streams.played, program.header.workers
    done = set(played.order)
    lane_of = {event: number for number, lane in enumerate(played.lanes) for event in lane}
    waits = {
        number: [lane_of[event] for event in streams.before[lane[place]] if event not in done]
        for number, (lane, place) in enumerate(zip(played.lanes, played.places, strict=True))
        if place < len(lane)
    }
    circle = shortest_circle(waits)
    instructions = [(worker, instruction) for worker, lane in enumerate(program.lanes) for instruction in lane]
    for number, following in zip(circle, [*circle[1:], circle[0]], strict=True):
        lane, place = played.lanes[number], played.places[number]
        if number < workers:
            yield instructions[lane[place]]
        elif following >= workers:  # else the worker has yet to post what is next
            yield instructions[streams.posts[lane[place - 1] - len(instructions)]]


def _circle(standing: Iterable[tuple[int, Instruction]]) -> str:
    *most, last = [f"`{line(instruction)}` on worker {worker}" for worker, instruction in standing]
    return f"{', '.join(most)} and {last} wait for each other"


def _repeats(stream: ProgramStream, program: Program) -> bool:
    """Whether from turn to turn lanes and streams come exactly one turn further, as in the rule "repeats"."""
    middle = program.header.updates // updates_a_turn(stream.header) // 2
    starts = [lines_before(stream.header, turn, middle, program.header.updates) for turn in stream.turns]
    lengths = [len(turn.instructions) for turn in stream.turns]
    posts = [sum(isinstance(line, Send | Recv) for line in turn.instructions) for turn in stream.turns]
    before = replay_in_streams(program, Communicators.SINGLE, starts).played.places
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    after = replay_in_streams(program, Communicators.SINGLE, ends).played.places
    turn = [*lengths, *(count for count in posts if count)]
    return [later - earlier for later, earlier in zip(after, before, strict=True)] == turn
