"""Optimizers that step the parameters of a rank: found by their steps, compared by their settings."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from chimera_runtime.optimizer.optimizer_facts import OptimizerFacts
from chimera_runtime.program.rank_facts import Group
from chimera_runtime.ranks.agreement import Fact, settings_of

STAGE: Group = (0,)


class Rank:
    """A stage with a matrix and a vector, which other ranks hold as well, and one that none does."""

    def __init__(self) -> None:
        self.parameters = {
            STAGE: [nn.Parameter(torch.ones(s)) for s in ((2, 2), (2,))],
            (1,): [nn.Parameter(torch.ones(3))],
        }
        self.all = [p for of_group in self.parameters.values() for p in of_group]
        names = {p: f"p{i}" for i, p in enumerate(self.all)}
        self.facts = OptimizerFacts(self.parameters, [STAGE], names)

    def stepped(self, *optimizers: torch.optim.Optimizer) -> Fact:
        """Facts about the steps of the stage, after a step of each."""
        for optimizer in optimizers:
            optimizer.step()
        return self.facts.take()[settings_of(STAGE)]


def two(
    make: Callable[[Rank], Any], other: Callable[[Rank], Any]
) -> tuple[tuple[Fact, Fact], tuple[dict[str, str], dict[str, str]]]:
    ranks = Rank(), Rank()
    optimizers = [make(ranks[0]), other(ranks[1])]
    facts = [
        rank.stepped(*(made if isinstance(made, list) else [made]))
        for rank, made in zip(ranks, optimizers, strict=True)
    ]
    return (facts[0], facts[1]), (facts[0][1](), facts[1][1]())


def adam(**settings: Any) -> Callable[[Rank], torch.optim.Optimizer]:
    return lambda rank: torch.optim.AdamW(rank.all, **settings)


ALIKE: dict[str, Callable[[Rank], Any]] = {
    "an optimizer of the stage alone": lambda rank: torch.optim.AdamW(rank.parameters[STAGE]),
    "in another order, with other neighbours": lambda rank: torch.optim.AdamW(rank.all[::-1]),
    "two optimizers, of which one is of no interest": lambda rank: [
        torch.optim.SGD(rank.parameters[1,]),
        torch.optim.AdamW(rank.parameters[STAGE]),
    ],
    "a learning rate that is a tensor": lambda rank: torch.optim.AdamW(
        rank.all, lr=torch.tensor(1e-3, dtype=torch.float64)
    ),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_steps_alike_has_the_same_digest(name: str) -> None:
    (first, other), _ = two(adam(), ALIKE[name])
    assert first[0] == other[0]


def by_shape(rank: Rank) -> torch.optim.Optimizer:
    first, *others = rank.all
    return torch.optim.AdamW([{"params": [first]}, {"params": others, "weight_decay": 0.0}])


DIFFERENT: dict[str, tuple[Callable[[Rank], Any], str]] = {
    "learning rate": (adam(lr=0.5), "lr"),
    "momentum": (adam(betas=(0.8, 0.9)), "betas"),
    "weight decay": (adam(weight_decay=0.3), "weight_decay"),
    "a tensor": (adam(lr=torch.tensor(0.5)), "lr"),
    "another class": (lambda rank: torch.optim.Adam(rank.all, weight_decay=0.01), "optimizer"),
    "other groups": (by_shape, "division into groups"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_steps_otherwise_has_another_digest_and_says_why(name: str) -> None:
    make, setting = DIFFERENT[name]
    (first, other), (text, theirs) = two(adam(), make)
    assert first[0] != other[0]
    assert text[setting] != theirs.get(setting)


def test_settings_are_those_of_now_and_steps_are_counted() -> None:
    rank = Rank()
    optimizer = torch.optim.SGD(rank.all, lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    stepped = rank.stepped(optimizer)
    assert rank.stepped(optimizer)[0] == stepped[0]
    assert rank.stepped()[0] != stepped[0], "there was no step"
    scheduler.step()
    digest, text = rank.stepped(optimizer)
    assert (digest != stepped[0], text()["lr"], stepped[1]()["lr"]) == (True, "0.5", "1.0")


def test_groups_that_are_added_or_loaded_are_seen() -> None:
    rank, other = Rank(), Rank()
    whole = torch.optim.SGD(rank.all, lr=1.0)
    grown = torch.optim.SGD(other.all[:1], lr=1.0)
    other.stepped(grown)
    grown.add_param_group({"params": other.all[1:2]})
    assert rank.stepped(whole)[0] != other.stepped(grown)[0], "in two groups"
    whole.load_state_dict(torch.optim.SGD(Rank().all, lr=2.0).state_dict())
    assert rank.stepped(whole)[1]()["lr"] == "2.0"


def test_tensors_that_change_in_place_are_read_again() -> None:
    rank = Rank()
    rate = torch.tensor(0.5)
    optimizer = torch.optim.AdamW(rank.all, lr=rate)
    before = rank.stepped(optimizer)
    rate.fill_(0.25)
    assert rank.stepped(optimizer)[0] != before[0]


def test_steps_are_counted_of_optimizers_of_this_rank_alone() -> None:
    rank = Rank()
    torch.optim.SGD(Rank().all).step()
    assert rank.facts.steps == 0
    optimizers = [torch.optim.SGD(parameters) for parameters in rank.parameters.values()]
    for optimizer in (*optimizers, optimizers[1]):
        optimizer.step()
    assert rank.facts.steps == 2, "of the one that has stepped most often"
    assert rank.facts.take().keys() == {settings_of(STAGE)}
    assert rank.facts.steps == 0


def test_optimizers_that_are_gone_are_forgotten() -> None:
    rank = Rank()
    rank.stepped(torch.optim.SGD(rank.all, lr=1.0))
    gc.collect()
    assert rank.facts.take() == {}
    rank.stepped(torch.optim.SGD(rank.all, lr=2.0))


def test_nothing_is_watched_once_it_is_closed_or_gone() -> None:
    before = len(_global_optimizer_post_hooks)
    rank, other = Rank(), Rank()
    assert len(_global_optimizer_post_hooks) == before + 2
    rank.facts.close()
    del other
    gc.collect()
    assert len(_global_optimizer_post_hooks) == before
