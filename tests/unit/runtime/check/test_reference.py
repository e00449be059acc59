"""Results of one process for the check, against the formulas of the schemes."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from chimera_runtime.check.reference import Reference, Training, differences, distance, mini_batches, seed_of
from chimera_runtime.data.micro_batch_source import Batches
from tests.unit.runtime.datasets import Drawing, Flowing
from tests.unit.runtime.models import CPU, RATE, Layer, loss, model, reference

UPDATES = 6


def batch(micro_batches: int, update: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The micro-batches of an update, as the ranks load them."""
    batches = Batches(model().dataset(), 1, micro_batches, 1, 1, 0, 0)
    return [(batches.input(update, micro), batches.target(update, micro)) for micro in range(micro_batches)]


def gradient(weights: list[torch.Tensor], data: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Gradients of the mean loss of some data, with respect to the weights of both stages."""
    first, second = (w.clone().requires_grad_() for w in weights)
    total = sum(loss(torch.tanh(x @ first.t()) @ second.t(), target) for x, target in data) / len(data)
    return list(torch.autograd.grad(total, [first, second]))


def start() -> list[torch.Tensor]:
    return [Layer(s, 2).weight.detach() for s in range(2)]


def trained(one: Reference, updates: int, period: int, reads: Any) -> Training:
    """Weights after some updates, each with the reference's own gradients."""
    training = Training(one, period, reads)
    for _ in range(updates):
        training.step(training.gradients())
    return training


def newest(training: Training) -> list[torch.Tensor]:
    return [weight for history in training.histories.values() for weight in history.newest]


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
    training = Training(reference(2), 2, (((0, 2),), ((0, 2),)))
    for _ in range(2):
        training.step({(s,): [torch.ones_like(w)] for s, w in enumerate(start())})
    assert_weights(training, [w - 2 * RATE for w in start()])
    assert [history.largest_step for history in training.histories.values()] == [pytest.approx(RATE)] * 2


def test_weights_that_a_forward_changes_are_changed_in_the_version_that_it_reads() -> None:
    """Stands for an embedding with a largest norm: the next version begins with what the forward has left."""

    class Halving(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data.mul_(0.5)
            return super().forward(x)

    training = Training(reference(1, build=Halving), 1, (((0, 1),), ((0, 1),)))
    training.gradients()
    training.step({(s,): [torch.zeros_like(w)] for s, w in enumerate(start())})
    assert_weights(training, [w / 2 for w in start()])


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


def test_a_stage_is_given_the_keyword_arguments_that_it_can_be_called_with() -> None:
    class Scaled(Layer):
        def forward(self, x: torch.Tensor, scale: Any = None) -> torch.Tensor:  # type: ignore[override]
            assert scale is not None
            return super().forward(x * scale[:, None])

    def items(scale: float) -> list[Any]:
        return [
            (x * (1 if scale == 1 else scale), y, {"scale": torch.tensor(2.0 / scale)}) for x, y in model().dataset()
        ]

    def build(stage: int, stages: int) -> Layer:
        return Layer(stage, stages) if stage else Scaled(stage, stages)

    losses = [
        trained(reference(2, build=build, items=lambda s=s: items(s)), 2, 2, (((0, 2),),) * 2).losses  # type: ignore[misc]
        for s in (1.0, 2.0)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-13)


def test_sums_are_divided_by_all_that_counts_and_where_nothing_counts_there_is_nothing_to_learn() -> None:
    def weighed(factor: float) -> Any:
        def judge(output: torch.Tensor, target: torch.Tensor) -> Any:
            count = (target > 0.98).sum() * factor
            return (loss(output, target) * count).sum(), count

        return judge

    training = Training(reference(4, judge=weighed(1.0)), 4, (((0, 4),),) * 2)
    data = batch(4, 0)
    counted = [(x, t) for x, t in data if t > 0.98]
    assert 0 < len(counted) < 4, "or the test says nothing"
    for mine, theirs in zip(training.gradients().values(), gradient(start(), counted), strict=True):
        torch.testing.assert_close(mine[0], theirs, rtol=1e-13, atol=1e-15)
    nothing = Training(reference(4, judge=weighed(0.0)), 4, (((0, 4),),) * 2)
    assert all(not g.any() for gradients in nothing.gradients().values() for g in gradients if g is not None)
    assert nothing.losses[0] != nothing.losses[0]


# The items of the reference are those of the ranks, which load them by other code.


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Turning:
    """A sampler that asks for the epoch, and draws."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(26).roll(self.epoch).tolist())


def collate(items: list[Any]) -> Any:
    """Draws, as one that masks words does."""
    inputs = torch.stack([x for x, _ in items])
    return inputs, torch.stack([y for _, y in items]) + torch.rand(len(items), 1), {"scale": inputs * 2}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    "changed", [{}, {"collate": collate}, {"dataset": Flowing}, {"sampler": lambda _data: Turning()}]
)
def test_the_ranks_see_the_same_in_each_epoch(parts: int, changed: dict[str, Any]) -> None:
    """26 items in mini-batches of 2 * 2 * 3: seven of them are four epochs."""
    used = replace(model(), **{"dataset": Drawing} | changed)
    reference = mini_batches(used, (2, 6, parts), 5, CPU)
    sampler = used.sampler and used.sampler(None)
    copies = [Batches(used.dataset(), 2, 2, parts, 3, copy, 5, used.collate, sampler) for copy in range(3)]
    for update in range(7):
        shown = [
            (batches.input(update, micro), batches.target(update, micro), batches.keywords(update, micro))
            for batches in copies
            for micro in range(2 * parts)
        ]
        for (x, y, keywords), (inputs, target, named) in zip(shown, next(reference), strict=True):
            assert torch.equal(x, inputs)
            assert torch.equal(y, target)
            assert keywords.keys() == named.keys()
            assert all(torch.equal(keywords[name], named[name]) for name in keywords)


def test_a_batch_keeps_its_structure_on_the_way_to_the_device() -> None:
    item = Pair(torch.ones(2), torch.zeros(2)), {"a": [torch.ones(1)]}
    (batch,) = next(mini_batches(model(items=lambda: [item]), (1, 1, 1), 0, CPU))
    inputs, targets, keywords = batch
    assert keywords == {}
    assert isinstance(inputs, Pair)
    assert inputs.left.shape == (1, 2)
    assert targets["a"][0].shape == (1, 1)


def test_a_seed_is_made_of_all_parts() -> None:
    """The value is that of docs/explanation/runtime.md, by another implementation: BLAKE2b of "item/1/2/3"."""
    assert seed_of("item", 1, 2, 3) != seed_of("item", 1, 23)
    assert 0 <= seed_of("item", 1, 2, 3) < 2**63
