"""Names and initial weights of the stages of all ranks, compared at start."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime.errors import Misuse
from chimera_runtime.model.model import Layers, Model
from chimera_runtime.model.ties import Tie
from chimera_runtime.ranks.world import World
from chimera_runtime.start.inventory import compare_stages
from tests.unit.runtime.models import model
from tests.unit.runtime.thread_ranks import job, together, worlds

MODEL = model()
LAYERED = replace(MODEL, build_stage=Layers([nn.Identity] * 4))
TIE = Tie((0, 1), (((0, "words"), (1, "head")),))


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape or (3, 2), generator=torch.Generator().manual_seed(seed))


def holding(
    buffers: Mapping[str, torch.Tensor] | None = None, *, saved: bool = True, **parameters: Any
) -> nn.ParameterDict:
    """A stage with these parameters and buffers."""
    stage = nn.ParameterDict({name: nn.Parameter(value) for name, value in parameters.items()})
    for name, buffer in (buffers or {}).items():
        stage.register_buffer(name, buffer, persistent=saved)
    return stage


class Extra(nn.Module):
    """A stage with further state, which it may fail to return."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails

    def get_extra_state(self) -> int:
        if self.fails:
            raise ValueError("not yet")
        return 1

    def set_extra_state(self, _state: Any) -> None:
        """There is nothing to set."""


Compare = Callable[..., list[list[str]]]


@pytest.fixture(name="compare")
def _compare(alone: World) -> Compare:
    """Compares the stages of ranks, each given as a dict; returns the remarks of each, or the only error of all."""

    def of_ranks(
        *built: Mapping[int, nn.Module], of: Model = MODEL, ties: Sequence[Tie] = (), loads: int = 0
    ) -> list[list[str]]:
        with worlds(alone, job(workers=len(built))) as ranks:
            errors: list[str] = []

            def one(rank: int) -> list[str]:
                models = of if isinstance(of, list) else [of] * len(built)
                try:
                    return compare_stages(ranks[rank].control_group, models[rank], built[rank], ties, loads)
                except Misuse as error:
                    errors.append(str(error))
                    return []

            remarks = together([partial(one, rank) for rank in range(len(built))])
        if errors:
            assert len(errors) == len(built), "refused on some ranks only"
            assert len({*errors}) == 1
            raise Misuse(errors[0])
        return remarks

    return of_ranks


def without_stage(_stage: int, parameter: str) -> str:
    return parameter


A, B = drawn(1), drawn(2)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (holding(weight=A), holding(weight=B), "gives weight to weight of stage 0 and to weight of stage 1: give each"),
        (holding({"mean": A}), holding({"mean": B}), "gives mean to mean of stage 0 and to mean of stage 1"),
        (holding(scale=A), holding({"scale": B}), "gives scale to scale of stage 0 and to scale of stage 1"),
        (Extra(), Extra(), "gives _extra_state to _extra_state of stage 0 and to _extra_state of stage 1"),
    ],
)
def test_a_name_of_two_stages_is_refused_on_both_ranks(
    compare: Compare, first: nn.Module, second: nn.Module, words: str
) -> None:
    named = replace(MODEL, name=without_stage)
    with pytest.raises(Misuse, match=words):
        compare({0: first}, {1: second}, of=named)
    with pytest.raises(Misuse, match=words):
        compare({0: first, 1: second}, of=named)
    compare({0: first}, {1: second})


def test_a_name_of_two_layers_or_of_two_entries_of_a_stage_is_refused(compare: Compare) -> None:
    stage = nn.ModuleDict({"0": holding(weight=A), "1": holding(weight=B)})
    with pytest.raises(Misuse, match="to weight of layer 0 and to weight of layer 1"):
        compare({0: stage}, {1: nn.Identity()}, of=replace(LAYERED, name=without_stage))
    one = replace(MODEL, name=lambda stage, name: "x" if stage else name)
    with pytest.raises(Misuse, match="name gives x to weight of stage 1 and to mean of stage 1"):
        compare({0: nn.Identity()}, {1: holding({"mean": A}, weight=B)}, of=one)


def test_buffers_that_are_not_saved_may_have_one_name(compare: Compare) -> None:
    tables = [holding({"frequencies": A}, saved=False) for _ in range(2)]
    compare({0: tables[0]}, {1: tables[1]}, of=replace(MODEL, name=without_stage))


def test_ends_of_a_tie_may_have_one_name_but_not_that_of_another_parameter(compare: Compare) -> None:
    words, head = holding(words=A, other=B), holding(head=A)
    for names in (("words", "words"), ("words", "head")):
        named = replace(MODEL, name=lambda stage, name, names=names: name if name == "other" else names[stage])
        assert compare({0: words}, {1: head}, of=named, ties=[TIE]) == [[], []]
    named = replace(MODEL, name=lambda stage, name: "other" if stage else name)
    with pytest.raises(Misuse, match="name gives other to other of stage 0 and to words of stage 0"):
        compare({0: words}, {1: head}, of=named, ties=[TIE])


