"""A stage whose backwards are split: what its halves hand back and add up, and what they raise."""

import pytest
import torch
from torch import nn

from chimera_runtime.blame import ModelError
from chimera_runtime.stage.weight_versions import Versions, masters
from chimera_runtime.values.boundary import Traits
from tests.unit.runtime.staged import WIDTH, Steps, assert_close, by_hand, data, groups, linear, rows, run, stage


@pytest.mark.parametrize("whole", ["", "a reason"])
@pytest.mark.parametrize("recomputed", [set(), {0, 1, 2, 3}])
@pytest.mark.parametrize("late", [(1, 1, 1, 1), (2, 2)])
def test_a_backward_in_two_halves_gives_what_autograd_gives(
    late: tuple[int, ...], recomputed: set[int], whole: str
) -> None:
    outputs, input_gradients, gradients = by_hand(linear())
    one = stage(linear(), traits=Traits((), "", whole=whole), recomputed=recomputed)
    made, back = run(one, groups(2, 2), groups(1, 1, 2), groups(*late)[::-1])
    assert_close(made, outputs)
    assert_close(back, input_gradients)
    assert_close([p.grad for p in one.module.parameters()], gradients)


def test_the_weights_have_their_gradients_after_the_second_half() -> None:
    for whole in ("", "a reason"):
        one = stage(linear(), traits=Traits((), "", whole=whole))
        one.forward(0, rows(data(1), 0))
        one.backward_input(0, rows(data(2), 0))
        assert all(parameter.grad is None for parameter in one.module.parameters()) is not bool(whole)
        one.backward_weights(0)
        assert all(parameter.grad is not None for parameter in one.module.parameters())


class LateFork(nn.Linear):
    """A layer in which the gradient of the weight fails, and that of the input does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def fail(_: torch.Tensor) -> None:
            raise RuntimeError("too late")

        self.weight.register_hook(fail)
        return super().forward(x)


def test_an_error_in_the_second_half_names_the_operation() -> None:
    torch.manual_seed(0)
    one = stage(LateFork(WIDTH, WIDTH))
    one.forward(2, rows(data(1), 2))
    one.backward_input(2, rows(data(2), 2))
    with pytest.raises(ModelError, match="the backward of stage 1") as raised:
        one.backward_weights(2)
    assert raised.value.operation is not None
    assert (raised.value.operation.kind, raised.value.operation.micro_batches) == ("W", (2,))


def test_without_a_flush_a_whole_backward_keeps_its_gradients_until_the_second_half() -> None:
    """A step may lie between: it is of the update before."""
    module = linear()
    parameters = list(module.parameters())
    made = masters(parameters)
    one = stage(module, traits=Traits((), "", whole="a reason"))
    one.weights = Versions(parameters, made, Steps(made))
    for micro in (0, 1):
        one.forward(micro, rows(data(1), micro))
        one.backward_input(micro, rows(data(2), micro))
    assert all(parameter.grad is None for parameter in parameters)
    one.backward_weights(1)
    one.backward_weights(0)
    reference = linear()
    for micro in (0, 1):
        reference(data(1)[micro]).backward(data(2)[micro])
    assert_close([p.grad for p in parameters], [p.grad for p in reference.parameters()])
