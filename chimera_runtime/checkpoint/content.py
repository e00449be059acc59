"""What a checkpoint has in it, and how a rank finds its part in one that other ranks may have written.

    model.<name>             a parameter
    replicas.<k>/<name>      a buffer of the k-th replica of its stage
    extra.<k>/<name>         what else the modules of that have in their state_dict
    averages.<a>.<..>        these three once more, for an average of the weights
    state.<name>.<what>      what an optimizer keeps of a parameter
    groups.<hash>            `KeptGroup`: what is kept of a group of an optimizer, once for all groups that are equal
    shared.<name>            the state of something else, the same everywhere
    of_copy.<copy>.<name>    that of something else which each copy has of its own
    of_rank.<rank>.<name>    that of something else which each rank has of its own
    about.0                  `About`, with the groups of each parameter

All but tensors is pickled here, so that it is as it was when it was saved and keeps its types. In format 1 it was
wrapped in a tuple; groups were by the name of a parameter, and ``scheduler.0`` had the state of the first scheduler.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from chimera_runtime.checkpoint.entries import (
    absent,
    entries_of,
    flat,
    packed_state,
    paths_of,
    room_for,
    unpacked_state,
    value_of,
)
from chimera_runtime.checkpoint.stateful import Stateful, give, packed_states, require_equal, shown_states, states_of
from chimera_runtime.optimizer.optimizer_state import (
    KeptGroup,
    OptimizerState,
    by_name,
    group_of,
    plain,
    refusal,
    restore,
)
from chimera_runtime.optimizer.scheduler_state import for_groups_of, groups_of, restore_schedulers
from chimera_runtime.optimizer.sharded_optimizer import ShardedOptimizer
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.state.averages import Average, AverageState
from chimera_runtime.state.state import packed, unpacked
from chimera_runtime.values.fingerprint import fingerprint

FORMAT = 2
"""Of what a checkpoint holds; raised when an older version could not read it."""

FORMATS = (1, FORMAT)
"""Those that can be read."""

ABOUT = "about"
_ONE = "0"


@dataclass(frozen=True)
class About:
    """What a checkpoint says of the job that wrote it; updates and items, of all copies, are those before it.

    ``groups`` has for each worker of each copy, as ``copy * workers + worker``, the hash of the group of each parameter
    that its optimizers step. ``unsaved`` names buffers that are in no state dict and had changed.
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
        """The hash of the group of each parameter, with those of one rank in the first place."""
        of_all = [self.groups[number] for number in sorted(self.groups, reverse=True)]
        known: dict[str, str] = {}
        for groups in (*of_all, self.groups.get(place, {})):
            known |= groups
        return known


@dataclass(frozen=True)
class Part:
    """What one rank saves: ``state`` without `About`, and what the ranks compare."""

    state: dict[str, Any]
    facts: "SavedFacts"


