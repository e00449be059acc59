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
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from chimera_ir.flow.flow import Flow, crossing
from chimera_ir.ir.ids import Worker
from chimera_ir.ir.levels import Schedule
from chimera_ir.ir.ops import Message


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
        The message that leaves after an operation.
    received
        The message that is waited for before an operation.
    retired
        The sends that the wait before an operation proves to be over.
    unanswered
        The sends that no wait proves to be over.
    """

    postings: tuple[Posting, ...]
    sent: Mapping[int, Transfer]
    received: Mapping[int, Transfer]
    retired: Mapping[int, list[Transfer]]
    unanswered: tuple[Transfer, ...]


@dataclass(slots=True)
class _Draft:
    """The traffic of a lane while it is gathered, peer by peer; ``wanted`` holds (first use, transfer)."""

    wanted: list[tuple[int, Transfer]] = field(default_factory=list)
    sent: dict[int, Transfer] = field(default_factory=dict)
    received: dict[int, Transfer] = field(default_factory=dict)
    retired: dict[int, list[Transfer]] = field(default_factory=lambda: defaultdict(list))
    unanswered: list[Transfer] = field(default_factory=list)


def communicate(schedule: Schedule, ahead: int) -> tuple[Traffic, ...]:
    """The traffic of every lane, by the policy above.

    Parameters
    ----------
    schedule
        Complete, placed and acyclic.
    ahead
        How many operations before its use a receive is posted, at least 0.
    """
    drafts = [_Draft() for _ in schedule.lanes]
    links = _links(schedule)
    for (sender, receiver), transfers in links.items():
        there, here = drafts[receiver], drafts[sender]
        there.wanted += zip(_first_uses(transfers), transfers, strict=True)
        for transfer in transfers:
            there.received[transfer.used] = here.sent[transfer.produced] = transfer
        _retire(here, transfers, links.get((receiver, sender), []))
    return tuple(_traffic(draft, ahead) for draft in drafts)


def _traffic(draft: _Draft, ahead: int) -> Traffic:
    wanted = sorted(draft.wanted, key=lambda item: item[1].sender)
    wanted.sort(key=itemgetter(0))
    return Traffic(
        postings=tuple([Posting(max(0, use - ahead), transfer) for use, transfer in wanted]),
        sent=draft.sent,
        received=draft.received,
        retired={use: sorted(transfers, key=_produced) for use, transfers in draft.retired.items()},
        unanswered=tuple(sorted(draft.unanswered, key=_produced)),
    )


def _links(schedule: Schedule) -> dict[tuple[Worker, Worker], list[Transfer]]:
    """The messages of every directed pair of workers, in the order in which they are sent."""
    header = schedule.header
    places = Flow(header, chain.from_iterable(map(enumerate, schedule.lanes)))
    links: dict[tuple[Worker, Worker], list[Transfer]] = defaultdict(list)
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


def _produced(transfer: Transfer) -> int:
    return transfer.produced
