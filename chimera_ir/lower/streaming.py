"""The pass from a schedule without end to a program without end: one turn of each worker is lowered.

worker 0:                     worker 0:
  F m s0 v-1                    recv m-1 s1->s0 from w1 into 0 of 1
  B m-1 s0 v-2                  wait all_reduce s0 v-1
                                stash s0 v-2
                                step s0 v-1
                                F m s0 v-1
                                send m s0->s1 to w1
                                wait recv m-1 s1->s0
                                wait send m-1 s0->s1
                                B m-1 s0 v-2
                                drop s0 v-2
                                all_reduce s0 v

Places of a lane are counted on from turn to turn, from the start of turn 0 of the worker; those before it are negative.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from sys import maxsize

from chimera_ir.flow.flow import crossing
from chimera_ir.flow.turn_net import TurnNet, turn_net
from chimera_ir.ir.ids import Micro, Worker
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Compute, Message
from chimera_ir.ir.sharing import Communicators
from chimera_ir.ir.streams import ProgramStream, ScheduleStream
from chimera_ir.ir.turns import Turn, moved
from chimera_ir.lower.buffers import rings
from chimera_ir.lower.comm import Link, Transfer, in_order, placed
from chimera_ir.lower.insertion import with_inserted
from chimera_ir.lower.launched_moves import Moves
from chimera_ir.lower.sync import Duration
from chimera_ir.lower.updates import update


def lower_stream(
    stream: ScheduleStream,
    ahead: int,
    duration: Duration,
    communicators: Communicators,
    moves: Iterable[Moves],
) -> ProgramStream:
    """The program without end that runs a schedule without end; arguments as in `lower.lower`.

    ``moves`` are the moves of memory of each turn, which the schedule does not have.
    """
    net, turns = turn_net(stream), list[Turn]()
    links = _links(net, ahead)
    traffics = in_order(placed(links, [maxsize] * len(net.lanes), {}, ahead, communicators), -maxsize)
    for lane, traffic, insertions, between in zip(stream.lanes, traffics, update(net, duration), moves, strict=True):
        slots, sizes = rings(traffic.postings, len(lane), net.header.period)
        turns.append(Turn(tuple(with_inserted(lane, traffic, slots, insertions, between)), sizes))
    return ProgramStream(net.header, tuple(turns))


def _links(net: TurnNet, ahead: int) -> dict[Link, list[Transfer]]:
    """Returns the messages of every directed pair of workers that matter for turn 0 of a stream, in the order sent.

    They are messages of several turns: all that decide where those of turn 0 are posted and waited for.
    """
    lengths = [lane.length for lane in net.lanes]
    links = _of_turn(net)
    # For each message, the turns of its sender and of its receiver in which it is sent and used.
    ends = {
        link: [(t.produced // lengths[t.sender], t.used // lengths[t.receiver]) for t in transfers]
        for link, transfers in links.items()
    }
    reach = 2 * max((abs(sent - used) for sent, used in chain(*ends.values())), default=0) + 2 + ahead
    return {
        link: _around(transfers, reach, {*chain(*ends[link])}, net.header, lengths) for link, transfers in links.items()
    }


def _of_turn(net: TurnNet) -> Mapping[Link, list[Transfer]]:
    """The messages of each link whose first micro-batch is one of turn 0."""
    header, period, flow = net.header, net.header.period, net.flow
    links: dict[Link, list[Transfer]] = defaultdict(list)
    for number, lane in enumerate(net.lanes):
        worker = Worker(number)
        of_turn = (
            (
                place - turn * lane.length,
                Compute(operation.kind, moved(operation.micros, -turn * period), operation.stage),
            )
            for place, operation in enumerate(lane.operations)
            for turn in [operation.micros[0] // period]
        )
        for produced, message, peer in crossing(header, worker, of_turn):
            receiver = net.lanes[peer]
            last_use = max(
                receiver.place(*net.at(flow.last_use(message._replace(micros=(Micro(micro % period),)))))
                + micro // period * receiver.length
                for micro in message.micros
            )
            used = receiver.place(*net.at(flow.consumer(message)))
            links[worker, peer].append(Transfer(message, worker, peer, produced, used, last_use))
    return links


def _around(
    transfers: Sequence[Transfer], reach: int, ends: Collection[int], header: Header, lengths: Sequence[int]
) -> list[Transfer]:
    """Returns the messages of a link that are sent or used within ``reach`` turns of turn 0, in the order sent.

    ``transfers`` are the messages of a link in one turn; ``ends`` are the numbers of the turns in which they are sent
    and used. ``lengths`` has the number of operations in a turn of each worker.
    """
    messages: list[Transfer] = []
    for turn in range(-reach - max(ends), reach + 1 - min(ends)):
        for message, sender, receiver, produced, used, over in transfers:
            sent, received = turn * lengths[sender], turn * lengths[receiver]
            later = Message(moved(message.micros, turn * header.period), *message.edge)
            messages.append(Transfer(later, sender, receiver, produced + sent, used + received, over + received))
    return sorted(messages, key=attrgetter("produced"))
