"""A stage on its own: what its forwards and backwards hand on, keep and add up, one by one, in groups, or run again."""

from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime.blame import ModelError
from chimera_runtime.errors import BadModel
from chimera_runtime.stage.stage_output import SendOutput
from chimera_runtime.stage.weight_versions import Weights
from chimera_runtime.values.boundary import Traits
from tests.unit.runtime.models import CPU
from tests.unit.runtime.staged import (
    CAN,
    CANNOT,
    MICROS,
    ONE,
    ROWS,
    WIDTH,
    Steps,
    assert_close,
    by_hand,
    data,
    groups,
    linear,
    loss_output,
    rows,
    run,
    stage,
)

# What is handed on and added up.


@pytest.mark.parametrize("traits", [CAN, CANNOT])
@pytest.mark.parametrize("recomputed", [set(), {0, 1}, {0, 1, 2, 3}])
@pytest.mark.parametrize(
    ("forwards", "backwards"), [((1, 1, 1, 1), (1, 1, 1, 1)), ((2, 2), (1, 1, 1, 1)), ((2, 1, 1), (2, 2)), ((4,), (4,))]
)
def test_however_they_are_grouped_and_kept_passes_give_what_autograd_gives(
    forwards: tuple[int, ...], backwards: tuple[int, ...], recomputed: set[int], traits: Traits
) -> None:
    outputs, input_gradients, gradients = by_hand(linear())
    one = stage(linear(), traits=traits, recomputed=recomputed)
    made, back = run(one, groups(*forwards), groups(*backwards))
    assert_close(made, outputs)
    assert_close(back, input_gradients)
    assert_close([p.grad for p in one.module.parameters()], gradients)


def test_a_stage_that_can_runs_several_micro_batches_at_once_where_it_runs_them_again_later() -> None:
    """One that cannot, and one that keeps everything, run them one by one."""
    calls: list[int] = []

    class Counting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(len(x))
            return super().forward(x)

    for traits, recomputed, expected in (
        (CAN, {0, 1}, [2 * ROWS]),
        (CANNOT, {0, 1}, [ROWS, ROWS]),
        (CAN, set(), [ROWS, ROWS]),
    ):
        calls.clear()
        one = stage(Counting(WIDTH, WIDTH), traits=traits, recomputed=recomputed)
        one.forward((0, 1), rows(data(1), (0, 1)))
        assert calls == expected
        one.backward((0, 1), rows(data(2), (0, 1)))
        assert calls == expected + [ROWS] * 2 * bool(recomputed)


def test_what_is_run_again_repeats_with_the_schedule() -> None:
    """Micro-batches are counted on and on in a schedule whose updates overlap."""
    calls: list[int] = []

    class Counting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return super().forward(x)

    one = stage(Counting(WIDTH, WIDTH), recomputed={1})
    for micro in (4 * MICROS, 4 * MICROS + 1):
        calls.clear()
        one.forward(micro, rows(data(1), 0))
        one.backward(micro, rows(data(2), 0))
        assert len(calls) == 1 + micro % MICROS


