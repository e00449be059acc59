"""Numbers of micro-batches and the seeds that follow from them."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from chimera_runtime.check.reference import seed_of
from chimera_runtime.program.numbering import Numbering


@given(first=st.integers(0, 100), micro=st.integers(0, 1000), passes=st.integers(1, 64))
def test_a_micro_batch_has_its_place_in_its_update_however_it_is_counted(first: int, micro: int, passes: int) -> None:
    """From the first of an update on, or over the whole run."""
    from_update, from_start = Numbering(0, 0, passes, passes, first), Numbering(0, 0, passes, passes)
    assert from_update.place(micro) == from_start.place(first * passes + micro)
    update, number = from_update.place(micro)
    assert 0 <= number < passes
    assert (update - first) * passes + number == micro


def test_seeds_are_those_that_are_documented() -> None:
    """Written apart: the reference makes them of the same parts, with code of its own."""
    numbering = Numbering(seed=7, copy=2, passes=4, cycle=4, first=3)
    assert numbering.forward_seed(5, stage=1) == seed_of("forward", 7, 4, 2, 1, 1)
    assert numbering.step_seed(3, 1) == seed_of("step", 7, 3, 1)


def test_no_two_forwards_of_a_run_share_a_seed() -> None:
    numberings = [Numbering(0, copy, 2, 2) for copy in range(3)]
    seeds = [n.forward_seed(micro, stage) for n, micro, stage in product(numberings, range(8), range(4))]
    assert len(set(seeds)) == len(seeds)


def test_a_step_has_one_seed_on_all_copies() -> None:
    assert len({Numbering(0, copy, 2, 2).step_seed(1, 1) for copy in range(4)}) == 1
