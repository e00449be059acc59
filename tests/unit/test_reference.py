"""What one process computes for the check, against the formulas of the schemes."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from support.batches import Batches
from support.compare import LARGEST_TOLERANCE, TOLERANCES, Deviation, Verdict, tolerance
from support.model import Model
from support.reference import Reference, Training, differences, distance

RATE, UPDATES, ITEMS = 0.2, 6, 24


def item(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.tensor([1.0, number / ITEMS], dtype=torch.float64)
    return x, x.sum().sin().reshape(1)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


class Layer(nn.Module):
    """The first of two maps to two numbers, through a function that is not linear; the second to one."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        self.last = stage == stages - 1
        start = torch.arange(2 if self.last else 4, dtype=torch.float64).reshape(-1, 2) / 5 + 0.1
        self.weight = nn.Parameter(start)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t() if self.last else torch.tanh(x @ self.weight.t())


def model(optimizer: Any = lambda parameters: torch.optim.SGD(parameters, lr=RATE)) -> Model:
    return Model(Path("model.py"), Layer, loss, lambda: [item(i) for i in range(ITEMS)], optimizer)


def reference(micro_batches: int, copies: int = 1, **changed: Any) -> Reference:
    return Reference(model(**changed), 2, 1, micro_batches, 1, copies, 0, torch.device("cpu"))


