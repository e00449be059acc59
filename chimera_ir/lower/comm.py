"""Messages between workers: where they are sent, received and waited for.

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
    right after the first ``wait recv`` of a message that the peer sent after using this one. That proves that the peer
    has received it, so the wait never blocks. Sends that no later message answers are waited for at the end of the
    lane, where they delay no operation.

Where operations hand values on in one direction only, as forwards alone do, nothing answers a message. There:

``wait send``
    right before the first operation that, in the earliest run, begins when the operation that uses the message is over;
    if there is none, at the end of the lane. So the transfer has the time of an operation, and what is sent is let go
    soon after it was used. In the order in which operations begin in the earliest run, the receive is posted before.

With one communicator for both directions of a pair of workers, both post the messages between them in one order:

    worker 0:                    worker 1:
      F m2 s0                      recv m2 s0->s1 from w0
      send m2 s0->s1 to w1         B m1 s1
      recv m1 s1->s0 from w1       send m1 s1->s0 to w0
      wait recv m1 s1->s0          wait recv m2 s0->s1
      wait send m1 s0->s1          wait send m0 s1->s0
      B m1 s0                      F m2 s1

A message comes in this order by the sum of two places: that of its producer in the sender's lane and that of its first
use in the receiver's lane. Messages of one operation have the sum of the first of them. Of equal sums the one of the
lower sender comes first. There:

``recv``
    as above, but after the worker's own send that comes before it in this order, and before the one that comes next.

Every receive is still posted before its use. Suppose that a worker uses y no later than it produces x. Then the peer
has produced y before it uses x, so the sum of y is less, and the receive of y does not come after the send of x. The
order does not depend on times, so it repeats as the lanes do.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, itemgetter
from typing import NamedTuple

from chimera_ir.flow.flow import Flow, crossing
from chimera_ir.flow.net import Net
from chimera_ir.ir.ids import Stage, Worker
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Message
from chimera_ir.ir.sharing import Communicators

AHEAD = 1
"""How many operations before its use a receive is posted, unless a caller says otherwise."""


class Transfer(NamedTuple):
    """A message between two workers.

    ``produced`` is the place of its producer in the sender's lane, ``used`` that of its first user in the receiver's
    lane, and ``over`` the place in the receiver's lane after which its memory is free.
    """

    message: Message
    sender: Worker
    receiver: Worker
    produced: int
    used: int
    over: int


_Link = tuple[Worker, Worker]
"""A directed pair of workers."""


class Posting(NamedTuple):
    """A receive, and the place of the operation before which it is posted."""

    before: int
    transfer: Transfer


@dataclass(frozen=True, slots=True)
class Traffic:
    """The communication of one lane; every index is that of a compute operation in it.

    Attributes
    ----------
    postings
        The receives, in the order of the lane.
    sent
        The messages that leave after an operation: one, or those of both operations of a pair.
    received
        The messages that are waited for before an operation.
    retired
        The sends that are waited for before an operation.
    unanswered
        The sends that are waited for at the end.
    """

    postings: list[Posting]
    sent: Mapping[int, list[Transfer]]
    received: Mapping[int, list[Transfer]]
    retired: Mapping[int, list[Transfer]]
    unanswered: list[Transfer]


@dataclass(slots=True)
class _Draft:
    """The traffic of a lane while it is gathered, peer by peer.

    ``wanted`` holds the receives, each with the place before which it is posted; a negative one is the lane's start.
    """

    wanted: list[tuple[int, Transfer]] = field(default_factory=list)
    sent: dict[int, list[Transfer]] = field(default_factory=lambda: defaultdict(list))
    received: dict[int, list[Transfer]] = field(default_factory=lambda: defaultdict(list))
    retired: dict[int, list[Transfer]] = field(default_factory=lambda: defaultdict(list))
    unanswered: list[Transfer] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EarliestRun:
    """When the operations of each lane begin and end if all run as early as they may, by worker and place."""

    begins: Sequence[Sequence[int]]
    ends: Sequence[Sequence[int]]


def earliest_run(net: Net) -> EarliestRun:
    """The earliest run if every operation takes as long as it has micro-batches."""
    lengths = [operation.size for operation in net.operations]
    ends = net.ends(lengths)
    begins = [end - length for end, length in zip(ends, lengths, strict=True)]
    return EarliestRun(*([times[lane.start : lane.stop] for lane in net.lanes] for times in (begins, ends)))


def communicate(
    schedule: Schedule,
    ahead: int,
    run: EarliestRun | None = None,
    communicators: Communicators = Communicators.DIRECTED,
) -> Iterator[Traffic]:
    """The traffic of every lane, by the policy above.

    Parameters
    ----------
    schedule
        Complete, placed and acyclic.
    ahead
        How many operations before its use a receive is posted, at least 0.
    run
        The earliest run of the schedule, where operations hand values on in one direction only.
    communicators
        Which messages share one: those from one worker to another, or those between two workers.
    """
    drafts = _drafts(schedule, ahead, run, communicators)[::-1]
    while drafts:  # a draft is let go with its lane: all of them together take as much memory as the program
        yield _traffic(drafts.pop())


def _drafts(schedule: Schedule, ahead: int, run: EarliestRun | None, communicators: Communicators) -> list[_Draft]:
    drafts = [_Draft() for _ in schedule.lanes]
    places = Flow(schedule.header, chain.from_iterable(map(enumerate, schedule.lanes)))
    links = _links(schedule, places)
    waits = {} if run is None else _waits(links, run)
    if run is not None:
        links = _kept_for_sends(schedule.header, places, links, waits)
    for (sender, receiver), transfers in links.items():
        there, here = drafts[receiver], drafts[sender]
        answers = links.get((receiver, sender), [])
        wanted = [use - ahead for use in _first_uses(transfers)]
        if communicators is Communicators.PAIR:
            wanted = [*_in_one_order(wanted, transfers, answers)]
        there.wanted += zip(wanted, transfers, strict=True)
        for transfer in transfers:
            there.received[transfer.used].append(transfer)
            here.sent[transfer.produced].append(transfer)
        if run is None:
            _retire(here, transfers, answers)
        else:
            _retire_before(here, transfers, waits, len(schedule.lanes[sender]))
    return drafts


def _traffic(draft: _Draft) -> Traffic:
    for transfers in (draft.unanswered, *draft.retired.values()):
        transfers.sort(key=attrgetter("produced"))
    wanted = sorted(draft.wanted, key=itemgetter(0))  # of those with the same place, the lower sender stays first
    return Traffic(
        postings=[Posting(max(0, before), transfer) for before, transfer in wanted],
        sent=draft.sent,
        received=draft.received,
        retired=draft.retired,
        unanswered=draft.unanswered,
    )


def _links(schedule: Schedule, places: Flow) -> dict[_Link, list[Transfer]]:
    """The messages of every directed pair of workers, in the order in which they are sent."""
    header = schedule.header
    links: dict[_Link, list[Transfer]] = defaultdict(list)
    for number, lane in enumerate(schedule.lanes):
        worker = Worker(number)
        for produced, message, peer in crossing(header, worker, enumerate(lane)):
            used, over = places.consumer(message), places.last_use(message)
            links[worker, peer].append(Transfer(message, worker, peer, produced, used, over))
    return links


def _first_uses(transfers: Iterable[Transfer]) -> list[int]:
    """First uses in the order of the sends: for each message of a link the earliest use of it or of a later one."""
    uses: list[int] = [transfer.used for transfer in transfers]
    for index in range(len(uses) - 2, -1, -1):
        uses[index] = min(uses[index], uses[index + 1])
    return uses


def _in_one_order(wanted: Iterable[int], transfers: Sequence[Transfer], sends: Sequence[Transfer]) -> Iterator[int]:
    """The places before which a link's receives are posted, as near to what is wanted as the receiver's sends allow."""
    keys = _keys(sends)
    for place, key in zip(wanted, _keys(transfers), strict=True):
        following = bisect_left(keys, key)
        if following < len(sends):
            place = min(place, sends[following].produced)
        if following > 0:
            place = max(place, sends[following - 1].produced + 1)
        yield place


def _keys(transfers: Sequence[Transfer]) -> list[tuple[int, Worker]]:
    """The keys by which a link's messages come in the order of all messages between its two workers."""
    sums: dict[int, int] = {}
    for use, transfer in zip(_first_uses(transfers), transfers, strict=True):
        sums.setdefault(transfer.produced, transfer.produced + use)
    return [(sums[transfer.produced], transfer.sender) for transfer in transfers]


