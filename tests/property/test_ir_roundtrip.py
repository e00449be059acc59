"""Every level of IR prints as text that reads back, and no text makes the parser fail otherwise than by diagnostics."""

import random
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chimera_ir.diagnostics.model import Rejected
from chimera_ir.ir.levels import Plan, Program, Schedule
from chimera_ir.ir.ops import Planned
from chimera_ir.ir.streams import Level, ProgramStream, ScheduleStream
from chimera_ir.ir.text.printer import line, numbered_line, numbers_of, show
from chimera_ir.ir.text.reader import parse
from chimera_ir.ir.turns import shifted
from chimera_ir.lower.lower import lower, order
from chimera_ir.source import Source
from chimera_ir.verify.verify import verify_program, verify_schedule
from tests.property.programs import one_direction, plans, two_directions
from tests.property.updates import both_ways, double_buffered, every_one, schedule
from tests.property.updates import level as level_of
from tests.repeatable import examples

_FEW = examples(150)
_TEXTS = [show(lower(order(two_directions(4, 4)))), show(level_of(every_one(3)))]
_ODD = st.sampled_from("Fm0 s1->2wrecv\n\r\t\0:.#@=<-[]{}()\x85\u2028ü٣") | st.characters()


def read(text: str) -> Level | None:
    """The level, or none if the text was diagnosed."""
    source = Source("test.sir", text)
    try:
        return parse(source)
    except Rejected as rejected:
        found = rejected.diagnostics
    assert found
    for each in found:
        assert each.code.startswith("CH5")
        assert all(each.fill(words) for words in (each.title, each.label, each.help))
        assert 0 <= each.span.start <= each.span.end <= len(text)
    return None


@_FEW
@given(plans)
def test_every_level_reads_back(plan):
    weights = tuple(1 + 2 * m % 5 for m in range(plan.header.micro_batches))
    if any(weight > 1 for weight in weights):
        plan = replace(plan, header=replace(plan.header, weights=weights))
    schedule = order(plan)
    for level in (plan, schedule, lower(schedule)):
        assert read(show(level)) == level


@pytest.mark.parametrize("stream", [every_one(3), double_buffered(2, 3), both_ways(2)])
def test_every_asynchronous_level_reads_back(stream):
    lanes = schedule(stream, 9).lanes
    operations = (Planned(n, w, each) for w, lane in enumerate(lanes) for n, each in enumerate(lane))
    plan = Plan(schedule(stream, 9).header, tuple(operations))
    for level in (plan, level_of(stream).schedule, level_of(stream)):
        assert read(show(level)) == level


@pytest.mark.parametrize("program", [lower(order(one_direction(2, 2))), lower(order(two_directions(4, 4)))])
def test_every_operation_knows_its_line(program):
    text = show(program)
    program = read(text)
    for lane in program.lanes:
        for each in lane:
            assert text[each.origin.start : each.origin.end] == line(each, program.header)


def test_every_operation_of_a_stream_knows_its_line_and_its_turn():
    text = show(level_of(double_buffered(2, 3)))
    level = read(text)
    for turn, lane in zip(level.turns, level.view(7).lanes, strict=True):
        for each in turn.instructions:
            assert text[each.origin.start : each.origin.end] == numbered_line(each, numbers_of(level.header, turn))
        for each in lane:
            micros, updates = each.origin.turn
            counted = shifted(each, -micros, -updates)
            here = text[each.origin.start : each.origin.end]
            if getattr(each, "version", None) != 0:  # version 0 may stand for one below it
                assert (
                    here.split(" into ")[0] == numbered_line(counted, numbers_of(level.header, turn)).split(" into ")[0]
                )


@_FEW
@given(st.text(_ODD, max_size=300))
@example("")
@example("\0" * 1000)
@example("\f")
@example("(" * 1_000_000)
@example("program x\n" + "[" * 100_000)
@example("program x\nworkers 1\nstages 1\nmicro_batches 1048576\npipe p on 0 micros 0..99999999999999999999999\n")
@example("plan x\nworkers 1\nstages 1\nmicro_batches 1\npipe p on 0 micros 0..1\nF m0 s0 @ " + "9" * 5000 + " on w0")
@example("program p\nparameters x=" + "9" * 10_000)
def test_no_text_makes_the_parser_fail(text):
    read(text)


@_FEW
@given(st.integers(0, 2**32))
def test_a_damaged_text_is_read_or_diagnosed_and_then_verified_or_diagnosed(seed):
    rng = random.Random(seed)
    text = rng.choice(_TEXTS)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text))
        end = at + rng.choice([0, 1, 3, 20])
        text = text[:at] + "".join(rng.choice("0123s m\nw->Fv") for _ in range(rng.randint(0, 3))) + text[end:]
    level = read(text)
    if isinstance(level, ScheduleStream | ProgramStream) and level.operations > 10_000:
        return  # as many as a compilation refuses
    if isinstance(level, Program | ProgramStream):
        with suppress(Rejected):
            verify_program(level)
    elif isinstance(level, Schedule | ScheduleStream):
        verify_schedule(level, None)
