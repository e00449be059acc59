"""Rule "complete": each micro-batch has, on each stage, one of the allowed sets of operations, each operation once.

The table of kinds says what is allowed, and `alternatives` lists the sets of kinds: a forward and a backward, or a
forward and the two halves of a backward, for example. One operation of a set, a forward, is the first on the stage.
Every value that the stage then keeps of the micro-batch is freed by exactly one operation of the set: what the forward
keeps by the backward or, if that is split, by the input gradient, and what this keeps by the weight gradient.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations, islice, product

from chimera_ir.diagnostics.catalogue import schedule as say
from chimera_ir.diagnostics.catalogue.names import PairOfOne, PairUneven
from chimera_ir.diagnostics.catalogue.values import Instance
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.flow.flow import Flow
from chimera_ir.ir.kinds import Kind, Trained, Value
from chimera_ir.ir.levels import Header, Pipe, Schedule
from chimera_ir.ir.ops import NOWHERE, Compute, Micro, Pair, Stage, Worker, alternatives
from chimera_ir.ir.text.printer import kinds_line, line, micros_name
from chimera_ir.plural import listed
from chimera_ir.source import Span

# Rule "placed": every stage of a pipe is on one worker within range, every operation on the worker of its stage.


def placed(header: Header, operations: Iterable[tuple[Worker, Compute]]) -> Iterator[Diagnostic]:
    """Yields diagnostics of ``operations`` that are on a wrong worker or cannot exist; each has its worker.

    Mistakes of one kind in one line of text are one diagnostic. If the header itself is wrong, only its mistakes are
    shown.
    """
    mistakes = list(_header(header))
    yield from mistakes or _operations(header, operations)
    if header.absent and not mistakes:
        yield from _unread(header, operations)


def _header(header: Header) -> Iterator[Diagnostic]:
    if not _even(header):
        from chimera_ir.diagnostics.catalogue.irtext import UnevenPlan  # the mistakes of IR texts alone

        yield UnevenPlan(NOWHERE, header.micro_batches, header.updates, header.period, header.slices)
    for tie in header.ties:
        if frozen := [stage for stage in tie if stage in header.frozen]:
            yield say.TieFrozen(NOWHERE, listed(map(header.stage_name, tie)), header.stage_name(frozen[0]))
    for pipe in header.pipes:
        if len(pipe.workers) != header.stages:
            yield say.StagesUnplaced(NOWHERE, pipe.name, len(pipe.workers), header.stages, header.stages - 1)
        for stage, worker in enumerate(pipe.workers):
            if not 0 <= worker < header.workers:
                yield say.PlacedOutside(NOWHERE, pipe.name, header.stage_name(stage), worker, header.workers - 1)
                break
    occurrences = Counter(micro for pipe in header.pipes for micro in pipe.micros)
    for micro in (*range(header.micro_batches), *sorted(occurrences)):
        times = occurrences[micro] if 0 <= micro < header.micro_batches else occurrences[micro] + 1
        if times != 1:
            whole, last = micro // header.slices, header.micro_batches // header.slices - 1
            yield say.MicrosNotNumbered(NOWHERE, whole, occurrences[micro], last)
            return


def _unread(header: Header, operations: Iterable[tuple[Worker, Compute]]) -> Iterator[Diagnostic]:
    """Yields a diagnostic of the first forward whose output no stage reads, although its stage feeds others."""
    stages = range(header.stages)
    for micro, stage, origin in ((op.micros[0], op.stage, op.origin) for _, op in operations if op.kind.opens):
        fed = header.fed[stage] if stage in stages else ()
        if fed and not any(header.has(micro, after) for after in fed):
            names = header.stage_name(stage), ", ".join(map(header.stage_name, fed))
            yield say.ReadNowhere(origin, micros_name((micro,), header.slices), *names)
            return


def _even(header: Header) -> bool:
    if not header.period:
        return header.updates == 1
    shared = 1 <= header.updates <= header.micro_batches and header.micro_batches % header.updates == 0
    return shared and header.period % header.per_update == 0


_Mistake = (
    say.KindNotThere
    | say.NoSuchOperation
    | say.AbsentMicro
    | say.FrozenStage
    | say.RecomputesNothing
    | say.RecomputesInPart
    | say.WrongWorker
)
_MISTAKES = (
    say.KindNotThere,
    say.NoSuchOperation,
    say.AbsentMicro,
    say.FrozenStage,
    say.RecomputesNothing,
    say.RecomputesInPart,
    say.WrongWorker,
)
"""The mistakes of an operation by itself, in the order in which they are looked for and reported."""


def _operations(header: Header, operations: Iterable[tuple[Worker, Compute]]) -> Iterator[Diagnostic]:
    # For each kind of mistake the first operation of each line of the text, and how many mistakes the line has.
    first: dict[type[_Mistake], dict[Span, _Mistake]] = {kind: {} for kind in _MISTAKES}
    counts: Counter[Span] = Counter()
    for worker, operation in _doubtful(header, operations):
        mistake = _mistake(header, worker, operation)
        if mistake is not None:
            kind = next(kind for kind in _MISTAKES if isinstance(mistake, kind))
            first[kind].setdefault(operation.origin, mistake)
            counts[operation.origin] += 1
    for mistakes in first.values():
        for origin, mistake in mistakes.items():
            yield replace(mistake, count=counts[origin])


def _mistake(header: Header, worker: Worker, operation: Compute) -> _Mistake | None:
    kind, micros, stage = operation.kind, operation.micros, operation.stage

    def where() -> tuple[Span, str, Worker]:  # hardly any operation is wrong
        return operation.origin, line(operation, header), worker

    if kind not in header.kinds and not kind.recomputes:
        return say.KindNotThere(*where(), kinds_line(header), 1)
    if unknown := _unknown(header, worker, operation):
        message, *facts = unknown
        last = header.stages - 1, header.micro_batches // header.slices - 1, header.workers - 1
        return message(*where(), *last, 1, *facts)
    name = header.stage_name(stage)
    if lacking := [micro for micro in micros if not header.has(micro, stage)]:
        return say.AbsentMicro(*where(), micros_name(lacking[:1], header.slices), name, 1)
    if stage in header.frozen and kind not in header.kinds_of[stage]:
        passes = header.trained[stage] is Trained.BEFORE
        first = None if header.named or header.feeds else header.trained.index(Trained.ITSELF)
        return (say.FrozenBehind if passes else say.FrozenStage)(*where(), name, first, 1)
    recomputed = [micro for micro in micros if header.recomputes(micro, stage)]
    if kind.recomputes and micros[0] not in recomputed:
        return say.RecomputesNothing(*where(), name, header.pipe_of[micros[0]].name, 1)
    if 0 < len(recomputed) < len(micros):
        return say.RecomputesInPart(*where(), name, recomputed[0], 1)
    for pipe in (header.pipe_of[micro] for micro in micros):
        if pipe.workers[stage] != worker:
            return say.WrongWorker(*where(), pipe.workers[stage], pipe.name, name, 1)
    return None


def _doubtful(header: Header, operations: Iterable[tuple[Worker, Compute]]) -> Iterator[tuple[Worker, Compute]]:
    """Yields the operations that need a closer look: nearly all are obviously right, and are left out."""
    pipe_of, stages, plain = header.pipe_of, header.stages, {kind for kind in header.kinds if not kind.recomputes}
    if header.steps_inside or header.frozen or header.absent:
        yield from operations
        return
    for worker, operation in operations:
        micros, stage = operation.micros, operation.stage
        is_plain = operation.kind in plain and operation.version is None and len(micros) == 1 and 0 <= stage < stages
        if not (is_plain and micros[0] in pipe_of and pipe_of[micros[0]].workers[stage] == worker):
            yield worker, operation


def _unknown(
    header: Header, worker: Worker, operation: Compute
) -> tuple[type[say.NoSuchOperation]] | tuple[type[say.NumberNotThere], str, int] | None:
    """The type of the message that something about an operation does not exist, perhaps with its noun and number."""
    if not 0 <= operation.stage < header.stages:
        return say.NumberNotThere, "stage", operation.stage
    if not 0 <= worker < header.workers:
        return say.NumberNotThere, "worker", worker
    micros, version = operation.micros, operation.version
    if not micros:
        return (say.NoSuchOperation,)
    if len(set(micros)) < len(micros):
        return (say.MicroNamedTwice,)
    for micro in micros:
        if not 0 <= micro < header.micro_batches:
            return say.NumberNotThere, "micro-batch", micro // header.slices
    if operation.kind.moves or not header.steps_inside:
        return None if version is None else (say.VersionOfOneUpdate,)
    if version is None:
        return (say.NoVersionNamed,)
    return None if 0 <= version <= header.updates else (say.NumberNotThere, "version", version)


_LISTED = 100_000
"""The most incomplete cells, each a micro-batch on a stage, that are counted for a pipe."""

_Placed = tuple[Worker, Compute]

_Repetition = say.Duplicate | say.DoneTwice | say.OperandsOfWhole

_WholeSets = Sequence[Sequence[tuple[Kind, ...]]]
"""The sets of kinds that a micro-batch can have on stage s, as ``of_stage[s]``, the smallest set first."""

_Cells = Mapping[int, Sequence[_Placed]]
"""The operations in each cell, a micro-batch on a stage, whose key is ``micro * stages + stage``.