def test_replicas_that_start_equal_agree(compare: Compare) -> None:
    both = {0: holding({"mean": A}, weight=A), 1: holding(weight=B)}
    assert compare(both, {1: holding(weight=B)}, both) == [[]] * 3


@pytest.mark.parametrize(
    ("replica", "words"),
    [
        (holding(weight=B), "stage 1 starts with other weights on rank 2 than on rank 1, first in weight: a stage or"),
        (holding(wait=A), r"stage 1 has weight \(float32 of shape \(3, 2\)\) on rank 1 and wait \(.*\) on rank 2: let"),
        (holding(), r"stage 1 has weight \(.*\) on rank 1 and no further parameter on rank 2"),
        (holding(weight=A).requires_grad_(False), r"on rank 1 and weight \(float32 of shape \(3, 2\), frozen\) on"),
    ],
)
def test_replicas_that_differ_are_refused(compare: Compare, replica: nn.Module, words: str) -> None:
    with pytest.raises(Misuse, match=words):
        compare({0: nn.Identity()}, {1: holding(weight=A)}, {1: replica})


def test_a_name_that_depends_on_the_rank_is_refused(compare: Compare) -> None:
    models: Any = [replace(MODEL, name=lambda _stage, name, rank=rank: f"{rank}.{name}") for rank in range(2)]
    for stage in (holding(weight=A), holding({"weight": A}), Extra()):
        with pytest.raises(Misuse, match=r"stage 0 the name 0\.\w+ on rank 0 and 1\.\w+ on rank 1: let it depend on"):
            compare({0: stage}, {0: stage}, of=models)


def test_a_stage_whose_state_cannot_be_saved_yet_may_train(compare: Compare) -> None:
    assert compare({0: Extra(fails=True)}, {1: Extra(fails=True)}) == [[], []]


# Parameters that may be one in the model.


def test_equal_values_in_two_stages_are_remarked_upon_with_the_lines_to_write(compare: Compare) -> None:
    first, *others = compare({0: holding(words=A, bias=B)}, {1: holding(x=drawn(3))}, {2: holding(head=A)})
    assert others == [first, first]
    assert first == [
        "model.py: words of stage 0 and head of stage 2 begin with equal values, and each is trained by itself: if the "
        'model has one parameter there, write `def tied(num_stages): return [[(0, "words"), (2, "head")]]` and compile '
        "with --tied 0,2; if they only begin equal, as copies or draws from one seed, leave it so"
    ]


def test_layers_of_one_stage_are_told_without_a_line_to_compile(compare: Compare) -> None:
    stage = nn.ModuleDict({"0": holding(weight=A), "1": holding(weight=A)})
    ((remark,),) = compare({0: stage}, of=LAYERED)
    assert 'write `def tied(num_stages): return [[(0, "weight"), (1, "weight")]]`; if they only' in remark


def test_many_groups_and_many_ends_are_one_remark(compare: Compare) -> None:
    values = {f"w{i}": drawn(i) for i in range(9)}
    ((remark,),) = compare({stage: holding(**values) for stage in range(6)})
    assert (
        "w0 of stage 0, w0 of stage 1, .. and w0 of stage 5 begin with equal values (and so do those of 8 more groups"
        in remark
    )
    assert '[[(0, "w0"), (1, "w0"), .., (5, "w0")], [(0, "w1"), ' in remark
    assert "--tied 0,1,2,3,4,5;" in remark
    assert len(remark) < 700


@pytest.mark.parametrize(
    "stages",
    [
        [holding(weight=A), holding(weight=A.clone().T.contiguous())],
        [holding(weight=A), holding(weight=A.double())],
        [holding(weight=A), holding(weight=A).requires_grad_(False)],
        [holding({"table": A}), holding({"table": A})],
        *[
            [holding(weight=values), holding(weight=values)]
            for values in (torch.ones(4, 4), torch.zeros(2), torch.eye(4), torch.full((), 0.5), torch.ones(0))
        ],
        [holding(weight=torch.arange(16.0).expand(9, 16)), holding(weight=torch.arange(16.0).expand(9, 16))],
        [holding(a=A, b=A), holding(weight=B)],
    ],
)
def test_other_values_are_no_reason_for_a_remark(compare: Compare, stages: Sequence[nn.Module]) -> None:
    assert compare({0: stages[0]}, {1: stages[1]}) == [[], []]


def test_a_declared_tie_is_none_and_a_third_end_is_one(compare: Compare) -> None:
    words, head = holding(words=A), holding(head=A)
    assert compare({0: words}, {1: head}, of=MODEL, ties=[TIE]) == [[], []]
    (remark,), *_ = compare({0: words}, {1: head}, {2: holding(third=A)}, ties=[TIE])
    assert "words of stage 0 and third of stage 2 begin with equal values" in remark


def test_values_are_compared_again_when_weights_were_loaded(compare: Compare) -> None:
    (remark,), _ = compare({0: holding(words=A)}, {1: holding(head=A)}, loads=1)
    assert "begin with equal values" in remark
