"""The text form of every level of IR; `parse(show(level)) == level`.

schedule two_stages
parameters D=2 N=1
workers 2
stages 2
micro_batches 1
pipe down on 0 1 micros 0..1

worker 0:
  F m0 s0
  B m0 s0

worker 1:
  F m0 s1
  B m0 s1
"""

from collections.abc import Iterable, Iterator
from typing import assert_never

from chimera_ir.ir.ids import Micro, Stage, Version
from chimera_ir.ir.levels import Header, Pipe, Plan, Program, Schedule, Strategy
from chimera_ir.ir.ops import (
    AllReduce,
    Compute,
    Drop,
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


def show(level: Plan | Schedule | Program) -> str:
    """The text of a level, with a newline at its end; equal levels have equal texts."""
    match level:
        case Plan():
            lines = [*_header("plan", level.header), ""]
            lines += [
                f"  {line(planned.operation)} @ {planned.clock} on w{planned.worker}" for planned in level.operations
            ]
        case Schedule():
            lines = [*_header("schedule", level.header), *_lanes(level.lanes)]
        case Program():
            lines = [*_header("program", level.header), *_lanes(level.lanes)]
        case _:
            assert_never(level)
    return "\n".join(lines) + "\n"


def line(instruction: Instruction) -> str:
    """An instruction as one line, without indentation: ``send m0 s1->s2 to w2``."""
    match instruction:
        case Compute(kind, micros, stage, version=version):
            return f"{kind.letter} {_micros(micros)} s{stage}{_of(version)}"
        case Send(sent, to):
            return f"send {message_text(sent)} to w{to}"
        case Recv(received, source, slot):
            return f"recv {message_text(received)} from w{source} into {slot}"
        case WaitSend(sent):
            return f"wait send {message_text(sent)}"
        case WaitRecv(received):
            return f"wait recv {message_text(received)}"
        case AllReduce(stage, version=version):
            return f"all_reduce s{stage}{_of(version)}"
        case WaitAllReduce(stage, version=version):
            return f"wait all_reduce s{stage}{_of(version)}"
        case Step(stage, version=version):
            return f"step s{stage}{_of(version)}"
        case Stash(stage, version):
            return f"stash s{stage} v{version}"
        case Drop(stage, version):
            return f"drop s{stage} v{version}"
        case _:
            assert_never(instruction)


def message_text(message: Message) -> str:
    """A message as in the text: ``m0 s1->s2``."""
    return f"{_micros(message.micros)} s{message.source}->s{message.target}"


def _of(version: Version | None) -> str:
    return "" if version is None else f" v{version}"


def _micros(micros: tuple[Micro, ...]) -> str:
    return ",".join([f"m{micro}" for micro in micros])


def _lanes(lanes: Iterable[tuple[Instruction, ...]]) -> Iterator[str]:
    for worker, lane in enumerate(lanes):
        yield ""
        yield f"worker {worker}:"
        yield from (f"  {line(instruction)}" for instruction in lane)


def _header(level: str, header: Header) -> Iterator[str]:
    yield f"{level} {header.scheme}"
    if header.parameters:
        yield "parameters " + " ".join(f"{name}={value}" for name, value in header.parameters)
    yield f"workers {header.workers}"
    yield f"stages {header.stages}"
    yield f"micro_batches {header.micro_batches}" + (" halves" if header.halves else "")
    yield from [f"updates {header.updates} period {header.period}"] if header.asynchronous else []
    yield from (f"memory {bound.quantity.value} <= {bound.limit}" for bound in header.bounds)
    for strategy in Strategy:
        stages = tuple(stage for stage, chosen in header.strategies if chosen is strategy)
        yield from [f"sync {strategy.value} {_runs(stages)}"] if stages else []
    yield from (_pipe(pipe) for pipe in header.pipes)


def _pipe(pipe: Pipe) -> str:
    placement = " ".join(str(worker) for worker in pipe.workers)
    recompute = f" recompute {_runs(pipe.recompute)}" if pipe.recompute else ""
    return f"pipe {pipe.name} on {placement} micros {_runs(pipe.micros)}{recompute}"


def _runs(numbers: tuple[Micro, ...] | tuple[Stage, ...]) -> str:
    """Numbers as half-open runs, in their order: ``0..2 4..6``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, number + 1])
    return " ".join(f"{start}..{end}" for start, end in runs) or "none"
