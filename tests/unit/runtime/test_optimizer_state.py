"""Optimizer state by the names of parameters: read from one optimizer and given to another with other groups."""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime.errors import BadCheckpoint, Misuse
from chimera_runtime.optimizer_state import by_name, restore

NAMES = ("first", "second", "third")

Optimizers = Callable[[Any], torch.optim.Optimizer]

KINDS: dict[str, Optimizers] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.05),
    "Adam with amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.05, amsgrad=True),
    "Adam with a tensor": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.05), foreach=False),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "SGD without momentum": lambda groups: torch.optim.SGD(groups, lr=0.05),
}


def parameters() -> dict[str, nn.Parameter]:
    return {
        name: nn.Parameter(torch.linspace(-1, 1, 4 + place, dtype=torch.float64)) for place, name in enumerate(NAMES)
    }


def names(of: dict[str, nn.Parameter]) -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in of.items()}


def grouped(of: dict[str, nn.Parameter], *groups: Sequence[str], **settings: Any) -> list[dict[str, Any]]:
    return [{"params": [of[name] for name in group], **settings} for group in groups]


def train(of: dict[str, nn.Parameter], optimizers: Iterable[torch.optim.Optimizer], updates: range) -> None:
    for update in updates:
        for parameter in of.values():
            parameter.grad = torch.sin(parameter.detach() + update)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("split", [False, True], ids=["one optimizer", "several"])
def test_training_goes_on_bitwise_with_groups_in_another_order_and_split(kind: str, before: int, split: bool) -> None:
    """Also from before the first step, when there is no state yet."""
    make = KINDS[kind]
    undisturbed = parameters()
    optimizer = make(grouped(undisturbed, ["first", "second", "third"]))
    train(undisturbed, [optimizer], range(before))
    saved = deepcopy(by_name([optimizer], names(undisturbed)))
    assert list(saved.groups) == [*NAMES]

    resumed = parameters()
    for name, parameter in resumed.items():
        parameter.data.copy_(undisturbed[name].data)
    groups = [*grouped(resumed, ["third"]), *grouped(resumed, ["second", "first"])]
    others = [make([group]) for group in groups] if split else [make(groups)]
    restore(others, names(resumed), saved)
    train(undisturbed, [optimizer], range(before, before + 3))
    train(resumed, others, range(before, before + 3))
    for name, parameter in resumed.items():
        assert torch.equal(parameter, undisturbed[name]), name
        assert not torch.equal(parameter, parameters()[name])


def test_settings_are_those_that_were_saved_and_parameters_keep_them_group_by_group() -> None:
    saving, resuming = parameters(), parameters()
    optimizer = torch.optim.AdamW(
        [*grouped(saving, ["first"], lr=0.1), *grouped(saving, ["second", "third"], lr=0.2, weight_decay=0.3)]
    )
    optimizer.param_groups[0]["lr"] = 0.07
    other = torch.optim.AdamW([*grouped(resuming, ["third"]), *grouped(resuming, ["first"]), *grouped(resuming, [])])
    restore([other], names(resuming), by_name([optimizer], names(saving)))
    assert [group["lr"] for group in other.param_groups] == [0.2, 0.07, 0.001]
    assert other.param_groups[0]["weight_decay"] == 0.3


def test_parameters_that_were_in_several_groups_of_the_same_settings_may_be_in_one() -> None:
    """However the settings were written: as the optimizer's default, or in the group."""
    saving, resuming = parameters(), parameters()
    groups = [*grouped(saving, ["first"], weight_decay=0.1), *grouped(saving, ["second", "third"], lr=0.2)]
    optimizer = torch.optim.AdamW(groups, lr=0.2, weight_decay=0.1)
    other = torch.optim.AdamW(resuming.values())
    restore([other], names(resuming), by_name([optimizer], names(saving)))
    assert other.param_groups[0]["lr"] == 0.2


def test_parameters_that_had_different_settings_are_not_put_into_one_group() -> None:
    saving, resuming = parameters(), parameters()
    groups = [*grouped(saving, ["first"], lr=0.1), *grouped(saving, ["second", "third"], lr=0.2)]
    saved = by_name([torch.optim.AdamW(groups)], names(saving))
    with pytest.raises(BadCheckpoint, match=r"first and other parameters are in one group .* make the groups that"):
        restore([torch.optim.AdamW(resuming.values())], names(resuming), saved)


def test_an_optimizer_that_knows_names_keeps_its_own() -> None:
    saving, resuming = parameters(), parameters()
    optimizer = torch.optim.SGD([*saving.items()], lr=0.3)
    other = torch.optim.SGD([*reversed(resuming.items())], lr=0.1)
    restore([other], names(resuming), by_name([optimizer], names(saving)))
    assert (other.param_groups[0]["lr"], other.param_groups[0]["param_names"]) == (0.3, [*reversed(NAMES)])


def test_a_parameter_that_the_pipeline_does_not_have_is_refused() -> None:
    of = parameters()
    optimizer = torch.optim.SGD([*of.values(), nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(Misuse, match=r"a parameter that the pipeline does not have: make it of pipe.named_parameters"):
        by_name([optimizer], names(of))
