"""Inputs that micro-batches lack: what the ranks of all copies find out together, and what they refuse."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chimera_runtime.errors import Misuse
from chimera_runtime.program.job import Feed, Job
from chimera_runtime.start.decided_by_data import inputs_here, lacking_stages
from tests.unit.runtime.thread_ranks import job

NAMED = (("image", 0, 1), ("sound", 1, 2), ("text", 2, 4))


def graph(**changed: Any) -> Job:
    """An encoder of images and one of sound, which feed a text."""
    facts = {"stages": 4, "placement": ((0,) * 4,), "named": NAMED, "feeds": (Feed(0, 2), Feed(1, 2), Feed(2, 3))}
    return job(**facts | {"micro_batches": 3} | changed)


def present(*micros: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(micros, dtype=torch.uint8)


def test_a_rank_looks_at_the_inputs_of_its_own_sources() -> None:
    inputs = [{"image": 1, "sound": 2}, {"image": None, "sound": 3}, {"image": 4}]
    of_both: Any = SimpleNamespace(stages={0: None, 1: None}, inputs=((0, 3),))
    of_image: Any = SimpleNamespace(stages={0: None}, inputs=((1, 3),))
    assert inputs_here(graph(), of_both, inputs.__getitem__).tolist() == [[1, 1], [0, 1], [1, 0]]
    assert inputs_here(graph(), of_image, inputs.__getitem__).tolist() == [[0, 0], [0, 0], [1, 0]]
    halves = graph(parts=2)
    assert inputs_here(halves, of_both, [x for x in inputs for _ in range(2)].__getitem__)[2].tolist() == [1, 0]


def test_micro_batches_lack_the_groups_whose_inputs_lack() -> None:
    assert lacking_stages(graph(), 0, present((1, 1), (0, 1), (1, 0))) == [set(), {0}, {1}]


def test_what_the_program_leaves_out_is_not_missed() -> None:
    left_out = graph(absent=(("image", ((1, 2),)),))
    assert lacking_stages(left_out, 0, present((1, 1), (0, 1), (0, 1))) == [set(), set(), {0}]


def test_a_micro_batch_without_any_input_is_refused() -> None:
    with pytest.raises(Misuse, match="micro-batch 1 of copy 3 has no input for any of image and sound"):
        lacking_stages(graph(), 3, present((1, 1), (0, 0), (1, 1)))


def test_an_output_that_nothing_would_read_is_refused() -> None:
    with_own = graph(
        named=(("image", 0, 1), ("text", 1, 3), ("sound", 3, 4)),
        feeds=(Feed(0, 2), Feed(1, 2)),
        stages=4,
    )
    assert with_own.sources == (0, 1, 3)
    with pytest.raises(Misuse, match=r"no input for text, so that nothing reads the output of image\[0\]"):
        lacking_stages(with_own, 0, present((1, 0, 1), (1, 1, 1), (1, 1, 1)))


def test_an_output_whose_readers_lack_by_the_program_and_by_the_data_is_refused() -> None:
    two_readers = graph(
        named=(("image", 0, 1), ("text", 1, 2), ("sound", 2, 3), ("head", 3, 4)),
        feeds=(Feed(0, 3), Feed(2, 3)),
        absent=(("head", ((1, 2),)),),
    )
    assert two_readers.sources == (0, 1, 2)
    with pytest.raises(Misuse, match=r"so that nothing reads the output of image\[0\]"):
        lacking_stages(two_readers, 0, present((1, 1, 1), (1, 0, 1), (1, 1, 1)))


@pytest.mark.parametrize("stage", [0, 2])
def test_stages_with_operations_over_several_micro_batches_lack_none(stage: int) -> None:
    with pytest.raises(Misuse, match=r"has operations over several micro-batches, which two cannot run in part"):
        lacking_stages(graph(grouped=(stage,)), 0, present((1, 1), (0, 1), (1, 1)))
    assert lacking_stages(graph(grouped=(3,)), 0, present((0, 1), (1, 1), (1, 1)))[0] == {0}
