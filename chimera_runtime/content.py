"""What a checkpoint has in it, and how a rank finds its part in one that other ranks may have written.

    model.<name>             a parameter
    replicas.<k>/<name>      a buffer of the k-th replica of its stage
    state.<name>.<what>      what an optimizer keeps of a parameter
    groups.<name>            the settings of the optimizer's group that a parameter is in
    scheduler.0              the state of the schedulers, the same everywhere
    shared.<name>            that of something else which is the same everywhere
    of_copy.<copy>.<name>    that of something else which each copy has of its own
    about.0                  `About`

All but tensors is wrapped in a tuple, which torch.distributed.checkpoint stores as one value.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from chimera_runtime.optimizer_state import OptimizerState, by_name, restore
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.sharded_optimizer import ShardedOptimizer

FORMAT = 1
"""Of what a checkpoint holds; raised when an older version could not read it."""

ABOUT = "about"
_ONE = "0"


class Stateful(Protocol):
    """What has a state that can be saved: a scheduler, a scaler, a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """As `load_state_dict` takes it, also in another process; saved with pickle."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Goes on from what `state_dict` returned."""


@dataclass(frozen=True)
class About:
    """What a checkpoint says of the job that wrote it; updates and items, of all copies, are those before it."""

    format: int
    update: int
    items: int
    program: str
    name: str
    stages: int
    copies: int