class Counting(nn.Module):
    """Dropout and batch norm; its output depends on a buffer that it updates."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.calls: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        dropped: torch.Tensor = self.drop(self.norm(self.linear(x)))
        return dropped * self.calls.clone()


@pytest.mark.parametrize("recomputed", [{0, 1, 2, 3}, {2, 3}])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2)])
def test_a_stage_that_runs_again_gives_bitwise_what_one_that_keeps_everything_gives(
    recomputed: set[int], sizes: tuple[int, ...]
) -> None:
    """Outputs, gradients and buffers; the buffers are updated once, and the second run sees them as the first did."""
    results = []
    for again in (set[int](), recomputed):
        torch.manual_seed(0)
        module = Counting()
        buffers = tuple(name for name, _ in module.named_buffers())
        one = stage(module, traits=Traits(buffers, "updates its buffers"), recomputed=again)
        made, back = run(one, groups(*sizes), groups(1, 1, 1, 1))
        assert module.calls.item() == MICROS
        assert module.norm.num_batches_tracked == MICROS
        results.append([*made, *back, *(p.grad for p in module.parameters()), *module.buffers()])
    assert all(map(torch.equal, *results))


def test_a_forward_draws_by_update_micro_batch_and_stage_whatever_came_before() -> None:
    outputs = []
    for order in ([0, 1], [1, 0]):
        one = stage(nn.Dropout(0.5))
        for micro in order:
            one.forward(micro, (torch.ones(ROWS, WIDTH),))
            torch.rand(3)
        outputs.append([one.outputs(micro)[0] for micro in (0, 1)])
    assert all(map(torch.equal, *outputs))
    assert not torch.equal(*outputs[0])
    one.begin(1)
    one.forward(0, (torch.ones(ROWS, WIDTH),))
    assert not torch.equal(one.outputs(0)[0], outputs[0][0])
    other = stage(nn.Dropout(0.5), number=0)
    other.forward(0, (torch.ones(ROWS, WIDTH),))
    assert not torch.equal(other.outputs(0)[0], outputs[0][0])


def test_outputs_and_input_gradients_are_taken_once_by_the_micro_batches_that_made_them() -> None:
    one = stage(linear())
    one.forward((0, 1), rows(data(1), (0, 1)))
    for absent in (0, 1, (1, 0)):
        with pytest.raises(KeyError):
            one.outputs(absent)
    one.outputs((0, 1))
    with pytest.raises(KeyError):
        one.outputs((0, 1))
    one.backward(1, rows(data(2), 1))
    one.input_gradients(1)
    with pytest.raises(KeyError):
        one.input_gradients(1)


def test_a_backward_without_its_forward_is_an_error_and_so_is_a_second_one() -> None:
    one = stage(linear())
    with pytest.raises(KeyError):
        one.backward(0, rows(data(2), 0))
    one.forward(0, rows(data(1), 0))
    one.backward(0, rows(data(2), 0))
    with pytest.raises(KeyError):
        one.backward(0, rows(data(2), 0))


def test_what_is_handed_on_has_no_graph_and_lies_in_one_piece() -> None:
    class Transposed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).t().contiguous().t()

    one = stage(Transposed(WIDTH, WIDTH))
    one.forward(0, rows(data(1), 0))
    (output,) = one.outputs(0)
    assert output.is_contiguous()
    assert not output.requires_grad


class Shifting(nn.Linear):
    def forward(self, x: torch.Tensor, shift: Any = None) -> torch.Tensor:
        return super().forward(x + shift["by"])


@pytest.mark.parametrize("recomputed", [set(), {0, 1, 2, 3}])
@pytest.mark.parametrize("alone", ["", "draws random numbers"])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2)])
def test_keyword_arguments_are_those_of_each_micro_batch(
    recomputed: set[int], alone: str, sizes: tuple[int, ...]
) -> None:
    """However they are grouped and run again; each is loaded once."""
    asked: list[tuple[int, int]] = []
    shifts = data(7)

    def load(update: int, micro: int) -> dict[str, Any]:
        asked.append((update, micro))
        return {"shift": {"by": shifts[micro]}, "other": None}

    torch.manual_seed(0)
    one = stage(Shifting(WIDTH, WIDTH), traits=Traits((), alone, ("shift",)), recomputed=recomputed)
    one.runs.load_keywords = load
    one.begin(3)
    outputs, _ = run(one, groups(*sizes), groups(*sizes))
    plain = [x + shift for x, shift in zip(data(1), shifts, strict=True)]
    layer = nn.Linear(WIDTH, WIDTH)
    layer.load_state_dict(one.module.state_dict())
    expected = [layer(x) for x in plain]
    torch.autograd.backward(expected, data(2))
    assert_close(outputs, [y.detach() for y in expected])
    assert_close([p.grad for p in one.module.parameters()], [p.grad for p in layer.parameters()])
    assert asked == [(3, micro) for micro in range(MICROS)]


def test_a_keyword_argument_that_is_missing_later_is_an_error_of_the_model() -> None:
    one = stage(Shifting(WIDTH, WIDTH), traits=Traits((), "", ("shift",)))
    one.runs.load_keywords = lambda _update, _micro: {}
    with pytest.raises(BadModel, match="micro-batch 2 has no keyword argument shift, and the first had"):
        one.forward(2, rows(data(1), 2))


# Memory.


def test_a_gradient_that_lies_in_a_receive_buffer_is_copied_before_the_next_message_comes() -> None:
    """An identity has such gradients: its backward returns the gradient that was received."""

    class Same(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

    one = stage(Same())
    one.reserve({"y": [1], "dx": [1]}, CPU)
    (received,) = one.gradients[0]
    one.forward(0, rows(data(1), 0))
    received.fill_(7.0)
    one.backward(0, one.gradients[0])
    (gradient,) = one.input_gradients(0)
    received.fill_(-1.0)
    assert torch.equal(gradient, torch.full((ROWS, WIDTH), 7.0))


def test_receive_buffers_have_the_room_that_the_program_says() -> None:
    one = stage(linear(), 1, ONE, SendOutput(1, ONE))
    one.reserve({"y": [1, 2], "dx": [3]}, CPU)
    assert [[tuple(t.shape) for t in slot] for slot in one.inputs] == [[(ROWS, WIDTH)], [(2 * ROWS, WIDTH)]]
    assert [[tuple(t.shape) for t in slot] for slot in one.gradients] == [[(3 * ROWS, WIDTH)]]
    first = stage(linear(), 0, None, loss_output())
    first.reserve({}, CPU)
    assert [*first.inputs] == [*first.gradients] == []


@pytest.mark.parametrize("recomputed", [set(), {0}])
def test_nothing_of_a_micro_batch_is_kept_after_its_backward(recomputed: set[int]) -> None:
    alive: list[Any] = []

    class Watched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Watching.apply(super().forward(x), alive)  # type: ignore[no-any-return,no-untyped-call]

    class Watching(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor, held: list[Any]) -> torch.Tensor:
            context.token = Token(held)
            return x.clone()

        @staticmethod
        def backward(_context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            return gradient, None

    class Token:
        def __init__(self, held: list[Any]) -> None:
            self.held = held
            held.append(1)

        def __del__(self) -> None:
            self.held.pop()

    one = stage(Watched(WIDTH, WIDTH), recomputed=recomputed)
    one.forward(0, rows(data(1), 0))
    assert len(alive) == (0 if recomputed else 1)
    one.backward(0, rows(data(2), 0))
    assert alive == []


# What goes wrong.


def test_an_output_of_another_shape_is_an_error_of_the_model() -> None:
    class Growing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([super().forward(x)] * 2)

    one = stage(Growing(WIDTH, WIDTH))
    with pytest.raises(BadModel, match=r"stage 1 returned for micro-batch 2: tensor 0 is \(6, 4\) torch.float32"):
        one.forward(2, rows(data(1), 2))


def failing(where: str) -> nn.Module:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_context: Any, _gradient: torch.Tensor) -> torch.Tensor:
            raise ValueError("in the backward")

    class Module(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if where == "forward":
                raise ValueError("in the forward")
            return Failing.apply(super().forward(x))  # type: ignore[no-any-return,no-untyped-call]

    return Module(WIDTH, WIDTH)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_errors_of_the_module_are_the_models(where: str) -> None:
    one = stage(failing(where))
    with pytest.raises(ModelError, match=f"the {where} of stage 1"):
        run(one, [0], [0])


# The end of an update.


def test_a_step_takes_the_sum_of_the_gradients_and_the_next_update_begins_from_none() -> None:
    parameters: list[nn.Parameter] = []
    module = linear()
    parameters += module.parameters()
    steps = Steps(parameters)
    one = stage(module, steps=steps)
    updates: list[int] = []
    one.on_step = lambda stepped: updates.append(stepped.updates)
    _, _, expected = by_hand(linear())
    for _ in range(2):
        run(one, groups(1, 1, 1, 1), groups(1, 1, 1, 1))
        one.all_reduce()
        one.wait_all_reduce()
        one.step()
        assert all(p.grad is None for p in parameters)
    assert updates == [1, 2]
    for gradients in steps.gradients:
        assert_close(gradients, expected)


def drawn_by_steps(number: int, before: int) -> list[float]:
    """Random numbers of two steps, after ``before`` others were drawn before each."""
    module = linear()
    steps = Steps(list(module.parameters()))
    one = stage(module, number, steps=steps)
    for _ in range(2):
        torch.rand(before)
        one.step()
    return steps.drawn


def test_a_step_draws_by_update_and_stage_whatever_came_before() -> None:
    first, second = drawn_by_steps(1, before=0)
    assert drawn_by_steps(1, before=3) == [first, second]
    assert len({first, second, *drawn_by_steps(0, before=0)}) == 4


def test_weights_are_asked_for_the_versions_that_the_program_names() -> None:
    class Asked(Weights):
        def __init__(self) -> None:
            self.calls: list[tuple[str, int]] = []

        def select(self, version: int) -> None:
            self.calls.append(("select", version))

        def stash(self, version: int) -> None:
            self.calls.append(("stash", version))

        def drop(self, version: int) -> None:
            self.calls.append(("drop", version))

    one = stage(linear())
    one.weights = asked = Asked()
    assert one.at(3) is one
    one.stash(4)
    one.drop(2)
    assert asked.calls == [("select", 3), ("stash", 4), ("drop", 2)]
