"""Stages that are not a chain: modules that follow a value ask the header which stages read it.

Here two stages feed a third, as two encoders feed a decoder.
"""

from dataclasses import replace
from itertools import chain

import pytest

from chimera_ir.codegen.statements import Notation, Scribe, links
from chimera_ir.flow.flow import Flow, crossing
from chimera_ir.flow.net import net_of
from chimera_ir.ir.graph import Feed, NamedStages
from chimera_ir.ir.kinds import ACTIVATIONS, BACKWARD, FORWARD, GRADIENTS, KEPT, Kind, Trained, Value
from chimera_ir.ir.levels import Header, Pipe, Schedule
from chimera_ir.ir.ops import Blocks, Compute, Message, Micro, Stage, Worker
from chimera_ir.ir.text.printer import line
from chimera_ir.lower.lower import forwards, lower
from chimera_ir.verify.cycle import acyclic, first_value

MICRO = Micro(0)
FIRST, SECOND, LAST = map(Stage, range(3))
PIPES = (Pipe("down", (Worker(0), Worker(1), Worker(2)), (MICRO,)),)


def operation(kind: Kind, stage: Stage) -> Compute:
    return Compute(kind, (MICRO,), stage)


GROUPS = tuple(
    NamedStages(name, stage, Stage(stage + 1)) for name, stage in zip("abc", map(Stage, range(3)), strict=True)
)
HEADER = Header("two_into_one", (), 3, 3, 1, PIPES, named=GROUPS, feeds=(Feed(FIRST, LAST), Feed(SECOND, LAST)))
SCHEDULE = Schedule(
    HEADER, tuple((operation(FORWARD, stage), operation(BACKWARD, stage)) for stage in (FIRST, SECOND, LAST))
)
FROM_FIRST = (Feed(FIRST, SECOND), Feed(FIRST, LAST))
NUMBERS = {part: number for number, part in enumerate(operation for lane in SCHEDULE.lanes for operation in lane)}


@pytest.mark.parametrize(
    ("value", "stage", "readers", "makers"),
    [
        (ACTIVATIONS, FIRST, (LAST,), ()),
        (ACTIVATIONS, LAST, (), (FIRST, SECOND)),
        (GRADIENTS, LAST, (FIRST, SECOND), ()),
        (GRADIENTS, SECOND, (), (LAST,)),
        (KEPT, SECOND, (SECOND,), (SECOND,)),
    ],
)
def test_the_header_names_the_readers_and_the_makers_of_a_value(
    value: Value, stage: Stage, readers: tuple[Stage, ...], makers: tuple[Stage, ...]
) -> None:
    assert (HEADER.readers(value, stage), HEADER.makers(value, stage)) == (readers, makers)


def test_without_edges_the_stages_are_a_chain() -> None:
    header = Header("chain", (), 3, 3, 1, PIPES)
    assert header.fed == ((SECOND,), (LAST,), ())
    assert header.feeding == ((), (FIRST,), (SECOND,))


@pytest.mark.parametrize(
    ("frozen", "trained"),
    [
        ((), (Trained.ITSELF, Trained.ITSELF, Trained.ITSELF)),
        ((FIRST,), (Trained.NOTHING, Trained.ITSELF, Trained.ITSELF)),
        ((FIRST, LAST), (Trained.NOTHING, Trained.ITSELF, Trained.BEFORE)),
        ((SECOND, LAST), (Trained.ITSELF, Trained.BEFORE, Trained.BEFORE)),
    ],
)
def test_a_stage_reads_gradients_only_if_it_or_a_stage_before_it_is_trained(
    frozen: tuple[Stage, ...], trained: tuple[Trained, ...]
) -> None:
    chain = Header("chain", (), 3, 3, 1, PIPES, frozen=frozen)
    assert chain.trained == trained
    backs = [stage for stage in (FIRST, SECOND) if trained[stage] is not Trained.NOTHING]
    assert [stage for stage in (FIRST, SECOND) if chain.makers(GRADIENTS, stage)] == backs
    assert [chain.readers(GRADIENTS, Stage(stage + 1)) for stage in backs] == [(stage,) for stage in backs]
    assert chain.groups == tuple((stage,) for stage in (FIRST, SECOND, LAST) if stage not in frozen)
    edges = {(source, target): chain.answered((source, target, ACTIVATIONS)) for source, target, _ in chain.edges}
    assert edges[FIRST, SECOND] is (FIRST in backs)
    assert edges[SECOND, LAST] is (SECOND in backs)


