"""The stages beside the user's own model: what has no partner is named, and what computes something else is found."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime.blame import ModelError
from chimera_runtime.check.check import check
from chimera_runtime.check.reference import Reference
from chimera_runtime.check.side_by_side import compare_slices
from chimera_runtime.check.side_by_side import compare_with_model as compare
from chimera_runtime.errors import CheckFailed, Misuse
from chimera_runtime.ranks.world import World
from tests.unit.runtime.carrying import WIDTH, Joining, Listing, Recurring
from tests.unit.runtime.models import CPU, model, setting


class Half(nn.Module):
    """Half of the model: a table of weights in, or one out, with dropout in between."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(7 + stage)
        self.inner = nn.Linear(2, 2)
        self.outer = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("scale", torch.full((2,), 1.0 + stage))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.outer(torch.tanh(self.inner(x)))) * self.scale


def build(stage: int, _stages: int) -> nn.Module:
    return Half(stage).double()


class Whole(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.h = nn.ModuleList([Half(9) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for half in self.h:
            x = half(x)
        return x


def name(stage: int, parameter: str) -> str:
    return f"h.{stage}.{parameter}"


def made(whole: Callable[[], Any], names: Any = name, *tied: Any, **changed: Any) -> Reference:
    file = replace(model(**{"build": build, "judge": judged} | changed), reference=whole, name=names)
    return Reference(file, 2, 2, 2, 1, 1, 0, CPU, {(0, 1): tied})


def judged(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def failure(whole: Callable[[], Any], names: Any = name, **changed: Any) -> list[str]:
    """Lines of a failed check after the first."""
    with pytest.raises(CheckFailed) as failed:
        compare(made(whole, names, **changed))
    headline, *lines = str(failed.value).splitlines()
    assert headline == "check: FAILED"
    assert all(line.startswith("  reference(): ") for line in lines)
    return [line.removeprefix("  reference(): ") for line in lines]


def test_a_model_that_is_cut_into_the_stages_agrees_whatever_its_weights_were() -> None:
    """Buffers are taken over too, and dropout does not draw."""
    agreement = compare(made(lambda: Whole().double()))
    assert agreement.loss <= 1e-15
    assert agreement.gradients <= 1e-14
    assert agreement.bound == 1e-12
    assert str(agreement).startswith("reference(): 8 parameters; loss off by ")


def test_without_a_function_for_names_they_are_those_of_the_stages() -> None:
    class Staged(Whole):
        def __init__(self) -> None:
            super().__init__()
            self.stages = self.h
            del self.h

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.stages[1](self.stages[0](x))

    assert " 8 parameters;" in str(compare(made(lambda: Staged().double(), None)))


def test_a_layer_that_no_stage_has_is_named_once_with_its_parameters() -> None:
    (line,) = failure(lambda: Whole(3).double())
    assert line.startswith("no stage holds its h.2 (inner.weight, inner.bias, outer.weight, outer.bias): a layer")


def test_a_parameter_that_no_stage_has_is_named() -> None:
    def whole() -> nn.Module:
        module = Whole()
        module.h[1].extra = nn.Parameter(torch.ones(2))
        return module.double()

    (line,) = failure(whole)
    assert line.startswith("no stage holds its h.1.extra: a layer that was left out, or another name")


def test_a_wrong_name_is_told_with_the_nearest_one() -> None:
    (line, left) = failure(lambda: Whole().double(), lambda s, p: name(s, p).replace("0.outer.w", "0.outer.v"))
    assert line == (
        "it has no h.0.outer.veight of stage 0; the nearest to the first is h.0.outer.weight. name(stage, parameter) "
        "returns its names"
    )
    assert left.startswith("no stage holds its h.0.outer.weight: ")


def test_a_parameter_of_another_shape_is_told_with_both() -> None:
    def whole() -> nn.Module:
        module = Whole()
        module.h[0].inner = nn.Linear(3, 2)
        return module.double()

    (line,) = failure(whole)
    assert line == (
        "its h.0.inner.weight is (2, 3) torch.float64, trained: True; inner.weight of stage 0 is (2, 2) torch.float64, "
        "trained: True"
    )


def tied() -> nn.Module:
    module = Whole()
    module.h[1].outer.weight = module.h[0].inner.weight
    return module.double()


def test_a_tie_that_is_not_declared_is_refused_with_the_line_to_write() -> None:
    (line,) = failure(tied)
    assert line.startswith(
        "inner.weight of stage 0 and outer.weight of stage 1 are one parameter, h.0.inner.weight, and"
    )
    assert "tied(num_stages) -> [[(0, 'inner.weight'), (1, 'outer.weight')]]" in line


def test_a_tie_that_is_declared_is_one_parameter_whose_gradients_add_up() -> None:
    def same(stage: int, _stages: int) -> nn.Module:
        module = Half(stage)
        with torch.no_grad():
            (module.outer if stage else module.inner).weight.fill_(0.5)
        return module.double()

    places = [(0, "inner.weight"), (1, "outer.weight")]
    assert " 7 parameters;" in str(compare(made(tied, name, places, build=same)))


def test_a_tie_has_the_value_of_its_first_end() -> None:
    def other(stage: int, _stages: int) -> nn.Module:
        module = Half(stage)
        with torch.no_grad():
            (module.outer if stage else module.inner).weight.fill_(0.5 + stage)
        return module.double()

    places = [(0, "inner.weight"), (1, "outer.weight")]
    assert " 7 parameters;" in str(compare(made(tied, name, places, build=other)))


def test_parameters_that_only_the_stages_tie_are_named_once() -> None:
    """Whatever their values are: training would part them."""
    places = [(0, "inner.weight"), (1, "outer.weight"), (1, "inner.weight")]

    def partly() -> nn.Module:
        module = tied()
        with torch.no_grad():
            module.h[1].inner.weight.copy_(module.h[0].inner.weight)
        return module

    with pytest.raises(CheckFailed) as failed:
        compare(made(partly, name, places))
    _, *lines = str(failed.value).splitlines()
    assert lines == [
        "  reference(): inner.weight of stage 0 and inner.weight of stage 1 are tied, and are different parameters in "
        "it, h.0.inner.weight and h.1.inner.weight: let it share one, or take them out of tied(num_stages) and compile "
        "without --tied for them"
    ]


def test_a_layer_without_parameters_that_was_left_out_changes_the_loss() -> None:
    class Squared(Whole):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square()

    (line,) = failure(lambda: Squared().double())
    assert line.startswith("the loss of an update is ")
    assert line.endswith("a stage lacks something that has no parameters, or does it in another order")


def test_gradients_that_do_not_come_back_are_found() -> None:
    class Cut(Whole):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.h[1](self.h[0](x).detach())

    (line,) = failure(lambda: Cut().double())
    assert line.startswith("gradients differ by inf of the largest of their stage, most those of h.0.")


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(Misuse, match=r"reference returned a int, not a torch\.nn\.Module"):
        compare(made(lambda: 3))


def test_what_the_users_model_raises_is_told_as_theirs() -> None:
    class Broken(Whole):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    with pytest.raises(ModelError, match=r"an update of the stages and of reference\(\), side by side"):
        compare(made(lambda: Broken().double()))


def test_a_check_says_so_and_fails_with_it(alone: World) -> None:
    file = made(lambda: Whole().double()).model
    of_rank, built = setting(alone, of_model=file)

    def steps(_group: Any, parameters: list[nn.Parameter]) -> Any:
        return file.steps(parameters)

    said = check(of_rank, file, 1, built, steps)
    assert said is not None
    assert said.splitlines()[-1].startswith("  reference(): 8 parameters; loss off by")
    with pytest.raises(CheckFailed, match=r"no stage holds its h\.2"):
        check(of_rank, replace(file, reference=lambda: Whole(3).double()), 1, built, steps)


# Stages on slices of sequences beside the same stages on whole sequences.


SLICES, LENGTH = 3, 6


class Acausal(Listing):
    def attend(self, x: torch.Tensor, start: int, carry: Any) -> tuple[torch.Tensor, Any]:
        return x + x.mean(1, keepdim=True), super().attend(x, start, carry)[1]


class Forgetting(Joining):
    def attend(self, x: torch.Tensor, start: int, carry: Any) -> tuple[torch.Tensor, Any]:
        y, (keys, values) = super().attend(x, start, carry)
        return y, (keys[:, -1:], values[:, -1:])


class Detaching(Recurring):
    def attend(self, x: torch.Tensor, start: int, carry: Any) -> tuple[torch.Tensor, Any]:
        y, left = super().attend(x, start, carry)
        return y, tuple(tensor.detach() for tensor in left)


class Restarting(nn.Module):
    """Counts positions from 0 in each slice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(x.size(1))[:, None]


def sliced(*kinds: Callable[[], nn.Module], counted: bool = True) -> Reference:
    def loss(output: torch.Tensor, target: torch.Tensor) -> Any:
        total = (output - target).square().sum()
        return (total, output.size(1)) if counted else total / output.numel()

    def items() -> list[tuple[torch.Tensor, torch.Tensor]]:
        x = torch.randn(2, 2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return [(item, 2 * item) for item in x.flatten(0, 1)]

    def build(stage: int, _stages: int) -> nn.Module:
        return kinds[stage]().double()

    return Reference(model(build, loss, items), len(kinds), 2, 2, SLICES, 1, 0, CPU, slices=SLICES)


@pytest.mark.parametrize("counted", [False, True])
def test_causal_stages_agree_with_themselves(counted: bool) -> None:
    agreement = compare_slices(sliced(Listing, Joining, Recurring, counted=counted))
    assert max(agreement.loss, agreement.gradients) < agreement.bound == 1e-12
    assert f"{agreement}".startswith("3 slices: loss off from that of whole sequences by ")


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        ((Listing, Acausal, Listing), "slice 0 of the outputs of stage 1 differs by .* stage 1 is not causal"),
        ((Listing, Forgetting, Listing), "slice 1 of the outputs of stage 1 differs by .* carry of stage 1 lacks"),
        ((Restarting, Listing), "slice 1 of the outputs of stage 0 differs by .* does not count positions from start"),
        ((Listing, Acausal), "the loss differs by "),
        ((Joining, Detaching), "outputs are those of whole sequences, and the gradients of stage [01] differ by "),
    ],
)
def test_a_stage_that_cannot_run_in_slices_is_named(kinds: tuple[Callable[[], nn.Module], ...], said: str) -> None:
    with pytest.raises(CheckFailed, match=said):
        compare_slices(sliced(*kinds))
