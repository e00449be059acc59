"""Changes of what an asynchronous program says of updates and versions: rejected by the rule that should, or harmless.

Changes of messages are those of test_mutations, on the smaller programs.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import chain, islice, pairwise, product

import pytest

from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import (
    AllReduce,
    Compute,
    Drop,
    Instruction,
    Recv,
    Send,
    Stage,
    Stash,
    Step,
    Version,
    WaitAllReduce,
    WaitRecv,
    WaitSend,
)
from chimera_ir.ir.streams import ProgramStream
from chimera_ir.ir.turns import Turn, shelf
from chimera_ir.verify.verify import verify_program
from tests.executor import verdicts
from tests.property import mutations
from tests.property.mutations import RULES, changed, judged, moved, rules, table
from tests.property.updates import both_ways, double_buffered, every_one, in_turns, instance, level, synchronised
from tests.repeatable import also, either, some

STREAMS = {
    "every one": (every_one(2), either(4, 5)),
    "every one, three stages": (every_one(3), either(5, 8)),
    "double buffered": (double_buffered(2, 2), either(3, 4)),
    "both ways": (both_ways(2), either(3, 4)),
    "both ways, four": (both_ways(4), either(2, 3)),
    "in turns": (in_turns(2, 0), 6),
    "three in turns, late": (in_turns(3, 1), either(6, 9)),
    "both ways, one": (both_ways(1), either(5, 8)),
    "tied ends": (double_buffered(2, 2)._replace(ties=((0, 1),)), either(3, 4)),
    "tied, both ways": (both_ways(2)._replace(ties=((0, 1),)), either(3, 4)),
}
"""Streams, and of how many updates the lines are changed: warm-up, steady state and drain; in a search more of them."""

PROGRAMS = {name: instance(*stream) for name, stream in STREAMS.items()}

TIMING = set(RULES.values()) - {"complete, placed", "groups", "wrong peer", "slot too high", "no update", "not held"}
RIGHT = {
    "dropped": {"missing", "redundant"},
    "duplicated": {"redundant"},
    "version": {"missing", "redundant", "misplaced", "no update", "versions", "acyclic", "complete, placed"},
    "both versions": {"missing", "redundant", "misplaced", "acyclic", "copies", "complete, placed", "versions"},
    "stage": {"missing", "redundant", "not held", "not tied", "misplaced"},
    "crossed": {"missing", "redundant", "misplaced", "launch order", "deadlock"},
    "moved": TIMING,
    "sums": TIMING,
}
"""For every mutation the rules that may reject it."""

Updating = AllReduce | WaitAllReduce | Step | Stash | Drop


def mutants(program: Program, seed: int) -> Iterator[tuple[str, Program]]:
    """Changes of the lines about updates and versions; of the moves a sample."""
    rng = random.Random(seed)
    for worker, lane in enumerate(program.lanes):
        for place, each in enumerate(lane):
            if isinstance(each, Compute | Updating):
                for step in (-1, 1, 2):
                    yield "version", changed(program, worker, place, [replace(each, version=each.version + step)])
            if isinstance(each, Updating):
                yield "dropped", changed(program, worker, place, [])
                yield "duplicated", changed(program, worker, place, [each, each])
                for by in (-1, 1):
                    group = tuple(Stage(stage + by) for stage in each.group)
                    yield "stage", changed(program, worker, place, [replace(each, group=group)])
                for end in {*range(place - 4, place + 5), *rng.sample(range(len(lane)), 4)} - {place}:
                    if 0 <= end < len(lane):
                        yield "moved", moved(program, worker, place, end)
    yield from both_versions(program)
    yield from crossed(program)
    yield from sums(program)


def sums(program: Program) -> Iterator[tuple[str, Program]]:
    """A line of a sum elsewhere on all workers alike: right before or behind one of the same update or the next."""
    for kind, other in product((AllReduce, WaitAllReduce, Step), repeat=2):
        for group, version, by, behind in product(
            program.header.groups, range(1, program.header.updates + 1), (-1, 0, 1), (0, 1)
        ):
            lanes = [list(lane) for lane in program.lanes]
            for lane in lanes:
                line, target = (kind(group, version=Version(version)), other(group, version=Version(version + by)))
                if line != target and line in lane and target in lane:
                    lane.remove(line)
                    lane.insert(lane.index(target) + behind, line)
            mutant = replace(program, lanes=tuple(map(tuple, lanes)))
            if mutant != program:
                yield "sums", mutant


def both_versions(program: Program) -> Iterator[tuple[str, Program]]:
    """Forward and backward of a micro-batch on a stage, both with another version."""
    for micro in range(program.header.micro_batches):
        for stage in range(program.header.stages):
            for step in (-1, 1):
                lanes = (tuple(_shifted(each, micro, stage, step) for each in lane) for lane in program.lanes)
                yield "both versions", replace(program, lanes=tuple(lanes))


def _shifted(each: Instruction, micro: int, stage: int, step: int) -> Instruction:
    if isinstance(each, Compute) and micro in each.micros and each.stage == stage:
        return replace(each, version=Version(each.version + step))
    return each


def crossed(program: Program) -> Iterator[tuple[str, Program]]:
    """Two lines of one kind in each other's place, of two updates or of two stages."""
    for worker, lane in enumerate(program.lanes):
        for kind in (AllReduce, WaitAllReduce, Step, Stash, Drop):
            places = [place for place, each in enumerate(lane) if isinstance(each, kind)]
            for one, two in pairwise(places):
                swapped = changed(program, worker, one, [lane[two]])
                yield "crossed", changed(swapped, worker, two, [lane[one]])


