"""Content of a checkpoint, and the part of it that a rank reads; other ranks may have written that part.

    model.<name>             a parameter
    replicas.<k>/<name>      a buffer of the k-th replica of its stage
    extra.<k>/<name>         another entry in the state_dict of the modules of that replica
    averages.<a>.<..>        the three kinds above once more, for an average of the weights
    state.<name>.<key>       state of a parameter in its optimizer
    groups.<hash>            a `SavedGroup` of an optimizer, once for all groups that are equal
    shared.<name>            state of an object that is the same on all ranks
    of_copy.<copy>.<name>    state of an object that each copy has
    of_rank.<rank>.<name>    state of an object that each rank has
    about.0                  `CheckpointInfo`, with the groups of each parameter

Values other than tensors are pickled when they are collected, so that they keep their types and do not change before
they are written. In format 1 they were wrapped in a tuple; groups were by the name of a parameter, and ``scheduler.0``
had the state of the first scheduler.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from chimera_runtime.blame import ModelError, UserCode
from chimera_runtime.errors import FAILED, BadCheckpoint, Misuse
from chimera_runtime.errors import data as mistakes
from chimera_runtime.optimizer import optimizer_state
from chimera_runtime.optimizer.optimizer_state import (
    SavedGroup,
    for_groups_of,
    groups_of,
    parameters_of,
    restore_schedulers,
)
from chimera_runtime.optimizer.sharding import ShardedOptimizer
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.state.state import Average, AverageState, packed, unpacked
from chimera_runtime.values.fingerprint import fingerprint, shown

# Entries of a checkpoint: their paths in the nested state, and the conversion of values to entries and back.
#
# Also functions that get, compare, pickle and restore the states of objects of a training loop.


class Stateful(Protocol):
    """An object with a state that can be saved: a scheduler, a scaler, a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the object, which is saved with pickle."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Takes a state that `state_dict` returned, also in another process."""


def states_of(what: str, values: Mapping[str, Stateful]) -> dict[str, Any]:
    """Returns the states of objects by their names; in errors an object is ``what['name']``."""
    states = {}
    for name, value in values.items():
        with UserCode(f"state_dict() of {what}[{name!r}]", FAILED):
            states[name] = value.state_dict()
    return states


def packed_states(what: str, states: Mapping[str, Any]) -> dict[str, bytes]:
    """Pickles states; errors as of `packed`."""
    return {name: packed(state, f"{what}[{name!r}]") for name, state in states.items()}


def give(value: Stateful, state: Any, what: str) -> None:
    """Loads a saved state into an object, by its ``load_state_dict``; ``what`` names the object in errors."""
    try:
        with UserCode(f"load_state_dict() of {what}", FAILED):
            value.load_state_dict(state)
    except ModelError as error:
        if isinstance(error.__cause__, BadCheckpoint | Misuse):  # a loader of ours says what is wrong
            raise error.__cause__ from None
        raise


