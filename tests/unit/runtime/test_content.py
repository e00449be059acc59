"""What a checkpoint has in it: what a rank misses is named, and schedulers keep rates of their own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, ReduceLROnPlateau, SequentialLR

from chimera_runtime.content import FORMAT, About, Content, about_of, names_in
from chimera_runtime.world import World
from tests.unit.runtime.kept import Count, adam, mini_batch, pipeline

WEIGHT = "stages.0.0.weight"


def content(directory: Path, **changed: Any) -> Content:
    pipe = pipeline(directory)
    optimizer = adam(pipe)
    parts: dict[str, Any] = {
        "optimizers": [optimizer],
        "schedulers": [CosineAnnealingLR(optimizer, 5)],
        "shared": {"count": Count()},
        "of_copy": {"loader": Count()},
    }
    return Content(pipe, **parts | changed)


def metadata(state: dict[str, Any], *before: Any) -> dict[tuple[Any, ...], Any]:
    """What torch.distributed.checkpoint says of a state, by its path."""
    entries: dict[tuple[Any, ...], Any] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            entries |= metadata(value, *before, key)
        elif isinstance(value, torch.Tensor):
            properties = TensorProperties(dtype=value.dtype)
            entries[*before, key] = TensorStorageMetadata(properties, value.size(), [])
        else:
            entries[*before, key] = BytesStorageMetadata()
    return entries


def there(entries: dict[tuple[Any, ...], Any]) -> Metadata:
    names = {".".join(map(str, path)): path for path in entries}
    return Metadata({name: entries[path] for name, path in names.items()}, planner_data=names)


def trained(directory: Path) -> Content:
    """After an update, so that the optimizer has a state."""
    of = content(directory)
    of.pipe.step(mini_batch(0))
    of.optimizers[0].step()
    return of


def about(of: Content, **changed: Any) -> About:
    return About(**of.saved(0)["about"]["0"][0] | changed)


def test_it_says_what_it_is_of(alone: World, one_worker: Path) -> None:
    of = trained(one_worker)
    saved = of.saved(17)
    ((said,),) = saved["about"].values()
    facts = ("format", "update", "items", "stages", "copies")
    assert [said[fact] for fact in facts] == [FORMAT, 1, 17, 2, 1]
    assert of.is_laid_out_as(about(of))
    assert not of.is_laid_out_as(about(of, copies=2))
    assert not of.is_laid_out_as(about(of, program="another"))
    entries = metadata(saved)
    assert about_of(there(entries)) == {"about": {"0": ()}}
    assert about_of(Metadata({})) == {}
    assert names_in(there(entries)) == {name for name, _ in of.pipe.named_parameters()}
    assert set(saved["state"][WEIGHT]) == {"step", "exp_avg", "exp_avg_sq"}
    assert dict(saved["groups"][WEIGHT][0])["lr"] == 0.05


def renamed(entries: dict[Any, Any], old: str, new: str | None) -> None:
    """Another name of a parameter in all that is kept of it; none takes it away."""
    for path in [path for path in entries if old in path]:
        value = entries.pop(path)
        if new is not None:
            entries[tuple(new if part == old else part for part in path)] = value


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda e: None, None),
        (
            lambda e: renamed(e, WEIGHT, "stages.0.0.weights"),
            f"it has no parameter {WEIGHT}, which this model has (but stages.0.0.weights)",
        ),
        (
            lambda e: e.pop(("replicas", "0/stages.1.1.running_var")),
            "it has no buffer 0/stages.1.1.running_var, which this model has (but 0/stages.0.1.running_var)",
        ),
        (lambda e: e.pop(("groups", WEIGHT)), f"it has no optimizer state of {WEIGHT}, which an optimizer steps here"),
        (lambda e: e.pop(("scheduler", "0")), "it has no scheduler, and here is one"),
        (lambda e: e.pop(("shared", "count")), "it has no state of count, which is to be resumed here"),
        (lambda e: e.pop(("of_copy", "0", "loader")), "it has no state of loader, which is to be resumed here"),
        (
            lambda e: e.update({("model", WEIGHT): TensorStorageMetadata(TensorProperties(), torch.Size([3, 4]), [])}),
            f"{WEIGHT} is (3, 4) in it, and (3, 3) in this model",
        ),
    ],
)
def test_what_a_rank_misses_is_named(
    alone: World, one_worker: Path, spoil: Callable[[Any], Any], words: str | None
) -> None:
    of = trained(one_worker)
    entries = metadata(of.saved(0))
    spoil(entries)
    known = about(of)
    assert of.lacking(of.wanted(there(entries), known), there(entries)) == words


def test_another_layout_reads_the_first_replica_and_what_the_first_copy_has_of_its_own(
    alone: World, one_worker: Path
) -> None:
    """Where there is none of this rank's number."""
    of = trained(one_worker)
    entries = metadata(of.saved(0))
    here = of.wanted(there(entries), about(of))
    assert here.keys() == of.saved(0).keys()
    moved = {("of_copy", "3", *path[2:]) if path[0] == "of_copy" else path: entries[path] for path in entries}
    moved["of_copy", "0", "loader"] = BytesStorageMetadata()
    elsewhere = of.wanted(there(moved), about(of, program="another"))
    assert [*elsewhere["of_copy"]] == ["0"]
    assert {name.split("/")[0] for name in elsewhere["replicas"]} == {"0"}
    assert of.lacking(elsewhere, there(moved)) is None


