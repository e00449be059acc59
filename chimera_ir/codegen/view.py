"""What the templates show, computed: every line of every rank's script."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

from chimera_ir.ir.ids import Micro, Stage, Worker
from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.ops import (
    AllReduce,
    Backward,
    Forward,
    Instruction,
    Message,
    Recv,
    Send,
    Step,
    WaitAllReduce,
    WaitRecv,
    WaitSend,
)
from chimera_ir.ir.text.printer import line as instruction_line


@dataclass(frozen=True, slots=True)
class RankView:
    """A rank's script: ``slots`` and ``peers`` as Python literals, ``bindings`` the names that the lines use."""

    worker: int
    title: str
    micro_batches: int
    stages_text: str
    slots: str
    peers: str
    bindings: tuple[str, ...]
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PipeView:
    """A pipe's name and, as a Python literal, the worker of each of its stages."""

    name: str
    workers: str


@dataclass(frozen=True, slots=True)
class JobView:
    """The facts of the job: ``name`` and ``links`` are Python literals, ``title`` is prose."""

    title: str
    name: str
    workers: int
    stages: int
    micro_batches: int
    pipes: tuple[PipeView, ...]
    links: str


def title(header: Header) -> str:
    """The scheme with its parameters, as in ``name(D=4, N=8)``."""
    return f"{header.scheme}({', '.join(f'{name}={value}' for name, value in header.parameters)})"


def job_view(program: Program) -> JobView:
    """What train.py says of a program."""
    header = program.header
    return JobView(
        title=title(header),
        name=repr(title(header)),
        workers=header.workers,
        stages=header.stages,
        micro_batches=header.micro_batches,
        pipes=tuple(PipeView(pipe.name, repr(pipe.workers)) for pipe in header.pipes),
        links=_links(program),
    )


def _links(program: Program) -> str:
    """Who sends to whom, as a Python literal with a line for each sender."""
    rows = []
    for worker, lane in enumerate(program.lanes):
        receivers = sorted({instruction.to for instruction in lane if isinstance(instruction, Send)})
        if receivers:
            rows.append(f"        {', '.join(f'({worker}, {receiver})' for receiver in receivers)},\n")
    return f"(\n{''.join(rows)}    )" if rows else "()"


def rank_view(program: Program, worker: Worker) -> RankView:
    """What a rank's script says: the worker's lane, one statement per instruction."""
    header, lane = program.header, program.lanes[worker]
    stages, peers = header.stages_of[worker], _peers(lane)
    return RankView(
        worker=worker,
        title=title(header),
        micro_batches=header.micro_batches,
        stages_text=_listed("stage", stages),
        slots=repr({int(stage): _slots(lane, stage) for stage in stages}),
        peers=repr(peers),
        bindings=(*_bindings("stage", stages), *_bindings("peer", peers)),
        lines=_lines(header, worker, lane),
    )


def _lines(header: Header, worker: Worker, lane: tuple[Instruction, ...]) -> tuple[str, ...]:
    """The statements, the program's lines as comments beside them, and what is let go between them."""
    codes = [_code(header, worker, instruction) for instruction in lane]
    width = max(map(len, codes), default=0)
    lines: list[str] = []
    for instruction, code in zip(lane, codes, strict=True):
        lines.append(f"{code:<{width}}  # {instruction_line(instruction)}")
        spent = _spent(header, worker, instruction)
        lines.extend([f"del {spent}"] if spent else [])
    return tuple(lines)


def _spent(header: Header, worker: Worker, instruction: Instruction) -> str:
    """The gradients that nobody on this lane reads after the instruction."""
    match instruction:
        case Send(message=message) if message.source > message.target:
            return _payload(message)
        case Backward(micros=micros, stage=stage) if _is_local(header, worker, micros[0], stage + 1):
            return _name("dx", micros[0], stage + 1)
        case _:
            return ""


def _is_local(header: Header, worker: Worker, micro: Micro, stage: int) -> bool:
    """Whether a stage of a micro-batch's pipe exists and lies on this worker."""
    return 0 <= stage < header.stages and header.worker(micro, Stage(stage)) == worker


