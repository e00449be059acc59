"""Makes program.json, which tells the runtime about a program; `compiled_program.py` of the runtime reads it."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from chimera_ir.codegen.rolling import counter, lane_lines, reach, roll, turn_lines
from chimera_ir.codegen.statements import LinkVariables, Notation, Scribe, links, weights
from chimera_ir.flow.net import RunnableTurn, lag, runnable_turns
from chimera_ir.ir.kinds import COSTED, RECOMPUTATION, Kind, Value, values
from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.ops import Blocks, Compute, Crossing, LaneParts, Operation, Stage, WeightGroup, Worker, singles
from chimera_ir.ir.rolled import Loop, RolledProgram
from chimera_ir.ir.streams import ProgramStream
from chimera_ir.ir.text.printer import runs
from chimera_ir.ir.turns import initial
from chimera_ir.plural import counted, listed
from chimera_ir.source import runtime, templates
from chimera_ir.templates import text
from chimera_ir.verify.verify import Verified

# Collects the values with which the templates of scripts are filled.


class BodyView(NamedTuple):
    """The body of a function of a rank's script: the statements of a lane, indented.

    ``bindings`` are assignments that give stages and links the names by which ``lines`` call them.
    """

    bindings: tuple[str, ...]
    lines: tuple[str, ...]
    has_loops: bool


class RankView(NamedTuple):
    """The values for a rank's script: the bodies for an update (or turn) and for an evaluation, words and numbers.

    ``counting`` is a remark on how micro-batches are counted, ``counter`` the variable that counts turns.
    """

    worker: int
    title: str
    micro_batches_text: str
    evaluated_text: str
    counting: str
    counter: str
    per_update: int
    stages_text: str
    training: BodyView
    evaluation: BodyView

    @property
    def has_loops(self) -> bool:
        """Whether either function of the script has a loop."""
        return self.training.has_loops or self.evaluation.has_loops


def rank_view(verified: Verified, evaluation: Verified, worker: Worker) -> RankView:
    """The values of a rank's script: the worker's lane, or its turn, and its lane of the evaluation."""
    header = verified.header
    stages = header.stages_of[worker]
    return RankView(
        worker=worker,
        title=header.title,
        micro_batches_text=counted(header.whole_micro_batches, "micro-batch"),
        evaluated_text=counted(evaluation.header.whole_micro_batches, "micro-batch"),
        counting=_counting(header),
        counter=counter(header) if header.period else "",
        per_update=header.per_update,
        stages_text=f"stage{'s' if len(stages) > 1 else ''} {listed(stages)}" if stages else "no stage",
        training=_body(verified, worker),
        evaluation=_body(evaluation, worker),
    )


def _counting(header: Header) -> str:
    if header.slices > 1:
        return f" (counted in slices: {header.slices} of each)"
    return " (counted in halves)" if header.halves else ""


def _body(verified: Verified, worker: Worker) -> BodyView:
    header, parts = verified.header, verified.program.parts[worker]
    used = links(parts)
    # A program of turns is not written out; in it all stages take the same micro-batches together.
    blocks = verified.program.blocks if isinstance(verified.level, Program) else Blocks()
    scribe = Scribe(header, worker, used, Notation(), blocks)
    has_loops = False
    if isinstance(verified.level, ProgramStream):
        lines = list(turn_lines(scribe, verified.level.turns[worker]))
    else:
        run = verified.scripted
        pieces = run.lanes[worker].pieces if isinstance(run, RolledProgram) else roll(header, run.lanes[worker])
        has_loops = any(isinstance(piece, Loop) for piece in pieces)
        lines = list(lane_lines(scribe, pieces))
    return BodyView(
        bindings=tuple(_bindings(_groups(parts), used)),
        lines=tuple(f"    {line}" if line else "" for line in lines),
        has_loops=has_loops,
    )


def _groups(parts: LaneParts) -> list[WeightGroup]:
    stages = {operation.stage for operation in singles(parts.computes.lines)}
    groups = {(stage,) for stage in stages} | {update.group for update in parts.updates.lines}
    return sorted(groups, key=lambda group: (len(group) > 1, group))


def _bindings(groups: Iterable[WeightGroup], used: LinkVariables) -> Iterator[str]:
    for group in groups:
        call = "stage" if len(group) == 1 else "tie"
        yield f"{weights(group)} = lane.{call}({', '.join(map(str, group))})"
    for method, names in (("incoming", used.incoming), ("outgoing", used.outgoing)):
        for route, name in names.items():
            source, target, worker, *values = route
            value = "".join(f', value="{letter}"' for letter in values)
            yield f"{name} = lane.{method}({source}, {target}, worker={worker}{value})"


INTERFACE = 5
"""The version of the interface between scripts and chimera_runtime."""

Facts = dict[str, Any]
"""Entries of program.json, by name."""


def facts(verified: Verified, evaluation: Verified) -> Facts:
    """The content of program.json, but for the digest; ``evaluation`` is the program of the forwards alone."""
    program, header = verified.program, verified.header
    uses = used_by([operation for parts in program.parts for operation in parts.computes.lines])
    turns = runnable_turns(verified.level) if isinstance(verified.level, ProgramStream) else []
    return {
        "interface": INTERFACE,
        "name": header.title,
        "workers": header.workers,
        "stages": header.stages,
        "micro_batches": header.whole_micro_batches,
        "evaluated": evaluation.header.whole_micro_batches,
        "parts": header.parts,
        **({"slices": header.slices} if header.slices > 1 else {}),
        **({"lengths": list(header.lengths)} if header.lengths else {}),
        **({"frozen": list(header.frozen)} if header.frozen else {}),
        **({"named": header.named} if header.named else {}),
        **({"feeds": header.graph} if header.feeds else {}),
        **({"absent": [[name, runs(micros)] for name, micros in header.absent]} if header.absent else {}),
        **({"weights": list(map(int, header.weights))} if header.weights else {}),
        "recomputing": sorted({stage for pipe in header.pipes for stage in pipe.recompute}),
        **({"moving": uses["moving"]} if header.moves else {}),
        **({"moving_operands": uses["moving_operands"]} if uses["moving_operands"] else {}),
        **{name: uses[name] for name in ("grouped", "kinds", "split_backward")},
        "placement": [pipe.workers for pipe in header.pipes],
        "ties": [[*tie] for tie in header.ties],
        "links": sorted({(w, int(send.to)) for w, parts in enumerate(program.parts) for send in parts.sends.lines}),
        "communicators": [
            result.communicators.value for result in verified.with_evaluation(lambda: evaluation) if result.finishes
        ],
        "period": header.period,
        "reads": _reads(header, turns),
        "lag": lag(turns) if turns else 0,
        "ranks": [
            {**_rank(verified, worker, turns), "evaluation": _evaluation(evaluation, worker)}
            for worker in map(Worker, range(header.workers))
        ],
    }


def used_by(operations: Sequence[Operation]) -> Facts:
    """The entries of program.json by which ranks prepare stages: what these operations ask of which stage."""
    letters = {operation.kind.letter for operation in operations}
    placed = {(operation.kind, int(operation.stage), operation.size > 1) for operation in singles(operations)}

    def stages(has: Callable[[Kind], bool]) -> list[int]:
        return sorted({stage for kind, stage, _ in placed if has(kind)})

    return {
        "moving": stages(lambda kind: kind.moves and not kind.moves_operands),
        "moving_operands": stages(lambda kind: kind.moves_operands),
        "grouped": sorted({stage for _, stage, several in placed if several}),
        # The kinds for which a rehearsal needs a time; a backward's includes its recomputation.
        "kinds": [letter for letter in COSTED if letter in letters - {RECOMPUTATION.letter}],
        "split_backward": stages(lambda kind: kind.splits),
    }


def show(content: Mapping[str, Any]) -> str:
    """The text of program.json, with one line for each fact and for each entry of a list of lists or of objects."""
    lines = (f"  {json.dumps(name)}: {_lines(value)}" for name, value in content.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def with_numbers(text: str, numbers: Mapping[str, str]) -> str:
    """The text of program.json with the digests of the programs for other numbers of micro-batches."""
    facts = text.removesuffix("\n}\n")
    return f'{facts},\n  "numbers": {json.dumps(numbers)}\n}}\n'


def _lines(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], list | tuple | dict):
        return "[\n" + ",\n".join(f"    {json.dumps(entry)}" for entry in value) + "\n  ]"
    return json.dumps(value)


def _reads(header: Header, turns: Sequence[RunnableTurn]) -> list[list[tuple[int, int]]]:
    """For each stage, which versions of its weights the micro-batches of a turn read; empty with a flush.

    A run (offset, count) stands for the next ``count`` micro-batches: they read version U + ``offset``, where U updates
    come before the turn.
    """
    offsets: dict[tuple[int, int], int] = {}
    lines = [line for runnable in turns for line in runnable.turn.instructions]
    for operation in (line for line in lines if isinstance(line, Compute) and not line.kind.moves):
        for number, place in (divmod(micro, header.period) for micro in operation.micros):
            offsets[operation.stage, place] = (operation.version or 0) - number * header.per_turn
    stages = [[offsets[stage, place] for place in range(header.period)] for stage in range(header.stages)]
    return [[(offset, len([*run])) for offset, run in groupby(of_stage)] for of_stage in stages if of_stage]


def _rank(verified: Verified, worker: Worker, by_worker: Sequence[RunnableTurn]) -> Facts:
    header, parts, holdings = verified.header, verified.program.parts[worker], verified.holdings[worker]
    # Stage by stage: receive buffers, copies of weights, messages on their way, and, of a stream, initial weights.
    rooms = dict(holdings.receiving)
    copies = dict(holdings.copies)
    sending = Counter[tuple[Stage, Value]]()
    for (source, _, value), micros in holdings.sending:
        sending[source, value] += micros
    turns, initials = _turns(header, by_worker[worker]) if by_worker else (None, {})
    used, crossing = links(parts), [value for value in values() if value.crosses]
    return {
        "stages": {
            str(stage): {
                **{value.slots: _slots(header, stage, value, rooms) for value in crossing},
                "copies": copies[stage],
                "sending": [sending[stage, value] for value in crossing],
                "recomputed": runs(sorted(_micros(header, worker, stage, recomputing=True))),
                "initial": initials.get((stage,), (0, 0)),
            }
            for stage in header.stages_of[worker]
        },
        "ties": [
            {"stages": tie, "copies": count, "initial": initials.get(tie, (0, 0))} for tie, count in holdings.tied
        ],
        "incoming": list(used.incoming),
        "outgoing": list(used.outgoing),
        "kept": [[_kept(header, entry) for entry in moment] for moment in holdings.fullest],
        **({"on_host": holdings.on_host} if header.moves else {}),
        "turns": turns,
        "inputs": _loaded(header, worker, header.feeding),
        "targets": _loaded(header, worker, header.fed),
    }


def _kept(header: Header, entry: Sequence[int]) -> Sequence[int]:
    """The numbers of a `Kept`, without those at its end that are 0 in a program without moves or slices."""
    if header.moves:
        return entry
    return entry[:-1] if header.slices > 1 else entry[:4]


def _slots(header: Header, stage: Stage, value: Value, rooms: Mapping[Crossing, Sequence[int]]) -> Sequence[object]:
    """The slots for a value that a stage reads, by the room of each; if several stages make it, a list for each."""
    of_makers = [rooms.get((maker, stage, value), ()) for maker in header.makers(value, stage)]
    return of_makers if len(of_makers) > 1 else next(iter(of_makers), ())


def _evaluation(evaluation: Verified, worker: Worker) -> Facts:
    used, rooms = links(evaluation.program.parts[worker]), dict(evaluation.holdings[worker].receiving)
    receiving = sorted({(target, value) for _, target, value in rooms}, key=itemgetter(0))
    return {
        "slots": {str(stage): _slots(evaluation.header, stage, value, rooms) for stage, value in receiving},
        "incoming": list(used.incoming),
        "outgoing": list(used.outgoing),
    }


def _turns(header: Header, runnable: RunnableTurn) -> tuple[Facts, dict[WeightGroup, tuple[int, int]]]:
    """The entry ``turns`` of program.json for a worker, and for each weight group its entry ``initial``.

    ``turns`` has where the turns begin and end (`reach`), the updates of one, and how many updates ahead it needs
    mini-batches. ``initial`` has the versions of `Initial`.
    """
    initials = initial(header, runnable.turn)
    first, behind = reach(header, runnable.turn, initials)
    turns = {"first": first, "behind": behind, "step": header.per_turn, "ahead": runnable.ahead}
    return turns, {group: (kept.stash, kept.drop) for group, kept in initials.items()}


def _loaded(header: Header, worker: Worker, neighbours: Sequence[Sequence[Stage]]) -> list[tuple[int, int]]:
    """The micro-batches for which the worker loads inputs (by ``feeding``) or targets (by ``fed``), as runs."""
    stages = [stage for stage, others in enumerate(neighbours) if not others]
    return runs(sorted({micro // header.parts for stage in stages for micro in _micros(header, worker, stage)}))


def _micros(header: Header, worker: Worker, stage: int, *, recomputing: bool = False) -> set[int]:
    """The micro-batches that a worker runs, or recomputes, on a stage, within an update or a period."""
    cycle = header.period or header.micro_batches
    pipes = [pipe for pipe in header.pipes if pipe.workers[stage] == worker]
    micros = (micro for pipe in pipes for micro in pipe.micros)
    present = (micro for micro in micros if header.has(micro, Stage(stage)))
    return {micro % cycle for micro in present if not recomputing or header.recomputes(micro, Stage(stage))}


# Makes the files of an output directory as text: templates filled from `RankView`, and program.json.


def scripts(verified: Verified, evaluation: Verified) -> dict[str, str]:
    """The files that run a verified program and its evaluation, by path relative to the output directory.

    Each file needs only files before it: the runtime comes first, ``train.py`` last. ``program.json``, ``train.py`` and
    every rank's script have a digest of the program and the runtime, with which ranks check that all run the same.
    """
    header = verified.header
    environment = text(templates())
    train = environment.get_template("train.py.j2")
    script = environment.get_template("stream.py.j2" if header.period else "rank.py.j2")
    evaluate = environment.get_template("evaluate.py.j2")
    ranks = [rank_view(verified, evaluation, Worker(worker)) for worker in range(header.workers)]
    content, package = facts(verified, evaluation), _package(runtime())
    # Whatever decides the files decides the digest, which therefore cannot be computed from the files themselves.
    made_from = (
        content,
        ranks,
        package.digest,
        [Path(str(template.filename)).read_text(encoding="utf-8") for template in (train, script, evaluate)],
    )
    digest = sha256(repr(made_from).encode()).hexdigest()[:16]
    return {
        **package.files,
        "program.json": show({"interface": content.pop("interface"), "program": digest, **content}),
        **{
            f"rank_{rank.worker}.py": script.render(rank=rank, interface=INTERFACE, digest=digest)
            + evaluate.render(rank=rank)
            for rank in ranks
        },
        "train.py": train.render(header=header, workers=counted(header.workers, "worker"), digest=digest),
    }


class _Package(NamedTuple):
    files: Mapping[str, str]
    digest: str


@cache
def _package(folder: Path) -> _Package:
    paths = sorted(folder.rglob("*.py"), key=lambda path: (path.name != "__init__.py", path))
    files = {path.relative_to(folder.parent).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    return _Package(files, sha256(repr(files).encode()).hexdigest())
