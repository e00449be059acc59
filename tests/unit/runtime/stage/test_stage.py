"""A stage on its own: what its forwards and backwards hand on, keep and add up, one by one, in groups, or run again."""

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime import auxiliary_loss
from chimera_runtime.blame import ModelError
from chimera_runtime.check.reference import seed_of
from chimera_runtime.errors import BadModel
from chimera_runtime.program.job import Backwards
from chimera_runtime.program.numbering import Numbering
from chimera_runtime.ranks.messages import Names
from chimera_runtime.stage.gradient_sums import GradientSum
from chimera_runtime.stage.stage import Stage
from chimera_runtime.stage.stage_output import SendOutput, StageInput
from chimera_runtime.stage.weight_versions import Unstepped, Versions, WeightGroup, Weights, masters
from chimera_runtime.values.boundary import Boundary, Traits
from chimera_runtime.values.losses import Tally
from chimera_runtime.values.nested import ONE_TENSOR
from tests.unit.runtime.models import CPU
from tests.unit.runtime.staged import (
    CAN,
    CANNOT,
    MICROS,
    ONE,
    ROWS,
    WIDTH,
    Steps,
    Then,
    assert_close,
    assert_like_autograd,
    by_hand,
    data,
    groups,
    linear,
    loss_output,
    rows,
    run,
    stage,
    tuple_of,
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
    one = stage(linear(), traits=traits, recomputed=recomputed)
    assert_like_autograd(one, *run(one, groups(*forwards), groups(*backwards)))


def noting(calls: list[int]) -> nn.Module:
    """A layer that notes how many rows each call has, outside of itself: its own state is put back."""

    def note(y: torch.Tensor) -> torch.Tensor:
        calls.append(len(y))
        return y

    return Then(note)


@pytest.mark.parametrize(
    ("traits", "recomputed", "calls"),
    [(CAN, {0, 1}, [2 * ROWS]), (CANNOT, {0, 1}, [ROWS, ROWS]), (CAN, set(), [ROWS, ROWS])],
)
def test_a_stage_that_can_runs_several_micro_batches_at_once_where_it_runs_them_again_later(
    traits: Traits, recomputed: set[int], calls: list[int]
) -> None:
    """One that cannot, and one that keeps everything, run them one by one."""
    noted: list[int] = []
    one = stage(noting(noted), traits=traits, recomputed=recomputed)
    one.forward((0, 1), rows(data(1), (0, 1)))
    assert noted == calls
    one.backward((0, 1), rows(data(2), (0, 1)))
    assert noted == calls + [ROWS] * 2 * bool(recomputed)


def test_a_stage_without_backwards_keeps_nothing_of_a_forward() -> None:
    one = stage(linear().requires_grad_(False), backwards=Backwards(has=False, trains=False, returns=False))
    received = rows(data(1), (0,))
    alive = weakref.ref(received[0])
    one.forward(0, received)
    (output,) = one.outputs(0)
    assert not output.requires_grad
    del received
    assert alive() is None


def test_a_frozen_stage_behind_a_trained_one_makes_gradients_of_its_inputs_alone() -> None:
    frozen = stage(linear().requires_grad_(False), backwards=Backwards(trains=False))
    trained = stage(linear())
    for one in (frozen, trained):
        one.forward(0, rows(data(1), (0,)))
    frozen.backward_input(0, rows(data(2), (0,)))
    trained.backward(0, rows(data(2), (0,)))
    assert_close([*frozen.input_gradients(0)], [*trained.input_gradients(0)])
    assert all(parameter.grad is None for parameter in frozen.module.parameters())


def test_what_no_stage_before_reads_is_not_kept() -> None:
    one = stage(linear(), backwards=Backwards(returns=False))
    one.forward(0, rows(data(1), (0,)))
    one.backward(0, rows(data(2), (0,)))
    with pytest.raises(KeyError):
        one.input_gradients(0)


def test_what_is_run_again_repeats_with_the_schedule() -> None:
    """Micro-batches are counted on and on in a schedule whose updates overlap."""
    calls: list[int] = []
    one = stage(noting(calls), recomputed={1})
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
    for absent in (2, (1, 0), (1, 2)):
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
    one = stage(Then(lambda y: y.t().contiguous().t()))
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
    one.reserve({"y": ((1,),), "dx": ((1,),)}, CPU)
    (received,) = one.gradients[0][0]
    one.forward(0, rows(data(1), 0))
    received.fill_(7.0)
    one.backward(0, one.gradients[0][0])
    (gradient,) = one.input_gradients(0)
    received.fill_(-1.0)
    assert torch.equal(gradient, torch.full((ROWS, WIDTH), 7.0))


def test_receive_buffers_have_the_room_that_the_program_says() -> None:
    one = stage(linear(), 1, ONE, SendOutput(1, ONE))
    one.reserve({"y": ((1, 2),), "dx": ((3,),)}, CPU)
    assert [[tuple(t.shape) for t in slot] for slot in one.inputs[0]] == [[(ROWS, WIDTH)], [(2 * ROWS, WIDTH)]]
    assert [[tuple(t.shape) for t in slot] for slot in one.gradients[0]] == [[(3 * ROWS, WIDTH)]]
    first = stage(linear(), 0, None, loss_output())
    first.reserve({}, CPU)
    assert [*first.inputs] == [*first.gradients] == []


@pytest.mark.parametrize("recomputed", [set(), {0, 1, 2, 3}])
@pytest.mark.parametrize("size", [1, 4])
def test_outputs_of_inference_mode_are_handed_on(recomputed: set[int], size: int) -> None:
    class Inference(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.inference_mode():
                return super().forward(x)

    end = Boundary(ONE_TENSOR, ((ROWS, WIDTH),), (torch.float32,), (False,), (False,))
    one = stage(Inference(WIDTH, WIDTH), before=end, output=SendOutput(1, end), recomputed=recomputed)
    (micros, *_) = groups(*[size] * (MICROS // size))
    one.forward(micros, rows(data(1), micros))
    (output,) = one.outputs(micros)
    assert not output.is_inference()
    assert_close([output], [nn.functional.linear(*rows(data(1), micros), one.module.weight, one.module.bias)])


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
    one = stage(Then(lambda y: torch.cat([y] * 2)))
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

    def apply(y: torch.Tensor) -> Any:
        if where == "forward":
            raise ValueError("in the forward")
        return Failing.apply(y)  # type: ignore[no-untyped-call]

    return Then(apply)


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


# A stage whose backwards are split: what its halves hand back and add up, and what they raise.


@pytest.mark.parametrize("whole", ["", "a reason"])
@pytest.mark.parametrize("recomputed", [set(), {0, 1, 2, 3}])
@pytest.mark.parametrize("late", [(1, 1, 1, 1), (2, 2)])
def test_a_backward_in_two_halves_gives_what_autograd_gives(
    late: tuple[int, ...], recomputed: set[int], whole: str
) -> None:
    one = stage(linear(), traits=Traits((), "", whole=whole), recomputed=recomputed)
    assert_like_autograd(one, *run(one, groups(2, 2), groups(1, 1, 2), groups(*late)[::-1]))


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


# The argument of a stage's module, and the gradients for the stage before.

FLOATS, WHOLE = torch.float32, torch.int64
TWO = Boundary(tuple_of(3), ((2,), (2,), (2,)), (FLOATS, FLOATS, WHOLE), (True, True, False), (True, False, False))


def received_tensors() -> tuple[torch.Tensor, ...]:
    return torch.ones(2), torch.ones(2), torch.ones(2, dtype=WHOLE)


@pytest.fixture
def received() -> tuple[StageInput, tuple[torch.Tensor, ...]]:
    """An input of tensors that were received, and these as leaves."""
    stage_input = StageInput(1, TWO)
    return stage_input, stage_input.argument(received_tensors())[0]


def test_the_first_stage_is_called_on_what_was_loaded_and_hands_nothing_back() -> None:
    first = StageInput(0, None)
    batch = {"words": torch.ones(2)}
    assert first.argument(batch) == ((), batch)
    assert first.take_gradients((), (torch.ones(1),)) == ()


def test_leaves_are_the_tensors_received_and_require_gradients_where_the_stage_before_recorded_them() -> None:
    tensors = received_tensors()
    leaves, argument = StageInput(1, TWO).argument(tensors)
    assert argument == leaves
    assert [leaf.requires_grad for leaf in leaves] == [True, True, False]
    assert [leaf.data_ptr() for leaf in leaves] == [tensor.data_ptr() for tensor in tensors]


def test_gradients_come_back_for_what_the_first_micro_batch_used_and_zeros_where_there_are_none(received: Any) -> None:
    stage_input, leaves = received
    count = torch.ones(1)
    zeros, counted = stage_input.take_gradients(leaves, (count,))
    assert zeros.tolist() == [0, 0]
    assert counted is not count
    assert counted.item() == 1
    (leaves[0] * 3).sum().backward()
    assert stage_input.take_gradients(leaves, ())[0].tolist() == [3, 3]
    leaves[1].sum().backward()
    with pytest.raises(
        BadModel, match="uses a tensor that it receives and did not use for the example, or for the first micro-batch"
    ):
        stage_input.take_gradients(leaves, ())


def test_a_gradient_in_memory_of_its_own_is_handed_back_as_it_is_and_kept_by_nothing_else(received: Any) -> None:
    stage_input, leaves = received
    (leaves[0] * 3).sum().backward()
    place = leaves[0].grad.data_ptr()
    assert stage_input.take_gradients(leaves, ())[0].data_ptr() == place
    assert leaves[0].grad is None


def test_a_gradient_in_memory_that_anything_else_holds_is_copied(received: Any) -> None:
    """A receive buffer, or what a function of the model's own writes again in its next backward."""
    (stage_input, leaves), memory = received, torch.full((4,), 7.0)
    leaves[0].grad = memory[:2]
    (gradient,) = stage_input.take_gradients(leaves, ())
    memory.zero_()
    assert gradient.tolist() == [7, 7]


def test_a_gradient_for_what_the_stage_before_recorded_no_graph_for_is_for_nobody() -> None:
    """A stage may call requires_grad_() on what it gets, as it may in one process."""
    frozen = Boundary(tuple_of(1), ((2,),), (FLOATS,), (False,), (False,))
    stage_input = StageInput(1, frozen)
    leaves, _ = stage_input.argument((torch.ones(2),))
    (leaves[0].requires_grad_() * 3).sum().backward()
    assert stage_input.take_gradients(leaves, ()) == ()
    assert leaves[0].grad is None


# A weight group: two stages use one parameter, whose gradients are one sum and which steps once.


def group(weights: Weights, parameter: nn.Parameter, *stages: int) -> WeightGroup:
    gradients = GradientSum("s0+s3", [parameter], None, (0,), Names(0, 0, 4, 1.0), lambda work: work.wait())
    return WeightGroup(stages, weights, gradients, Numbering(7, 0, 2, 2))


class Noting:
    """An optimizer that notes the gradient, and what a step draws at random."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.seen: list[tuple[float, float]] = []

    def step(self) -> None:
        assert self.parameter.grad is not None
        self.seen.append((self.parameter.grad.item(), torch.rand(()).item()))


def drawn(*seed: int) -> float:
    torch.manual_seed(seed_of("step", *seed))
    return torch.rand(()).item()


def test_every_use_adds_to_one_gradient_and_the_step_has_a_seed_of_its_stages() -> None:
    parameter = nn.Parameter(torch.tensor([2.0]))
    optimizer = Noting(parameter)
    shared = group(Weights(optimizer), parameter, 0, 3)
    for _ in range(2):
        for factor in (3.0, 5.0, 7.0):
            (parameter * factor).sum().backward()
            shared.gradient_sum.collect()
        shared.all_reduce()
        shared.wait_all_reduce()
        shared.step()
        assert parameter.grad is None
    assert optimizer.seen == [(15.0, drawn(7, 0, 0, 3)), (15.0, drawn(7, 1, 0, 3))]
    assert shared.updates == 2


def test_gradients_of_weights_that_somebody_else_steps_stay_until_they_are_cleared() -> None:
    parameter = nn.Parameter(torch.tensor([2.0]))
    shared = group(Unstepped(), parameter, 0, 3)
    parameter.sum().backward()
    shared.gradient_sum.collect()
    shared.step()
    assert parameter.grad is not None
    shared.gradient_sum.clear()
    assert parameter.grad is None


def test_an_older_version_is_there_while_it_is_stashed() -> None:
    parameter = nn.Parameter(torch.tensor([2.0]))
    stepped = masters([parameter])
    shared = group(Versions([parameter], stepped, torch.optim.SGD(stepped, lr=1.0)), parameter, 0, 3)
    parameter.sum().backward()
    shared.gradient_sum.collect()
    shared.stash(0)
    shared.step()
    for version, value in ((1, 1.0), (0, 2.0), (1, 1.0)):
        shared.weights.select(version)
        assert parameter.item() == value
    shared.drop(0)


def test_a_rehearsal_leaves_the_weights_alone() -> None:
    parameter = nn.Parameter(torch.tensor([2.0]))
    optimizer = Noting(parameter)
    shared = group(Weights(optimizer), parameter, 0, 3)
    shared.rehearse()
    shared.stash(0)
    shared.all_reduce()
    shared.wait_all_reduce()
    shared.step()
    shared.drop(0)
    assert (optimizer.seen, shared.updates, parameter.item()) == ([], 1, 2.0)


# A stage at either end of the pipeline, and one that hands on several tensors.


@pytest.mark.parametrize("recomputed", [set(), {0, 1, 2, 3}])
@pytest.mark.parametrize("traits", [CAN, CANNOT])
def test_the_first_stage_takes_batches_and_the_last_gives_losses(traits: Traits, recomputed: set[int]) -> None:
    """A stage that is both; the batches are dicts, and several of them a tuple."""

    class Reading(nn.Linear):
        def forward(self, batch: Any) -> torch.Tensor:
            return super().forward(batch["x"])

    torch.manual_seed(0)
    module = Reading(WIDTH, WIDTH)
    one = stage(module, 0, None, loss_output(), traits, recomputed)
    batches, targets = [{"x": x} for x in data(1)], data(3)
    one.forward(0, batches[0], targets[0])
    one.forward((1, 2, 3), tuple(batches[1:]), tuple(targets[1:]))
    for micro in range(MICROS):
        one.backward(micro)
    losses = [(module(b) - t).square().mean() for b, t in zip(batches, targets, strict=True)]
    mean = torch.stack(losses).mean()
    tally = one.take_loss(0)
    assert tally.total == pytest.approx(sum(loss.item() for loss in losses), rel=1e-6)
    assert tally.count == MICROS
    assert one.take_loss(0) == Tally()
    expected = torch.autograd.grad(mean, list(module.parameters()))
    assert_close([p.grad for p in module.parameters()], list(expected))
    for hands_on in (one.outputs, one.input_gradients):
        with pytest.raises(KeyError):
            hands_on(0)


def test_a_stage_in_the_middle_passes_the_loss_by() -> None:
    one = stage(linear())
    one.forward(0, rows(data(1), 0))
    assert one.take_loss(0) == Tally()


# Several tensors, of which some have no gradient.

PAIR = Boundary(
    tuple_of(3),
    ((ROWS, WIDTH), (ROWS,), (ROWS, WIDTH)),
    (torch.float32, torch.int64, torch.float32),
    (True, False, True),
    (True, False, False),
)


class Picking(nn.Module):
    """Uses the first tensor, and the third where ``uses``; hands all three on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.uses = False

    def forward(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        assert [t.requires_grad for t in tensors] == [True, False, True]
        x, index, spare = tensors
        y = self.linear(x) + (spare if self.uses else 0)
        return y, index, y * 2


def picking(recomputed: set[int] | None = None) -> Stage:
    torch.manual_seed(0)
    return stage(Picking(), 1, PAIR, SendOutput(1, PAIR), recomputed=recomputed)


def triple(seed: int) -> tuple[torch.Tensor, ...]:
    x, spare, *_ = data(seed)
    return x, torch.arange(ROWS), spare


@pytest.mark.parametrize("recomputed", [None, {0}])
def test_gradients_come_back_of_what_is_used_alone(recomputed: set[int] | None) -> None:
    one = picking(recomputed)
    one.module.linear.weight.data.copy_(torch.eye(WIDTH))  # type: ignore[union-attr,operator]
    one.forward(0, triple(1))
    outputs = one.outputs(0)
    assert [t.dtype for t in outputs] == [torch.float32, torch.int64, torch.float32]
    one.backward(0, (torch.full((ROWS, WIDTH), 3.0),))
    (gradient,) = one.input_gradients(0)
    assert torch.equal(gradient, torch.full((ROWS, WIDTH), 3.0))


def test_an_input_that_is_used_now_and_was_not_at_first_is_an_error_of_the_model() -> None:
    one = picking()
    one.module.uses = True  # type: ignore[assignment]
    one.forward(0, triple(1))
    with pytest.raises(BadModel, match="stage 1 uses a tensor that it receives and did not use for the example"):
        one.backward(0, (torch.ones(ROWS, WIDTH),))


def test_an_input_that_is_not_used_now_and_was_at_first_gets_a_gradient_of_zeros() -> None:
    class Skipping(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(x, requires_grad=True) * 1

    one = stage(Skipping())
    one.forward(0, rows(data(1), 0))
    one.backward(0, rows(data(2), 0))
    assert torch.equal(one.input_gradients(0)[0], torch.zeros(ROWS, WIDTH))


def test_a_stage_whose_results_need_no_gradient_has_nothing_to_run_back() -> None:
    flat = Boundary(ONE_TENSOR, ((ROWS, WIDTH),), (torch.float32,), (False,), (False,))
    one = stage(nn.Identity(), 1, flat, SendOutput(1, flat))
    one.forward(0, rows(data(1), 0))
    one.backward(0)
    assert one.input_gradients(0) == ()


# Auxiliary losses.


class Balanced(nn.Module):
    """Two auxiliary losses, of which the output does not depend on one, and its parameter on nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.spare = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.name = "balance"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        auxiliary_loss(self.name, y.square().mean())
        auxiliary_loss(self.name, y.mean())
        auxiliary_loss("spare", (self.spare * x).sum())
        return y


@pytest.mark.parametrize("recomputed", [set(), {0, 1, 2, 3}])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2)])
def test_auxiliary_losses_count_once_and_flow_back_with_the_share_of_the_loss(
    recomputed: set[int], sizes: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    module = Balanced()
    traits = Traits((), "has auxiliary losses", (), ("balance", "spare"))
    one = stage(module, output=SendOutput(1, ONE, 0.25), traits=traits, recomputed=recomputed)
    one.weigh_loss(0.25, 8.0)
    _, back = run(one, groups(*sizes), groups(1, 1, 1, 1))
    made = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    inputs = [x.clone().requires_grad_() for x in data(1)]
    outputs = [module.linear(x) for x in inputs]
    balance = sum((y.square().mean() + y.mean() for y in outputs), torch.zeros(()))
    spare = sum(((module.spare * x).sum() for x in inputs), torch.zeros(()))
    expected = torch.autograd.grad(
        (*outputs, balance, spare),
        (*module.parameters(), *inputs),
        (*data(2), torch.tensor(2.0), torch.tensor(2.0)),
    )
    assert_close([*made, *back], list(expected))
    tally = one.take_loss(0)
    assert (tally.total, tally.count) == (0.0, 0.0)
    assert tally.auxiliary == pytest.approx({"balance": balance.item(), "spare": spare.item()}, rel=1e-6)
    assert one.take_loss(0) == Tally()


def test_an_auxiliary_loss_that_comes_late_is_an_error_of_the_model() -> None:
    one = stage(Balanced(), traits=Traits((), "has auxiliary losses", (), ("spare",)))
    with pytest.raises(BadModel, match="stage 1 has the auxiliary loss balance for micro-batch 3, and had it not"):
        one.forward(3, rows(data(1), 3))


def test_auxiliary_losses_flow_back_where_nothing_else_does() -> None:
    """No later stage uses what the stage hands on."""
    flat = Boundary(ONE_TENSOR, ((ROWS, WIDTH),), (torch.float32,), (True,), (False,))
    module = Balanced()
    one = stage(module, output=SendOutput(1, flat, 0.25), traits=Traits((), "", (), ("balance", "spare")))
    one.forward(0, rows(data(1), 0))
    one.backward(0)
    assert one.input_gradients(0)[0].abs().sum() > 0
    assert_close([module.spare.grad], [data(1)[0].sum(0) * 0.25])
