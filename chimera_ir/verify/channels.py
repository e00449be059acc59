"""Rule "channels": the program, with all its waits and sums, finishes on both transports (see `transport`).

The proof is a global order in which no wait blocks. If there is none, the diagnostic shows a shortest cycle of workers
that wait for each other.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from chimera_ir.diagnostics.catalogue.program import Blocked, Deadlock, ReceivesOutOfOrder
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.flow.engine import Played
from chimera_ir.ir.ids import Worker
from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import AllReduce, Instruction, Message, Recv, Send, WaitAllReduce, WaitRecv, WaitSend
from chimera_ir.ir.text.printer import line
from chimera_ir.verify.index import receiver, sender
from chimera_ir.verify.transport import Transport, replay
from chimera_ir.verify.wording import content, summed


@dataclass(frozen=True, slots=True)
class Certificate:
    """Proof that a program finishes on a ``transport``: an order of all its instructions in which no wait blocks.

    The order is ``played.order``. Instructions are numbered lane by lane.
    """

    transport: Transport
    played: Played


def channels(program: Program) -> tuple[Certificate, ...] | tuple[Diagnostic, ...]:
    """Returns a certificate for each transport or, if the program does not finish on one of them, the errors.

    The program obeys the rules "messages" and "gradients".
    """
    # If all orders agree, both transports behave the same (`transport`), so one replay proves both.
    disorder = tuple(_disorder(program))
    transports = [Transport.TAGGED] if disorder else list(Transport)
    result = replay(program)
    if [*result.places] != [*map(len, program.lanes)]:
        return (*disorder, _deadlock(program, transports, result))
    return disorder or tuple(Certificate(transport, result) for transport in transports)


def _disorder(program: Program) -> Iterator[Diagnostic]:
    """Yields, for every directed pair of workers, the first receive that would get the message of another send."""
    sends: dict[tuple[int, int], list[Send]] = {}
    recvs: dict[tuple[int, int], list[Recv]] = {}
    for worker, parts in enumerate(program.parts):
        for send in parts.sends.lines:
            sends.setdefault((worker, send.to), []).append(send)
        for recv in parts.recvs.lines:
            recvs.setdefault((recv.source, worker), []).append(recv)
    for (peer, worker), sent in sends.items():
        for number, (send, recv) in enumerate(zip(sent, recvs[peer, worker], strict=True), start=1):
            if send.message is not recv.message and send.message != recv.message:
                yield ReceivesOutOfOrder(
                    recv.origin,
                    worker,
                    line(recv, program.header),
                    peer,
                    line(send, program.header),
                    number,
                    send.origin,
                )
                break


def _deadlock(program: Program, transports: list[Transport], result: Played) -> Diagnostic:
    """Returns the diagnostic of a shortest cycle of workers that wait for each other.

    ``result`` says at which instructions the lanes stop, on ``transports``.
    """
    from chimera_ir.flow.graphs import shortest_cycle  # with networkx, which takes a while

    blocked = {Worker(w): place for w, place in enumerate(result.places) if place < len(program.lanes[w])}
    wanted = {worker: _wanted(program, worker, place, result) for worker, place in blocked.items()}
    cycle = shortest_cycle({worker: [peer for peer, _ in wants] for worker, wants in wanted.items()})
    chain = [_blocked(program, worker, blocked[worker], wanted[worker], cycle) for worker in map(Worker, cycle)]
    names = ", nor with ".join(transport.value for transport in transports)
    return Deadlock(chain[0].span, names, tuple(chain))


def _wanted(program: Program, worker: Worker, place: int, result: Played) -> list[tuple[Worker, Instruction]]:
    """Returns the instructions of other lanes without which ``worker`` cannot go on, each with the worker of its lane.

    ``place`` is where the lane of ``worker`` is blocked: at a wait for a message or for a sum. ``result`` says how far
    every lane gets; the returned instructions come after that.
    """
    header = program.header
    match program.lanes[worker][place]:
        case WaitRecv(message):
            return _posting(program, result, sender(header, message), Send, message)
        case WaitSend(message):
            return _posting(program, result, receiver(header, message), Recv, message)
        case WaitAllReduce(group, version=version):
            rest = ((member, result.places[member]) for member in header.members(group))
            return [
                (member, instruction)
                for member, start in rest
                for instruction in program.lanes[member][start:]
                if isinstance(instruction, AllReduce) and (instruction.group, instruction.version) == (group, version)
            ]
        case _:
            raise AssertionError("only waits block")


def _posting(
    program: Program, result: Played, peer: Worker, kind: type[Send | Recv], message: Message
) -> list[tuple[Worker, Instruction]]:
    rest = program.lanes[peer][result.places[peer] :]
    return [
        (peer, instruction) for instruction in rest if isinstance(instruction, kind) and instruction.message == message
    ]


def _blocked(
    program: Program, worker: Worker, place: int, wants: list[tuple[Worker, Instruction]], cycle: tuple[int, ...]
) -> Blocked:
    wait = program.lanes[worker][place]
    after = cycle[(cycle.index(worker) + 1) % len(cycle)]
    peer, needed = next(want for want in wants if want[0] == after)
    return Blocked(
        worker, line(wait, program.header), _meaning(program, wait), line(needed, program.header), peer, wait.origin
    )


def _meaning(program: Program, wait: Instruction) -> str:
    header = program.header
    match wait:
        case WaitRecv(message):
            return f"{content(header, message)} (worker {sender(header, message)})"
        case WaitSend(message):
            return f"worker {receiver(header, message)} to take {content(header, message)}"
        case WaitAllReduce():
            return f"the sum of the gradients of {summed(wait)}"
        case _:
            raise AssertionError("only waits block")