def test_an_operation_needs_what_all_stages_that_feed_it_make() -> None:
    flow = Flow(HEADER, ((number, part) for part, number in NUMBERS.items()))
    forward, backward = operation(FORWARD, LAST), operation(BACKWARD, FIRST)
    assert flow.needs(forward) == (NUMBERS[operation(FORWARD, FIRST)], NUMBERS[operation(FORWARD, SECOND)])
    assert flow.needs(backward) == (NUMBERS[operation(FORWARD, FIRST)], NUMBERS[operation(BACKWARD, LAST)])
    assert flow.needs(operation(FORWARD, SECOND)) == ()


def test_a_value_crosses_to_each_of_its_readers() -> None:
    sent = [
        (message, receiver)
        for worker, lane in enumerate(SCHEDULE.lanes)
        for _, message, receiver in crossing(HEADER, Worker(worker), enumerate(lane), Blocks())
    ]
    assert sent == [
        (Message((MICRO,), FIRST, LAST, ACTIVATIONS), 2),
        (Message((MICRO,), SECOND, LAST, ACTIVATIONS), 2),
        (Message((MICRO,), LAST, FIRST, GRADIENTS), 0),
        (Message((MICRO,), LAST, SECOND, GRADIENTS), 1),
    ]
    assert {message.edge for message, _ in sent} == {*HEADER.edges}


def test_activations_go_once_to_each_worker_and_gradients_come_from_each_stage() -> None:
    on_one = replace(HEADER, pipes=(Pipe("down", (Worker(0), Worker(1), Worker(1)), (MICRO,)),), feeds=FROM_FIRST)
    first, second, last = ((operation(FORWARD, stage), operation(BACKWARD, stage)) for stage in range(3))
    lanes = (first, (second[0], last[0], last[1], second[1]))
    sent = [
        message
        for worker, lane in enumerate(lanes)
        for _, message, _ in crossing(on_one, Worker(worker), enumerate(lane), Blocks())
    ]
    assert sent == [
        Message((MICRO,), FIRST, SECOND, ACTIVATIONS),
        Message((MICRO,), LAST, FIRST, GRADIENTS),
        Message((MICRO,), SECOND, FIRST, GRADIENTS),
    ]
    flow = Flow(on_one, chain.from_iterable(map(enumerate, lanes)))
    assert (flow.consumer(sent[0]), flow.last_use(sent[0])) == (0, 3)


def test_the_graph_says_which_value_an_edge_is_about() -> None:
    before, after = operation(FORWARD, SECOND), operation(FORWARD, LAST)
    net = net_of(SCHEDULE)
    assert NUMBERS[before] in net.predecessors[NUMBERS[after]]
    assert (first_value(HEADER, before, after), [*acyclic(net, None)]) == (ACTIVATIONS, [])


def test_lanes_receive_from_every_stage_that_feeds_them_and_scripts_hand_all_of_it_on() -> None:
    program = lower(SCHEDULE)
    assert [line(instruction, HEADER) for instruction in program.lanes[2]][:8] == [
        "recv m0 s0->s2 from w0 into 0",
        "recv m0 s1->s2 from w1 into 0",
        "wait recv m0 s0->s2",
        "wait recv m0 s1->s2",
        "F m0 s2",
        "B m0 s2",
        "send m0 s2->s0 to w0",
        "send m0 s2->s1 to w1",
    ]
    scribe = Scribe(HEADER, Worker(2), links(program.parts[2]), Notation(), program.blocks)
    assert scribe.statement(operation(FORWARD, LAST)) == (
        "stage2.forward(0, (*in_s0_s2.take(0), *in_s1_s2.take(0)), lane.target(0))"
    )


def test_an_evaluation_waits_for_all_stages_that_feed_a_stage() -> None:
    one = Worker(0)
    header = replace(HEADER, workers=1, pipes=(Pipe("down", (one, one, one), (MICRO,)),))
    lane = tuple(operation(kind, stage) for kind, stage in ((FORWARD, FIRST), (FORWARD, SECOND), (FORWARD, LAST)))
    (ordered,) = forwards(Schedule(header, (lane,))).lanes
    assert [part.stage for each in ordered for part in each.parts] == [SECOND, FIRST, LAST]
