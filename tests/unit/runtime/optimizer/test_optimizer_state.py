"""Optimizer state by the names of parameters: read from one optimizer and given to another with other groups."""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime.errors import Misuse
from chimera_runtime.optimizer.optimizer_state import by_name, group_of, plain, refusal, restore

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
    """Holds also before the first step, when there is no state yet."""
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
    assert refusal([torch.optim.AdamW(resuming.values())], names(resuming), [], saved.groups) == (
        "first and second are in one group of the optimizer, and were saved with different settings (lr: 0.1 and 0.2): "
        "make the groups that there were"
    )


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


class Counting(torch.optim.SGD):
    """Keeps numbers of its own: in its ``state_dict``, in a group, and in ``state`` beside those of parameters."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.taken, self.param_groups[0]["largest"] = 0, [0.0, "none"]
        self.state["all"] = {"norm": torch.zeros(1)}

    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        self.param_groups[0]["largest"] = [float(self.taken), "some"]
        self.state["all"]["norm"] += self.taken
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["history"] = [(self.taken, {"text": parameter.grad.sum()})]
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "taken": self.taken}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.taken = state_dict["taken"]
        super().load_state_dict(state_dict)


class Renamed(torch.optim.SGD):
    """Another name of torch's."""


def test_what_an_optimizer_keeps_beside_settings_and_state_of_parameters_comes_back() -> None:
    saving, resuming = parameters(), parameters()
    optimizer, other = (Counting(of.values(), lr=0.1, momentum=0.9) for of in (saving, resuming))
    train(saving, [optimizer], range(3))
    saved = deepcopy(by_name([optimizer], names(saving)))
    assert refusal([other], names(resuming), [], saved.groups) is None
    restore([other], names(resuming), saved)
    assert other.taken == 3
    assert other.state["all"]["norm"] == optimizer.state["all"]["norm"] == 6
    assert other.param_groups[0]["largest"] == [3.0, "some"]
    for parameter, theirs in zip(resuming.values(), saving.values(), strict=True):
        assert other.state[parameter]["history"] == optimizer.state[theirs]["history"]


def test_optimizers_that_kept_different_entries_are_not_made_one() -> None:
    saving, resuming = parameters(), parameters()
    first, second = Counting([saving["first"]], lr=0.1), Counting([saving["second"], saving["third"]], lr=0.1)
    train(saving, [first], range(1))
    saved = by_name([first, second], names(saving)).groups
    complaint = refusal(
        [Counting(grouped(resuming, ["first"], ["second", "third"]), lr=0.1)], names(resuming), [], saved
    )
    assert complaint is not None
    assert complaint.startswith(
        "one optimizer steps first and second, and when they were saved its state, taken differed"
    )


@pytest.mark.parametrize(
    ("saving", "resuming", "words"),
    [
        (torch.optim.AdamW, torch.optim.SGD, "first was stepped by AdamW and is stepped by SGD here"),
        (torch.optim.AdamW, torch.optim.Adam, "first was stepped by AdamW and is stepped by Adam here"),
        (torch.optim.SGD, Renamed, None),
        (Renamed, torch.optim.SGD, None),
        (Renamed, Counting, None),
        (Renamed, torch.optim.Adam, "first was stepped by Renamed (SGD) and is stepped by Adam here"),
    ],
)
def test_the_state_of_another_kind_of_optimizer_is_refused_and_a_subclass_is_not(
    saving: Any, resuming: Any, words: str | None
) -> None:
    mine, theirs = parameters(), parameters()
    saved = by_name([saving(mine.values(), lr=0.1)], names(mine)).groups
    complaint = refusal([resuming(theirs.values(), lr=0.1)], names(theirs), [], saved)
    assert complaint is None if words is None else str(complaint).startswith(words)


def test_state_keeps_the_dtype_in_which_it_was_saved() -> None:
    """Though torch converts what an optimizer keeps of a parameter to the dtype of that."""
    saving, resuming = ({"first": nn.Parameter(torch.ones(3, dtype=torch.bfloat16))} for _ in range(2))
    optimizers = [torch.optim.SGD(of.values(), lr=0.1) for of in (saving, resuming)]
    master, counts = torch.full((3,), 1 / 3), torch.arange(3, dtype=torch.uint8)
    optimizers[0].state[saving["first"]] = {"master": master, "counts": counts, "name": "x"}
    restore(optimizers[1:], names(resuming), by_name(optimizers[:1], names(saving)))
    state = optimizers[1].state[resuming["first"]]
    assert torch.equal(state["master"], master)
    assert torch.equal(state["counts"], counts)
    assert state["name"] == "x"


def test_a_parameter_without_state_stays_without() -> None:
    saving, resuming = parameters(), parameters()
    optimizer, other = (torch.optim.AdamW(of.values()) for of in (saving, resuming))
    train({"first": saving["first"]}, [optimizer], range(2))
    restore([other], names(resuming), deepcopy(by_name([optimizer], names(saving))))
    assert [bool(other.state[parameter]) for parameter in resuming.values()] == [True, False, False]


def test_two_optimizers_of_one_parameter_and_a_state_in_another_form_are_refused() -> None:
    class Wrapped(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"inner": super().state_dict()}

    of = parameters()
    twice = [torch.optim.SGD(of.values(), lr=0.1), torch.optim.SGD([of["second"]], lr=0.1)]
    with pytest.raises(Misuse, match="two optimizers step second: a checkpoint keeps the state of one"):
        by_name(twice, names(of))
    with pytest.raises(Misuse, match=r"optimizer Wrapped \(SGD\) has no state and param_groups .* of_rank= keeps any"):
        by_name([Wrapped(of.values(), lr=0.1)], names(of))


def test_a_group_is_saved_as_plain_containers() -> None:
    saving = parameters()
    scheduled = torch.optim.SGD(saving.values(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(scheduled, [2, 4])
    group = by_name([scheduled], names(saving), [scheduler]).groups["first"]
    assert group_of(plain(group)) == group
    assert plain(group)["kind"] == ("SGD", "SGD")
    with_none = torch.optim.SGD(saving.values(), lr=0.1)
    assert refusal([with_none], names(saving), [], dict.fromkeys(NAMES, group)) == (
        "the optimizer of first had the scheduler MultiStepLR, and here it has no scheduler: give schedulers= of the "
        "same classes, in the same order"
    )