def test_memory_for_optimizer_state_is_apart_from_that_of_the_training(alone: World, one_worker: Path) -> None:
    """An optimizer that has not stepped yet has none; what is as large as the parameter is laid out like it."""
    of, fresh = trained(one_worker), content(one_worker)
    entries = metadata(of.saved(0))
    wanted = fresh.wanted(there(entries), about(of))["state"][WEIGHT]
    assert {key: tuple(tensor.shape) for key, tensor in wanted.items()} == {
        "step": (),
        "exp_avg": (3, 3),
        "exp_avg_sq": (3, 3),
    }
    assert wanted["exp_avg"].dtype == torch.float64
    assert fresh.wanted(there({}), about(of))["state"] == {name: {} for name in of.pipe.names.values()}


def test_schedulers_go_on_with_the_rates_of_their_own_groups(alone: World, one_worker: Path) -> None:
    """Of which another rank had fewer; also those that are made of others."""

    def schedulers(optimizer: torch.optim.Optimizer) -> list[Any]:
        parts = [LinearLR(optimizer, 0.1, total_iters=2), LambdaLR(optimizer, lambda n: 0.9**n)]
        return [SequentialLR(optimizer, parts, [2]), LambdaLR(optimizer, lambda n: 1 / (1 + n))]

    def optimizer(*rates: float) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates], lr=0.1)

    def rates(of: torch.optim.Optimizer, scheduler: Any, updates: int) -> list[list[float]]:
        seen = []
        for _ in range(updates):
            of.step()
            scheduler.step()
            seen.append([group["lr"] for group in of.param_groups])
        return seen

    for number in range(2):
        first, expected, resumed = optimizer(0.3), optimizer(0.1, 0.2), optimizer(0.1, 0.2)
        saving, undisturbed, resuming = (schedulers(of)[number] for of in (first, expected, resumed))
        rates(first, saving, 3)
        rates(expected, undisturbed, 3)
        of = content(one_worker, optimizers=[], schedulers=[saving], shared={}, of_copy={})
        state = of.saved(0)
        for group, other in zip(resumed.param_groups, expected.param_groups, strict=True):
            group["lr"], group["initial_lr"] = other["lr"], other["initial_lr"]  # as `restore` has it
        replace(of, schedulers=[resuming]).take(state, about(of))
        assert resuming.get_last_lr() == undisturbed.get_last_lr()
        assert rates(resumed, resuming, 4) == rates(expected, undisturbed, 4)


def test_a_scheduler_that_has_no_rates_of_its_own_gets_none(alone: World, one_worker: Path) -> None:
    """Though others have given the groups of its optimizer some."""
    pipe = pipeline(one_worker)
    optimizer = adam(pipe)
    CosineAnnealingLR(optimizer, 5)
    plateau = ReduceLROnPlateau(optimizer)
    plateau.step(1.0)
    of = content(one_worker, schedulers=[plateau], shared={}, of_copy={}, optimizers=[])
    state = of.saved(0)
    other = ReduceLROnPlateau(optimizer)
    replace(of, schedulers=[other]).take(state, about(of))
    assert other.state_dict() == plateau.state_dict()
