"""Peaks of what a lane keeps, against a simulator that plays it by operation, with a set of the values that exist.

The simulator shares nothing with the table of kinds: it says itself what a forward, a backward and its halves do.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimera_ir.flow import live
from chimera_ir.ir.kinds import FORWARD, RECOMPUTATION, Counted
from chimera_ir.ir.levels import Header, Program, Schedule, in_full
from chimera_ir.ir.ops import Compute, Drop, Operation, Pair, Send, Stage, Stash, WaitMove, WaitSend, singles
from chimera_ir.lower.lower import lower, order
from chimera_ir.verify.holdings import fullest, holdings
from chimera_ir.verify.verify import schedule_of, verify_schedule
from tests.property.programs import plans
from tests.property.test_split_backward import split
from tests.repeatable import examples
from tests.unit.test_codegen import CASES, compiled, named

KEPT = ("activations", "input", "operands", "carries", "carry gradients", "host", "host operands")
"""The units of the numbers of a moment, in their order."""

Held = set[tuple[str, int, int]]
"""Everything that a worker keeps: the name of its unit, its micro-batch and its stage."""


def played(header: Header, lane: Iterable[Compute | WaitMove]) -> Iterator[Held]:
    """Yields all that a worker keeps, at every moment at which it is not the same as before.

    A copy is at both of its ends until the lane has waited for it.
    """
    held: Held = set()
    for operation in lane:
        stage, again = operation.stage, header.recomputes(operation.micros[0], operation.stage)
        first = "input" if again else "activations"
        later = {micro for micro in operation.micros if (micro + 1) % header.slices}
        earlier = {micro - 1 for micro in operation.micros if micro % header.slices}
        match operation.kind.letter:
            case "F":
                held |= {(first, micro, stage) for micro in operation.micros}
                held |= {("carries", micro, stage) for micro in later}
            case "recompute":
                held |= {("activations", micro, stage) for micro in operation.micros}
                yield {*held}
                held -= {("input", micro, stage) for micro in operation.micros}
            case "B" | "I" as letter:
                held |= {("carry gradients", micro, stage) for micro in earlier}
                yield {*held}
                held -= {(unit, micro, stage) for micro in later for unit in ("carries", "carry gradients")}
                held -= {("activations", micro, stage) for micro in operation.micros}
                held |= {("operands", micro, stage) for micro in operation.micros if letter == "I"}
            case "W":
                held -= {("operands", micro, stage) for micro in operation.micros}
            case "offload" | "reload" | "offload_operands" | "reload_operands" as letter:
                way = ("operands", "host operands") if letter.endswith("operands") else ("activations", "host")
                start, end = way if letter.startswith("offload") else way[::-1]
                if isinstance(operation, WaitMove):
                    held -= {(start, micro, stage) for micro in operation.micros}
                else:
                    held |= {(end, micro, stage) for micro in operation.micros}
        yield {*held}
    assert not held


def size(header: Header, unit: str, micro: int) -> int:
    """The size of a value: 1, or the relative length of the slice that made it."""
    maker = micro + 1 if unit == "carry gradients" else micro
    return header.lengths[maker % header.slices] if header.lengths else 1


def most(header: Header, moments: list[Held], *units: str) -> int:
    return max((sum(size(header, unit, m) for unit, m, _ in held if unit in units) for held in moments), default=0)


def agrees(schedule: Schedule) -> None:
    """Asserts that the peaks, and the fullest moments, are those of the simulator."""
    header = schedule.header
    moments = [list(played(header, singles(lane))) for lane in schedule.lanes]
    amounts = {
        live.activations: ("activations", "operands"),
        live.inputs: ("input",),
        live.between_halves: ("operands",),
    }
    for peaks, units in amounts.items():
        assert [peak.amount for peak in peaks(schedule)] == [most(header, of_worker, *units) for of_worker in moments]
    for stages, lane, of_worker in zip(header.stages_of, schedule.lanes, moments, strict=True):
        assert fullest(header, stages, singles(lane)) == front(header, stages, of_worker)


def front(
    header: Header, stages: tuple[Stage, ...], moments: list[Held], kept: tuple[str, ...] = KEPT
) -> tuple[Any, ...]:
    """The moments that no other exceeds in every number, each once, in order; none if nothing is ever kept."""
    counts = [Counter[Any]() for _ in moments]
    for count, held in zip(counts, moments, strict=True):
        for unit, micro, stage in held:
            count[unit, stage] += size(header, unit, micro)
    numbers = {tuple((s, *(count[u, s] for u in kept)) for s in stages) for count in counts}
    flat = {moment: [number for entry in moment for number in entry[1:]] for moment in numbers}
    return tuple(
        moment
        for moment in sorted(numbers)
        if any(flat[moment])
        if not any(
            other != moment and all(a >= b for a, b in zip(flat[other], flat[moment], strict=True)) for other in numbers
        )
    )


def moving_agrees(program: Program) -> None:
    """As `agrees`, by the lines of a program: on the workers and on their hosts."""
    for number, (parts, held) in enumerate(zip(program.parts, holdings(program), strict=True)):
        stages, moments = program.header.stages_of[number], list(played(program.header, parts.steps))
        assert held.fullest == front(program.header, stages, moments)
        assert held.on_host == front(program.header, stages, moments, ("host", "host operands"))
        for units in (("activations", "operands"), ("host", "host operands")):
            peak = live.peaks(program, *(unit for unit in Counted if unit.value in units))[number]
            assert peak.amount == most(program.header, moments, *units)


def counted(program: Program) -> None:
    """Asserts that copies of weights and messages under way are as many as a simulator has at most."""
    header = program.header
    for lane, groups, held in zip(program.lanes, header.groups_of, holdings(program), strict=True):
        versions, under_way = Counter(dict.fromkeys(groups, 1)), Counter[Any]()
        copies, sending = Counter(versions), Counter[Any]()
        for line in lane:
            match line:
                case Stash(group):
                    versions[group] += 1
                case Drop(group):
                    versions[group] -= 1
                case Send(message):
                    under_way[message.edge] += len(message.micros)
                case WaitSend(message):
                    under_way[message.edge] -= len(message.micros)
            copies |= versions
            sending |= under_way
        assert {**{(stage,): count for stage, count in held.copies}, **dict(held.tied)} == copies
        assert dict(held.sending) == sending
        assert not +under_way


def recomputing(schedule: Schedule, share: float, seed: int) -> Schedule:
    """The schedule with other stages that recompute: a ``share`` of them, by a rule that ``seed`` changes."""
    pipes = [
        replace(
            pipe, recompute=tuple(Stage(s) for s in range(len(pipe.workers)) if (s * 7 + p + seed) % 10 < 10 * share)
        )
        for p, pipe in enumerate(schedule.header.pipes)
    ]
    header = replace(schedule.header, pipes=tuple(pipes))
    plain = [
        [plainly(operation) for operation in lane if operation.kind is not RECOMPUTATION] for lane in schedule.lanes
    ]
    return Schedule(header, in_full(header, plain))


def plainly(operation: Operation) -> Operation:
    """The operation as on a stage that recomputes nothing."""
    if isinstance(operation, Pair):
        return replace(operation, forward=replace(operation.forward, kind=FORWARD))
    return replace(operation, kind=FORWARD) if operation.kind.opens else operation


@pytest.mark.parametrize("case", CASES, ids=named)
def test_the_library_keeps_what_a_simulator_counts(case: Any) -> None:
    verified = compiled(case)
    program = verified.program
    counted(program)
    for held, live_there, weights in zip(verified.holdings, verified.live, verified.weights, strict=True):
        peak = max((sum(kept.activations + kept.begun for kept in moment) for moment in held.fullest), default=0)
        assert (peak, sum(count for _, count in held.copies)) == (live_there * program.header.parts, weights)
    if program.header.moves:
        moving_agrees(program)
        return
    schedule = schedule_of(program)
    for share in (0, 0.5, 1):
        agrees(recomputing(schedule, share, seed=3))
    agrees(schedule)


@examples(60)
@given(plans, st.integers(0, 2**32), st.sampled_from([0.0, 0.3, 1.0]))
def test_random_schemes_keep_what_a_simulator_counts(plan, seed, share):
    schedule = order(plan)
    if not verify_schedule(schedule, plan).findings.errors:
        agrees(split(schedule, seed, share))
        counted(lower(schedule))
