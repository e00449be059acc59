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

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, cycle
from typing import NamedTuple, assert_never

from chimera_ir.ir import ops
from chimera_ir.ir.kinds import implied
from chimera_ir.ir.levels import Header, Pipe, Plan, Program, Schedule, Strategy, recomputes_all
from chimera_ir.ir.ops import Micro, Planned, Unclocked, Version, WeightGroup
from chimera_ir.ir.rolled import Loop, Piece, RolledProgram, Straight
from chimera_ir.ir.streams import Level, ProgramStream, ScheduleStream
from chimera_ir.ir.turns import Turn, shelf
from chimera_ir.plural import listed


def show(level: Level | RolledProgram) -> str:
    """The text of a level, with a newline at its end; equal levels have equal texts."""
    match level:
        case Plan():
            lines = [*_header("plan", level.header), ""]
            lines += [
                f"  {line(planned.operation, level.header)}{_order(planned)} on w{planned.worker}"
                for planned in level.operations
            ]
        case Schedule():
            lines = [*_header("schedule", level.header), *_lanes(level)]
        case Program():
            lines = [*_header("program", level.header), *_lanes(level)]
        case RolledProgram():
            lanes = (chain.from_iterable(_piece(piece, level.header) for piece in lane.pieces) for lane in level.lanes)
            lines = [*_header("program", level.header), *_headed(lanes)]
        case ScheduleStream():
            lines = [*_header("schedule", level.header, stream=True), *_turns(level)]
        case ProgramStream():
            lines = [*_header("program", level.header, stream=True), *_turns(level)]
        case _:
            assert_never(level)
    return "\n".join(lines) + "\n"


def _order(planned: Planned | Unclocked) -> str:
    if isinstance(planned, Planned):
        return f" @ {planned.clock}"
    return "" if planned.preference is None else f" prefer {planned.preference}"


class Numbers(NamedTuple):
    """Three functions that write as text a micro-batch, a weight version, and the slot of a receive."""

    micro: Callable[[Micro], str]
    version: Callable[[Version], str]
    slot: Callable[[ops.Recv], str]


@cache
def absolute(slices: int) -> Numbers:
    """The functions that write numbers as they are: ``m3``, ``v2``, ``0``; with slices, ``m3 q1`` for a slice."""
    micro = _of_slices(slices, lambda micro: f"m{micro}")
    return Numbers(micro, lambda version: f"v{version}", lambda recv: str(recv.slot))


def numbers_of(header: Header, turn: Turn) -> Numbers:
    """The functions that write numbers counted from the start of a turn: ``m+3``, ``v-1``, ``0 of 4``."""
    return Numbers(
        _of_slices(header.slices, lambda micro: _counted("m", micro)),
        lambda version: _counted("v", version),
        lambda recv: f"{recv.slot} of {turn.rings[shelf(recv.message)].slots}",
    )


def _of_slices(slices: int, whole: Callable[[int], str]) -> Callable[[Micro], str]:
    return whole if slices == 1 else lambda micro: f"{whole(micro // slices)} q{micro % slices}"


def line(instruction: ops.Instruction, header: Header) -> str:
    """An instruction of a level with ``header`` as one line without indentation, such as ``send m0 s1->s2 to w2``."""
    return numbered_line(instruction, absolute(header.slices))