def shown_states(states: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Returns, for each state, its values as short texts by key; two texts are equal exactly if their values are."""
    return {
        name: {str(key): shown(value) for key, value in state.items()}
        if isinstance(state, Mapping)
        else {"it": shown(state)}
        for name, state in states.items()
    }


def require_equal(what: str, of_ranks: Sequence[tuple[int, Mapping[str, Mapping[str, str]]]], instead: str) -> None:
    """Raises `Misuse` unless ranks have the same states under the same names.

    ``instead`` are the parameters of `Checkpoints` that take states which differ.
    """
    first, expected = of_ranks[0] if of_ranks else (0, {})
    for rank, states in of_ranks[1:]:
        for name in sorted({*expected, *states}):
            state, different = expected.get(name), states.get(name)
            if state == different:
                continue
            if state is None or different is None:
                without = first if state is None else rank
                raise mistakes.states_are_missing(
                    what=what, name=name, rank=rank if state is None else first, without=without
                )
            key = next(key for key in sorted({*state, *different}) if state.get(key) != different.get(key))
            values = state.get(key, "absent"), different.get(key, "absent")
            raise mistakes.states_differ(
                what=what, name=name, ranks=(first, rank), key=key, values=values, instead=instead
            )


Path = tuple[Any, ...]

_WHOLE = "*"
"""Key of the whole state of a parameter, if its own keys are not all texts."""


def names_in(there: Metadata, kind: str) -> set[str]:
    """Returns the names of all entries of a ``kind``, the first part of a path, without the number of the replica."""
    return {
        str(path[1]).partition("/")[2] if kind != "model" else str(path[1])
        for path in paths_of(there)
        if path[0] == kind
    }


def room_for(parameter: torch.Tensor, stored: Any) -> Any:
    """Returns an empty tensor into which a saved state of a parameter can be read, or ``()`` if it is no tensor.

    If the state has the parameter's shape, the tensor is sharded like the parameter.
    """
    if not isinstance(stored, TensorStorageMetadata):
        return ()
    dtype = stored.properties.dtype
    if stored.size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype)
    return torch.empty(stored.size, dtype=dtype)


def entries_of(there: Metadata) -> Iterator[tuple[Path, Any]]:
    """Yields the entries of a checkpoint, each with its path in the nested state."""
    paths = there.planner_data or {}
    for key, stored in there.state_dict_metadata.items():
        yield tuple(paths.get(key, (key,))), stored


def paths_of(there: Metadata) -> Iterator[Path]:
    """Yields the paths of the entries of a checkpoint."""
    return (path for path, _ in entries_of(there))


def flat(state: Mapping[str, Any], *before: Any) -> Iterator[tuple[Path, Any]]:
    """Yields the values of a nested state with their paths."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from flat(value, *before, key)
        else:
            yield (*before, key), value


def absent(path: Path, stored: Mapping[Path, Any]) -> str:
    """Returns the complaint about an entry that a checkpoint does not have."""
    kind, name = path[0], path[-1]
    match kind:
        case "model" | "replicas" | "extra":
            names = [str(other[1]) for other in stored if other[0] == kind]
            return mistakes.model_entry_is_missing(kind, str(name), names)
        case "averages":
            return mistakes.average_is_missing(average=path[1], name=str(name))
        case "scheduler":
            return mistakes.SCHEDULER_IS_MISSING
        case "of_rank":
            return mistakes.state_of_rank_is_missing(name=name)
        case _:
            return mistakes.state_is_missing(name=str(name))


def packed_state(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Converts the state of a parameter to entries, each tensor to one of its own."""
    if not all(isinstance(key, str) for key in state):
        return {_WHOLE: packed(dict(state), "the state of a parameter")}
    return {
        key: value if isinstance(value, torch.Tensor) else packed(value, f"the optimizer's {key}")
        for key, value in state.items()
    }


def unpacked_state(read: Mapping[str, Any]) -> dict[Any, Any]:
    """Converts entries to the state of a parameter: the inverse of `packed_state`."""
    values = {key: unpacked(value) if isinstance(value, bytes) else value for key, value in read.items()}
    whole: dict[Any, Any] = values.get(_WHOLE, values)
    return whole


def value_of(stored: Any) -> Any:
    """Returns the value of an entry, in either format."""
    return unpacked(stored) if isinstance(stored, bytes) else stored[0]


FORMAT = 2
"""Number of the format of a checkpoint; raised when an older version could not read it."""

FORMATS = (1, FORMAT)
"""Formats that can be read."""

INFO = ("about", "0")
"""Path of the `CheckpointInfo` in the nested state."""

_ONE = "0"
_OF_LOSS = "loss."


@dataclass(frozen=True)
class CheckpointInfo:
    """Facts about a checkpoint and the job that wrote it, after ``update`` updates and ``items`` items of all copies.

    ``groups[copy * workers + worker]`` has, for each parameter that the optimizers of that worker step, the hash of its
    `SavedGroup`. ``unsaved`` names buffers that had changed and are in no state dict.
    """

    format: int
    update: int
    items: int
    program: str
    name: str
    stages: int
    copies: int
    groups: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    unsaved: Sequence[str] = ()

    def group_of(self, place: int) -> dict[str, str]:
        """Maps parameters to the hashes of their `SavedGroup`; where workers differ, the one at ``place`` decides."""
        of_all = [self.groups[number] for number in sorted(self.groups, reverse=True)]
        hashes: dict[str, str] = {}
        for groups in (*of_all, self.groups.get(place, {})):
            hashes |= groups
        return hashes


@dataclass(frozen=True)
class SavedFacts:
    """Facts about a rank's part of a checkpoint, which the ranks compare before they save.

    ``place`` is the number ``copy * workers + worker``; ``groups`` and ``unsaved`` are as in `CheckpointInfo`.
    ``shared`` and ``of_copy`` have states of objects as texts for messages, ``counts`` the number of weights in each
    average.
    """

    place: int
    copy: int
    groups: dict[str, str]
    shared: dict[str, dict[str, str]]
    of_copy: dict[str, dict[str, str]]
    counts: dict[str, dict[str, str]]
    unsaved: list[str]


@dataclass(frozen=True)
class Objects:
    """Objects of a loop with a state, in addition to pipeline, optimizers and schedulers; see `Checkpoints`."""

    shared: Mapping[str, Stateful] = field(default_factory=dict)
    of_copy: Mapping[str, Stateful] = field(default_factory=dict)
    of_rank: Mapping[str, Stateful] = field(default_factory=dict)
    averages: Mapping[str, Average] = field(default_factory=dict)


class CheckpointContent:
    """Collects the state of a training loop for a checkpoint, and restores it from one; see `Checkpoints`."""

    def __init__(
        self,
        pipe: Pipeline,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Stateful],
        objects: Objects,
    ) -> None:
        self.pipe = pipe
        self._optimizers = optimizers
        # A scheduler whose groups are known is saved by parameter, another one as an object that all ranks share.
        self._schedulers: list[Stateful] = []
        others: dict[str, Stateful] = {}
        for number, scheduler in enumerate(schedulers):
            if groups_of(scheduler, pipe.names) is None:
                others[f"schedulers[{number}]"] = scheduler
            else:
                self._schedulers.append(scheduler)
        self._objects = replace(objects, shared={**objects.shared, **others})
        self._unsaved = pipe.unsaved_buffers()

    # ---- saving

    def part(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], SavedFacts]:
        """Returns what this rank saves, without the `CheckpointInfo`, and the facts that ranks compare before.

        ``state`` is the pipeline's ``state_dict()``. Tensors are not copied.
        """
        # Optimizers: the state of each parameter, and each group once, under its hash.
        pipe = self.pipe
        named = optimizer_state.by_name(self._optimizers, pipe.names, self._schedulers)
        hashes: dict[int, str] = {}
        groups: dict[str, bytes] = {}
        for group in named.groups.values():
            if id(group) not in hashes:
                plain = optimizer_state.plain(group)
                hashes[id(group)] = fingerprint(plain)[:32]
                groups[hashes[id(group)]] = packed(plain, "what an optimizer keeps of its groups")
        of_name = {name: hashes[id(group)] for name, group in named.groups.items()}

        # Objects of the loop, and averages of the weights.
        kinds = ("shared", "of_copy", "of_rank")
        states = {kind: states_of(kind, getattr(self._objects, kind)) for kind in kinds}
        saved = {kind: packed_states(kind, states[kind]) for kind in kinds}
        averages = {name: average.saved() for name, average in self._average_states().items()}
        counts = {name: average["count"] for name, average in averages.items() if average["count"]}
        unsaved = [name for name, bits in pipe.unsaved_buffers().items() if self._unsaved.get(name) != bits]
        facts = SavedFacts(
            self._place,
            pipe.copy,
            of_name,
            shown_states(states["shared"]),
            shown_states(states["of_copy"]),
            shown_states(counts),
            unsaved,
        )
        content = {
            **state,
            "averages": averages,
            "state": {name: packed_state(of_parameter) for name, of_parameter in named.state.items()},
            "groups": groups,
            "shared": saved["shared"],
            "of_copy": {str(pipe.copy): saved["of_copy"]},
            "of_rank": {self._rank: saved["of_rank"]},
        }
        return content, facts

    def complete(self, content: Mapping[str, Any], facts: Sequence[SavedFacts], items: int) -> dict[str, Any]:
        """Returns this rank's ``content`` with the `CheckpointInfo`, from the ``facts`` of all ranks.

        Raises `Misuse` if a state that must be the same on several ranks differs.
        """
        require_equal("shared", [(rank, of.shared) for rank, of in enumerate(facts)], "of_copy= or of_rank=")
        for copy in sorted({of.copy for of in facts}):
            of_ranks = [(rank, of.of_copy) for rank, of in enumerate(facts) if of.copy == copy]
            require_equal("of_copy", of_ranks, "of_rank=")
        for name in self._objects.averages:
            counts = [(rank, {name: of.counts[name]}) for rank, of in enumerate(facts) if name in of.counts]
            require_equal("averages", counts, "of_rank=")
        pipe, job = self.pipe, self.pipe.job
        groups = {of.place: of.groups for of in reversed(facts)}  # of ranks in one place the first counts
        unsaved = sorted({name for of in facts for name in of.unsaved})
        info = CheckpointInfo(
            FORMAT, pipe.updates, items, job.program, job.name, job.stages, pipe.copies, groups, unsaved
        )
        first, last = INFO
        return {**content, first: {last: packed(asdict(info), "the checkpoint")}}

    # ---- resuming

    def is_laid_out_as(self, info: CheckpointInfo) -> bool:
        """Whether each worker of each copy now holds the stages that it held when the checkpoint was written."""
        job = self.pipe.job
        if (info.program, info.copies) != (job.program, self.pipe.copies):
            return False
        # Format 1 counted replicas by ranks, whose places depend on the layout, and did not save the layout.
        return info.format > 1 or info.copies == 1 or all(len(workers) == 1 for workers in job.holders)

    @property
    def stepped(self) -> list[str]:
        """Names of the parameters that this rank's optimizers step."""
        names = self.pipe.names
        return [names[p] for optimizer in self._optimizers for p in parameters_of(optimizer) if p in names]

    def wanted_groups(self, there: Metadata, info: CheckpointInfo) -> dict[str, Any]:
        """Returns a nested state with an empty place for the `SavedGroup` of each parameter of this rank."""
        saved = {path[1] for path in paths_of(there) if path[0] == "groups"}
        hashes = info.group_of(self._place)
        keys = (hashes.get(name) if info.format > 1 else name for name in self.stepped)
        return {"groups": {key: () for key in keys if key in saved}}

    def groups(self, read: Mapping[str, Any], info: CheckpointInfo) -> dict[str, SavedGroup]:
        """Returns the group of each parameter of this rank, if the checkpoint has it."""
        if info.format == 1:
            return {name: SavedGroup(dict(settings)) for name, (settings,) in read["groups"].items()}
        of_hash = {key: optimizer_state.group_of(unpacked(value)) for key, value in read["groups"].items()}
        hashes = info.group_of(self._place)
        return {name: of_hash[hashes[name]] for name in self.stepped if hashes.get(name) in of_hash}

    def refusal(self, groups: Mapping[str, SavedGroup]) -> str | None:
        """Returns why optimizers and schedulers of this rank cannot continue from saved groups; None if they can."""
        return optimizer_state.refusal(self._optimizers, self.pipe.names, self._schedulers, groups)

    def wanted(self, there: Metadata, info: CheckpointInfo, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a nested state with places for all that this rank reads from a checkpoint; `take` restores it.

        ``state`` is the pipeline's ``state_dict``, with the buffers of the replica that `replica` names. Those of the
        loss, which earlier versions did not save, stay as they are if the checkpoint has none.
        """
        copy = str(self.pipe.copy)
        paths = {*paths_of(there)}
        if ("of_copy", copy) not in {path[:2] for path in paths}:
            copy = _ONE
        wanted: dict[str, Any] = {
            **state,
            "averages": {name: average.saved(self.replica(info)) for name, average in self._average_states().items()},
            "state": {name: {} for name in self.stepped},
            "shared": dict.fromkeys(self._objects.shared, ()),
            "of_copy": {copy: dict.fromkeys(self._objects.of_copy, ())},
            "of_rank": {
                self._rank if self.is_laid_out_as(info) else "elsewhere": dict.fromkeys(self._objects.of_rank, ())
            },
        }
        if info.format == 1:
            wanted |= {"extra": {}, "scheduler": {_ONE: ()} if self._schedulers else {}}
        parameters = dict(self.pipe.named_parameters()) | self._sharded()
        if not any(name.startswith(_OF_LOSS) for name in names_in(there, "replicas")):
            buffers = state["replicas"].items()
            wanted["replicas"] = {key: buffer for key, buffer in buffers if f"/{_OF_LOSS}" not in key}
        for path, stored in entries_of(there):
            if path[0] == "state" and path[1] in wanted["state"]:
                wanted["state"][path[1]][path[2]] = room_for(parameters[path[1]], stored)
        return wanted

    def replica(self, info: CheckpointInfo) -> int | None:
        """Returns the replica whose buffers all ranks read, which is number 0; None if each rank reads its own."""
        return None if self.is_laid_out_as(info) else 0

    def lacking(self, wanted: Mapping[str, Any], there: Metadata) -> str | None:
        """Returns a complaint if a checkpoint lacks something that this rank wants, or has it in another shape."""
        stored = dict(entries_of(there))
        for path, value in flat(wanted):
            if path not in stored:
                return absent(path, stored)
            entry = stored[path]
            if isinstance(entry, TensorStorageMetadata) and tuple(entry.size) != tuple(value.shape):
                return mistakes.shapes_differ(name=f"{path[-1]}", saved=tuple(entry.size), here=tuple(value.shape))
        return None

    def take(self, read: Mapping[str, Any], info: CheckpointInfo, groups: Mapping[str, SavedGroup]) -> None:
        """Restores everything that was read into the places of `wanted`, except for the pipeline's own state."""
        for name, average in self._average_states().items():
            average.load(read["averages"][name], self.replica(info))
        state = {name: unpacked_state(saved) for name, saved in read["state"].items() if saved}
        optimizer_state.restore(self._optimizers, self.pipe.names, optimizer_state.OptimizerState(state, dict(groups)))
        if info.format == 1:
            for scheduler in self._schedulers:
                give(scheduler, for_groups_of(scheduler, value_of(read["scheduler"][_ONE])), "the scheduler")
        else:
            states = {name: group.schedulers or [] for name, group in groups.items()}
            restore_schedulers(self._schedulers, self.pipe.names, states)
        for what, values, saved in (
            ("shared", self._objects.shared, read["shared"]),
            ("of_copy", self._objects.of_copy, *read["of_copy"].values()),
            ("of_rank", self._objects.of_rank, *read["of_rank"].values()),
        ):
            for name, value in values.items():
                give(value, value_of(saved[name]), f"{what}[{name!r}]")

    def left_out(self, there: Metadata) -> list[str]:
        """Returns the objects in a checkpoint that `Checkpoints` was not given on this rank."""
        names = {
            (path[0], path[1 if path[0] in ("shared", "averages") else 2])
            for path in paths_of(there)
            if path[0] in vars(self._objects)
        }
        return sorted(f"{kind}[{name!r}]" for kind, name in names if name not in vars(self._objects)[kind])

    @property
    def exceeds_format_1(self) -> bool:
        """Whether this rank saves anything that checkpoints of format 1 do not contain."""
        named = optimizer_state.by_name(self._optimizers, self.pipe.names)
        has_entries = any(group.entries for group in named.groups.values())
        return len(self._schedulers) > 1 or has_entries or bool(self.pipe.state_dict()["extra"])

    @property
    def _place(self) -> int:
        return self.pipe.copy * self.pipe.job.workers + self.pipe.worker

    @property
    def _rank(self) -> str:
        """The key of this rank in a checkpoint, first rank of its pipelines, copy and worker, in any layout."""
        return f"{self.pipe.first_rank}/{self.pipe.copy}/{self.pipe.worker}"

    def _average_states(self) -> dict[str, AverageState]:
        return {
            name: self.pipe.average_state(value, f"averages[{name!r}]")
            for name, value in self._objects.averages.items()
        }

    def _sharded(self) -> dict[str, torch.Tensor]:
        """The parameters of sharded optimizers by name, as DTensors that are cut like the optimizer's state."""
        names = self.pipe.names
        return {
            names[parameter]: optimizer.spread(parameter)
            for optimizer in self._optimizers
            if isinstance(optimizer, ShardedOptimizer)
            for parameter in parameters_of(optimizer)
        }
