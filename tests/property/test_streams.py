"""Asynchronous lanes: a few updates tell what any number of them does."""

import re
import sys
from collections.abc import Iterator
from random import Random
from types import ModuleType
from typing import Any

import pytest

from chimera_ir.codegen.render import scripts
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.flow.net import reads_of
from chimera_ir.ir.ids import Worker
from chimera_ir.ir.levels import Program
from chimera_ir.ir.text.parser import parse
from chimera_ir.ir.text.printer import line, show
from chimera_ir.ir.turns import body, unroll
from chimera_ir.lower.lower import lower
from chimera_ir.source import Source
from chimera_ir.verify.acyclic import acyclic
from chimera_ir.verify.channels import channels
from chimera_ir.verify.complete import complete
from chimera_ir.verify.erase import schedule_of
from chimera_ir.verify.gradients import gradients
from chimera_ir.verify.index import cells
from chimera_ir.verify.messages import messages, places
from chimera_ir.verify.slots import slots
from chimera_ir.verify.verify import Verified, verify_program, verify_schedule
from chimera_ir.verify.versions import versions
from tests.property.streams import Stream, one_forward_one_backward, random_stream
from tests.unit.journal import Journal

NAMED = {
    f"1f1b D={stages} K={per_update}": one_forward_one_backward(stages, per_update)
    for stages in (1, 2, 3, 4)
    for per_update in (1, stages, stages + 1)
}
RANDOM = {f"random {seed}": random_stream(Random(seed)) for seed in range(40)}
STREAMS = {**NAMED, **RANDOM}


def shown(stream: Stream) -> int:
    """How many updates make the steady state visible."""
    return 2 * stream.turns + 3


def verified(stream: Stream) -> Verified:
    schedule = stream.schedule(shown(stream))
    assert verify_schedule(schedule, None).findings.diagnostics == ()
    return verify_program(lower(schedule))


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_the_schedule_of_any_number_of_updates_follows_from_one_turn(stream: Stream) -> None:
    schedule = stream.schedule(shown(stream))
    for worker, lane in enumerate(schedule.lanes):
        turn = body(schedule.header, lane)
        assert turn is not None
        for updates in (1, 2, 3, shown(stream), shown(stream) + 5):
            assert tuple(unroll(schedule.header, turn, updates)) == stream.schedule(updates).lanes[worker]


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_the_program_of_any_number_of_updates_follows_from_one_turn_and_is_right(stream: Stream) -> None:
    few = verified(stream).program
    turns = [body(few.header, lane) for lane in few.lanes]
    for updates in (*range(1, 6), shown(stream) + 4):
        header = stream.schedule(updates).header
        lanes = [tuple(unroll(few.header, turn, updates)) if turn else () for turn in turns]
        program = Program(header, tuple(lanes))
        assert list(mistakes(program)) == []
        if updates > shown(stream):
            assert program == lower(stream.schedule(updates))
            verify_program(program)


def mistakes(program: Program) -> Iterator[Diagnostic]:
    """What all rules but "repeats" say, which asks for more updates than there may be."""
    schedule = schedule_of(program)
    operations = [(Worker(w), operation) for w, lane in enumerate(schedule.lanes) for operation in lane]
    yield from complete(program.header, operations)
    yield from acyclic(schedule, None, reads_of(schedule))
    in_lanes = cells(program)
    found = places(program, in_lanes)
    yield from messages(program, in_lanes, found)
    yield from slots(program, in_lanes, found)
    yield from gradients(program)
    yield from versions(program)
    yield from (each for each in channels(program) if isinstance(each, Diagnostic))


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_a_program_reads_back(stream: Stream) -> None:
    program = verified(stream).program
    assert parse(Source("stream.sir", show(program))) == program


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_the_loop_of_a_script_does_its_lane_for_any_number_of_updates(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = verified(stream)
    written = scripts(program)
    for worker, lane in enumerate(program.program.lanes):
        run = loaded(written[f"rank_{worker}.py"], monkeypatch)["stream"]
        turn = body(program.program.header, lane)
        assert turn is not None
        for updates in (1, 2, 3, shown(stream), 2 * shown(stream)):
            journal = Journal(worker, len(stream.places), Alone(), asynchronous=True)
            run(journal.lane(), updates)
            assert journal.lines == [line(each) for each in unroll(program.program.header, turn, updates)]


class Alone(dict[tuple[int, int, int], tuple[int, ...]]):
    """Every message is about one micro-batch."""

    def __missing__(self, key: tuple[int, int, int]) -> tuple[int, ...]:
        return (key[0],)


def loaded(text: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a rank script defines, its runtime replaced by nothing."""
    runtime = ModuleType("runtime")
    runtime.Lane = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "runtime", runtime)
    module: dict[str, Any] = {"__name__": "rank"}
    exec(compile(text, "rank", "exec", dont_inherit=True), module)
    return module


@pytest.mark.parametrize("stream", NAMED.values(), ids=NAMED)
def test_a_script_does_not_depend_on_how_many_updates_were_compiled(stream: Stream) -> None:
    more = verify_program(lower(stream.schedule(shown(stream) + 3)))
    some, others = (ranks(scripts(program)) for program in (verified(stream), more))
    assert some == others


def ranks(files: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in files.items() if re.match(r"rank_\d", name)}