def _retire(draft: _Draft, transfers: list[Transfer], answers: list[Transfer]) -> None:
    """Assigns each message of a link to the first use of an answer, which the peer sent after using the message."""
    produced = [answer.produced for answer in answers]
    uses = _first_uses(answers)
    for transfer in transfers:
        first = bisect_left(produced, transfer.used)
        if first < len(uses):
            draft.retired[uses[first]].append(transfer)
        else:
            draft.unanswered.append(transfer)


def _waits(links: Mapping[_Link, Iterable[Transfer]], run: EarliestRun) -> dict[Message, int]:
    """By message, the place in its sender's lane before which its send is waited for; it may be the lane's end."""
    return {
        transfer.message: bisect_left(run.begins[transfer.sender], run.ends[transfer.receiver][transfer.used])
        for transfers in links.values()
        for transfer in transfers
    }


def _kept_for_sends(
    header: Header, places: Flow, links: Mapping[_Link, Iterable[Transfer]], waits: Mapping[Message, int]
) -> dict[_Link, list[Transfer]]:
    """The messages with memory that is kept until what is made of them, which may lie there, is sent or used."""

    def over(transfer: Transfer) -> int:
        micros, source, target = transfer.message
        last, towards = transfer.over, target - source
        while 0 <= target + towards < header.stages:
            made = Message(micros, target, Stage(target + towards))
            if header.worker(micros[0], made.target) != transfer.receiver:
                return max(last, waits[made])
            last, target = places.consumer(made), made.target
        return last

    return {
        link: [transfer._replace(over=over(transfer)) for transfer in transfers] for link, transfers in links.items()
    }


def _retire_before(draft: _Draft, transfers: Iterable[Transfer], waits: Mapping[Message, int], end: int) -> None:
    """Assigns each message of a link to the operation before which its send is waited for, if that is in the lane."""
    for transfer in transfers:
        place = waits[transfer.message]
        if place < end:
            draft.retired[place].append(transfer)
        else:
            draft.unanswered.append(transfer)