@dataclass(frozen=True)
class SavedFacts:
    """What the ranks compare before they save.

    Attributes
    ----------
    place
        ``copy * workers + worker``.
    groups
        The hash of the group of each parameter.
    shared, of_copy
        What is in the states that are to be equal, as it is shown in messages, by their names.
    counts
        How often averages were taken, for those of which it is known here.
    unsaved
        The buffers that are in no state dict and have changed.
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
    """What a loop has beside the pipeline, its optimizers and schedulers, by name; see `Checkpoints`."""

    shared: Mapping[str, Stateful] = field(default_factory=dict)
    of_copy: Mapping[str, Stateful] = field(default_factory=dict)
    of_rank: Mapping[str, Stateful] = field(default_factory=dict)
    averages: Mapping[str, Average] = field(default_factory=dict)


class Content:
    """Everything of a training loop that a checkpoint keeps; see `Checkpoints`."""

    def __init__(
        self,
        pipe: Pipeline,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Stateful],
        objects: Objects,
    ) -> None:
        self.pipe = pipe
        self._optimizers = optimizers
        names = pipe.names
        by_group = [groups_of(scheduler, names) is not None for scheduler in schedulers]
        self._schedulers = [scheduler for scheduler, known in zip(schedulers, by_group, strict=True) if known]
        others = {
            f"schedulers[{number}]": scheduler
            for number, (scheduler, known) in enumerate(zip(schedulers, by_group, strict=True))
            if not known
        }
        self._objects = replace(objects, shared={**objects.shared, **others})
        self._unsaved = pipe.unsaved_buffers()

    # ---- saving

    def part(self, state: Mapping[str, Any]) -> Part:
        """What this rank saves beside the state of the pipeline; tensors are those of the training.

        Raises
        ------
        Misuse, ModelError
            If an object cannot say its state, or that cannot be saved.
        """
        pipe = self.pipe
        named = by_name(self._optimizers, pipe.names, self._schedulers)
        hashes: dict[int, str] = {}
        groups: dict[str, bytes] = {}
        for group in named.groups.values():
            if id(group) not in hashes:
                hashes[id(group)] = fingerprint(plain(group))[:32]
                groups[hashes[id(group)]] = packed(plain(group), "what an optimizer keeps of its groups")
        of_name = {name: hashes[id(group)] for name, group in named.groups.items()}
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
        return Part(
            {
                **state,
                "averages": averages,
                "state": {name: packed_state(kept) for name, kept in named.state.items()},
                "groups": groups,
                "shared": saved["shared"],
                "of_copy": {str(pipe.copy): saved["of_copy"]},
                "of_rank": {self._rank: saved["of_rank"]},
            },
            facts,
        )

    def complete(self, part: Part, facts: Sequence[SavedFacts], items: int) -> dict[str, Any]:
        """All that this rank saves after so many items, given what is known of all ranks.

        Raises
        ------
        Misuse
            If something that is to be the same on several ranks is not.
        """
        require_equal("shared", [(rank, of.shared) for rank, of in enumerate(facts)], "of_copy= or of_rank=")
        for copy in sorted({of.copy for of in facts}):
            of_ranks = [(rank, of.of_copy) for rank, of in enumerate(facts) if of.copy == copy]
            require_equal("of_copy", of_ranks, "of_rank=")
        for name in self._objects.averages:
            counts = [(rank, {name: of.counts[name]}) for rank, of in enumerate(facts) if name in of.counts]
            require_equal("averages", counts, "of_rank=")
        pipe, groups = self.pipe, dict[int, Mapping[str, str]]()
        for of in facts:
            groups.setdefault(of.place, of.groups)
        unsaved = sorted({name for of in facts for name in of.unsaved})
        job = pipe.job
        about = About(FORMAT, pipe.updates, items, job.program, job.name, job.stages, pipe.copies, groups, unsaved)
        return {**part.state, ABOUT: {_ONE: packed(asdict(about), "the checkpoint")}}

    # ---- resuming

    def is_laid_out_as(self, about: About) -> bool:
        """Whether each worker of each copy holds what it held when the checkpoint was written."""
        job = self.pipe.job
        if (about.program, about.copies) != (job.program, self.pipe.copies):
            return False
        # Format 1 counted replicas by ranks, which follow the layout, and did not say which that was.
        return about.format > 1 or about.copies == 1 or all(len(workers) == 1 for workers in job.holders)

    @property
    def stepped(self) -> list[str]:
        """The names of the parameters that optimizers step here."""
        names = self.pipe.names
        return [
            names[p]
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for p in group["params"]
            if p in names
        ]

    def wanted_groups(self, there: Metadata, about: About) -> dict[str, Any]:
        """Where the groups of this rank's parameters are to be read into."""
        known = {path[1] for path in paths_of(there) if path[0] == "groups"}
        hashes = about.group_of(self._place)
        keys = (hashes.get(name) if about.format > 1 else name for name in self.stepped)
        return {"groups": {key: () for key in keys if key in known}}

    def groups(self, read: Mapping[str, Any], about: About) -> dict[str, KeptGroup]:
        """The group of each parameter of this rank that the checkpoint has one for."""
        if about.format == 1:
            return {name: KeptGroup(dict(settings)) for name, (settings,) in read["groups"].items()}
        of_hash = {key: group_of(unpacked(value)) for key, value in read["groups"].items()}
        hashes = about.group_of(self._place)
        return {name: of_hash[hashes[name]] for name in self.stepped if hashes.get(name) in of_hash}

    def refusal(self, groups: Mapping[str, KeptGroup]) -> str | None:
        """Why optimizers and schedulers of this rank cannot go on with some groups; None if nothing is against it."""
        return refusal(self._optimizers, self.pipe.names, self._schedulers, groups)

    def wanted(self, there: Metadata, about: About, state: Mapping[str, Any]) -> dict[str, Any]:
        """Where this rank's part of a checkpoint is to be read into: `take` takes it from there.

        ``state`` is the one of the pipeline, of the replica that is to be read: see `replica`.
        """
        copy = str(self.pipe.copy)
        paths = {*paths_of(there)}
        if ("of_copy", copy) not in {path[:2] for path in paths}:
            copy = _ONE
        wanted: dict[str, Any] = {
            **state,
            "averages": {name: average.saved(self.replica(about)) for name, average in self._average_states().items()},
            "state": {name: {} for name in self.stepped},
            "shared": dict.fromkeys(self._objects.shared, ()),
            "of_copy": {copy: dict.fromkeys(self._objects.of_copy, ())},
            "of_rank": {
                self._rank if self.is_laid_out_as(about) else "elsewhere": dict.fromkeys(self._objects.of_rank, ())
            },
        }
        if about.format == 1:
            wanted |= {"extra": {}, "scheduler": {_ONE: ()} if self._schedulers else {}}
        parameters = dict(self.pipe.named_parameters()) | self._sharded()
        for path, stored in entries_of(there):
            if path[0] == "state" and path[1] in wanted["state"]:
                wanted["state"][path[1]][path[2]] = room_for(parameters[path[1]], stored)
        return wanted

    def replica(self, about: About) -> int | None:
        """The replica whose buffers are read: None where each rank reads its own."""
        return None if self.is_laid_out_as(about) else 0

    def lacking(self, wanted: Mapping[str, Any], there: Metadata) -> str | None:
        """What this rank needs and a checkpoint has not, or has in another shape; None if all is there."""
        stored = dict(entries_of(there))
        for path, value in flat(wanted):
            if path not in stored:
                return absent(path, stored)
            kept = stored[path]
            if isinstance(kept, TensorStorageMetadata) and tuple(kept.size) != tuple(value.shape):
                return f"{path[-1]} is {tuple(kept.size)} in it, and {tuple(value.shape)} in this model"
        return None

    def take(self, read: Mapping[str, Any], about: About, groups: Mapping[str, KeptGroup]) -> None:
        """Goes on with what `wanted` named, now that it has been read, but for the state of the pipeline.

        Raises
        ------
        BadCheckpoint, ModelError
            If something does not take its state.
        """
        for name, average in self._average_states().items():
            average.load(read["averages"][name], self.replica(about))
        state = {name: unpacked_state(kept) for name, kept in read["state"].items() if kept}
        restore(self._optimizers, self.pipe.names, OptimizerState(state, dict(groups)))
        if about.format == 1:
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
        """What a checkpoint has and this rank is not given a place for."""
        names = {
            (path[0], path[1 if path[0] in ("shared", "averages") else 2])
            for path in paths_of(there)
            if path[0] in vars(self._objects)
        }
        return sorted(f"{kind}[{name!r}]" for kind, name in names if name not in vars(self._objects)[kind])

    @property
    def exceeds_format_1(self) -> bool:
        """Whether there is something here of which format 1 had nothing."""
        named = by_name(self._optimizers, self.pipe.names)
        entries = any(group.entries for group in named.groups.values())
        return len(self._schedulers) > 1 or entries or bool(self.pipe.state_dict()["extra"])

    @property
    def _place(self) -> int:
        return self.pipe.copy * self.pipe.job.workers + self.pipe.worker

    @property
    def _rank(self) -> str:
        """What is this rank's own, whatever the layout: by the first rank of its pipelines, copy and worker."""
        return f"{self.pipe.first_rank}/{self.pipe.copy}/{self.pipe.worker}"

    def _average_states(self) -> dict[str, AverageState]:
        return {
            name: self.pipe.average_state(value, f"averages[{name!r}]")
            for name, value in self._objects.averages.items()
        }

    def _sharded(self) -> dict[str, torch.Tensor]:
        """The parameters whose optimizer keeps the state of a part alone, as that is laid out."""
        names = self.pipe.names
        return {
            names[parameter]: optimizer.spread(parameter)
            for optimizer in self._optimizers
            if isinstance(optimizer, ShardedOptimizer)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }


def wanted_about(there: Metadata) -> dict[str, Any]:
    """Where `About` is to be read into; empty if the checkpoint is not one of ours."""
    return {ABOUT: {_ONE: ()}} if (ABOUT, _ONE) in {*paths_of(there)} else {}


def about_of(read: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `About`."""
    fields: dict[str, Any] = value_of(read[ABOUT][_ONE])
    return fields
