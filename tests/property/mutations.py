"""Changed programs, which rules reject them, and the score of a run."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from chimera_ir.diagnostics.model import Rejected
from chimera_ir.ir.kinds import NOTHING
from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.ops import (
    AllReduce,
    Drop,
    Instruction,
    Message,
    Micro,
    Pair,
    Recv,
    Send,
    Slot,
    Stage,
    Stash,
    Step,
    WaitAllReduce,
    WeightGroup,
    Worker,
)
from chimera_ir.ir.streams import ProgramStream, view_of
from chimera_ir.verify.verify import proven, verify_program
from tests.executor import verdicts
from tests.repeatable import some

RULES = {
    "CH283": "complete, placed",
    "CH284": "groups",
    "CH30": "complete, placed",
    "CH310": "acyclic",
    "CH312": "groups",
    "CH313": "groups",
    "CH314": "groups",
    "CH317": "versions",
    "CH318": "complete, placed",
    "CH329": "complete, placed",
    "CH330": "complete, placed",
    "CH332": "complete, placed",
    "CH333": "complete, placed",
    "CH341": "complete, placed",
    "CH342": "complete, placed",
    "CH401": "missing",
    "CH402": "redundant",
    "CH403": "misplaced",
    "CH404": "wrong peer",
    "CH405": "unknown message",
    "CH406": "slot in use",
    "CH407": "slot too high",
    "CH408": "out of order",
    "CH409": "deadlock",
    "CH410": "not held",
    "CH411": "launch order",
    "CH412": "versions",
    "CH416": "no update",
    "CH417": "versions",
    "CH418": "copies",
    "CH421": "not tied",
    "CH60": "repeats",
}

RIGHT = {
    "dropped": {"complete, placed", "missing"},
    "duplicated": {"complete, placed", "redundant"},
    "peer": {"wrong peer"},
    "slot": {"slot in use", "slot too high"},
    "stage": {
        "complete, placed",
        "groups",
        "missing",
        "unknown message",
        "redundant",
        "not held",
        "misplaced",
        "not tied",
    },
    "micro": {"complete, placed", "groups", "missing", "unknown message", "redundant"},
    "swapped": set(RULES.values())
    - {"complete, placed", "groups", "missing", "redundant", "wrong peer", "slot too high"},
    "moved": set(RULES.values())
    - {"complete, placed", "groups", "missing", "redundant", "wrong peer", "slot too high"},
    "elsewhere": {"complete, placed", "missing", "unknown message", "not held", "redundant"},
}
"""For every mutation the rules that may reject it."""

_MOVES = 120
_ELSEWHERE = 30


def mutants(program: Program, seed: int) -> Iterator[tuple[str, Program]]:
    """Some of the single changes of a line, and of the moves over longer distances."""
    return some(_mutants(program, seed))


def _mutants(program: Program, seed: int) -> Iterator[tuple[str, Program]]:
    rng = random.Random(seed)
    for worker, lane in enumerate(program.lanes):
        for place, each in enumerate(lane):
            yield "dropped", changed(program, worker, place, [])
            yield "duplicated", changed(program, worker, place, [each, each])
            for kind, other in retargeted(program, each):
                yield kind, changed(program, worker, place, [other])
            if place + 1 < len(lane) and lane[place + 1] != each:
                yield "swapped", moved(program, worker, place, place + 1)
    full = [worker for worker, lane in enumerate(program.lanes) if len(lane) > 2]
    for _ in range(_MOVES if full else 0):
        worker = rng.choice(full)
        start, end = rng.sample(range(len(program.lanes[worker])), 2)
        yield "moved", moved(program, worker, start, end)
    for _ in range(_ELSEWHERE if full and len(program.lanes) > 1 else 0):
        worker = rng.choice(full)
        place = rng.randrange(len(program.lanes[worker]))
        target = rng.choice([w for w in range(len(program.lanes)) if w != worker])
        lanes = list(changed(program, worker, place, []).lanes)
        spot = rng.randrange(len(lanes[target]) + 1)
        lanes[target] = (*lanes[target][:spot], program.lanes[worker][place], *lanes[target][spot:])
        yield "elsewhere", replace(program, lanes=tuple(lanes))


def changed(program: Program, worker: int, place: int, by: list[Instruction]) -> Program:
    lanes = list(program.lanes)
    lanes[worker] = (*lanes[worker][:place], *by, *lanes[worker][place + 1 :])
    return replace(program, lanes=tuple(lanes))


def moved(program: Program, worker: int, start: int, end: int) -> Program:
    lane = list(program.lanes[worker])
    lane.insert(end, lane.pop(start))
    lanes = list(program.lanes)
    lanes[worker] = tuple(lane)
    return replace(program, lanes=tuple(lanes))


def retargeted(program: Program, each: Instruction) -> Iterator[tuple[str, Instruction]]:
    header = program.header
    if isinstance(each, Pair):
        for kind, forward in retargeted(program, each.forward):
            yield kind, replace(each, forward=forward)
        for kind, backward in retargeted(program, each.backward):
            yield kind, replace(each, backward=backward)
        return
    for worker in range(header.workers):
        if isinstance(each, Send) and worker != each.to:
            yield "peer", replace(each, to=Worker(worker))
        if isinstance(each, Recv) and worker != each.source:
            yield "peer", replace(each, source=Worker(worker))
    if isinstance(each, Recv):
        for slot in range(header.micro_batches + 1):
            if slot != each.slot:
                yield "slot", replace(each, slot=Slot(slot))
    for stage in range(-1, header.stages + 1):
        if hasattr(each, "stage") and stage != each.stage:
            yield "stage", replace(each, stage=Stage(stage))
        if hasattr(each, "group"):
            yield from (("stage", replace(each, group=group)) for group in regrouped_stages(header, each.group, stage))
        if hasattr(each, "message"):
            for end in ("source", "target"):
                if getattr(each.message, end) != stage:
                    yield "stage", replace(each, message=rerouted(header, each.message._replace(**{end: Stage(stage)})))
    if isinstance(each, AllReduce | WaitAllReduce | Step | Stash | Drop):
        return
    for micros in regrouped(each.message.micros if hasattr(each, "message") else each.micros):
        if hasattr(each, "message"):
            yield "micro", replace(each, message=each.message._replace(micros=micros))
        else:
            yield "micro", replace(each, micros=micros)
    for micro in range(-1, header.micro_batches + 1):
        if hasattr(each, "message") and each.message.micros != (micro,):
            yield "micro", replace(each, message=each.message._replace(micros=(Micro(micro),)))
        if hasattr(each, "micros") and each.micros != (micro,):
            yield "micro", replace(each, micros=(Micro(micro),))


def rerouted(header: Header, message: Message) -> Message:
    """A message with the value that goes between its stages, as it would be read from text."""
    return message._replace(value=header.value_between.get((message.source, message.target, ""), NOTHING))


def regrouped_stages(header: Header, group: WeightGroup, stage: int) -> Iterator[WeightGroup]:
    """Other groups about a stage: it by itself, its ties, and the group with this stage taken out or put in."""
    others = [(Stage(stage),), *(tie for tie in header.ties if stage in tie)]
    others += [tuple(sorted({*group} ^ {Stage(stage)}))]
    yield from (other for other in dict.fromkeys(others) if other and other != group)


def regrouped(micros: tuple[Micro, ...]) -> Iterator[tuple[Micro, ...]]:
    """Other groups of the same micro-batches."""
    if len(micros) > 1:
        yield micros[::-1]
        yield micros[:-1]
        yield (*micros, micros[0])


def rules(program: Program | ProgramStream) -> set[str]:
    """The rules that reject a program, or some updates of a stream; none if it is verified."""
    try:
        proven(program) if isinstance(program, Program) else verify_program(program)
    except Rejected as rejected:
        found = rejected.diagnostics
    else:
        return set()
    assert all(each.fill(each.title) and each.fill(each.help) for each in found)
    return {RULES.get(each.code) or RULES[each.code[:4]] for each in found if each.code != "CH415"}


def judged(
    changed: Iterable[tuple[str, str, Program | ProgramStream]],
    right: dict[str, set[str]],
    rejecting: Iterable[set[str]] | None = None,
) -> tuple[Counter[tuple[str, str]], list[tuple[str, set[str]]]]:
    """The score of named mutants by kind and rule; and those that no right rule rejects and the executor not clears.

    ``rejecting`` has the `rules` of each mutant where they are known.
    """
    score: Counter[tuple[str, str]] = Counter()
    failures = []
    judging = (
        ((each, rules(each[2])) for each in changed) if rejecting is None else zip(changed, rejecting, strict=True)
    )
    for (name, kind, mutant), found in judging:
        if not found:
            verdict = verdicts(view_of(mutant), seeds=3)
            failures += [(name, verdict)] * (verdict != {"finished"})
        elif not found & right[kind]:
            failures.append((name, found))
        score.update((kind, rule) for rule in found or {"harmless"})
    return score, failures


def table(score: Counter[tuple[str, str]]) -> str:
    """The score by mutation and rule; a mutant that several rules reject counts for each of them."""
    columns = list(dict.fromkeys(kind for kind, _ in score))
    used = {rule for _, rule in score}
    rows = [rule for rule in ("harmless", *dict.fromkeys(RULES.values())) if rule in used]
    lines = ["mutants by rule  " + "".join(f"{column:>11}" for column in columns)]
    lines += [f"{row:<17}" + "".join(f"{score[column, row] or '.':>11}" for column in columns) for row in rows]
    return "\n".join(lines)
