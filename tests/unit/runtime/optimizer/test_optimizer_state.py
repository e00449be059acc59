"""Optimizer state by the names of parameters: read from one optimizer and given to another with other groups."""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import ConstantLR, LRScheduler

from chimera_runtime.errors import Misuse
from chimera_runtime.optimizer.optimizer_state import (
    TorchClass,
    by_name,
    class_of,
    for_groups_of,
    group_of,
    groups_of,
    plain,
    refusal,
    restore,
    restore_schedulers,
)

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


# The state of schedulers by groups: read from some optimizers and given to others with other groups.


Make = Callable[[torch.optim.Optimizer], Any]

SCHEDULERS: dict[str, Make] = {
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


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("before", [1, 3])
def test_schedulers_go_on_with_the_same_groups_in_another_order(kind: str, before: int) -> None:
    groups = [["first"], ["second"], ["third"]]
    saving, undisturbed, resumed = (Run([SCHEDULERS[kind]], groups) for _ in range(3))
    saving.rates(before)
    undisturbed.rates(before)
    assert resumed.take(saving) is None
    assert resumed.schedulers[0].get_last_lr() == undisturbed.schedulers[0].get_last_lr()
    assert resumed.rates(5) == undisturbed.rates(5)


@pytest.mark.parametrize("kind", ["cosine", "sequence", "steps", "chain"])
def test_schedulers_go_on_with_other_groups_and_several_optimizers(kind: str) -> None:
    """One optimizer of all parameters becomes two, and two become one, as where stages move to other ranks."""
    make = SCHEDULERS[kind]
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
    makes = [SCHEDULERS["cosine"], lambda of: lr_scheduler.CosineAnnealingLR(of, 40, eta_min=0.05)]
    saving, undisturbed = (Run(makes, [["first", "second"]], [["third"]]) for _ in range(2))
    turned = Run(makes[::-1], [["third"]], [["first", "second"]])
    saving.rates(4)
    undisturbed.rates(4)
    assert turned.take(saving) is None
    assert turned.rates(4) == undisturbed.rates(4)


def test_schedulers_at_different_points_are_not_made_one_and_other_kinds_are_refused() -> None:
    saving = Run([SCHEDULERS["cosine"]] * 2, [["first"]], [["second"], ["third"]])
    saving.optimizers[0].step()
    saving.schedulers[0].step()
    one = Run([SCHEDULERS["cosine"]], [["first"], ["second"], ["third"]])
    assert str(one.take(saving)).startswith(
        "one optimizer steps first and second, and when they were saved their schedulers were at different points"
    )
    other = Run([SCHEDULERS["steps"]] * 2, [["first"]], [["second"], ["third"]])
    assert other.take(saving) == (
        "the optimizer of first had the scheduler CosineAnnealingLR, and here it has the scheduler MultiStepLR: give "
        "schedulers= of the same classes, in the same order"
    )
    none = Run([SCHEDULERS["cosine"]] * 2, [["first"]], [["second"], ["third"]])
    none.schedulers = none.schedulers[:1]
    assert str(none.take(saving)).startswith(
        "the optimizer of second had the scheduler CosineAnnealingLR, and here it has no scheduler: give schedulers="
    )


def test_the_groups_of_a_wrapped_scheduler_are_known_and_of_other_objects_are_not() -> None:
    class Wrapper:
        def __init__(self, scheduler: Any) -> None:
            self.scheduler = scheduler

    run = Run([SCHEDULERS["cosine"]], [["first"], ["third"]])
    groups = run.optimizers[0].param_groups
    assert groups_of(run.schedulers[0], run.names) == groups_of(Wrapper(run.schedulers[0]), run.names) == groups
    assert groups_of(run.schedulers[0], {}) is None
    assert groups_of(object(), run.names) is None


def test_a_scheduler_that_schedules_nothing_here_stays_as_it_is() -> None:
    run = Run([SCHEDULERS["cosine"]], [["first"]])
    run.optimizers[0].param_groups[0]["params"].clear()
    run.schedulers[0].last_epoch = 7
    restore_schedulers(run.schedulers, run.names, {})
    assert run.schedulers[0].last_epoch == 7


def test_a_state_of_format_1_gets_the_rates_of_the_groups_that_there_are() -> None:
    saving, resumed = Run([SCHEDULERS["sequence"]], [["first"]]), Run([SCHEDULERS["sequence"]], [["first"], ["third"]])
    saving.rates(3)
    undisturbed = Run([SCHEDULERS["sequence"]], [["first"], ["third"]])
    undisturbed.rates(3)
    for group, other in zip(resumed.optimizers[0].param_groups, undisturbed.optimizers[0].param_groups, strict=True):
        group["lr"], group["initial_lr"] = other["lr"], other["initial_lr"]
    (scheduler,) = resumed.schedulers
    scheduler.load_state_dict(for_groups_of(scheduler, saving.schedulers[0].state_dict()))
    assert resumed.rates(4) == undisturbed.rates(4)


# Kinds of optimizers and schedulers: by their names, and by the class of torch that they are derived from.


class Mine(torch.optim.AdamW):
    pass


class Bare(torch.optim.Optimizer):
    pass


class Steps(LRScheduler):
    def get_lr(self) -> list[float]:
        return [0.1 for _ in self.optimizer.param_groups]


def test_a_kind_names_the_class_and_that_of_torch() -> None:
    parameter = nn.Parameter(torch.ones(1))
    adam = Mine([parameter])
    assert class_of(adam) == TorchClass("Mine", "AdamW")
    assert str(class_of(adam)) == "Mine (AdamW)"
    assert class_of(Bare([parameter], {})) == TorchClass("Bare", "")
    assert str(class_of(ConstantLR(adam))) == "ConstantLR"
    assert class_of(Steps(adam)) == TorchClass("Steps", "")
    assert class_of(object()) == TorchClass("object", "")


def test_kinds_go_together_by_either_name_and_with_one_that_is_not_known() -> None:
    assert TorchClass("AdamW", "AdamW").can_read(TorchClass("Mine", "AdamW"))
    assert TorchClass("Bare", "").can_read(TorchClass("Bare", ""))
    assert TorchClass("Bare", "").can_read(None)
    assert not TorchClass("Other", "").can_read(TorchClass("Bare", ""))
    assert not TorchClass("Adam", "Adam").can_read(TorchClass("AdamW", "AdamW"))