def numbered_line(instruction: ops.Instruction, numbers: Numbers) -> str:
    """An instruction as one line without indentation; ``numbers`` writes its micro-batches, versions and slots."""

    def of(version: "Version | None") -> str:
        return "" if version is None else f" {numbers.version(version)}"

    match instruction:
        case ops.Compute(kind, micros, stage, version=version):
            return f"{kind.letter} {_micros(micros, numbers)} s{stage}{of(version)}"
        case ops.Pair(forward, backward):
            return f"{numbered_line(forward, numbers)} & {numbered_line(backward, numbers)}"
        case ops.Send(sent, to):
            return f"send {message_text(sent, numbers)} to w{to}"
        case ops.Recv(received, source):
            return f"recv {message_text(received, numbers)} from w{source} into {numbers.slot(instruction)}"
        case ops.WaitSend(sent):
            return f"wait send {message_text(sent, numbers)}"
        case ops.WaitRecv(received):
            return f"wait recv {message_text(received, numbers)}"
        case ops.WaitMove(kind, micros, stage):
            return f"wait {kind.letter} {_micros(micros, numbers)} s{stage}"
        case ops.AllReduce(group, version=version):
            return f"all_reduce {group_text(group)}{of(version)}"
        case ops.WaitAllReduce(group, version=version):
            return f"wait all_reduce {group_text(group)}{of(version)}"
        case ops.Step(group, version=version):
            return f"step {group_text(group)}{of(version)}"
        case ops.Stash(group, version):
            return f"stash {group_text(group)}{of(version)}"
        case ops.Drop(group, version):
            return f"drop {group_text(group)}{of(version)}"
        case _:
            assert_never(instruction)


def group_text(group: WeightGroup) -> str:
    """A weight group as in IR text, such as ``s1``, or ``s0+s3`` for parameters that stages share."""
    return "+".join([f"s{stage}" for stage in group])


def group_name(group: WeightGroup, header: Header) -> str:
    """A weight group as in messages, such as ``stage 1``, or ``the tie of stages 0 and 3``."""
    names = [*map(header.stage_name, group)]
    return f"the tie of stages {listed(names)}" if len(group) > 1 else f"stage {names[0]}"


def micros_name(micros: Sequence[Micro], slices: int) -> str:
    """Micro-batches as in messages: ``micro-batch 0``, ``micro-batches 0, 1``, or ``slice 2 of micro-batch 0``."""
    if slices > 1:
        return f"slice {micros[0] % slices} of micro-batch {micros[0] // slices}"
    plural = "es" if len(micros) > 1 else ""
    return f"micro-batch{plural} {', '.join(map(str, micros))}"


def message_text(message: ops.Message, numbers: Numbers) -> str:
    """A message as in IR text, such as ``m0 s1->s2``, or ``z m0 s1->s2`` if the stages do not imply its value z."""
    value = "" if implied(message.value) else f"{message.value} "
    return f"{value}{_micros(message.micros, numbers)} s{message.source}->s{message.target}"


def _counted(letter: str, number: int) -> str:
    return f"{letter}{number:+}" if number else letter


def _micros(micros: tuple[Micro, ...], numbers: Numbers) -> str:
    return ",".join([numbers.micro(micro) for micro in micros])


def _lanes(level: Schedule | Program) -> Iterator[str]:
    return _headed([line(instruction, level.header) for instruction in lane] for lane in level.lanes)


def _turns(level: ScheduleStream | ProgramStream) -> Iterator[str]:
    for_turns = ((turn, numbers_of(level.header, turn)) for turn in level.turns)
    return _headed(
        [numbered_line(instruction, numbers) for instruction in turn.instructions] for turn, numbers in for_turns
    )


def _piece(piece: Piece, header: Header) -> Iterable[str]:
    if isinstance(piece, Straight):
        return [line(instruction, header) for instruction in piece.instructions]
    columns = [_column(instruction, piece, header.slices) for instruction in piece.instructions]
    return chain.from_iterable(zip(*columns, strict=True))


