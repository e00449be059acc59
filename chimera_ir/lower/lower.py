"""The pass from a schedule to a program: compute operations keep their order, and all other instructions are inserted.

    F m0 s1                     recv m0 s0->s1 from w0 into 0
    B m0 s1                     wait recv m0 s0->s1
                                F m0 s1
                                B m0 s1
                                send m0 s1->s0 to w0
                                all_reduce s1
                                wait send m0 s1->s0
                                wait all_reduce s1
                                step s1

The policies are in the modules of the passes: `comm` (messages), `buffers` (slots), `sync` (gradients), `streaming`
(schedules without end), `updates` (the sums, steps and weight versions of such schedules) and `moves` (memory to the
host and back). `insertion` puts the lanes together.
"""

from collections.abc import Iterable

from chimera_ir.flow.host_moves import waits_in_turn, waits_of
from chimera_ir.flow.net import Net, net_of
from chimera_ir.ir.ids import Slot
from chimera_ir.ir.levels import Program, Schedule
from chimera_ir.ir.ops import Instruction, Operation, WaitSend
from chimera_ir.ir.sharing import Communicators
from chimera_ir.ir.streams import ProgramStream, ScheduleStream
from chimera_ir.lower.buffers import slots
from chimera_ir.lower.comm import AHEAD, Traffic, communicate, earliest_run
from chimera_ir.lower.insertion import with_inserted
from chimera_ir.lower.launched_moves import Moves, moves_between, without_moves
from chimera_ir.lower.streaming import lower_stream
from chimera_ir.lower.sync import Duration, Insertions, synchronise


def _unit_time(_: Operation) -> int:
    return 1


def lower(
    schedule: Schedule | ScheduleStream,
    ahead: int = AHEAD,
    duration: Duration = _unit_time,
    net: Net | None = None,
    communicators: Communicators = Communicators.DIRECTED,
) -> Program | ProgramStream:
    """The program that runs a schedule; of a schedule stream, a program stream.

    Every hand-over between workers is one message, which is sent, received and waited for at both ends, and which has a
    slot of its own while it is needed. Every stage that a worker holds is summed and stepped once per update. An
    inserted instruction has the origin of the operation that it serves.

    The schedule has no errors by the rules "complete", "placed" and "acyclic"; ``net`` is the net of a schedule with a
    flush, if known already. A receive is posted ``ahead`` operations before its use. ``duration`` gives the time of an
    operation in any unit, which decides where a bubble is (`sync`). ``communicators`` says with how many the program
    must finish: one per directed pair of workers, or one per pair.

    Raises `ValueError` if ``ahead`` is negative, or if the schedule is some updates of a stream: lower the stream
    (`stream_of`).
    """
    if ahead < 0:
        raise ValueError("ahead must be at least 0")
    header, is_stream = schedule.header, isinstance(schedule, ScheduleStream)
    if header.period and not is_stream:
        raise ValueError("some updates of a stream are not lowered by themselves")
    moves: list[Moves] = [{}] * header.workers
    if header.moves:
        waits = waits_in_turn if is_stream else waits_of
        moves = [moves_between(lane, waits(header, lane), header.period) for lane in schedule.lanes]
        schedule, net = without_moves(schedule), None
    if isinstance(schedule, ScheduleStream):
        return lower_stream(schedule, ahead, duration, communicators, moves)
    net = net or net_of(schedule)
    run = None if header.answers else earliest_run(net)
    traffics = communicate(schedule, ahead, run, communicators)
    lanes = zip(schedule.lanes, traffics, synchronise(schedule, duration, net), moves, strict=True)
    return Program(
        header,
        tuple(_lane(lane, traffic, slots(traffic.postings), sums, between) for lane, traffic, sums, between in lanes),
    )


def _lane(
    lane: tuple[Operation, ...],
    traffic: Traffic,
    recv_slots: Iterable[Slot],
    insertions: Insertions,
    moves: Moves,
) -> tuple[Instruction, ...]:
    return (
        *insertions.after.get(-1, ()),
        *with_inserted(lane, traffic, recv_slots, insertions, moves),
        *(WaitSend(transfer.message, lane[transfer.produced].origin) for transfer in traffic.unanswered),
        *insertions.at_end,
    )
