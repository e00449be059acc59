"""Decides where each lane sends the messages between workers, receives them, and waits for them.

    worker 0:                    worker 0:
      F m0 s0                      F m0 s0
      F m1 s0                      send m0 s0->s1 to w1
      B m0 s0                      recv m0 s1->s0 from w1    (one operation ahead of B m0 s0)
      B m1 s0                      F m1 s0
                                   send m1 s0->s1 to w1
                                   recv m1 s1->s0 from w1
                                   wait recv m0 s1->s0
                                   wait send m0 s0->s1       (over: its gradients have come back)
                                   B m0 s0
                                   wait recv m1 s1->s0
                                   wait send m1 s0->s1
                                   B m1 s0

Two stages on the same worker need no message. Between workers a forward sends its activations to the next stage, and a
backward sends the gradients of its input to the stage before. The policy, for a worker and each of its peers:

``send``
    right after the operation that produces the message.
``recv``
    ``ahead`` operations before the one that uses the message, or at the start of the lane if there are fewer. It is
    posted even earlier where that is needed to post the receives from a peer in the order in which the peer sends.
    So one in-order queue per directed pair of workers suffices, and no transfer queues behind one that is needed later.
``wait recv``
    right before the operation that uses the message.
``wait send``
    right after the first ``wait recv`` of a message that the peer sent after using this one. That message proves that
    the peer has received this one, so the wait never blocks. Sends that no later message answers are waited for at the
    end of the lane, where they delay no operation.

Where two stages hand values on in one direction only, as forwards alone do, and frozen stages with nothing trained
before them, nothing answers a message. There:

``wait send``
    right before the first operation that, in a run of the schedule, begins when the operation that uses the message is
    over; if there is none, at the end of the lane. So the transfer has the time of an operation, and the memory of the
    message is free soon after it was used. The wait always ends: in the order in which operations begin in that run,
    the receive is posted before it. For forwards alone it is the earliest run. For a schedule that trains it is the
    latest run that is as short: a frozen encoder, which waits for nothing, would else run ahead of the text by as many
    micro-batches as there are. There the wait is an operation later, so that the encoder has one to spare.

With one communicator for both directions of a pair of workers, both post the messages between them in one order:

    worker 0:                    worker 1:
      F m2 s0                      recv m2 s0->s1 from w0
      send m2 s0->s1 to w1         B m1 s1
      recv m1 s1->s0 from w1       send m1 s1->s0 to w0
      wait recv m1 s1->s0          wait recv m2 s0->s1
      wait send m1 s0->s1          wait send m0 s1->s0
      B m1 s0                      F m2 s1

The order is by the sum of two places: that of the message's producer in the sender's lane and that of its first use in
the receiver's lane. Messages of one operation all have the sum of the first of them. Of messages with equal sums, the
one of the lower sender comes first. There:

``recv``
    as above, but after the sends of this worker that come before it in this order, and before the next send.

Every receive is still posted before its use: no send that comes before it in the order is posted after that use. For
let a worker use a message y from a peer, and produce a message x to the same peer at this place or later. The schedule
is acyclic, so the peer produces y before it uses x. Then y has a lower place than x in the peer's lane and no higher
one in the worker's lane: y has the smaller sum, so the receive of y comes before the send of x in the order. The order
does not depend on times, so it repeats as the lanes do.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, chain
from operator import attrgetter
from typing import NamedTuple

from chimera_ir.flow.flow import Flow, crossing, passed_on
from chimera_ir.flow.net import Net
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Blocks, Communicators, Message, Slot, Worker
from chimera_ir.ir.turns import Shelf, shelf

AHEAD = 1
"""The number of operations by which a receive is posted before its use, unless a caller says otherwise."""


class Transfer(NamedTuple):
    """A message between two workers, with places in the sender's and in the receiver's lane.

    ``produced`` is the place in the sender's lane of the operation that makes it, ``used`` the place in the receiver's
    lane of the first that reads it, ``over`` the place there after which the memory of the received message is free.
    """

    message: Message
    sender: Worker
    receiver: Worker
    produced: int
    used: int
    over: int


Link = tuple[Worker, Worker]
"""A directed pair of workers."""


class Posting(NamedTuple):
    """The receive of a message, which is posted before the operation at place ``before`` of its lane."""

    before: int
    transfer: Transfer


@dataclass(slots=True)
class Traffic:
    """The messages of one lane: where it posts receives and sends, and where it waits for them.

    Places are those of compute operations in the lane. ``postings`` has the receives in the order of the lane. ``sent``
    has, by place, the messages sent after the operation, ``received`` those that are waited for before it, and
    ``retired`` the sends that are waited for before it. The ``unanswered`` sends are waited for at the end of the lane.
    """

    postings: list[Posting] = field(default_factory=list)
    sent: dict[int, list[Transfer]] = field(default_factory=lambda: defaultdict(list))
    received: dict[int, list[Transfer]] = field(default_factory=lambda: defaultdict(list))
    retired: dict[int, list[Transfer]] = field(default_factory=lambda: defaultdict(list))
    unanswered: list[Transfer] = field(default_factory=list)


class Run(NamedTuple):
    """The begin and end of each operation in a run, as ``begins[worker][place]`` and ``ends``.

    A send that nothing answers is waited for ``later`` operations later than it could be.
    """

    begins: Sequence[Sequence[int]]
    ends: Sequence[Sequence[int]]
    later: int


def earliest_run(net: Net) -> Run:
    """The run in which every operation begins as early as it can, and takes 1 for each of its micro-batches."""
    lengths = [operation.size for operation in net.operations]
    return _run(net, net.ends(lengths), lengths, later=0)


def latest_run(net: Net) -> Run:
    """The run in which every operation ends as late as it can without making the run longer.

    An operation takes the cost of its kind for each of its micro-batches.
    """
    lengths = [op.size * sum(part.kind.cost for part in op.parts) for op in net.operations]
    latest = [max(net.ends(lengths), default=0)] * len(lengths)
    for number in reversed(net.order):
        for before in net.predecessors[number]:
            latest[before] = min(latest[before], latest[number] - lengths[number])
    return _run(net, latest, lengths, later=1)


def _run(net: Net, ends: Sequence[int], lengths: Sequence[int], later: int) -> Run:
    begins = [end - length for end, length in zip(ends, lengths, strict=True)]
    of_begins, of_ends = ([times[lane.start : lane.stop] for lane in net.lanes] for times in (begins, ends))
    return Run(of_begins, of_ends, later)


def communicate(
    schedule: Schedule,
    ahead: int,
    run: Run | None = None,
    communicators: Communicators = Communicators.DIRECTED,
) -> Iterator[Traffic]:
    """Yields the traffic of each lane, by the policy above.

    The schedule has no errors by the rules "complete", "placed" and "acyclic". A receive is posted ``ahead`` operations
    before its use, at least 0. ``run`` is one of the schedule, if any two stages hand values on in one direction only.
    ``communicators`` says which messages share one.
    """
    return in_order(_gathered(schedule, ahead, run, communicators), 0)


def in_order(traffics: list[Traffic], start: int) -> Iterator[Traffic]:
    """Sorts the traffic of each lane into the order of the lane, which begins at place ``start``.

    A receive that would be posted before the start is posted at the start.
    """
    traffics = traffics[::-1]
    while traffics:  # each is freed with its lane: all together take as much memory as the program
        traffic = traffics.pop()
        for transfers in (traffic.unanswered, *traffic.retired.values()):
            transfers.sort(key=attrgetter("produced"))
        # Of several postings with the same place, the lower sender stays first. None is before the start of the lane.
        traffic.postings.sort(key=attrgetter("before"))
        traffic.postings = [Posting(max(start, before), transfer) for before, transfer in traffic.postings]
        yield traffic


def _gathered(schedule: Schedule, ahead: int, run: Run | None, communicators: Communicators) -> list[Traffic]:
    # The hand-overs between workers are the messages. For those without answers it is decided now where their sends are
    # waited for, as this decides for how long their memory is in use.
    places = Flow(schedule.header, chain.from_iterable(map(enumerate, schedule.lanes)))
    blocks = Blocks(chain.from_iterable(schedule.lanes))
    links = _links(schedule, places, blocks)
    waits = {} if run is None else _waits(schedule.header, links, run)
    if run is not None:
        links = _kept_for_sends(schedule.header, places, blocks, links, waits)
    return placed(links, [len(lane) for lane in schedule.lanes], waits, ahead, communicators)


def placed(
    links: Mapping[Link, list[Transfer]],
    ends: Sequence[int],
    waits: Mapping[Message, int],
    ahead: int,
    communicators: Communicators,
) -> list[Traffic]:
    """The traffic of every lane, not yet in its order: a receive may be posted before the lane's start.

    ``links`` has the messages of every directed pair of workers, in the order in which they are sent. ``ends`` has the
    place at which each lane ends. ``waits`` has the place at which a send is waited for that no message answers.
    Receives are posted ``ahead`` operations before their use; ``communicators`` says which messages share one.
    """
    traffics = [Traffic() for _ in ends]
    for (sender, receiver), transfers in links.items():
        at_receiver, at_sender = traffics[receiver], traffics[sender]
        answers = links.get((receiver, sender), [])
        # Receives are posted ahead of their use, in the order of the sends.
        posts = [use - ahead for use in _first_uses(transfers)]
        if communicators is Communicators.PAIR:
            posts = [*_in_one_order(posts, transfers, answers)]
        at_receiver.postings += map(Posting, posts, transfers)
        # Messages are sent when they are made, and waited for when they are used.
        for transfer in transfers:
            at_receiver.received[transfer.used].append(transfer)
            at_sender.sent[transfer.produced].append(transfer)
        # Sends are waited for when an answer proves that they are over, or else by the times of the earliest run.
        end = ends[sender]
        retired = _answered(transfers, answers, end)
        if waits:
            retired = (waits.get(sent.message, place) for sent, place in zip(transfers, retired, strict=True))
        for place, transfer in zip(retired, transfers, strict=True):
            (at_sender.retired[place] if place < end else at_sender.unanswered).append(transfer)
    return traffics


def _links(schedule: Schedule, places: Flow, blocks: Blocks) -> dict[Link, list[Transfer]]:
    """The messages of every directed pair of workers, in the order sent; ``places`` are those in lanes."""
    header = schedule.header
    links: dict[Link, list[Transfer]] = defaultdict(list)
    for number, lane in enumerate(schedule.lanes):
        worker = Worker(number)
        for produced, message, peer in crossing(header, worker, enumerate(lane), blocks):
            used, over = places.consumer(message), places.last_use(message)
            links[worker, peer].append(Transfer(message, worker, peer, produced, used, over))
    return links


def _first_uses(transfers: Sequence[Transfer]) -> list[int]:
    """The place of the first use of each message or of any sent after it: its receive is posted before that."""
    return list(accumulate((transfer.used for transfer in reversed(transfers)), min))[::-1]


def _in_one_order(posts: Iterable[int], transfers: Sequence[Transfer], answers: Sequence[Transfer]) -> Iterator[int]:
    """Yields for each message of a link the place before which its receive is posted, in one order for both directions.

    That is after all sends of the same worker that come before the message in that order, and before the next one;
    within these limits, as near as possible to ``posts``. ``answers`` are the messages of the opposite link.
    """
    keys = _keys(answers)
    for place, key in zip(posts, _keys(transfers), strict=True):
        following = bisect_left(keys, key)
        if following < len(answers):
            place = min(place, answers[following].produced)
        if following > 0:
            place = max(place, answers[following - 1].produced + 1)
        yield place


def _keys(transfers: Sequence[Transfer]) -> list[tuple[int, Worker]]:
    """The sort key of each message of a link in the one order of all messages between its two workers."""
    sums: dict[int, int] = {}
    for use, transfer in zip(_first_uses(transfers), transfers, strict=True):
        sums.setdefault(transfer.produced, transfer.produced + use)
    return [(sums[transfer.produced], transfer.sender) for transfer in transfers]


def _answered(transfers: Iterable[Transfer], answers: list[Transfer], end: int) -> Iterator[int]:
    """Yields for each message of a link the place at which the sender first uses an answer to it, or ``end``.

    An answer is a message that the peer sends back after it has used the message.
    """
    produced, uses = [answer.produced for answer in answers], [*_first_uses(answers), end]
    return (uses[bisect_left(produced, transfer.used)] for transfer in transfers)


def _waits(header: Header, links: Mapping[Link, Iterable[Transfer]], run: Run) -> dict[Message, int]:
    answered = {edge: header.answered(edge) for edge in header.edges}
    return {
        transfer.message: bisect_left(run.begins[transfer.sender], run.ends[transfer.receiver][transfer.used])
        + run.later
        for transfers in links.values()
        for transfer in transfers
        if not answered[transfer.message.edge]
    }


def _kept_for_sends(
    header: Header,
    places: Flow,
    blocks: Blocks,
    links: Mapping[Link, Iterable[Transfer]],
    waits: Mapping[Message, int],
) -> dict[Link, list[Transfer]]:
    """Corrects ``over`` of all messages, for schedules in which no message answers some others.

    A stage may make its output in the memory of its input. So ``over`` is when the receiver needs nothing any more that
    is made from the message: no stage there reads it, and all sends of it are over, each at its place in ``waits``. A
    send that is answered is over before the backward that ends the use of its input.
    """
    answered = {edge: header.answered(edge) for edge in header.edges}

    def over(transfer: Transfer) -> int:
        last, received = transfer.over, [transfer.message]
        # What is made of a message is sent on, or read by a stage on this worker: then follow what that stage makes.
        for made in chain.from_iterable(passed_on(header, message, blocks) for message in received):
            if answered[made.edge]:
                continue
            if header.worker(made.micros[0], made.target) != transfer.receiver:
                last = max(last, waits[made])
            else:
                last = max(last, places.consumer(made))
                received.append(made)
        return last

    return {
        link: [transfer._replace(over=over(transfer)) for transfer in transfers] for link, transfers in links.items()
    }


# Gives each receive of a lane a buffer (a slot), such that there are only as many slots as are ever in use at once.
#
# recv m0 s0->s1               recv m0 s0->s1 into 0
# F m0 s1                      F m0 s1
# recv m1 s0->s1               recv m1 s0->s1 into 1     (slot 0 is in use until B m0 s1 is over)
# B m0 s1                      B m0 s1
# F m1 s1                      F m1 s1
# recv m2 s0->s1               recv m2 s0->s1 into 0
# B m1 s1                      B m1 s1
# F m2 s1                      F m2 s1
# B m2 s1                      B m2 s1


def slots(postings: Iterable[Posting]) -> tuple[Slot, ...]:
    """The slot of each receive of a lane.

    All messages over one edge between stages share as few slots as possible. They take the slots in a circle if that
    needs no further slot, because then the lane repeats as its operations do.

    Activations stay in their slot until the backward of the same micro-batch and stage is over: the forward reads them,
    and may keep or send on the same memory. (That send is over by then, because the gradients that answer it have been
    waited for.) Gradients stay until the backward that reads them is over. Without backwards, activations stay until
    everything that is made from them on this worker is used and sent.
    """
    shelves: dict[Shelf, list[tuple[int, int]]] = defaultdict(list)
    keys: list[Shelf] = []
    for before, transfer in postings:
        keys.append(shelf(transfer.message))
        shelves[keys[-1]].append((before, transfer.over))
    slots_of = {key: iter(_few(uses)) for key, uses in shelves.items()}
    return tuple([next(slots_of[key]) for key in keys])


def _few(uses: list[tuple[int, int]]) -> Sequence[Slot]:
    """As few slots as possible for the messages over one edge.

    ``uses`` has for each the place before which its receive is posted, and the place of its last use.
    """
    slots = _longest_free(uses)
    # The number of slots that the shelf needs if they are used round and round.
    posted = [before for before, _ in uses]
    size = max(bisect_right(posted, last_use) - number for number, (_, last_use) in enumerate(uses))
    return [Slot(number % size) for number in range(len(uses))] if size == max(slots) + 1 else _in_rings(slots)


def _longest_free(uses: list[tuple[int, int]]) -> list[Slot]:
    """A slot for each message, always the one that has been free for longest.

    A slot is free after the last use of its message. If ``uses`` repeats, the order in which slots are taken does too.
    """
    free: deque[Slot] = deque()
    busy: list[tuple[int, Slot]] = []
    slots: list[Slot] = []
    for before, last_use in uses:
        while busy and busy[0][0] < before:
            free.append(heappop(busy)[1])
        slot = free.popleft() if free else Slot(len(busy))
        heappush(busy, (last_use, slot))
        slots.append(slot)
    return slots


def _in_rings(slots: Sequence[Slot]) -> Sequence[Slot]:
    """Renumbers the slots so that messages that come again in every period go round slots with successive numbers.

    If messages repeat with a period, each is followed, a period later, by one in another slot; such slots are a ring.
    The period is found in the middle of the messages, where all take a slot again; if there is none, the slots keep
    their numbers.
    """
    # How many messages ago each slot was taken before: this does not depend on the slots' numbers.
    latest: dict[Slot, int] = {}
    ago: list[int] = []
    for number, slot in enumerate(slots):
        ago.append(number - latest.get(slot, number))
        latest[slot] = number
    start = max(len(slots) // 4, next((number for number, messages in enumerate(ago) if messages), len(slots)))
    end = len(slots) - (len(slots) - start) // 4
    periods = range(1, (end - start) // 2)
    period = next((p for p in periods if all(ago[n] == ago[n + p] for n in range(start, end - p))), None)
    if period is None:
        return slots
    # The slot that each is followed by in the next period; so many periods come that every slot is taken.
    going_on = [*slots[:end]]
    for number in range(end, end + max(ago[start:end]) + period):
        going_on.append(going_on[number - ago[end - period + (number - end) % period]])
    following = dict(zip(going_on[start:], going_on[start + period :], strict=False))
    if len({*following.values()}) < len(following) or len(following) <= max(slots):
        return slots
    numbers: dict[Slot, Slot] = {}
    for slot in sorted(following):
        while slot not in numbers:
            numbers[slot] = Slot(len(numbers))
            slot = following[slot]
    return [numbers[slot] for slot in slots]


def rings(
    postings: Iterable[Posting], length: int, period: int
) -> tuple[tuple[Slot, ...], tuple[tuple[Shelf, int], ...]]:
    """The slot of each receive in turn 0 of a stream, and the number of slots of each shelf.

    A shelf is all slots of a worker for one edge between stages. Receives take them in a circle, so the slot follows
    from the message's number among those over the edge; slot 0 goes to the first message about a micro-batch of turn 0
    or later. A shelf has as many slots as the most receives, its own included, that are posted from the posting of a
    message to its last use.

    ``postings`` has the receives of turn 0, and may have others. The turn has ``length`` operations and ``period``
    micro-batches.
    """
    receives: dict[Shelf, list[Posting]] = defaultdict(list)
    keys: list[Shelf] = []
    for posting in postings:
        if 0 <= posting.before < length:
            keys.append(shelf(posting.transfer.message))
            receives[keys[-1]].append(posting)
    slots_of: dict[Shelf, Iterator[Slot]] = {}
    sizes: list[tuple[Shelf, int]] = []
    for key, messages in receives.items():
        # The receives posted from the posting of a message to its last use; each receive of a turn comes in every turn.
        size = max(
            sum((transfer.over - before) // length + 1 for before, _ in messages[number:])
            + sum((transfer.over - before) // length for before, _ in messages[:number])
            for number, (_, transfer) in enumerate(messages)
        )
        # The number, counted from the turn's first receive, of the message that gets slot 0.
        first = min(
            -(transfer.message.micros[0] // period) * len(messages) + number
            for number, (_, transfer) in enumerate(messages)
        )
        slots_of[key] = iter([Slot((number - first) % size) for number in range(len(messages))])
        sizes.append((key, size))
    return tuple(next(slots_of[key]) for key in keys), tuple(sizes)