Cells without operations are absent, so that memory grows with the operations and not with the sizes in the header.
"""


def complete(header: Header, operations: Sequence[_Placed]) -> Iterator[Diagnostic]:
    """Yields diagnostics of missing and of repeated operations.

    Missing operations have one diagnostic for each pipe and set of kinds, repeated ones one for each pair of lines. A
    micro-batch on a stage counts in at most one diagnostic. ``operations`` are all operations, each with the worker
    that runs it. The header has passed the rule "placed", so its micro-batches are 0 .. N-1; the numbers of the
    operations are within its ranges.
    """
    of_stage = [alternatives(kinds) for kinds in header.kinds_of]
    # By "placed" each operation has a row of its stage. Such rows that are complete on any stage are so on this one.
    whole = tuple(dict.fromkeys(chain.from_iterable(of_stage)))
    if _is_complete(header, operations, whole):
        return
    cells: dict[int, list[_Placed]] = defaultdict(list)
    for placed in operations:
        for micro in placed[1].micros:
            cells[micro * header.stages + placed[1].stage].append(placed)
    repeated = list(_repeated(header, cells, whole))
    yield from repeated
    # A line that moves the same micro-batches again and again lacks others for this reason: its repetition says it all.
    lines = {diagnostic.span for diagnostic in repeated}
    for diagnostic in _missing(header, cells, of_stage):
        if not isinstance(diagnostic, say.MissingMove) or diagnostic.span not in lines:
            yield diagnostic


def _is_complete(header: Header, operations: Iterable[_Placed], whole: Iterable[tuple[Kind, ...]]) -> bool:
    # A cell's set of kinds is a number with a bit for each kind: large schedules have millions of cells.
    bits = {kind: 1 << number for number, kind in enumerate(header.kinds)}
    present: dict[int, int] = {}
    stages = header.stages
    for _, operation in operations:
        stage, bit = operation.stage, bits[operation.kind]
        for micro in operation.micros:
            cell = micro * stages + stage
            before = present.get(cell, 0)
            if before & bit:
                return False
            present[cell] = before | bit
    right = {sum(bits[kind] for kind in kinds) for kinds in whole}
    lacking = sum(map(len, header.lacks.values()))
    return len(present) == stages * header.micro_batches - lacking and {*present.values()} <= right


def _repeated(header: Header, cells: _Cells, whole: Sequence[tuple[Kind, ...]]) -> Iterator[Diagnostic]:
    twice: dict[tuple[Span, Span], list[_Repetition]] = {}
    for several in cells.values():
        both = _clash(several, whole)
        if both is not None:
            first, second = both
            twice.setdefault((first[1].origin, second[1].origin), []).append(_again(header, second, first))
    for group in twice.values():
        first_one = group[0]
        yield replace(first_one, count=len(group))


def _clash(several: Sequence[_Placed], whole: Sequence[tuple[Kind, ...]]) -> tuple[_Placed, _Placed] | None:
    """The first two operations of a cell that are of one kind, or whose kinds no set of ``whole`` has together."""
    for first, second in combinations(several, 2):
        kind, other = first[1].kind, second[1].kind
        if kind is other or not any(kind in kinds and other in kinds for kinds in whole):
            return first, second
    return None


def _again(header: Header, second: _Placed, first: _Placed) -> _Repetition:
    (worker, operation), (first_worker, earlier) = second, first
    if operation.kind is earlier.kind:
        where = line(operation, header), worker, first_worker, earlier.origin, _directions(header)
        return say.Duplicate(operation.origin, *where, 1)
    for (place, move), (_, backward) in (second, first), (first, second):
        if move.kind.moves_operands:
            texts = line(move, header), place, line(backward, header), backward.origin
            return say.OperandsOfWhole(move.origin, *texts, 1)
    return say.DoneTwice(
        operation.origin, line(operation, header), line(earlier, header), worker, first_worker, earlier.origin, 1
    )


def _missing(header: Header, cells: _Cells, of_stage: _WholeSets) -> Iterator[Diagnostic]:
    for pipe in header.pipes:
        absent: dict[tuple[Kind, ...], list[tuple[Micro, Stage]]] = defaultdict(list)
        for lacking, micro, stage in islice(_absent(header, pipe, cells, of_stage), _LISTED):
            absent[lacking].append((micro, stage))
        for lacking, places in absent.items():
            micro, stage = places[0]
            present = [operation for _, operation in cells.get(micro * header.stages + stage, ())]
            version = next((operation.version for operation in present if not operation.kind.moves), None)
            lines = [Compute(kind, (micro,), stage, version=None if kind.moves else version) for kind in lacking]
            added = "` and `".join(line(operation, header) for operation in lines)
            where = _nearest(header, pipe, cells, lacking[0], micro, stage)
            which = micros_name((micro,), header.slices)
            facts = (
                pipe.name,
                pipe.workers[stage],
                which,
                header.stage_name(stage),
                tuple(kind.noun for kind in lacking),
                added,
            )
            message = say.MissingMove if any(kind.moves for kind in lacking) else say.Missing
            if stage in header.frozen and message is say.Missing:
                message = say.MissingOfFrozen
            yield (message if present else say.Skipped)(where, *facts, _directions(header), len(places))


def _absent(
    header: Header, pipe: Pipe, cells: _Cells, of_stage: _WholeSets
) -> Iterator[tuple[tuple[Kind, ...], Micro, Stage]]:
    """Yields the kinds that make a cell's the first possible set of its stage; cells with a `_clash` are left out."""
    for micro, (number, whole) in product(pipe.micros, enumerate(of_stage)):
        several = cells.get(micro * header.stages + number, ())
        if not header.has(micro, Stage(number)):
            continue
        if not several or _clash(several, whole) is None:
            present = [operation.kind for _, operation in several]
            kinds = next(kinds for kinds in whole if {*present} <= {*kinds})
            lacking = tuple(kind for kind in kinds if kind not in present)
            if lacking:
                yield lacking, micro, Stage(number)


