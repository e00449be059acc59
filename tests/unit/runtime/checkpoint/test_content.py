"""Content of a checkpoint: what a rank misses is named, and what ranks share is the same on all of them."""

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
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau

from chimera_runtime.blame import ModelError
from chimera_runtime.checkpoint.content import (
    FORMAT,
    INFO,
    CheckpointContent,
    CheckpointInfo,
    Objects,
    absent,
    entries_of,
    flat,
    give,
    names_in,
    packed_state,
    packed_states,
    paths_of,
    require_equal,
    shown_states,
    states_of,
    unpacked_state,
    value_of,
)
from chimera_runtime.errors import BadCheckpoint, Misuse
from chimera_runtime.optimizer.optimizer_state import SavedGroup
from chimera_runtime.ranks.world import World
from chimera_runtime.state.state import packed
from tests.unit.runtime.kept import WIDTH, Count, adam, mini_batch, pipeline

WEIGHT = "stages.0.0.weight"


def said(saved: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = value_of(saved["about"]["0"])
    return fields


class Made:
    """A pipeline with an optimizer, a scheduler and other objects, and what a checkpoint keeps of them."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.pipe = pipeline(directory, **options)
        self.optimizer = adam(self.pipe)
        self.scheduler = CosineAnnealingLR(self.optimizer, 5)
        self.objects = Objects({"count": Count()}, {"loader": Count()}, {"mine": Count()})
        self.content = CheckpointContent(self.pipe, [self.optimizer], [self.scheduler], self.objects)

    def saved(self, items: int = 0) -> dict[str, Any]:
        content, facts = self.content.part(self.pipe.state_dict())
        return self.content.complete(content, [facts], items)

    def info(self, **changed: Any) -> CheckpointInfo:
        return CheckpointInfo(**said(self.saved()) | changed)

    def wanted(self, entries: dict[Any, Any], info: CheckpointInfo) -> dict[str, Any]:
        state = self.pipe.state_dict(self.content.replica(info))
        return self.content.wanted(there(entries), info, state)


def metadata(state: dict[str, Any], *before: Any) -> dict[tuple[Any, ...], Any]:
    """Metadata of torch.distributed.checkpoint for a state, by path."""
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


def trained(directory: Path) -> Made:
    """Returns the loop after an update, so that the optimizer has a state."""
    of = Made(directory)
    of.pipe.step(mini_batch(0))
    of.optimizer.step()
    return of


def test_it_says_what_it_is_of(alone: World, one_worker: Path) -> None:
    of = trained(one_worker)
    saved = of.saved(17)
    facts = ("format", "update", "items", "stages", "copies", "unsaved")
    assert [said(saved)[fact] for fact in facts] == [FORMAT, 1, 17, 2, 1, []]
    content = of.content
    assert content.is_laid_out_as(of.info())
    assert not content.is_laid_out_as(of.info(copies=2))
    assert not content.is_laid_out_as(of.info(program="another"))
    entries = metadata(saved)
    assert INFO in paths_of(there(entries))
    names = {name for name, _ in of.pipe.named_parameters()}
    assert names_in(there(entries), "model") == names
    assert names_in(there(entries), "replicas") >= {"stages.0.1.running_mean"}
    assert set(saved["state"][WEIGHT]) == {"step", "exp_avg", "exp_avg_sq"}
    hashes = said(saved)["groups"][0]
    assert {*hashes} == names
    assert {*hashes.values()} == {*saved["groups"]}
    assert len(saved["groups"]) == 2
    groups = content.groups(saved, of.info())
    assert groups[WEIGHT].settings["lr"] == 0.05 == of.optimizer.param_groups[0]["lr"]
    assert content.refusal(groups) is None


def test_format_1_did_not_say_how_replicas_were_counted(alone: World, one_worker: Path) -> None:
    """One that each worker holds of its own, they were counted alike in every layout."""
    of = trained(one_worker)
    assert of.content.is_laid_out_as(of.info(format=1))
    two = of.info(format=1, copies=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of.pipe, "copies", 2)
        assert of.content.is_laid_out_as(two)
        patch.setattr(of.pipe, "job", replace(of.pipe.job, placement=((0, 1), (1, 0)), workers=2))
        assert not of.content.is_laid_out_as(two)
        assert of.content.is_laid_out_as(replace(two, format=2))


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
        (lambda e: e.pop(("shared", "count")), "it has no state of count, which is to be resumed here"),
        (lambda e: e.pop(("of_copy", "0", "loader")), "it has no state of loader, which is to be resumed here"),
        (
            lambda e: renamed(e, "0/0/0", "1/0/0"),
            "it has no state of of_rank['mine'] for this rank: what each rank has of its own is resumed under the same "
            "schedule with as many copies",
        ),
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
    entries = metadata(of.saved())
    spoil(entries)
    assert of.content.lacking(of.wanted(entries, of.info()), there(entries)) == words


def test_a_parameter_without_a_group_is_named(alone: World, one_worker: Path) -> None:
    of = trained(one_worker)
    groups = of.content.groups(of.saved(), of.info())
    del groups[WEIGHT]
    assert of.content.refusal(groups) == f"it has no optimizer state of {WEIGHT}, which an optimizer steps here"


def test_another_layout_reads_the_first_replica_and_what_the_first_copy_has_of_its_own(
    alone: World, one_worker: Path
) -> None:
    """Reads another copy's if there is none of this rank's number; what a rank has of its own is refused."""
    of = trained(one_worker)
    entries = metadata(of.saved())
    here = of.wanted(entries, of.info())
    assert here.keys() | {"groups", "about"} == of.saved().keys()
    moved = {("of_copy", "3", *path[2:]) if path[0] == "of_copy" else path: entries[path] for path in entries}
    moved["of_copy", "0", "loader"] = BytesStorageMetadata()
    other = of.info(program="another")
    elsewhere = of.wanted(moved, other)
    assert [*elsewhere["of_copy"]] == ["0"]
    assert {name.split("/")[0] for name in elsewhere["replicas"]} == {"0"}
    assert "of_rank['mine']" in str(of.content.lacking(elsewhere, there(moved)))
    without = CheckpointContent(of.pipe, [of.optimizer], [of.scheduler], replace(of.objects, of_rank={}))
    assert without.lacking(without.wanted(there(moved), other, of.pipe.state_dict(0)), there(moved)) is None
    assert without.left_out(there(moved)) == ["of_rank['mine']"]


def test_memory_for_optimizer_state_is_apart_from_that_of_the_training(alone: World, one_worker: Path) -> None:
    """An optimizer that has not stepped yet has none; what is as large as the parameter is laid out like it."""
    of, fresh = trained(one_worker), Made(one_worker)
    entries = metadata(of.saved())
    wanted = fresh.wanted(entries, of.info())["state"][WEIGHT]
    assert {key: tuple(tensor.shape) for key, tensor in wanted.items()} == {
        "step": (),
        "exp_avg": (3, 3),
        "exp_avg_sq": (3, 3),
    }
    assert wanted["exp_avg"].dtype == torch.float64
    assert fresh.wanted({}, of.info())["state"] == {name: {} for name in of.pipe.names.values()}


def test_a_scheduler_whose_optimizer_is_not_known_is_kept_as_what_ranks_share(alone: World, one_worker: Path) -> None:
    of = trained(one_worker)
    elsewhere = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    plateaus = [ReduceLROnPlateau(elsewhere) for _ in range(2)]
    plateaus[0].step(1.0)
    saving, resuming = (
        CheckpointContent(of.pipe, [of.optimizer], [of.scheduler, plateau], Objects()) for plateau in plateaus
    )
    content, _ = saving.part(of.pipe.state_dict())
    assert [*content["shared"]] == ["schedulers[1]"]
    groups = resuming.groups(content, of.info())
    resuming.take(content, of.info(), groups)
    assert plateaus[1].state_dict() == plateaus[0].state_dict()


def test_what_ranks_share_is_the_same_on_all_of_them(alone: World, one_worker: Path) -> None:
    """Ranks of one copy are compared if each copy has its own; the message says what differs, where, and what to do."""
    of = trained(one_worker)
    content, facts = of.content.part(of.pipe.state_dict())

    def refused(**changed: Any) -> str:
        with pytest.raises(Misuse) as error:
            of.content.complete(content, [facts, replace(facts, **changed)], 0)
        return str(error.value)

    assert refused(shared={"count": {"numbers": "list 5"}}) == (
        f"shared['count'] is not the same on rank 0 and on rank 1: numbers is {facts.shared['count']['numbers']} "
        "and list 5; of_copy= or of_rank= keeps what differs"
    )
    assert refused(shared={}) == "shared= has 'count' on rank 0, and not on rank 1"
    assert refused(of_copy={"loader": {}, "more": {}}).startswith("of_copy['loader'] is not the same on rank 0 and on")
    of.content.complete(content, [facts, replace(facts, copy=1, of_copy={"loader": {}})], 0)


def test_groups_of_a_parameter_that_differ_between_ranks_go_to_the_rank_that_had_them(
    alone: World, one_worker: Path
) -> None:
    """A rank that was not there gets those of the first one."""
    info = CheckpointInfo(2, 1, 1, "", "", 1, 1, {0: {"a": "x", "b": "y"}, 1: {"a": "z"}})
    assert [info.group_of(place) for place in (0, 1, 2)] == [
        {"a": "x", "b": "y"},
        {"a": "z", "b": "y"},
        {"a": "x", "b": "y"},
    ]


def test_groups_of_format_1_have_settings_alone(alone: World, one_worker: Path) -> None:
    of = trained(one_worker)
    old = {"groups": {WEIGHT: ((("lr", 0.3),),)}}
    assert of.content.groups(old, of.info(format=1)) == {WEIGHT: SavedGroup({"lr": 0.3})}


def test_a_buffer_that_is_in_no_state_dict_and_has_changed_is_named(alone: World, one_worker: Path) -> None:
    class Cached(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.register_buffer("cache", torch.zeros(2), persistent=False)

    of = Made(one_worker, build=lambda *_: Cached().double())
    assert of.info().unsaved == []
    of.pipe.stages[1].get_buffer("cache").add_(1)
    assert of.info().unsaved == ["stages.1.cache"]
    assert "0/stages.1.cache" not in of.saved()["replicas"]


# The entries of a checkpoint: what an optimizer keeps of a parameter goes there and back, of whatever type.


def test_the_state_of_a_parameter_comes_back_with_its_types() -> None:
    kept: dict[Any, Any] = {"step": 3, "exp": torch.ones(2), "parts": [torch.zeros(1)], "names": {"a": (1, "b")}}
    stored = packed_state(kept)
    assert isinstance(stored["exp"], torch.Tensor)
    assert all(isinstance(value, bytes) for key, value in stored.items() if key != "exp")
    assert unpacked_state(stored) == kept
    odd = {0: torch.ones(1), "x": None}
    assert unpacked_state(packed_state(odd)) == odd
    with pytest.raises(Misuse, match="the optimizer's made cannot be saved"):
        packed_state({"made": lambda: None})


def test_values_of_either_format_are_read() -> None:
    assert value_of(packed({"a": 1}, "it")) == value_of(({"a": 1},)) == {"a": 1}


def test_paths_are_those_of_the_nested_state() -> None:
    there = Metadata(
        {"model.a.b": BytesStorageMetadata(), "extra.0/a._extra_state": BytesStorageMetadata()},
        planner_data={"model.a.b": ("model", "a.b"), "extra.0/a._extra_state": ("extra", "0/a._extra_state")},
    )
    assert [path for path, _ in entries_of(there)] == [("model", "a.b"), ("extra", "0/a._extra_state")]
    assert names_in(there, "model") == {"a.b"}
    assert names_in(there, "extra") == {"a._extra_state"}
    assert [*flat({"a": {"b": 1}, "c": {}})] == [(("a", "b"), 1)]
    assert absent(("extra", "0/a"), {}) == "it has no entry of a state_dict 0/a, which this model has"


# Objects with a state: what differs between ranks is named; an error of theirs is the user's, one of ours is not.


class Thing:
    def __init__(self, error: Exception | None = None) -> None:
        self.state, self._error = {"scale": 2.0}, error

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._error is not None:
            raise self._error
        self.state = state


def test_states_are_said_by_name_and_taken() -> None:
    assert states_of("shared", {"a": Thing()}) == {"a": {"scale": 2.0}}
    thing = Thing()
    give(thing, {"scale": 1.0}, "shared['a']")
    assert thing.state == {"scale": 1.0}
    with pytest.raises(Misuse, match=r"shared\['a'\] cannot be saved"):
        packed_states("shared", {"a": lambda: None})


def test_errors_of_an_object_are_told_as_such() -> None:
    with pytest.raises(ModelError, match=r"load_state_dict\(\) of shared\['a'\]: .*ValueError: no"):
        give(Thing(ValueError("no")), {}, "shared['a']")
    with pytest.raises(BadCheckpoint, match=r"^another length$"):
        give(Thing(BadCheckpoint("another length")), {}, "shared['a']")


def test_what_differs_is_named_with_its_ranks() -> None:
    one, other = shown_states({"a": {"scale": 2.0, "n": 1}}), shown_states({"a": {"scale": 4.0, "n": 1}})
    require_equal("shared", [(0, one), (2, one)], "of_rank=")
    with pytest.raises(Misuse) as refused:
        require_equal("shared", [(0, one), (1, one), (2, other)], "of_rank=")
    assert str(refused.value) == (
        "shared['a'] is not the same on rank 0 and on rank 2: scale is 2.0 and 4.0; of_rank= keeps what differs"
    )
    assert shown_states({"a": [1]}) != shown_states({"a": [2]})
