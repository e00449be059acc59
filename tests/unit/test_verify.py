"""The rules on levels that are built by hand, and what a `Verified` holds. For mistakes in texts: tests/errors."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from chimera_ir.diagnostics.model import Diagnostic, Rejected, Severity
from chimera_ir.ir.kinds import ACTIVATIONS, BACKWARD, FORWARD, GRADIENTS, KEPT, Counted
from chimera_ir.ir.levels import Bound, Header, Pipe, Plan, Program, Quantity, Schedule
from chimera_ir.ir.ops import (
    AllReduce,
    Compute,
    Drop,
    Instruction,
    Message,
    Planned,
    Recv,
    Send,
    Stash,
    Step,
    WaitAllReduce,
    WaitRecv,
    WaitSend,
)
from chimera_ir.lower.lower import lower, order
from chimera_ir.source import Span
from chimera_ir.verify import verify
from chimera_ir.verify.findings import Findings, Rule, apply
from chimera_ir.verify.holdings import memory
from chimera_ir.verify.messages import Certificate, Transport
from chimera_ir.verify.verify import Verified, proven, schedule_of, verify_program, verify_schedule
from tests.property.programs import one_direction, two_directions
from tests.property.updates import both_ways, level


def codes(schedule: Schedule) -> list[str]:
    found = verify_schedule(schedule, None).findings.diagnostics
    assert all(each.fill(text) for each in found for text in (each.title, each.label, each.help))
    return [each.code for each in found]


def rejected(program: Program) -> list[str]:
    with pytest.raises(Rejected) as caught:
        proven(program) if program.header.asynchronous else verify_program(program)
    return [each.code for each in caught.value.diagnostics]


@pytest.mark.parametrize(
    ("plan", "live", "weights"),
    [
        (one_direction(4, 8), (4, 3, 2, 1), (1, 1, 1, 1)),
        (one_direction(4, 2), (2, 2, 2, 1), (1, 1, 1, 1)),
        (two_directions(4, 4), (3, 4, 4, 3), (2, 2, 2, 2)),
    ],
)
def test_the_papers_memory_of_every_worker(plan: Plan, live: tuple[int, ...], weights: tuple[int, ...]):
    """Table 2: 1F1B keeps min(D - w, N); both directions (D/2 + 1 .. D), with two copies of the weights."""
    verified = verify_program(lower(order(plan)))
    assert (verified.live, verified.weights) == (live, weights)


def test_a_bound_on_host_memory_counts_what_is_kept_there_and_nothing_else():
    """With rows whose forward leaves what its backward reads there, 1F1B keeps 4, 3, 2, 1 micro-batches there."""
    schedule, host = order(one_direction(4, 8)), replace(KEPT, letter="h", counted=Counted.HOST)
    forward = replace(FORWARD, makes=(ACTIVATIONS, host))
    backward = replace(BACKWARD, reads=(host, GRADIENTS), frees=(host,))
    kinds = {FORWARD: forward, BACKWARD: backward}
    lanes = tuple(tuple(replace(each, kind=kinds[each.kind]) for each in lane) for lane in schedule.lanes)

    def exceeded(quantity: Quantity, *limits: int) -> list[tuple[int, int, int]]:
        header = replace(schedule.header, only=(forward, backward), bounds=(Bound(quantity, limits),))
        found = [*memory(Schedule(header, lanes))]
        return [(each.worker, each.peak, each.limit) for each in found]

    assert exceeded(Quantity.HOST, 4, 3, 2, 1) == []
    assert exceeded(Quantity.HOST, 3, 2, 0, 1) == [(2, 2, 0)]
    assert exceeded(Quantity.ACTIVATIONS, 0, 0, 0, 0) == []


def test_of_several_limits_the_one_that_is_exceeded_most_is_reported_whatever_the_amounts():
    bound = Bound(Quantity.WEIGHTS, (9, 3, 5))
    assert [bound.exceeded(amounts) for amounts in ((9, 3, 5), (9, 4, 5), (10, 5, 6), (0, 0, 7))] == [None, 1, 1, 2]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message((9,), 0, 1, ACTIVATIONS), "no such micro-batch or stage"),
        (Message((0,), 6, 7, ACTIVATIONS), "no stage 7"),
    ],
)
def test_a_message_that_no_program_has_is_rejected(message: Message, reason: str):
    program = lower(order(one_direction(2, 2)))
    first, *others = program.lanes
    with pytest.raises(Rejected) as caught:
        verify_program(replace(program, lanes=((*first, WaitSend(message)), *others)))
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.fill(diagnostic.title).endswith(f"is about no message of this worker: there is {reason}")


def test_a_line_that_is_there_twice_and_names_a_wrong_worker_has_one_diagnostic_for_each_mistake():
    program = lower(order(one_direction(3, 2)))
    (first, *others), send = program.lanes, Send(Message((0,), 0, 1, ACTIVATIONS), 1)
    place = first.index(send) + 1
    repeated = (*first[:place], replace(send, to=2), *first[place:])
    assert rejected(replace(program, lanes=(repeated, *others))) == ["CH402", "CH404"]


def test_a_verified_program_comes_only_from_verification():
    verified = verify_program(lower(order(one_direction(2, 2))))
    with pytest.raises(TypeError, match="only verify_program"):
        Verified(verified.level, verified.program, verified.schedule, frozenset(Rule), (), (), (), object())
    with pytest.raises((TypeError, ValueError)):
        replace(verified, live=(0, 0))


def played(program: Program, certificate: Certificate) -> Iterator[tuple[int, Instruction]]:
    """Yields the instructions of a program in the order of a certificate, each with its worker."""
    instructions = [(worker, each) for worker, lane in enumerate(program.lanes) for each in lane]
    return map(instructions.__getitem__, certificate.played.order)


@pytest.mark.parametrize("plan", [one_direction(4, 8), two_directions(4, 8)])
def test_a_certificate_replays(plan: Plan):
    """Performed in the order of the certificate, every wait finds both ends of its message posted before."""
    program = lower(order(plan))
    for certificate in verify_program(program).certificates:
        posted = set()
        queues = {}
        for worker, each in played(program, certificate):
            if isinstance(each, Send):
                posted.add(("send", each.message))
                queues.setdefault((worker, each.to), ([], []))[0].append(each.message)
            if isinstance(each, Recv):
                posted.add(("recv", each.message))
                queues.setdefault((each.source, worker), ([], []))[1].append(each.message)
            if isinstance(each, WaitSend | WaitRecv):
                assert {("send", each.message), ("recv", each.message)} <= posted
        for number, lane in enumerate(program.lanes):
            assert [each for worker, each in played(program, certificate) if worker == number] == [*lane]
        assert all(sends == recvs for sends, recvs in queues.values())


OF_PROGRAMS = set(Rule) - {Rule.SCRIPTS}
"""The rule on scripts is about what is generated: see test_scripts."""


@pytest.mark.parametrize("streams", [False, True])
def test_the_rules_of_a_program_are_those_that_were_applied(streams: bool):
    program = level(both_ways(2)) if streams else lower(order(one_direction(2, 2)))
    assert verify_program(program).rules == OF_PROGRAMS - (set() if streams else {Rule.REPEATS})


@pytest.mark.parametrize("left_out", Rule)
def test_a_rule_that_is_not_applied_is_not_called_proven(left_out: Rule, monkeypatch: pytest.MonkeyPatch):
    def some(rule: Rule, *parts: Iterable[Diagnostic]) -> Findings:
        return Findings() if rule is left_out else apply(rule, *parts)

    monkeypatch.setattr(verify, "apply", some)
    schedule = order(one_direction(2, 2))
    checked = verify_schedule(schedule, one_direction(2, 2))
    assert verify_program(lower(schedule), checked).rules == OF_PROGRAMS - {Rule.REPEATS, left_out}
    assert left_out not in verify_program(level(both_ways(2))).rules or left_out is Rule.CONFLICT_FREE


def test_many_warnings_are_cut_short_and_are_warnings_still():
    """25 pipes whose clocks fall along the data, while no lane runs anything too soon."""
    header = Header("x", (), 2, 2, 25, tuple(Pipe(f"p{m}", (0, 1), (m,)) for m in range(25)))
    clocks = [
        (100 * m + clock, worker, Compute(kind, (m,), worker, Span(4 * m + clock, 4 * m + clock)))
        for m in range(25)
        for clock, worker, kind in ((1, 0, FORWARD), (0, 1, FORWARD), (2, 1, BACKWARD), (3, 0, BACKWARD))
    ]
    plan = Plan(header, tuple(Planned(*each) for each in clocks))
    checked = verify_schedule(order(plan), plan)
    assert [each.code for each in checked.findings.diagnostics] == ["CH309"] * 20 + ["CH419"]
    assert not checked.findings.errors
    verify_program(lower(checked.schedule), checked)


def test_both_transports_are_certified():
    verified = verify_program(lower(order(one_direction(2, 2))))
    assert [each.transport for each in verified.certificates] == [Transport.DIRECTED, Transport.TAGGED]


def test_the_clock_of_the_paper_raises_no_doubt():
    for plan in (one_direction(4, 8), two_directions(4, 4), two_directions(6, 12)):
        assert verify_schedule(order(plan), plan).findings.diagnostics == ()


def test_a_clock_that_stands_still_warns():
    header = Header("x", (), 2, 2, 1, (Pipe("p", (0, 1), (0,)),))
    ops = [
        (0, 0, Compute(FORWARD, (0,), 0)),
        (0, 1, Compute(FORWARD, (0,), 1)),
        (1, 1, Compute(BACKWARD, (0,), 1)),
        (2, 0, Compute(BACKWARD, (0,), 0)),
    ]
    plan = Plan(header, tuple(Planned(*each) for each in ops))
    found = verify_schedule(order(plan), plan).findings.diagnostics
    assert [(each.code, each.severity) for each in found] == [("CH309", Severity.WARNING)]


HAND = Header("x", (), 1, 1, 1, (Pipe("p", (0,), (0,)),))
LANE = (Compute(FORWARD, (0,), 0), Compute(BACKWARD, (0,), 0))
STREAM = replace(HAND, period=1)
READING = tuple(replace(operation, version=0) for operation in LANE)


@pytest.mark.parametrize(
    ("header", "lanes", "found"),
    [
        (HAND, (LANE,), []),
        (replace(HAND, pipes=(Pipe("p", (1,), (0,)),)), (LANE,), ["CH305"]),
        (replace(HAND, pipes=(Pipe("p", (), (0,)),)), (LANE,), ["CH306"]),
        (replace(HAND, micro_batches=2), (LANE,), ["CH307"]),
        (replace(HAND, pipes=(Pipe("p", (0,), (0, 0)),)), (LANE,), ["CH307"]),
        (replace(HAND, pipes=(Pipe("p", (0,), (0, 5)),)), (LANE,), ["CH307"]),
        (HAND, ((*LANE, Compute(FORWARD, (3,), 0)),), ["CH308"]),
        (HAND, ((*LANE, Compute(FORWARD, (0,), 3)),), ["CH308"]),
        (HAND, ((*LANE, Compute(FORWARD, (-1,), 0)),), ["CH308"]),
        (HAND, (LANE, (Compute(FORWARD, (0,), 0),)), ["CH311"]),
        (HAND, ((*LANE, Compute(FORWARD, (), 0)),), ["CH308"]),
        (HAND, ((),), ["CH329"]),
        (HAND, ((Compute(FORWARD, (0, 0), 0), Compute(BACKWARD, (0,), 0)),), ["CH308"]),
        (Header("x", (), 1, 1, 1, ()), ((),), ["CH307"]),
        (STREAM, (READING,), ["CH601"]),
        (STREAM, (LANE,), ["CH308"]),
        (STREAM, ((Compute(FORWARD, (0,), 0, version=0), Compute(BACKWARD, (0,), 0, version=2)),), ["CH308"]),
        (HAND, (READING,), ["CH308"]),
        (replace(HAND, updates=2), (LANE,), ["CH517"]),
        (replace(STREAM, updates=2), (READING,), ["CH517"]),
        (replace(STREAM, updates=0), (READING,), ["CH517"]),
        (replace(STREAM, micro_batches=2, period=3), (READING,), ["CH517", "CH307"]),
    ],
)
def test_schedules_that_no_text_can_spell(header: Header, lanes: tuple, found: list[str]):
    assert codes(Schedule(header, lanes)) == found


UPDATE = (AllReduce((0,), version=1), WaitAllReduce((0,), version=1), Step((0,), version=1))


@pytest.mark.parametrize(
    ("lane", "found"),
    [
        ((*READING, *UPDATE, Stash((0,), 1)), ["CH402"]),
        ((*READING, Stash((0,), -1), *UPDATE), ["CH402"]),
        ((*READING, Stash((1,), 0), *UPDATE), ["CH410"]),
        ((*READING, *UPDATE, Drop((0,), 0)), ["CH402"]),
        ((*READING, *UPDATE, Drop((-1,), 0)), ["CH410"]),
        ((*READING, Stash((0,), 0), Stash((0,), 0), *UPDATE, Drop((0,), 0), Drop((0,), 0)), ["CH402", "CH402"]),
        ((*READING, Drop((0,), 0), Stash((0,), 0), *UPDATE), ["CH403"]),
        ((*READING, Stash((0,), 0), *UPDATE, Drop((0,), 0)), ["CH418"]),
        ((*READING, *UPDATE, Step((0,))), ["CH416"]),
        ((*READING, *UPDATE, Step((0,), version=2)), ["CH416"]),
    ],
)
def test_lanes_with_versions_that_no_text_can_spell(lane: tuple, found: list[str]):
    assert rejected(Program(STREAM, (lane,))) == found


def test_some_updates_of_a_stream_prove_nothing_of_the_others():
    program = level(both_ways(2)).view(4)
    assert proven(program)[1].rules == OF_PROGRAMS - {Rule.REPEATS}
    with pytest.raises(ValueError, match="about the others"):
        verify_program(program)
    with pytest.raises(ValueError, match="by themselves"):
        lower(schedule_of(program))


def test_a_synchronous_program_keeps_no_versions():
    lane = (*LANE, AllReduce((0,)), WaitAllReduce((0,)), Stash((0,), 0), Step((0,)), Drop((0,), 0))
    assert rejected(Program(HAND, (lane,))) == ["CH402", "CH402"]
    assert Counter(rejected(Program(HAND, ((*LANE, *UPDATE),)))) == {"CH416": 3, "CH401": 3}


def test_every_wait_of_an_asynchronous_program_has_its_own_sum():
    """A launch of the next update wakes no wait for this one: the sums of two updates are two events."""
    verified = verify_program(level(both_ways(2)))
    program = verified.program
    for certificate in verified.certificates:
        launched: Counter[AllReduce] = Counter()
        for _, each in played(program, certificate):
            if isinstance(each, AllReduce):
                launched[each.group, each.version] += 1
            if isinstance(each, WaitAllReduce):
                assert launched[each.group, each.version] == 2


def test_forwards_and_backwards_may_be_grouped_differently():
    header = Header("x", (), 1, 2, 2, (Pipe("p", (0, 0), (0, 1)),))
    forwards = (Compute(FORWARD, (0, 1), 0), Compute(FORWARD, (0, 1), 1))
    backwards = (
        Compute(BACKWARD, (0,), 1),
        Compute(BACKWARD, (1,), 1),
        Compute(BACKWARD, (0,), 0),
        Compute(BACKWARD, (1,), 0),
    )
    assert codes(Schedule(header, ((*forwards, *backwards),))) == []
    apart = (Compute(FORWARD, (0, 1), 0), Compute(FORWARD, (0,), 1), Compute(FORWARD, (1,), 1), *backwards)
    assert codes(Schedule(header, (apart,))) == ["CH312"]


def test_a_stage_that_recomputes_has_the_activations_of_one_backward():
    plan = one_direction(4, 8)
    pipe = replace(plan.header.pipes[0], recompute=(1, 2))
    verified = verify_program(lower(order(replace(plan, header=replace(plan.header, pipes=(pipe,))))))
    assert verified.live == (4, 1, 1, 1)


def test_many_errors_of_a_rule_are_cut_short():
    program = lower(order(one_direction(4, 64)))
    found = rejected(Program(program.header, schedule_of(program).lanes))
    assert found.count("CH401") == 20 + 4 * 3, "20 by the rule on messages; all sums, waits and steps"
    assert "CH415" in found


def test_a_program_has_one_lane_per_worker():
    program = lower(order(one_direction(2, 1)))
    assert rejected(Program(program.header, program.lanes[:1])) == ["CH311"]
    assert rejected(Program(program.header, (*program.lanes, ()))) == ["CH311"]