@cache
def mutants_of(name: str) -> list[tuple[str, Program]]:
    """Some mutants of a program, the same each time."""
    return [*some(mutants(PROGRAMS[name], [*PROGRAMS].index(name)))]


@cache
def rejecting(name: str) -> list[set[str]]:
    """The rules that reject each mutant of a program; two tests ask for them."""
    return [rules(mutant) for _, mutant in mutants_of(name)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_programs_themselves_are_verified_and_run(name):
    assert rules(PROGRAMS[name]) == set()
    assert verdicts(PROGRAMS[name], seeds=5) == {"finished"}


@pytest.mark.parametrize("name", STREAMS)
def test_updates_are_placed_where_the_definition_says(name):
    lanes = tuple(tuple(each for each in lane if not hasattr(each, "message")) for lane in PROGRAMS[name].lanes)
    defined = synchronised(*STREAMS[name])
    if name == "both ways, one" or STREAMS[name][0].ties:  # the agreed order of launches holds some of them back
        for group in STREAMS[name][0].groups:
            assert of_group(lanes, group) == of_group(defined, group)
    else:
        assert lanes == defined


def of_group(lanes, group):
    """The lines of a weight group but for launches, and all that computes."""
    return [
        [
            each
            for each in lane
            if isinstance(each, Compute) or (not isinstance(each, AllReduce) and each.group == group)
        ]
        for lane in lanes
    ]


@pytest.mark.parametrize(("depth", "updates"), [(1, 4), (2, 6), (4, 16)])
def test_an_update_per_micro_batch_takes_a_copy_for_every_stage_behind(depth, updates):
    """PipeDream's weight stashing: stage s keeps D - s versions."""
    verified = verify_program(level(every_one(depth)))
    assert verified.weights == tuple(range(depth, 0, -1))


@pytest.mark.parametrize(("depth", "per_update"), [(2, 2), (2, 3), (4, 4), (4, 6)])
def test_double_buffering_takes_two_copies_of_every_stage(depth, per_update):
    """PipeDream-2BW."""
    assert verify_program(level(double_buffered(depth, per_update))).weights == (2,) * depth


def test_every_mutant_is_rejected_by_the_rule_that_should_or_harmless(capsys):
    all_of_them = ((f"{name}, {kind}", kind, mutant) for name in PROGRAMS for kind, mutant in mutants_of(name))
    score, failures = judged(all_of_them, RIGHT, chain.from_iterable(map(rejecting, PROGRAMS)))
    with capsys.disabled():
        print(f"\n{table(score)}")
    assert not failures, failures[:5]
    assert {rule for _, rule in score} > {"missing", "redundant", "misplaced", "versions", "acyclic", "copies"}


def turned(stream: ProgramStream, seed: int) -> Iterator[tuple[str, ProgramStream]]:
    """Every single change of a line of a turn; of the moves all, as a turn is short."""
    rng = random.Random(seed)
    for worker, turn in enumerate(stream.turns):
        lines = turn.instructions
        for place, each in enumerate(lines):
            yield "dropped", with_turn(stream, worker, (*lines[:place], *lines[place + 1 :]))
            yield "duplicated", with_turn(stream, worker, (*lines[:place], each, *lines[place:]))
            for kind, other in retold(stream, turn, each):
                yield kind, with_turn(stream, worker, (*lines[:place], other, *lines[place + 1 :]))
            for end in {place + 1, rng.randrange(len(lines))} - {place, len(lines)}:
                others = [*lines[:place], *lines[place + 1 :]]
                others.insert(end, each)
                yield "moved", with_turn(stream, worker, tuple(others))
        for key, count in turn.slots:
            for more in (-1, 1):
                sizes = tuple((shelf, count + more if shelf == key else slots) for shelf, slots in turn.slots)
                if count + more:
                    turns = (*stream.turns[:worker], Turn(lines, sizes), *stream.turns[worker + 1 :])
                    yield "slots", replace(stream, turns=turns)


def with_turn(stream: ProgramStream, worker: int, lines: tuple[Instruction, ...]) -> ProgramStream:
    turn = Turn(lines, stream.turns[worker].slots)
    return replace(stream, turns=(*stream.turns[:worker], turn, *stream.turns[worker + 1 :]))


def retold(stream: ProgramStream, turn: Turn, each: Instruction) -> Iterator[tuple[str, Instruction]]:
    """A line of another micro-batch, version, stage or slot."""
    for step in (-stream.header.period, -1, 1, stream.header.period):
        if isinstance(each, Compute | Updating):
            yield "version", replace(each, version=each.version + step)
        if isinstance(each, Compute):
            yield "micro", replace(each, micros=tuple(micro + step for micro in each.micros))
        if isinstance(each, Send | Recv | WaitSend | WaitRecv):
            micros = tuple(micro + step for micro in each.message.micros)
            yield "micro", replace(each, message=each.message._replace(micros=micros))
    if isinstance(each, Recv):
        for slot in range(dict(turn.slots)[shelf(each.message)]):
            if slot != each.slot:
                yield "slot", replace(each, slot=slot)


def test_every_mutant_of_a_turn_is_rejected_or_harmless(capsys):
    """Whatever rule rejects it: a line that is wrong once a turn is wrong against any of the lines around it."""
    names = also(STREAMS.keys() - {"both ways, four"}, ["both ways, four"])
    mutants_of = (
        (f"{name}, {kind}", kind, mutant)
        for seed, name in enumerate(STREAMS)
        if name in names
        for kind, mutant in some(turned(level(STREAMS[name][0]), seed))
    )
    kinds = ("dropped", "duplicated", "version", "micro", "slot", "slots", "moved")
    score, failures = judged(mutants_of, {kind: set(RULES.values()) for kind in kinds})
    with capsys.disabled():
        print(f"\n{table(score)}")
    assert not failures, failures[:5]
    assert {kind for kind, rule in score if rule != "harmless"} == set(kinds)
    assert not score.keys() & {(kind, "harmless") for kind in ("dropped", "duplicated")}


def test_messages_are_ruled_as_in_a_synchronous_program():
    updating = {"stage", "swapped", "moved", "dropped", "duplicated", "elsewhere"}
    right = {kind: known | TIMING if kind in updating else known for kind, known in mutations.RIGHT.items()}
    changes = (
        (f"{name}, {kind}", kind, mutant)
        for name in ("every one", "double buffered")
        for kind, mutant in mutations.mutants(PROGRAMS[name], 0)
    )
    _, failures = judged(changes, right)
    assert not failures, failures[:5]


def test_the_executor_sees_what_the_rules_on_weights_see():
    """The other way round: wrong weights fail in the executor too; too many copies only cost memory."""
    seen = {"versions": set(), "acyclic": set(), "copies": set()}
    for name in PROGRAMS:
        for (_, mutant), found in islice(zip(mutants_of(name), rejecting(name), strict=True), 0, None, 3):
            if len(found) == 1 and found & set(seen):
                (rule,) = found
                seen[rule].add("runs" if verdicts(mutant, seeds=2) == {"finished"} else "fails")
    assert seen == {"versions": {"fails"}, "acyclic": {"fails"}, "copies": {"runs"}}