def _nearest(header: Header, pipe: Pipe, cells: _Cells, kind: Kind, micro: Micro, stage: Stage) -> Span:
    """Returns the line to blame for a missing operation: the line of the most similar operation of the pipe.

    ``kind``, ``micro`` and ``stage`` are of the missing operation. An operation of the same kind is most similar, then
    one that frees what the missing one keeps, or the reverse (`_linked`). Among equals an operation on the same stage
    comes first, then one that is no forward, then one of an earlier micro-batch, then one of the nearest micro-batch.
    """

    def distance(operation: Compute) -> tuple[bool, bool, bool, bool, bool, int]:
        (other, *_), here = operation.micros, operation.stage == stage
        same = operation.kind is kind
        linked = _linked(operation.kind, kind)
        return not same, not linked, not here, operation.kind.opens, other > micro, abs(other - micro)

    mine = {*pipe.micros}
    candidates = [operation for several in cells.values() for _, operation in several if operation.micros[0] in mine]
    return min(candidates, key=distance).origin if candidates else NOWHERE


def _linked(kind: Kind, other: Kind) -> bool:
    both = (*((value, other) for value in kind.frees), *((value, kind) for value in other.frees))
    return any(value in maker.keeps_in_slice for value, maker in both)


def _directions(header: Header) -> str:
    return " in each direction" if header.answers else ""


