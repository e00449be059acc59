"""What a worker holds, stage by stage: small programs, counted by hand."""

from collections import Counter

import pytest

from chimera_ir.ir.kinds import ACTIVATIONS, GRADIENTS
from chimera_ir.ir.ops import Compute, Instruction, Recv, Stage
from chimera_ir.verify.holdings import Holdings, Kept, Moment
from tests.instructions import singly
from tests.unit.test_codegen import CASES, compiled, named


def held(scheme: str, **parameters: int) -> tuple[Holdings, ...]:
    return compiled((scheme, tuple(parameters.items()))).holdings


def moments(*moments: tuple[tuple[int, int, int, int], ...]) -> tuple[Moment, ...]:
    """Moments without carries; of each stage its number, activations, inputs and begun backwards."""
    return tuple(tuple(Kept(Stage(stage), *counts) for stage, *counts in moment) for moment in moments)


def test_the_fullest_moments_are_those_that_no_other_exceeds() -> None:
    outer, inner, *_ = held("chimera", D=4, N=4)
    assert outer.fullest == moments(((0, 2, 0, 0), (3, 1, 0, 0)))
    assert inner.fullest == moments(((1, 2, 0, 0), (2, 2, 0, 0)))


def test_a_recomputation_has_its_input_and_what_it_makes() -> None:
    _, inner, *_ = held("chimera_doubling", D=4, N=8)
    assert inner.fullest == moments(((1, 0, 4, 0), (2, 1, 4, 0)), ((1, 1, 4, 0), (2, 0, 2, 0)))


def test_what_is_between_the_halves_of_a_backward_counts_by_itself() -> None:
    """Two stages, W one micro-batch late on the second: F0 F1 I0 F2 I1 W0 .. there, F0 F1 I0 W0 F2 .. on the first."""
    first, second = held("zb_h1", D=2, N=3)
    assert first.fullest == moments(((0, 1, 0, 1),), ((0, 2, 0, 0),))
    assert second.fullest == moments(((1, 0, 0, 2),), ((1, 1, 0, 1),))


def test_versions_are_copies_of_their_stage() -> None:
    assert [each.copies for each in held("pipedream", D=4)] == [((0, 4),), ((1, 3),), ((2, 2),), ((3, 1),)]


def test_messages_are_on_their_way_until_their_send_is_waited_for() -> None:
    first, last = held("gpipe", D=2, N=3)
    assert first.sending == (((0, 1, ACTIVATIONS), 3),)
    assert last.sending == (((1, 0, GRADIENTS), 3),)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_the_moments_add_up_to_the_peaks_of_the_rule(case: tuple[str, tuple[tuple[str, int], ...]]) -> None:
    verified = compiled(case)
    header = verified.program.header
    for worker, holdings in enumerate(verified.holdings):
        sums = [sum(kept.activations + kept.begun for kept in moment) for moment in holdings.fullest]
        assert max(sums, default=0) == verified.live[worker] * header.parts
        assert sum(count for _, count in holdings.copies) == verified.weights[worker]


@pytest.mark.parametrize("case", CASES, ids=named)
def test_there_are_as_many_receive_buffers_as_are_ever_in_use(case: tuple[str, tuple[tuple[str, int], ...]]) -> None:
    program = compiled(case).program
    for lane in program.lanes:
        slots: Counter[tuple[int, int]] = Counter()
        for each in lane:
            if isinstance(each, Recv):
                shelf = each.message.source, each.message.target
                slots[shelf] = max(slots[shelf], each.slot + 1)
        assert slots == most_in_use(lane)


def most_in_use(lane: tuple[Instruction, ...]) -> Counter[tuple[int, int]]:
    """By the two stages of messages: how many are in use at most, from their posting to the end of their backward."""
    backward = {
        (micro, each.stage): place
        for place, instruction in enumerate(lane)
        for each in singly([instruction])
        if isinstance(each, Compute) and each.kind.sums
        for micro in each.micros
    }
    changes: list[tuple[int, int, tuple[int, int]]] = []
    for place, each in enumerate(lane):
        if isinstance(each, Recv):
            shelf = each.message.source, each.message.target
            end = max(backward[micro, each.message.target] for micro in each.message.micros)
            changes += [(place, 1, shelf), (end, -1, shelf)]
    now: Counter[tuple[int, int]] = Counter()
    most: Counter[tuple[int, int]] = Counter()
    for _, change, shelf in sorted(changes):
        now[shelf] += change
        most[shelf] = max(most[shelf], now[shelf])
    return most