def batch(micro_batches: int, update: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The micro-batches of an update, as the ranks load them."""
    batches = Batches(model().dataset(), 1, micro_batches, 1, 1, 0, 0)
    return [(batches.input(update, micro), batches.target(update, micro)) for micro in range(micro_batches)]


def gradient(weights: list[torch.Tensor], data: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Of the mean loss of some data, with respect to the weights of both stages."""
    first, second = (w.clone().requires_grad_() for w in weights)
    total = sum(loss(torch.tanh(x @ first.t()) @ second.t(), target) for x, target in data) / len(data)
    return list(torch.autograd.grad(total, [first, second]))


def start() -> list[torch.Tensor]:
    return [Layer(s, 2).weight.detach() for s in range(2)]


def trained(one: Reference, updates: int, period: int, reads: Any) -> Training:
    """After some updates, each with the reference's own gradients."""
    training = one.begin(period, reads)
    for _ in range(updates):
        training.step(training.gradients())
    return training


def newest(training: Training) -> list[torch.Tensor]:
    return [weight for history in training.histories for weight in history.newest]


def assert_weights(found: Training, expected: list[torch.Tensor]) -> None:
    for mine, theirs in zip(newest(found), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13)


def test_two_buffered_weights_step_with_the_gradient_on_the_weights_before() -> None:
    """w(t+1) = w(t) - rate * gradient(w(t-1)), and w(1) = w(0) - rate * gradient(w(0))."""
    history = [start()]
    for update in range(UPDATES):
        slope = gradient(history[max(0, update - 1)], batch(3, update))
        history.append([w - RATE * g for w, g in zip(history[-1], slope, strict=True)])
    assert_weights(trained(reference(3), UPDATES, 3, (((-1, 3),), ((-1, 3),))), history[-1])


def test_every_stage_steps_with_the_gradient_on_its_own_version() -> None:
    """One micro-batch an update; the first of two stages is an update behind the last."""
    history = [start()]
    for update in range(UPDATES):
        late, new = history[max(0, update - 1)], history[-1]
        slope = gradient([late[0], new[1]], batch(1, update))
        history.append([w - RATE * g for w, g in zip(new, slope, strict=True)])
    assert_weights(trained(reference(1), UPDATES, 1, (((-1, 1),), ((0, 1),))), history[-1])


def test_a_period_of_two_updates_reads_as_twice_a_period_of_one() -> None:
    short = trained(reference(2), UPDATES, 2, (((-1, 1), (0, 1)), ((0, 2),)))
    long = trained(reference(2), UPDATES, 4, (((-1, 1), (0, 2), (1, 1)), ((0, 2), (1, 2))))
    assert short.losses == long.losses
    assert_weights(long, newest(short))


def test_versions_without_delay_are_training_as_usual() -> None:
    weights, losses = start(), []
    for update in range(UPDATES):
        data = batch(4, update)
        losses.append(float(sum(loss(torch.tanh(x @ weights[0].t()) @ weights[1].t(), t) for x, t in data) / 4))
        weights = [w - RATE * g for w, g in zip(weights, gradient(weights, data), strict=True)]
    found = trained(reference(4), UPDATES, 4, (((0, 4),), ((0, 4),)))
    assert found.losses == pytest.approx(losses, rel=1e-13)
    assert_weights(found, weights)


def test_copies_average_over_as_many_times_the_data() -> None:
    """Two copies of two micro-batches are one of four."""
    two = trained(reference(2, copies=2), 3, 2, (((-1, 2),), ((-1, 2),)))
    one = trained(reference(4), 3, 4, (((-1, 4),), ((-1, 4),)))
    assert two.losses == pytest.approx(one.losses, rel=1e-13)
    assert_weights(two, newest(one))


def test_a_step_takes_the_gradients_that_it_is_given() -> None:
    training = reference(2).begin(2, (((0, 2),), ((0, 2),)))
    for _ in range(2):
        training.step([[torch.ones_like(w)] for w in start()])
    assert_weights(training, [w - 2 * RATE for w in start()])
    assert [history.largest_step for history in training.histories] == [pytest.approx(RATE)] * 2


def test_weights_that_a_forward_changes_are_changed_in_the_version_that_it_reads() -> None:
    """As by an embedding with a largest norm: the next version begins with what the forward has left."""

    class Halving(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data.mul_(0.5)
            return super().forward(x)

    changed = Model(Path("model.py"), Halving, loss, model().dataset, model().optimizer)
    training = Reference(changed, 2, 1, 1, 1, 1, 0, torch.device("cpu")).begin(1, (((0, 1),), ((0, 1),)))
    training.gradients()
    training.step([[torch.zeros_like(w)] for w in start()])
    assert_weights(training, [w / 2 for w in start()])


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def test_a_batch_keeps_its_structure_on_the_way_to_the_device() -> None:
    item = Pair(torch.ones(2), torch.zeros(2)), {"a": [torch.ones(1)]}
    inputs, targets = reference(1).batch([item], [(0, 0)])
    assert isinstance(inputs, Pair)
    assert inputs.left.shape == (1, 2)
    assert targets["a"][0].shape == (1, 1)


# How far is too far.


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_tolerance_grows_with_the_sums_and_never_lets_a_missing_half_or_a_wrong_sign_pass(dtype: torch.dtype) -> None:
    bounds = [tolerance(dtype, summands) for summands in (1, 16, 256, 2**30)]
    assert bounds == sorted(bounds)
    assert bounds[0] == TOLERANCES[dtype]
    assert bounds[-1] <= LARGEST_TOLERANCE <= 0.5
    if dtype == torch.float64:
        assert bounds[:3] == [1e-12] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("summands", [2, 8, 64])
def test_sums_in_another_order_stay_within_the_tolerance(dtype: torch.dtype, summands: int) -> None:
    """In halves that are added at last, as by two replicas, against one after another."""
    torch.manual_seed(summands)
    parts = torch.randn(summands, 10_000).to(dtype)

    def total(some: torch.Tensor) -> torch.Tensor:
        added = torch.zeros_like(some[0])
        for one in some:
            added += one
        return added

    first, second = parts[::2], parts[1::2]
    apart, together = total(first) + total(second), total(parts)
    assert distance([apart], [together]) / float(together.abs().max()) <= tolerance(dtype, summands)


def test_only_what_roundings_do_not_explain_counts() -> None:
    wanted = torch.tensor([1.0, 0.0, -4.0], dtype=torch.float32)
    eps = torch.finfo(torch.float32).eps
    found = wanted + torch.tensor([eps, 0.0, 4 * eps])
    assert list(differences([found], [wanted])) == [4 * eps]
    assert list(differences([found], [wanted], roundings=1)) == [0.0]
    assert list(differences([found + 1e-3], [wanted], roundings=1)) == [pytest.approx(1e-3, rel=1e-3)]


def test_a_gradient_on_one_side_alone_and_one_that_is_no_number_are_as_far_as_can_be() -> None:
    none, number = None, torch.ones(2)
    assert list(differences([none, none, number], [none, number, none])) == [0.0, float("inf"), float("inf")]
    assert distance([number * float("nan")], [number]) == float("inf")
    assert distance([number * float("inf")], [number * float("inf")]) == float("inf")


def verdict(**changed: Any) -> Verdict:
    values: dict[str, Any] = {
        "updates": 3,
        "dtype": "float64",
        "gradients": [Deviation(0, "gradients of update 1", 0.0, "weight")],
        "gradient_tolerance": 1e-12,
        "weights": [Deviation(0, "weights after 3 updates", 0.0, "weight")],
        "weight_tolerance": 1e-9,
        "losses": [1.0] * 3,
        "reference_losses": [1.0] * 3,
        "loss_error": 0.0,
        "unequal": [],
    }
    return Verdict(**values | changed)


def test_a_verdict_names_of_every_stage_that_is_off_the_first_update_and_the_parameter() -> None:
    assert verdict().passed
    wrong = verdict(
        gradients=[
            Deviation(0, "gradients of update 1", 1e-13, "weight"),
            Deviation(1, "gradients of update 2", 2.0, "bias"),
            Deviation(1, "gradients of update 3", 3.0, "weight"),
        ],
        weights=[Deviation(2, "weights after 3 updates", 1e-8, "weight"), Deviation(1, "weights after", 1.0, "bias")],
    )
    assert not wrong.passed
    assert str(wrong).splitlines()[-2:] == [
        "  stage 1: gradients of update 2 differ by 2.00e+00, most in bias",
        "  stage 2: weights after 3 updates differ by 1.00e-08, most in weight",
    ]
    assert "a stage = 3.00e+00, at most 1e-12 in float64" in str(wrong)


@pytest.mark.parametrize(
    "fault",
    [
        {"loss_error": 1e-11},
        {"loss_error": float("inf"), "reference_losses": [1.0, 1.0, float("nan")]},
        {"unequal": ["replicas of stage 1: NOT bitwise equal; ranks that agree: 0 | 3"]},
        {"weights": [Deviation(0, "weights after 3 updates", float("inf"), "weight")]},
    ],
)
def test_each_part_of_a_verdict_can_fail_it(fault: dict[str, Any]) -> None:
    failed = verdict(**fault)
    assert not failed.passed
    assert str(failed).startswith("check: FAILED\n")
    assert all(line in str(failed) for line in failed.unequal)
    assert ("one process comes to no finite loss either" in str(failed)) == ("reference_losses" in fault)


def test_micro_batches_counted_from_an_earlier_update_are_the_same() -> None:
    """Over several epochs: those of all updates in a row, for a copy of three, cut in halves."""
    batches = Batches(model().dataset(), 2, 2, 2, 3, 1, 7)
    for micro in range(20):
        update, number = divmod(micro, 4)
        assert torch.equal(batches.input(0, micro), batches.input(update, number))
        assert torch.equal(batches.target(1, micro), batches.target(update + 1, number))
