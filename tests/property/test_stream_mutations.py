"""Changes of what an asynchronous program says of updates and versions: rejected by the rule that should, or harmless.

Changes of messages are those of test_mutations, on the smaller programs.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise, product

import pytest

from chimera_ir.ir.ids import Stage, Version
from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import AllReduce, Compute, Drop, Instruction, Stash, Step, WaitAllReduce
from chimera_ir.verify.verify import verify_program
from tests.executor import verdicts
from tests.property import mutations
from tests.property.mutations import RULES, changed, judged, moved, rules, table
from tests.property.updates import both_ways, double_buffered, every_one, in_turns, instance, synchronised

STREAMS = {
    "every one": (every_one(2), 5),
    "every one, three stages": (every_one(3), 8),
    "double buffered": (double_buffered(2, 2), 4),
    "both ways": (both_ways(2), 4),
    "both ways, four": (both_ways(4), 3),
    "in turns": (in_turns(2, 0), 6),
    "three in turns, late": (in_turns(3, 1), 9),
    "both ways, one": (both_ways(1), 8),
}
PROGRAMS = {name: instance(*stream) for name, stream in STREAMS.items()}

TIMING = set(RULES.values()) - {"complete, placed", "groups", "wrong peer", "slot too high", "no update", "not held"}
RIGHT = {
    "dropped": {"missing", "redundant"},
    "duplicated": {"redundant"},
    "version": {"missing", "redundant", "misplaced", "no update", "versions", "acyclic", "complete, placed"},
    "both versions": {"missing", "redundant", "misplaced", "acyclic", "copies", "complete, placed"},
    "stage": {"missing", "redundant", "not held", "misplaced"},
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
                for stage in (-1, 1):
                    yield "stage", changed(program, worker, place, [replace(each, stage=Stage(each.stage + stage))])
                for end in {*range(place - 4, place + 5), *rng.sample(range(len(lane)), 4)} - {place}:
                    if 0 <= end < len(lane):
                        yield "moved", moved(program, worker, place, end)
    yield from both_versions(program)
    yield from crossed(program)
    yield from sums(program)


def sums(program: Program) -> Iterator[tuple[str, Program]]:
    """A line of a sum elsewhere on all workers alike: right before or behind one of the same update or the next."""
    for kind, other in product((AllReduce, WaitAllReduce, Step), repeat=2):
        for stage, version, by, behind in product(
            range(program.header.stages), range(1, program.header.updates + 1), (-1, 0, 1), (0, 1)
        ):
            lanes = [list(lane) for lane in program.lanes]
            for lane in lanes:
                line, target = (
                    kind(Stage(stage), version=Version(version)),
                    other(Stage(stage), version=Version(version + by)),
                )
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


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_programs_themselves_are_verified_and_run(name):
    assert rules(PROGRAMS[name]) == set()
    assert verdicts(PROGRAMS[name], seeds=5) == {"finished"}


@pytest.mark.parametrize("name", STREAMS)
def test_updates_are_placed_where_the_definition_says(name):
    lanes = tuple(tuple(each for each in lane if not hasattr(each, "message")) for lane in PROGRAMS[name].lanes)
    defined = synchronised(*STREAMS[name])
    if name == "both ways, one":  # the agreed order of launches holds some of them back
        for stage in range(2):
            assert of_stage(lanes, stage) == of_stage(defined, stage)
    else:
        assert lanes == defined


def of_stage(lanes, stage):
    """The lines of a stage but for launches, and all that computes."""
    return [
        [
            each
            for each in lane
            if not isinstance(each, AllReduce) and (each.stage == stage or isinstance(each, Compute))
        ]
        for lane in lanes
    ]


@pytest.mark.parametrize(("depth", "updates"), [(1, 4), (2, 6), (4, 16)])
def test_an_update_per_micro_batch_takes_a_copy_for_every_stage_behind(depth, updates):
    """PipeDream's weight stashing: stage s keeps D - s versions."""
    verified = verify_program(instance(every_one(depth), updates))
    assert verified.weights == tuple(range(depth, 0, -1))


@pytest.mark.parametrize(("depth", "per_update"), [(2, 2), (2, 3), (4, 4), (4, 6)])
def test_double_buffering_takes_two_copies_of_every_stage(depth, per_update):
    """PipeDream-2BW."""
    assert verify_program(instance(double_buffered(depth, per_update), 6)).weights == (2,) * depth


def test_every_mutant_is_rejected_by_the_rule_that_should_or_harmless(capsys):
    all_of_them = (
        (f"{name}, {kind}", kind, mutant)
        for seed, (name, program) in enumerate(PROGRAMS.items())
        for kind, mutant in mutants(program, seed)
    )
    score, failures = judged(all_of_them, RIGHT)
    with capsys.disabled():
        print(f"\n{table(score)}")
    assert not failures, failures[:5]
    assert {rule for _, rule in score} > {"missing", "redundant", "misplaced", "versions", "acyclic", "copies"}


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
    for seed, program in enumerate(PROGRAMS.values()):
        for _, mutant in islice(mutants(program, seed), 0, None, 3):
            found = rules(mutant)
            if len(found) == 1 and found & set(seen):
                seen[found.pop()].add("runs" if verdicts(mutant, seeds=2) == {"finished"} else "fails")
    assert seen == {"versions": {"fails"}, "acyclic": {"fails"}, "copies": {"runs"}}