@dataclass(frozen=True)
class Content:
    """Everything of a training loop that a checkpoint keeps; see `Checkpoints`."""

    pipe: Pipeline
    optimizers: Sequence[torch.optim.Optimizer]
    schedulers: Sequence[Stateful]
    shared: Mapping[str, Stateful]
    of_copy: Mapping[str, Stateful]

    def saved(self, items: int) -> dict[str, Any]:
        """What this rank saves after so many items; tensors are those of the training."""
        pipe = self.pipe
        state = pipe.state_dict()
        named = by_name(self.optimizers, pipe.names)
        about = About(FORMAT, pipe.updates, items, pipe.job.program, pipe.job.name, pipe.job.stages, pipe.copies)
        return {
            **state,
            "state": named.state,
            "groups": {name: (settings,) for name, settings in named.groups.items()},
            "scheduler": {_ONE: (self.schedulers[0].state_dict(),)} if self.schedulers else {},
            "shared": _states(self.shared),
            "of_copy": {str(pipe.copy): _states(self.of_copy)},
            ABOUT: {_ONE: (asdict(about),)},
        }

    def is_laid_out_as(self, about: About) -> bool:
        """Whether each rank holds what it held when the checkpoint was written."""
        return (about.program, about.copies) == (self.pipe.job.program, self.pipe.copies)

    def wanted(self, there: Metadata, about: About) -> dict[str, Any]:
        """Where this rank's part of a checkpoint is to be read into: `take` takes it from there."""
        replica = None if self.is_laid_out_as(about) else 0
        names = by_name(self.optimizers, self.pipe.names).groups
        copy = str(self.pipe.copy)
        if ("of_copy", copy) not in {path[:2] for path in _paths(there)}:
            copy = _ONE
        wanted: dict[str, Any] = {
            **self.pipe.state_dict(replica),
            "state": {name: {} for name in names},
            "groups": dict.fromkeys(names, ()),
            "scheduler": {_ONE: ()} if self.schedulers else {},
            "shared": dict.fromkeys(self.shared, ()),
            "of_copy": {copy: dict.fromkeys(self.of_copy, ())},
            ABOUT: {_ONE: ()},
        }
        parameters = dict(self.pipe.named_parameters()) | self._sharded()
        for path, stored in _entries(there):
            if path[0] == "state" and path[1] in wanted["state"]:
                wanted["state"][path[1]][path[2]] = _room(parameters[path[1]], stored)
        return wanted

    def _sharded(self) -> dict[str, torch.Tensor]:
        """The parameters whose optimizer keeps the state of a part alone, as that is laid out."""
        names = self.pipe.names
        return {
            names[parameter]: optimizer.spread(parameter)
            for optimizer in self.optimizers
            if isinstance(optimizer, ShardedOptimizer)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def lacking(self, wanted: Mapping[str, Any], there: Metadata) -> str | None:
        """What this rank needs and a checkpoint has not, or has in another shape; None if all is there."""
        stored = dict(_entries(there))
        for path, value in _flat(wanted):
            if path not in stored:
                return _absent(path, stored)
            kept = stored[path]
            if isinstance(kept, TensorStorageMetadata) and tuple(kept.size) != tuple(value.shape):
                return f"{path[1]} is {tuple(kept.size)} in it, and {tuple(value.shape)} in this model"
        return None

    def take(self, state: Mapping[str, Any], about: About) -> None:
        """Goes on with what `wanted` named, now that it has been read."""
        self.pipe.load_state_dict(state, None if self.is_laid_out_as(about) else 0)
        groups = {name: settings for name, (settings,) in state["groups"].items()}
        restore(self.optimizers, self.pipe.names, OptimizerState(state["state"], groups))
        if self.schedulers:
            (scheduled,) = state["scheduler"][_ONE]
            for scheduler in self.schedulers:
                scheduler.load_state_dict(_for_groups_of(scheduler, scheduled))
        for kept, states in ((self.shared, state["shared"]), (self.of_copy, *state["of_copy"].values())):
            for name, value in kept.items():
                value.load_state_dict(states[name][0])


def about_of(there: Metadata) -> dict[str, Any]:
    """Where `About` is to be read into; empty if the checkpoint is not one of ours."""
    return {ABOUT: {_ONE: ()}} if (ABOUT, _ONE) in {*_paths(there)} else {}


def names_in(there: Metadata) -> set[str]:
    """The parameters that a checkpoint has."""
    return {str(path[1]) for path in _paths(there) if path[0] == "model"}


def _states(values: Mapping[str, Stateful]) -> dict[str, Any]:
    return {name: (value.state_dict(),) for name, value in values.items()}


def _for_groups_of(scheduler: Any, scheduled: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a scheduler, but with the rates of this one's groups: another rank's may be more, fewer or others.

    The schedulers that it is made of are treated alike.
    """
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
    rates = {"_last_lr": [group["lr"] for group in groups]}
    if all("initial_lr" in group for group in groups):
        rates["base_lrs"] = [group["initial_lr"] for group in groups]
    state: dict[str, Any] = {**scheduled, **{key: rates[key] for key in rates if groups and key in scheduled}}
    if "_schedulers" in scheduled:
        parts = zip(scheduler._schedulers, scheduled["_schedulers"], strict=True)
        state["_schedulers"] = [_for_groups_of(part, of_part) for part, of_part in parts]
    return state


def _room(parameter: torch.Tensor, stored: Any) -> Any:
    """Memory for what an optimizer keeps of a parameter: laid out as that, if it is as large."""
    if not isinstance(stored, TensorStorageMetadata):
        return ()
    dtype = stored.properties.dtype
    if stored.size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype)
    return torch.empty(stored.size, dtype=dtype)


def _entries(there: Metadata) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What a checkpoint has, by its path in the nested state."""
    paths = there.planner_data or {}
    for key, stored in there.state_dict_metadata.items():
        yield tuple(paths.get(key, (key,))), stored


def _paths(there: Metadata) -> Iterator[tuple[Any, ...]]:
    return (path for path, _ in _entries(there))


def _flat(state: Mapping[str, Any], *before: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _flat(value, *before, key)
        else:
            yield (*before, key), value


def _absent(path: tuple[Any, ...], stored: Mapping[tuple[Any, ...], Any]) -> str:
    """What is missing, in the words of the one who trains."""
    kind, name = path[0], path[-1]
    match kind:
        case "model" | "replicas":
            near = get_close_matches(str(name), [str(known[1]) for known in stored if known[0] == kind], 1)
            noun = "parameter" if kind == "model" else "buffer"
            return f"it has no {noun} {name}, which this model has{f' (but {near[0]})' if near else ''}"
        case "groups":
            return f"it has no optimizer state of {path[1]}, which an optimizer steps here"
        case "scheduler":
            return "it has no scheduler, and here is one"
        case _:
            return f"it has no state of {name}, which is to be resumed here"
