"""What a worker uses of a mini-batch: inputs at the first stage, targets at the last, keyword arguments on the way."""

from dataclasses import replace
from typing import Any

import pytest

from chimera_runtime.start.assemble import needed_inputs
from tests.unit.runtime.models import facts
from tests.unit.runtime.thread_ranks import job


@pytest.mark.parametrize(
    ("inputs", "targets", "parts", "expected"),
    [
        (((0, 2),), (), 1, {0: {0}, 1: {0}}),
        ((), ((1, 2), (3, 4)), 1, {1: {1}, 3: {1}}),
        (((0, 2),), ((2, 4),), 1, {0: {0}, 1: {0}, 2: {1}, 3: {1}}),
        (((0, 1), (2, 3)), (), 2, {0: {0}, 2: {0}}),
        ((), (), 1, {}),
    ],
)
def test_what_is_loaded_is_counted_in_whole_micro_batches(
    inputs: Any, targets: Any, parts: int, expected: dict[int, set[int]]
) -> None:
    of_worker = replace(facts(0), inputs=inputs, targets=targets)
    assert (
        needed_inputs(job(micro_batches=4, parts=parts), of_worker, takes_keywords=False, reads_shapes=False)
        == expected
    )


def test_updates_of_a_longer_period_use_what_any_of_them_does() -> None:
    of_worker = replace(facts(0), inputs=((0, 1), (5, 6)), targets=())
    assert needed_inputs(job(micro_batches=4, period=8), of_worker, takes_keywords=False, reads_shapes=False) == {
        0: {0},
        1: {0},
    }


def test_a_stage_with_keyword_arguments_uses_those_of_every_micro_batch() -> None:
    of_worker = replace(facts(0), inputs=((0, 1),), targets=())
    assert needed_inputs(job(), of_worker, takes_keywords=True, reads_shapes=False) == {0: {0, 2}, 1: {2}}


def test_who_looks_at_shapes_uses_the_first_micro_batch() -> None:
    of_worker = replace(facts(0), inputs=(), targets=((1, 2),))
    assert needed_inputs(job(), of_worker, takes_keywords=False, reads_shapes=True) == {0: {0, 2}, 1: {1}}
