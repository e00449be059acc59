"""The values of the templates: every line of every rank's script."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from chimera_ir.codegen.loops import commented, rolled, turn_loop
from chimera_ir.codegen.notation import WrittenOut
from chimera_ir.codegen.rolling import Loop, roll
from chimera_ir.codegen.statements import Rooms, Scribe
from chimera_ir.ir.ids import Worker
from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.ops import Compute, Instruction, Message, Recv, Send
from chimera_ir.ir.text.printer import line as instruction_line
from chimera_ir.plural import counted
from chimera_ir.verify.verify import Verified


@dataclass(frozen=True, slots=True)
class RankView:
    """A rank's script: ``bindings`` are the names that the lines use.

    ``slots``, ``peers``, ``kept``, ``copies`` and ``sending`` are Python literals; see templates/support/job.py.

    ``lines`` have their indentation; ``tables`` says whether values are entries of dictionaries, ``counting`` is a
    remark on how micro-batches are counted.
    """

    worker: int
    title: str
    micro_batches_text: str
    counting: str
    imports: str
    stages_text: str
    slots: str
    peers: str
    kept: str
    copies: str
    sending: str
    bindings: tuple[str, ...]
    lines: tuple[str, ...]
    tables: bool


@dataclass(frozen=True, slots=True)
class PipeView:
    """A pipe's name and, as a Python literal, the worker of each of its stages."""

    name: str
    workers: str


@dataclass(frozen=True, slots=True)
class JobView:
    """The facts of the job: ``title`` is prose; other texts are Python literals.

    ``reads`` says for each stage which version every micro-batch of a period reads; see templates/support/job.py.
    """

    title: str
    name: str
    workers: int
    workers_text: str
    stages: int
    micro_batches: int
    parts: int
    recomputing: str
    grouped: str
    pipes: tuple[PipeView, ...]
    links: str
    period: int
    reads: str


def title(header: Header) -> str:
    """The scheme with its parameters, as in ``name(D=4, N=8)``."""
    return f"{header.scheme}({', '.join(f'{name}={value}' for name, value in header.parameters)})"


def job_view(program: Program) -> JobView:
    """The values of train.py for a program."""
    header = program.header
    return JobView(
        title=title(header),
        name=repr(title(header)),
        workers=header.workers,
        workers_text=counted(header.workers, "worker"),
        stages=header.stages,
        micro_batches=header.whole_micro_batches,
        parts=header.parts,
        recomputing=repr(tuple(sorted({int(stage) for pipe in header.pipes for stage in pipe.recompute}))),
        grouped=repr(_grouped(program)),
        pipes=tuple(PipeView(pipe.name, repr(pipe.workers)) for pipe in header.pipes),
        links=_links(program),
        period=header.period,
        reads=_reads(program),
    )


def _grouped(program: Program) -> tuple[int, ...]:
    """The stages that have an operation over several micro-batches."""
    stages = {
        int(instruction.stage)
        for lane in program.lanes
        for instruction in lane
        if isinstance(instruction, Compute) and len(instruction.micros) > 1
    }
    return tuple(sorted(stages))


def _links(program: Program) -> str:
    """The pairs of sender and receiver, as a Python literal with a line for each sender."""
    rows = []
    for worker, lane in enumerate(program.lanes):
        receivers = sorted({instruction.to for instruction in lane if isinstance(instruction, Send)})
        if receivers:
            rows.append(", ".join(f"({worker}, {receiver})" for receiver in receivers))
    return _rows(rows)


def _rows(rows: list[str]) -> str:
    """A tuple over several lines."""
    lines = "".join(f"        {row},\n" for row in rows)
    return f"(\n{lines}    )" if rows else "()"


