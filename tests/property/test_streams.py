"""Asynchronous lanes: a few updates tell what any number of them does."""

import re
from collections.abc import Iterator
from random import Random

import pytest

from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.flow.net import net_of
from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import Compute, Instruction, Worker
from chimera_ir.ir.streams import ProgramStream, ScheduleStream, stream_of
from chimera_ir.ir.text.printer import line, show
from chimera_ir.ir.text.reader import parse
from chimera_ir.ir.turns import Turn
from chimera_ir.lower.lower import lower
from chimera_ir.source import Source
from chimera_ir.verify.complete import complete
from chimera_ir.verify.cycle import acyclic
from chimera_ir.verify.messages import cells, channels, messages, places, slots
from chimera_ir.verify.verify import Verified, proven, schedule_of, verify_program, verify_schedule
from chimera_ir.verify.versions import gradients, versions
from tests.lowered import scripts_of
from tests.property.streams import Stream, one_forward_one_backward, random_stream
from tests.repeatable import also, tries
from tests.unit.journal import journals, loaded
from tests.unroller import lowered

NAMED = {
    f"1f1b D={stages} K={per_update}": one_forward_one_backward(stages, per_update)
    for stages in also((1, 3), (2, 4))
    for per_update in (1, stages, stages + 1)
}
RANDOM = {f"random {seed}": random_stream(Random(seed)) for seed in range(tries(10))}
STREAMS = {**NAMED, **RANDOM}


def shown(stream: Stream) -> int:
    """How many updates make the steady state visible."""
    return 2 * stream.turns + 3


def verified(stream: Stream) -> Verified:
    schedule = stream.schedule(shown(stream))
    assert verify_schedule(schedule, None).findings.diagnostics == ()
    return verify_program(lower(stream_of(schedule)))


def program_of(verified: Verified) -> ProgramStream:
    return verified.level


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_the_schedule_of_any_number_of_updates_follows_from_one_turn(stream: Stream) -> None:
    schedule = stream_of(stream.schedule(shown(stream)))
    for updates in (1, 2, 3, shown(stream), shown(stream) + 5):
        assert schedule.view(updates) == stream.schedule(updates)


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_the_program_of_any_number_of_updates_follows_from_one_turn_and_is_right(stream: Stream) -> None:
    level = program_of(verified(stream))
    for updates in (*range(1, 6), shown(stream) + 4):
        program = level.view(updates)
        assert list(mistakes(program)) == []
        if updates > shown(stream):
            assert program == lowered(stream.schedule(updates))
            proven(program)


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_lowering_a_turn_gives_what_lowering_an_instance_gives(stream: Stream) -> None:
    schedule = stream.schedule(shown(stream))
    for ahead in (0, 1, 3):
        assert lower(stream_of(schedule), ahead, slow).view(shown(stream)) == lowered(schedule, ahead, slow)


def slow(operation: Compute) -> int:
    """Durations that differ by kind and stage."""
    return (2 if operation.kind.opens else 5) + 3 * operation.stage


def mistakes(program: Program) -> Iterator[Diagnostic]:
    """What all rules but "repeats" say, which asks for more updates than there may be."""
    schedule = schedule_of(program)
    operations = [(Worker(w), operation) for w, lane in enumerate(schedule.lanes) for operation in lane]
    yield from complete(program.header, operations)
    yield from acyclic(net_of(schedule), None)
    in_lanes = cells(program)
    found = places(program)
    yield from messages(program, in_lanes, found)
    yield from slots(program, in_lanes, found)
    yield from gradients(program)
    yield from versions(program)
    yield from (each for each in channels(program) if isinstance(each, Diagnostic))


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_a_program_reads_back(stream: Stream) -> None:
    program = program_of(verified(stream))
    for level in (program, program.schedule):
        text = show(level)
        assert parse(Source("stream.sir", text)) == level
        assert len(text.splitlines()) <= 20 + 2 * len(level.turns) + sum(map(len, stream_turns(level)))


def stream_turns(level: ScheduleStream | ProgramStream) -> list[tuple[Instruction, ...]]:
    return [turn.instructions if isinstance(turn, Turn) else turn for turn in level.turns]


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_the_turns_of_a_script_do_its_lane_for_any_number_of_updates(stream: Stream) -> None:
    program = verified(stream)
    written, level = scripts_of(program), program_of(program)
    for worker in range(level.header.workers):
        script = loaded(written[f"rank_{worker}.py"])
        for updates in (1, 2, 3, shown(stream), 2 * shown(stream)):
            journal = journals(written)[worker]
            journal.run(script, updates)
            assert journal.lines == [line(each, level.header) for each in level.view(updates).lanes[worker]]


@pytest.mark.parametrize("stream", NAMED.values(), ids=NAMED)
def test_a_script_does_not_depend_on_how_many_updates_were_compiled(stream: Stream) -> None:
    more = verify_program(lower(stream_of(stream.schedule(shown(stream) + 3))))
    some, others = (ranks(scripts_of(program)) for program in (verified(stream), more))
    assert some == others


def ranks(files: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in files.items() if re.match(r"rank_\d", name)}
