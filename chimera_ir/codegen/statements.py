"""Each instruction of a lane as Python statements.

A name tells what it holds: ``x_m0_s1`` is what stage 1 receives of micro-batch 0, ``y_m0_m1_s1`` what it hands on of
micro-batches 0 and 1. What waits for a backward, ``f_m0_s1``, is always of a single micro-batch.
"""

from collections.abc import Mapping, Sequence
from typing import assert_never

from chimera_ir.ir.ids import Micro, Stage, Worker
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import (
    AllReduce,
    Backward,
    Drop,
    Forward,
    Instruction,
    Message,
    Recv,
    Send,
    Stash,
    Step,
    WaitAllReduce,
    WaitRecv,
    WaitSend,
)

Rooms = Mapping[tuple[int, bool], tuple[int, ...]]
"""By receiving stage, and whether of activations: for how many micro-batches each slot has room."""

Statements = tuple[tuple[str, ...], tuple[str, ...]]
"""The statements of an instruction, and the names that nobody on the lane reads after them."""


def statements(header: Header, worker: Worker, instruction: Instruction, rooms: Rooms) -> Statements:
    """What a worker does for an instruction."""
    match instruction:
        case Forward():
            return _forward(header, worker, instruction), _spent_by_forward(header, worker, instruction)
        case Backward():
            return _backward(header, worker, instruction)
        case Send(message=message):
            return _send(header, instruction), _spent_by_send(header, message)
        case Recv():
            return (_recv(header, instruction, rooms),), ()
        case WaitRecv(message=message):
            return (f"{_received(message)}.wait()",), ()
        case WaitSend(message=message):
            return (f"{_sent(message)}.wait()",), ()
        case AllReduce(stage=stage):
            return (f"sum_s{stage} = stage{stage}.all_reduce()",), ()
        case WaitAllReduce(stage=stage):
            return (f"sum_s{stage}.wait()",), ()
        case Step(stage=stage):
            return (f"stage{stage}.step()",), ()
        case Stash(stage=stage, version=version):
            return (f"stage{stage}.stash({version})",), ()
        case Drop(stage=stage, version=version):
            return (f"stage{stage}.drop({version})",), ()
        case _:
            assert_never(instruction)


def _name(prefix: str, micros: Sequence[int], stage: int) -> str:
    return "_".join([prefix, *(f"m{micro}" for micro in micros), f"s{stage}"])


def _all(items: Sequence[str]) -> str:
    return f"({', '.join(items)})"


def _is_local(header: Header, worker: Worker, micro: Micro, stage: int) -> bool:
    """Whether a stage of a micro-batch's pipe exists and lies on this worker."""
    return 0 <= stage < header.stages and header.worker(micro, Stage(stage)) == worker


def _hands_on_apart(header: Header, micros: Sequence[Micro], stage: Stage) -> bool:
    """Whether what a forward hands on has a name of its own, rather than being a part of what is kept."""
    return len(micros) > 1 or header.recomputes(micros[0], stage)


# ---- messages


def _send(header: Header, send: Send) -> tuple[str, ...]:
    message = send.message
    return (f"{_sent(message)} = peer{send.to}.isend({_payload(header, message)}, tag={_tag(header, message)})",)


def _recv(header: Header, recv: Recv, rooms: Rooms) -> str:
    message, forward = recv.message, recv.message.source < recv.message.target
    buffers = f"stage{message.target}.{'inputs' if forward else 'gradients'}[{recv.slot}]"
    room = rooms[int(message.target), forward][recv.slot]
    if room > len(message.micros):
        buffers = f"part({buffers}, 0, {len(message.micros)}, {room})"
    return f"{_received(message)} = peer{recv.source}.irecv({buffers}, tag={_tag(header, message)})"


def _received(message: Message) -> str:
    return _name("x" if message.source < message.target else "dy", message.micros, message.target)


def _sent(message: Message) -> str:
    return _name("y_sent" if message.source < message.target else "dx_sent", message.micros, message.source)


def _payload(header: Header, message: Message) -> str:
    if message.source > message.target:
        return _name("dx", message.micros, message.source)
    return _outputs(header, message.micros, message.source)


def _outputs(header: Header, micros: Sequence[Micro], stage: Stage) -> str:
    """What a forward hands on."""
    if _hands_on_apart(header, micros, stage):
        return _name("y", micros, stage)
    return f"{_name('f', micros, stage)}.outputs"


def _spent_by_send(header: Header, message: Message) -> tuple[str, ...]:
    if message.source > message.target or _hands_on_apart(header, message.micros, message.source):
        return (_payload(header, message),)
    return ()


def _tag(header: Header, message: Message) -> int:
    """A number that no other message of the update has; runtime.py reads it backwards for its error messages."""
    return (message.micros[0] * header.stages + message.source) * 2 + (message.source > message.target)


# ---- compute