def _reads(program: Program) -> str:
    """The versions that are read, as a Python literal with a line for each stage; empty in a synchronous program.

    They are those of the last whole period, in which the warm-up no longer matters.
    """
    header = program.header
    if not header.asynchronous:
        return "()"
    period = header.period
    last = header.micro_batches // period - 1
    updates = last * (period // header.per_update)
    versions = _versions_read(program)
    stages = [[versions[stage, last * period + i] - updates for i in range(period)] for stage in range(header.stages)]
    return _rows([repr(tuple((offset, len([*run])) for offset, run in groupby(offsets))) for offsets in stages])


def _versions_read(program: Program) -> dict[tuple[int, int], int]:
    """By stage and micro-batch, the version that the forward reads."""
    return {
        (int(instruction.stage), int(micro)): int(instruction.version)
        for lane in program.lanes
        for instruction in lane
        if isinstance(instruction, Compute) and instruction.kind.opens and instruction.version is not None
        for micro in instruction.micros
    }


def rank_view(verified: Verified, worker: Worker) -> RankView:
    """The values of a rank's script: the worker's lane instruction by instruction, or its turn as a loop."""
    header, lane, held = verified.program.header, verified.program.lanes[worker], verified.held[worker]
    stages, peers, rooms = header.stages_of[worker], _peers(lane), _rooms(lane)
    tables: set[str] = set()
    if header.asynchronous:
        lines = turn_loop(header, worker, lane, rooms, tables)
        counting = "m is the micro-batch" + (", k the update" if header.per_update > 1 else "")
    else:
        lines = list(_lines(Scribe(header, worker, rooms, WrittenOut()), lane, tables))
        counting = " (counted in halves)" if header.halves else ""
    return RankView(
        worker=worker,
        title=title(header),
        micro_batches_text=counted(header.whole_micro_batches, "micro-batch"),
        counting=counting,
        imports=", ".join(["Lane", *(name for name in ("join", "part") if any(f"{name}(" in line for line in lines))]),
        stages_text=_listed("stage", stages),
        slots=repr({int(stage): (rooms.get((stage, True), ()), rooms.get((stage, False), ())) for stage in stages}),
        peers=repr(peers),
        kept=_moments(held.fullest),
        copies=repr(dict(held.copies)),
        sending=repr({int(sums.stage): (sums.activations, sums.gradients) for sums in held.sending}),
        bindings=(
            *_bindings("stage", stages),
            *_bindings("peer", peers),
            *(f"{name} = {{}}" for name in sorted(tables)),
        ),
        lines=tuple(f"    {line}" if line else "" for line in lines),
        tables=bool(tables),
    )


def _moments(fullest: Iterable[Iterable[tuple[int, int, int]]]) -> str:
    """The moments of the most memory as a Python literal, with a line for each."""
    rows = "".join(f"    {tuple(tuple(kept) for kept in moment)!r},\n" for moment in fullest)
    return f"(\n{rows})" if rows else "()"


def _lines(scribe: Scribe, lane: tuple[Instruction, ...], tables: set[str]) -> Iterator[str]:
    """The statements, with the program's lines as comments and ``del`` after last uses.

    Stretches that repeat are loops; then values are entries of dictionaries, whose names are added to ``tables``.
    """
    pieces = roll(scribe.header, lane)
    if any(isinstance(piece, Loop) for piece in pieces):
        yield from rolled(scribe, pieces, tables)
    else:
        yield from commented([(scribe.statements(instruction), instruction_line(instruction)) for instruction in lane])


def _listed(word: str, numbers: Iterable[int]) -> str:
    words = [str(n) for n in numbers]
    match words:
        case []:
            return f"no {word}"
        case [number]:
            return f"{word} {number}"
        case _:
            return f"{word}s {', '.join(words[:-1])} and {words[-1]}"


def _bindings(word: str, numbers: Iterable[int]) -> tuple[str, ...]:
    return tuple(f"{word}{n} = lane.{word}({n})" for n in numbers)


def _peers(lane: tuple[Instruction, ...]) -> tuple[int, ...]:
    peers: set[int] = set()
    for instruction in lane:
        match instruction:
            case Send(to=worker) | Recv(source=worker):
                peers.add(int(worker))
            case _:
                pass
    return tuple(sorted(peers))


def _rooms(lane: tuple[Instruction, ...]) -> Rooms:
    """By receiving stage and direction, the micro-batches that each slot must have room for."""
    rooms_of: dict[tuple[int, bool], dict[int, int]] = {}
    for instruction in lane:
        match instruction:
            case Recv(message=Message(micros=micros, source=source, target=target), slot=slot):
                rooms = rooms_of.setdefault((int(target), source < target), {})
                rooms[slot] = max(rooms.get(slot, 1), len(micros))
            case _:
                pass
    return {key: tuple(rooms.get(slot, 1) for slot in range(max(rooms) + 1)) for key, rooms in rooms_of.items()}
