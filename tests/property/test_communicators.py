"""Whatever the schedule: with the communicators that it is proven for a program finishes, and with no others.

With those that it was compiled for it is always proven.
"""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from chimera_ir.flow.net import runnable_turns
from chimera_ir.ir.ops import Communicators
from chimera_ir.ir.streams import ProgramStream
from chimera_ir.lower.lower import forwards, lower, order
from chimera_ir.verify.verify import verify_lowered, verify_program, verify_schedule
from tests.executor import verdict
from tests.lowered import level
from tests.property.programs import random_plan
from tests.property.streams import random_stream
from tests.repeatable import either, examples
from tests.unit.test_lookahead import ends

_FEW = examples(either(75, 150))
_SHARED = st.sampled_from(Communicators)


def stream(seed: int, ahead: int, communicators: Communicators) -> ProgramStream:
    drawn = random_stream(Random(seed))
    return level(drawn.schedule((2 * drawn.turns + 7) * 2), ahead=ahead, communicators=communicators)


@_FEW
@given(st.integers(0, 2**32), st.integers(0, 3), _SHARED)
def test_a_program_finishes_exactly_if_that_is_proven(seed: int, ahead: int, communicators: Communicators) -> None:
    made = verify_program(lower(order(random_plan(seed, 0.0)), ahead, communicators=communicators))
    assert not made.blocked(communicators)
    for known in made.communications:
        seen = {verdict(made.program, known.communicators.value, seed) for seed in range(2)}
        assert seen == ({"finished"} if known.finishes else {"stuck"}), known


@_FEW
@given(st.integers(0, 2**32), st.integers(0, 2), _SHARED)
def test_a_stream_finishes_after_any_number_of_updates_if_that_is_proven(
    seed: int, ahead: int, communicators: Communicators
) -> None:
    of = stream(seed, ahead, communicators)
    made = verify_program(of)
    assert not made.blocked(communicators)
    for known in made.communications[1:]:
        name, shown = known.communicators.value, made.program.header.updates
        if not known.finishes:
            assert verdict(made.program, name, seed) == "stuck"
            continue
        assert {verdict(of.view(updates), name, seed) for updates in (1, 2, 5, shown, 2 * shown)} == {"finished"}


@_FEW
@given(st.integers(0, 2**32), st.integers(0, 2))
def test_updates_that_are_given_one_by_one_end_with_a_communicator_for_both_directions(seed: int, ahead: int) -> None:
    of = stream(seed, ahead, Communicators.PAIR)
    for given_ in range(1, 8):
        assert ends(of, runnable_turns(of), given_ * of.header.period // of.header.per_update, 1, ("pair",))


@_FEW
@given(st.integers(0, 2**32), st.integers(0, 3), _SHARED)
def test_forwards_alone_finish_exactly_if_that_is_proven(seed: int, ahead: int, communicators: Communicators) -> None:
    checked = verify_schedule(forwards(order(random_plan(seed, 0.0))), None)
    made = verify_lowered(lower(checked.level, ahead, net=checked.net, communicators=communicators), checked)
    assert not made.blocked(communicators)
    for known in made.communications:
        seen = {verdict(made.program, known.communicators.value, seed) for seed in range(2)}
        assert seen == ({"finished"} if known.finishes else {"stuck"}), known
