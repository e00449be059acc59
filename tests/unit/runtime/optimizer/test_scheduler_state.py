"""The state of schedulers by groups: read from some optimizers and given to others with other groups."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from chimera_runtime.optimizer.optimizer_state import (
    by_name,
    for_groups_of,
    groups_of,
    refusal,
    restore,
    restore_schedulers,
)

NAMES = ("first", "second", "third")

Make = Callable[[torch.optim.Optimizer], Any]

KINDS: dict[str, Make] = {
    "cosine": lambda of: lr_scheduler.CosineAnnealingLR(of, 9),
    "lambda": lambda of: lr_scheduler.LambdaLR(
        of, [lambda n, k=k: 0.9 ** (n + k) for k in range(len(of.param_groups))]
    ),
    "sequence": lambda of: lr_scheduler.SequentialLR(
        of, [lr_scheduler.LinearLR(of, 0.1, total_iters=2), lr_scheduler.ExponentialLR(of, 0.9)], [2]
    ),
    "steps": lambda of: lr_scheduler.MultiStepLR(of, [2, 4, 5]),
    "cycle": lambda of: lr_scheduler.CyclicLR(of, [0.01] * len(of.param_groups), 0.2, step_size_up=3),
    "chain": lambda of: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(of, 0.5, 3), lr_scheduler.ExponentialLR(of, 0.9)], of
    ),
}


class Run:
    """Parameters, an optimizer of each list of groups, and a scheduler of each."""

    def __init__(self, makes: Sequence[Make], *optimizers: Sequence[Sequence[str]]) -> None:
        self.of = {name: nn.Parameter(torch.ones(2, dtype=torch.float64)) for name in NAMES}
        self.names: dict[torch.Tensor, str] = {parameter: name for name, parameter in self.of.items()}
        rates = dict(zip(NAMES, (0.1, 0.1, 0.2), strict=True))
        self.optimizers = [
            torch.optim.SGD(
                [{"params": [self.of[name] for name in group], "lr": rates[group[0]]} for group in groups], momentum=0.9
            )
            for groups in optimizers
        ]
        self.schedulers = [make(optimizer) for make, optimizer in zip(makes, self.optimizers, strict=True)]

    def rates(self, updates: int) -> list[dict[str, float]]:
        rates = []
        for _ in range(updates):
            for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
                optimizer.step()
                scheduler.step()
            groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
            rates.append({self.names[p]: group["lr"] for group in groups for p in group["params"]})
        return rates

    def take(self, other: "Run") -> str | None:
        saved = by_name(other.optimizers, other.names, other.schedulers)
        complaint = refusal(self.optimizers, self.names, self.schedulers, saved.groups)
        if complaint is None:
            restore(self.optimizers, self.names, saved)
            states = {name: group.schedulers or [] for name, group in saved.groups.items()}
            restore_schedulers(self.schedulers, self.names, states)
        return complaint


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [1, 3])
def test_schedulers_go_on_with_the_same_groups_in_another_order(kind: str, before: int) -> None:
    groups = [["first"], ["second"], ["third"]]
    saving, undisturbed, resumed = (Run([KINDS[kind]], groups) for _ in range(3))
    saving.rates(before)
    undisturbed.rates(before)
    assert resumed.take(saving) is None
    assert resumed.schedulers[0].get_last_lr() == undisturbed.schedulers[0].get_last_lr()
    assert resumed.rates(5) == undisturbed.rates(5)


@pytest.mark.parametrize("kind", ["cosine", "sequence", "steps", "chain"])
def test_schedulers_go_on_with_other_groups_and_several_optimizers(kind: str) -> None:
    """One optimizer of all parameters becomes two, and two become one, as where stages move to other ranks."""
    make = KINDS[kind]
    for saved, resuming in [
        (([["first", "second"], ["third"]],), ([["second"]], [["third"], ["first"]])),
        (([["second"]], [["third"], ["first"]]), ([["first", "second"], ["third"]],)),
    ]:
        saving, undisturbed = (Run([make] * len(saved), *saved) for _ in range(2))
        resumed = Run([make] * len(resuming), *resuming)
        saving.rates(3)
        undisturbed.rates(3)
        assert resumed.take(saving) is None
        assert resumed.rates(4) == undisturbed.rates(4)


def test_each_of_two_schedulers_gets_its_own_state() -> None:
    """Schedulers may be of any class, in any order."""
    makes = [KINDS["cosine"], lambda of: lr_scheduler.CosineAnnealingLR(of, 40, eta_min=0.05)]
    saving, undisturbed = (Run(makes, [["first", "second"]], [["third"]]) for _ in range(2))
    turned = Run(makes[::-1], [["third"]], [["first", "second"]])
    saving.rates(4)
    undisturbed.rates(4)
    assert turned.take(saving) is None
    assert turned.rates(4) == undisturbed.rates(4)


def test_schedulers_at_different_points_are_not_made_one_and_other_kinds_are_refused() -> None:
    saving = Run([KINDS["cosine"]] * 2, [["first"]], [["second"], ["third"]])
    saving.optimizers[0].step()
    saving.schedulers[0].step()
    one = Run([KINDS["cosine"]], [["first"], ["second"], ["third"]])
    assert str(one.take(saving)).startswith(
        "one optimizer steps first and second, and when they were saved their schedulers were at different points"
    )
    other = Run([KINDS["steps"]] * 2, [["first"]], [["second"], ["third"]])
    assert other.take(saving) == (
        "the optimizer of first had the scheduler CosineAnnealingLR, and here it has the scheduler MultiStepLR: give "
        "schedulers= of the same classes, in the same order"
    )
    none = Run([KINDS["cosine"]] * 2, [["first"]], [["second"], ["third"]])
    none.schedulers = none.schedulers[:1]
    assert str(none.take(saving)).startswith(
        "the optimizer of second had the scheduler CosineAnnealingLR, and here it has no scheduler: give schedulers="
    )


def test_the_groups_of_a_wrapped_scheduler_are_known_and_of_other_objects_are_not() -> None:
    class Wrapper:
        def __init__(self, scheduler: Any) -> None:
            self.scheduler = scheduler

    run = Run([KINDS["cosine"]], [["first"], ["third"]])
    groups = run.optimizers[0].param_groups
    assert groups_of(run.schedulers[0], run.names) == groups_of(Wrapper(run.schedulers[0]), run.names) == groups
    assert groups_of(run.schedulers[0], {}) is None
    assert groups_of(object(), run.names) is None


def test_a_scheduler_that_schedules_nothing_here_stays_as_it_is() -> None:
    run = Run([KINDS["cosine"]], [["first"]])
    run.optimizers[0].param_groups[0]["params"].clear()
    run.schedulers[0].last_epoch = 7
    restore_schedulers(run.schedulers, run.names, {})
    assert run.schedulers[0].last_epoch == 7


def test_a_state_of_format_1_gets_the_rates_of_the_groups_that_there_are() -> None:
    saving, resumed = Run([KINDS["sequence"]], [["first"]]), Run([KINDS["sequence"]], [["first"], ["third"]])
    saving.rates(3)
    undisturbed = Run([KINDS["sequence"]], [["first"], ["third"]])
    undisturbed.rates(3)
    for group, other in zip(resumed.optimizers[0].param_groups, undisturbed.optimizers[0].param_groups, strict=True):
        group["lr"], group["initial_lr"] = other["lr"], other["initial_lr"]
    (scheduler,) = resumed.schedulers
    scheduler.load_state_dict(for_groups_of(scheduler, saving.schedulers[0].state_dict()))
    assert resumed.rates(4) == undisturbed.rates(4)