def _forward(header: Header, worker: Worker, forward: Forward) -> tuple[str, ...]:
    micros, stage = forward.micros, forward.stage
    states = [_name("f", [micro], stage) for micro in micros]
    last = stage == header.stages - 1
    if header.recomputes(micros[0], stage):
        return _keeping(header, worker, forward, states, last)
    if len(micros) == 1:
        return (_plain(stage, micros[0], states[0], _inputs(header, worker, forward), last),)
    inputs = _inputs_apart(header, worker, forward)
    lines = [_plain(stage, *each, last) for each in zip(micros, states, inputs, strict=True)]
    if not last:
        lines.append(f"{_name('y', micros, stage)} = join({_all([f'{state}.outputs' for state in states])})")
    return tuple(lines)


def _plain(stage: Stage, micro: Micro, state: str, inputs: str, last: bool) -> str:
    if last:
        return f"{state} = stage{stage}.forward_loss({micro}, {inputs}, lane.target({micro}))"
    return f"{state} = stage{stage}.forward({micro}, {inputs})"


def _keeping(header: Header, worker: Worker, forward: Forward, states: list[str], last: bool) -> tuple[str, ...]:
    """A forward that keeps nothing but its input, over one micro-batch or several at once."""
    micros, stage = forward.micros, forward.stage
    inputs, outputs = _inputs(header, worker, forward), _name("y", micros, stage)
    targets = [f"lane.target({micro})" for micro in micros]
    if len(micros) == 1:
        if last:
            call = f"forward_loss_keep_input({micros[0]}, {inputs}, {targets[0]})"
            return (f"{states[0]} = stage{stage}.{call}",)
        return (f"{states[0]}, {outputs} = stage{stage}.forward_keep_input({micros[0]}, {inputs})",)
    numbers = _all([str(micro) for micro in micros])
    if last:
        opening = f"{', '.join(states)} = stage{stage}.forward_loss_keep_inputs("
        return (opening, f"    {numbers}, {inputs}, {_all(targets)}", ")")
    return (f"{_all(states)}, {outputs} = stage{stage}.forward_keep_inputs(", f"    {numbers}, {inputs}", ")")


def _inputs(header: Header, worker: Worker, forward: Forward) -> str:
    """What a forward reads, of all its micro-batches."""
    micros, stage = forward.micros, forward.stage
    if stage == 0:
        loaded = [f"lane.input({micro})" for micro in micros]
        return loaded[0] if len(loaded) == 1 else _all(loaded)
    if _is_local(header, worker, micros[0], stage - 1):
        return _outputs(header, micros, Stage(stage - 1))
    return f"{_name('x', micros, stage)}.tensors"


def _inputs_apart(header: Header, worker: Worker, forward: Forward) -> list[str]:
    """The same for each micro-batch."""
    if forward.stage == 0:
        return [f"lane.input({micro})" for micro in forward.micros]
    return _apart(_inputs(header, worker, forward), len(forward.micros))


def _apart(tensors: str, count: int) -> list[str]:
    return [f"part({tensors}, {i}, {i + 1}, {count})" for i in range(count)]


def _spent_by_forward(header: Header, worker: Worker, forward: Forward) -> tuple[str, ...]:
    before = Stage(forward.stage - 1)
    local = _is_local(header, worker, forward.micros[0], before)
    if local and _hands_on_apart(header, forward.micros, before):
        return (_outputs(header, forward.micros, before),)
    return ()


def _backward(header: Header, worker: Worker, backward: Backward) -> Statements:
    micros, stage = backward.micros, backward.stage
    gradients = _gradients(header, worker, backward)
    results = [_name("dx", [micro], stage) for micro in micros]
    again = "_recompute" if header.recomputes(micros[0], stage) else ""
    lines: list[str] = []
    for micro, given, result in zip(micros, gradients, results, strict=True):
        state = _name("f", [micro], stage)
        call = f"backward_loss{again}({state})" if not given else f"backward{again}({state}, {given})"
        lines.append(f"stage{stage}.{call}" if stage == 0 else f"{result} = stage{stage}.{call}")
    spent = [_name("dx", micros, stage + 1)] if _is_local(header, worker, micros[0], stage + 1) else []
    if len(micros) > 1 and stage > 0:
        lines.append(f"{_name('dx', micros, stage)} = join({_all(results)})")
        spent += results
    return tuple(lines), tuple(spent)


def _gradients(header: Header, worker: Worker, backward: Backward) -> list[str]:
    """What a backward reads of each micro-batch; nothing on the last stage."""
    micros, stage = backward.micros, backward.stage
    if stage == header.stages - 1:
        return [""] * len(micros)
    if _is_local(header, worker, micros[0], stage + 1):
        given = _name("dx", micros, stage + 1)
    else:
        given = f"{_name('dy', micros, stage)}.tensors"
    return [given] if len(micros) == 1 else _apart(given, len(micros))
