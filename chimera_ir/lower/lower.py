"""From a schedule to a program: the compute operations keep their order, all other instructions are inserted.

    F m0 s1                     recv m0 s0->s1 from w0 into 0
    B m0 s1                     wait recv m0 s0->s1
                                F m0 s1
                                B m0 s1
                                send m0 s1->s0 to w0
                                all_reduce s1
                                wait send m0 s1->s0
                                wait all_reduce s1
                                step s1

The policies stand with the passes: `comm` (messages), `buffers` (slots), `sync` (gradients), `updates` (those of an
asynchronous scheme, with the versions of its weights).

The lanes of an asynchronous schedule are parts of endless sequences (`ir.turns`). They are lowered with a margin of
further turns on both sides, and the margin is cut off afterwards. So each instruction has its place of the steady
state, in warm-up and drain, too.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from chimera_ir.flow.net import Net, net_of
from chimera_ir.ir.ids import Slot
from chimera_ir.ir.levels import Program, Schedule
from chimera_ir.ir.ops import Compute, Instruction, Recv, Send, WaitRecv, WaitSend
from chimera_ir.lower.buffers import rings, slots
from chimera_ir.lower.comm import Traffic, communicate
from chimera_ir.lower.margin import Margin, Middle, widened
from chimera_ir.lower.sync import Duration, Insertions, synchronise
from chimera_ir.lower.updates import update


def _unit_time(_: Compute) -> int:
    return 1


def lower(schedule: Schedule, ahead: int = 1, duration: Duration = _unit_time, net: Net | None = None) -> Program:
    """The program that runs a schedule.

    Afterwards every hand-over between workers is one message, which is sent, received and waited for at both ends, and
    has a slot of its own while it is needed. Every stage that a worker holds is summed and stepped once per update. An
    inserted instruction has the origin of the operation that it serves.

    Parameters
    ----------
    schedule
        Complete, placed and acyclic; if it is asynchronous, its lanes repeat (`verify_schedule`).
    ahead
        How many operations before its use a receive is posted, at least 0.
    duration
        How long operations take, in any unit; this decides where a bubble is (`sync`).
    net
        The net of the schedule, where it is known already.

    Raises
    ------
    ValueError
        If ``ahead`` is negative.
    """
    if ahead < 0:
        raise ValueError("ahead must be at least 0")
    if schedule.header.asynchronous:
        wide, margin = widened(schedule)
        return Program(schedule.header, tuple(map(margin.cut, _streaming(wide, ahead, duration, margin))))
    traffics = communicate(schedule, ahead)
    lanes = zip(schedule.lanes, traffics, synchronise(schedule, duration, net or net_of(schedule)), strict=True)
    return Program(
        schedule.header,
        tuple(tuple(_lane(lane, traffic, slots(traffic.postings), sums)) for lane, traffic, sums in lanes),
    )


def sketch(schedule: Schedule) -> Program:
    """An asynchronous schedule with messages only, to see how much memory they take, in less time than `lower` takes.

    Only the middle half, which is in the steady state, has the messages that `lower` would give it. The sketch has no
    sums, steps or stashes (`updates.copies` counts these).
    """
    middle = Middle(schedule.header)
    lanes = (
        _lane(lane, traffic, rings(traffic.postings, middle.within), Insertions({}, {}))
        for lane, traffic in zip(schedule.lanes, communicate(schedule, 1), strict=True)
    )
    return Program(
        schedule.header,
        tuple(tuple(instruction for instruction in lane if middle.keeps(instruction)) for lane in lanes),
    )


def _streaming(schedule: Schedule, ahead: int, duration: Duration, margin: Margin) -> Iterator[list[Instruction]]:
    """The lowered lanes of a wide schedule, margins included."""
    traffics = communicate(schedule, ahead)
    updates = update(schedule, margin.durations(duration))
    for lane, traffic, insertions in zip(schedule.lanes, traffics, updates, strict=True):
        yield _lane(lane, traffic, rings(traffic.postings, margin.within), insertions)


def _lane(
    lane: tuple[Compute, ...], traffic: Traffic, recv_slots: Iterable[Slot], insertions: Insertions
) -> list[Instruction]:
    posted = _posted(lane, traffic, recv_slots)
    before, after = insertions.before, insertions.after
    received, sent, retired = traffic.received, traffic.sent, traffic.retired
    instructions: list[Instruction] = [*after.get(-1, ())]
    for place, operation in enumerate(lane):
        if place in posted:
            instructions += posted[place]
        if place in before:
            instructions += before[place]
        if place in received:
            instructions.append(WaitRecv(received[place].message, operation.origin))
            if place in retired:
                instructions += [
                    WaitSend(transfer.message, lane[transfer.produced].origin) for transfer in retired[place]
                ]
        instructions.append(operation)
        if place in sent:
            transfer = sent[place]
            instructions.append(Send(transfer.message, transfer.receiver, operation.origin))
        if place in after:
            instructions += after[place]
    instructions += [WaitSend(transfer.message, lane[transfer.produced].origin) for transfer in traffic.unanswered]
    instructions += insertions.at_end
    return instructions


def _posted(lane: tuple[Compute, ...], traffic: Traffic, recv_slots: Iterable[Slot]) -> dict[int, list[Recv]]:
    """The receives to post before each operation."""
    posted: dict[int, list[Recv]] = defaultdict(list)
    for (before, transfer), slot in zip(traffic.postings, recv_slots, strict=True):
        posted[before].append(Recv(transfer.message, transfer.sender, slot, lane[transfer.used].origin))
    return posted