def _column(instruction: ops.Instruction, loop: Loop, slices: int) -> Iterable[str]:
    """The line of an instruction in all rounds of a loop."""
    numbers: list[Iterable[int]] = []

    def micro(number: Micro) -> str:
        every = range(number, number + loop.rounds * loop.step, loop.step)
        if slices == 1:
            numbers.append(every)
            return "m%d"
        numbers.extend(([m // slices for m in every], [m % slices for m in every]))
        return "m%d q%d"

    def slot(recv: ops.Recv) -> str:
        ring = loop.rings[recv.message]
        numbers.append(cycle([ring.later(recv.slot, number) for number in range(ring.slots)]))
        return "%d"

    # The text has places for the numbers, in their order.
    text = numbered_line(instruction, Numbers(micro, lambda version: f"v{version}", slot))
    return map(text.__mod__, zip(*numbers, strict=False))


def _headed(lanes: Iterable[Iterable[str]]) -> Iterator[str]:
    for worker, lines in enumerate(lanes):
        yield ""
        yield f"worker {worker}:"
        yield from (f"  {text}" for text in lines)


def _header(level: str, header: Header, *, stream: bool = False) -> Iterator[str]:
    yield f"{level} {header.scheme}"
    if header.parameters:
        yield "parameters " + " ".join(f"{name}={value}" for name, value in header.parameters)
    yield f"workers {header.workers}"
    yield f"stages {header.stages}"
    parts = " halves" if header.halves else f" slices {header.slices}" if header.slices > 1 else ""
    parts += f" lengths {' '.join(map(str, header.lengths))}" if header.lengths else ""
    yield f"micro_batches {header.micro_batches}{parts}"
    if header.only:
        yield kinds_line(header)
    if header.period:
        yield f"updates {header.updates} " + ("per turn" if stream else f"period {header.period}")
    for bound in header.bounds:
        limits = bound.limits if len({*bound.limits}) > 1 else bound.limits[:1]
        yield f"memory {bound.quantity.value} <= {' '.join(map(str, limits))}"
    for strategy in Strategy:
        stages = tuple(stage for stage, chosen in header.strategies if chosen is strategy)
        yield from [f"sync {strategy.value} {_runs_text(stages)}"] if stages else []
    if header.frozen:
        yield f"frozen {_runs_text(header.frozen)}"
    if header.named:
        yield "named " + " ".join(f"{name} {start}..{stop}" for name, start, stop in header.named)
    for source, target, keyword in header.feeds:
        yield f"feeds s{source}->s{target}" + (f" as {keyword}" if keyword else "")
    yield from (f"absent {group} {_runs_text(micros)}" for group, micros in header.absent)
    for share in sorted({*header.shares} - {1}):
        yield f"keep {share} {_runs_text(s for s, kept in enumerate(header.shares) if kept == share)}"
    yield from (f"tied {' '.join(f's{stage}' for stage in tie)}" for tie in header.ties)
    for weight in sorted({*header.weights} - {1}):
        yield f"weigh {weight} {_runs_text(m for m, w in enumerate(header.weights) if w == weight)}"
    yield from (_pipe(pipe) for pipe in header.pipes)


def kinds_line(header: Header) -> str:
    """The ``kinds`` line of a header with only some kinds of operations, such as ``kinds F``."""
    return "kinds " + " ".join(kind.letter for kind in header.only or header.kinds)


def _pipe(pipe: Pipe) -> str:
    placement = " ".join(str(worker) for worker in pipe.workers)
    whole = [stage for stage in pipe.recompute if recomputes_all(pipe, stage)]
    recompute = f" recompute {_runs_text(whole)}" if whole else ""
    for micros in dict.fromkeys(micros for _, micros in pipe.recomputed):
        stages = [stage for stage, of_stage in pipe.recomputed if of_stage == micros]
        recompute += f" recompute {_runs_text(stages)} of {_runs_text(micros)}"
    return f"pipe {pipe.name} on {placement} micros {_runs_text(pipe.micros)}{recompute}"


def _runs_text(numbers: Iterable[int]) -> str:
    return " ".join(f"{start}..{end}" for start, end in runs(numbers)) or "none"


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers as half-open runs, in their order.

    Examples
    --------
    >>> runs([0, 1, 4, 5, 6])
    [(0, 2), (4, 7)]
    """
    runs: list[tuple[int, int]] = []
    for number in numbers:
        start, _ = runs.pop() if runs and runs[-1][1] == number else (number, number)
        runs.append((start, number + 1))
    return runs