def _listed(word: str, numbers: Iterable[int]) -> str:
    found = [str(n) for n in numbers]
    match found:
        case []:
            return f"no {word}"
        case [one]:
            return f"{word} {one}"
        case _:
            return f"{word}s {', '.join(found[:-1])} and {found[-1]}"


def _bindings(word: str, numbers: Iterable[int]) -> tuple[str, ...]:
    return tuple(f"{word}{n} = lane.{word}({n})" for n in numbers)


def _peers(lane: tuple[Instruction, ...]) -> tuple[int, ...]:
    found: set[int] = set()
    for instruction in lane:
        match instruction:
            case Send(to=worker) | Recv(source=worker):
                found.add(int(worker))
    return tuple(sorted(found))


def _slots(lane: tuple[Instruction, ...], stage: int) -> tuple[int, int]:
    """How many receive buffers a stage needs: for activations, for gradients."""
    activations = gradients = 0
    for instruction in lane:
        match instruction:
            case Recv(message=Message(source=source, target=target), slot=slot) if target == stage:
                if source < target:
                    activations = max(activations, slot + 1)
                else:
                    gradients = max(gradients, slot + 1)
    return activations, gradients


def _code(header: Header, worker: Worker, instruction: Instruction) -> str:
    match instruction:
        case Forward():
            return _forward(header, worker, instruction)
        case Backward():
            return _backward(header, worker, instruction)
        case Send(message=message, to=to):
            return f"{_sent(message)} = peer{to}.isend({_payload(message)}, tag={_tag(header, message)})"
        case Recv(message=message, source=source, slot=slot):
            kind = "inputs" if message.source < message.target else "gradients"
            buffers = f"stage{message.target}.{kind}[{slot}]"
            return f"{_received(message)} = peer{source}.irecv({buffers}, tag={_tag(header, message)})"
        case WaitRecv(message=message):
            return f"{_received(message)}.wait()"
        case WaitSend(message=message):
            return f"{_sent(message)}.wait()"
        case AllReduce(stage=stage):
            return f"sum_s{stage} = stage{stage}.all_reduce()"
        case WaitAllReduce(stage=stage):
            return f"sum_s{stage}.wait()"
        case Step(stage=stage):
            return f"stage{stage}.step()"
        case _:
            assert_never(instruction)


def _name(prefix: str, micro: int, stage: int) -> str:
    return f"{prefix}_m{micro}_s{stage}"


def _received(message: Message) -> str:
    return _name("x" if message.source < message.target else "dy", message.micros[0], message.target)


def _sent(message: Message) -> str:
    return _name("y_sent" if message.source < message.target else "dx_sent", message.micros[0], message.source)


def _payload(message: Message) -> str:
    if message.source < message.target:
        return f"{_name('f', message.micros[0], message.source)}.outputs"
    return _name("dx", message.micros[0], message.source)


def _tag(header: Header, message: Message) -> int:
    """A number that no other message of the update has; runtime.py reads it backwards for its error messages."""
    return (message.micros[0] * header.stages + message.source) * 2 + (message.source > message.target)


def _forward(header: Header, worker: Worker, forward: Forward) -> str:
    micro, stage = forward.micros[0], forward.stage
    if stage == 0:
        inputs = f"lane.input({micro})"
    elif _is_local(header, worker, micro, stage - 1):
        inputs = f"{_name('f', micro, stage - 1)}.outputs"
    else:
        inputs = f"{_name('x', micro, stage)}.tensors"
    state = _name("f", micro, stage)
    if stage == header.stages - 1:
        return f"{state} = stage{stage}.forward_loss({micro}, {inputs}, lane.target({micro}))"
    return f"{state} = stage{stage}.forward({micro}, {inputs})"


def _backward(header: Header, worker: Worker, backward: Backward) -> str:
    micro, stage = backward.micros[0], backward.stage
    state = _name("f", micro, stage)
    if stage == header.stages - 1:
        call = f"stage{stage}.backward_loss({state})"
    elif _is_local(header, worker, micro, stage + 1):
        call = f"stage{stage}.backward({state}, {_name('dx', micro, stage + 1)})"
    else:
        call = f"stage{stage}.backward({state}, {_name('dy', micro, stage)}.tensors)"
    return call if stage == 0 else f"{_name('dx', micro, stage)} = {call}"