def paired(schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields pairs of which forward and backward share a micro-batch, so that they wait for themselves.

    Also yields pairs of which the two sides differ in the number of micro-batches.
    """
    header = schedule.header
    for pair in (operation for lane in schedule.lanes for operation in lane if isinstance(operation, Pair)):
        forward, backward = pair.parts
        facts = pair.origin, (), Instance(), line(forward, header), line(backward, header)
        common = {*forward.micros} & {*backward.micros}
        if common:
            yield PairOfOne(*facts, micros_name([min(common)], header.slices))
        elif forward.size != backward.size:
            yield PairUneven(*facts, forward.size, backward.size)


# Rule "groups", a part of "complete": the stages of a pipe take its micro-batches in the same groups.
#
# An operation over several micro-batches hands all of them on at once, so the next stage's operation is over the same
# micro-batches. Forwards and backwards may be grouped differently. All gradients of a backward count for one update.


def groups(header: Header, operations: Iterable[tuple[Worker, Compute]]) -> Iterator[Diagnostic]:
    """Yields diagnostics of operations that mix pipes, and of backwards that mix updates.

    If there are none, yields diagnostics of operations that do not have the same micro-batches as an operation whose
    values they read, one for each pair of lines. The operations are complete and placed.
    """
    listed = [operation for _, operation in operations]
    if all(len(operation.micros) == 1 for operation in listed):
        return
    mixed = list(_mixed(header, listed))
    yield from mixed or _differing(header, listed)


def _mixed(header: Header, operations: Iterable[Compute]) -> Iterator[Diagnostic]:
    reported: set[Span] = set()
    for operation in operations:
        pipes = list(dict.fromkeys(header.pipe_of[micro].name for micro in operation.micros))
        if len(pipes) > 1 and operation.origin not in reported:
            reported.add(operation.origin)
            yield say.PipesMixed(operation.origin, line(operation, header), *pipes[:2])
        for neighbour in (*header.feeding[operation.stage], *header.fed[operation.stage]) if header.absent else ():
            has = [header.has(micro, neighbour) for micro in operation.micros]
            if len({*has}) > 1 and operation.origin not in reported:
                reported.add(operation.origin)
                lacking = micros_name((operation.micros[has.index(False)],), header.slices)
                names = line(operation, header), header.stage_name(neighbour), lacking
                yield say.PartlyAbsent(operation.origin, *names)
        updates = list(dict.fromkeys(micro // header.per_update for micro in operation.micros))
        if len(updates) > 1 and operation.kind.sums and operation.origin not in reported:
            reported.add(operation.origin)
            yield say.UpdatesMixed(operation.origin, line(operation, header), *updates[:2])


def _nested(first: tuple[Micro, ...], second: tuple[Micro, ...]) -> bool:
    """Whether one of two blocks of micro-batches is a part of the other, in the same order."""
    small, large = sorted((first, second), key=len)
    start = large.index(small[0]) if small[0] in large else 0
    return large[start : start + len(small)] == small


def _differing(header: Header, operations: list[Compute]) -> Iterator[Diagnostic]:
    data_flow, may_nest = Flow(header, enumerate(operations)), bool(header.named)
    differing: dict[tuple[Span, Span], list[tuple[Compute, Compute, Value]]] = {}
    for operation in operations:
        received = (value for value in operation.kind.reads if value.crosses)
        for value, stage in ((v, s) for v in received for s in header.makers(v, operation.stage, operation.micros[0])):
            cells = (data_flow.makers[value][micro * header.stages + stage] for micro in operation.micros)
            for before in (operations[number] for number in dict.fromkeys(cells)):
                if before.micros != operation.micros and not (may_nest and _nested(before.micros, operation.micros)):
                    differing.setdefault((before.origin, operation.origin), []).append((before, operation, value))
    for (origin, end), pairs in differing.items():
        before, operation, value = pairs[0]
        message = say.BlocksDoNotNest if may_nest else say.GroupsDiffer
        yield message(end, line(before, header), origin, line(operation, header), value.noun, len(pairs))
