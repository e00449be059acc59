"""Inventory of the stages of all ranks: names and initial weights, which the ranks compare once, before the probe."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from chimera_runtime.blame import ModelError
from chimera_runtime.errors import model as mistakes
from chimera_runtime.errors.start import (
    initial_loss_differs,
    initial_weights_differ,
    parameters_differ,
    stages_are_refused,
)
from chimera_runtime.model.model import Model
from chimera_runtime.model.naming import buffers_of, further_entries, name_in_model
from chimera_runtime.model.ties import End, Modules, Tie, declaration, described, named
from chimera_runtime.ranks.agreement import ControlGroup
from chimera_runtime.values.mesh_tensors import local
from chimera_runtime.values.nested import digest, plain

_SAMPLE = 64
"""Numbers of a parameter that are read to see whether its values were drawn, or follow a simple rule."""


class Entry(NamedTuple):
    """Entry in the ``state_dict`` of a stage: parameter, buffer or another one; it goes from rank to rank as JSON.

    ``stage`` and ``name`` are its end, of a tied parameter the first one; ``in_model`` is its name in the model. A
    parameter has dtype, shape and ``frozen`` in ``traits``, and a digest of its values. ``sample`` is a digest of a
    few of them if it is trained, and another parameter hardly has these by chance.
    """

    stage: int
    name: str
    in_model: str
    traits: str = ""
    digest: str = ""
    sample: str = ""

    @property
    def end(self) -> End:
        """Stage and name in the stage."""
        return self.stage, self.name


Entries = Mapping[int, Sequence[Entry]]
"""The entries of the stages of a rank, by stage."""


def compare_stages(
    control_group: ControlGroup, model: Model, built: Modules, ties: Sequence[Tie], loads: int = 0
) -> list[str]:
    """Makes sure that names are unique, and that replicas start equal; returns remarks. Every rank calls it.

    After ``loads`` files of weights only names and samples of values are compared. Raises `Misuse` on all ranks if
    entries have one name in the model, or replicas of a stage differ in parameters or in their names.
    """
    mine = {stage: [*entries_of(model, built, ties, stage, is_hashed=not loads)] for stage in built}

    def verdict(values: Sequence[Any]) -> tuple[str | None, list[str]]:
        ranks = [{stage: [Entry(*entry) for entry in entries] for stage, entries in value} for value in values]
        comparison = Comparison(model, ties, ranks)
        return next(comparison.complaints(), None), [] if (remark := comparison.remark()) is None else [remark]

    what = "for the names and the initial weights of its stages"
    complaint, remarks = control_group.decide(f"stages/{loads}", [*mine.items()], verdict, what)
    if complaint is not None:
        raise stages_are_refused(complaint=complaint)
    return remarks


def entries_of(model: Model, built: Modules, ties: Sequence[Tie], stage: int, *, is_hashed: bool) -> Iterator[Entry]:
    """Yields the entries in the ``state_dict`` of a stage of this rank; errors as in `name_in_model`."""
    ends, module = {parameter: end for end, parameter in named(built, ties).items()}, built[stage]
    for parameter in module.parameters():
        end, values = ends[parameter], local(parameter)
        sample = _sample(values) if parameter.requires_grad else ""
        digest_of = digest([values]) if is_hashed else ""
        yield Entry(*end, name_in_model(model, *end), described(parameter), digest_of, sample)
    others = [name for name, _, is_saved in buffers_of(module) if is_saved]
    with suppress(ModelError):  # what cannot be saved is an error when somebody saves
        others += [name for name, _ in further_entries(stage, module)]
    for name in others:
        yield Entry(stage, name, name_in_model(model, stage, name))


def _sample(values: torch.Tensor) -> str:
    """A digest of some numbers of a tensor; empty unless most of these differ, as random ones do, unlike constants."""
    count = values.numel()
    if count < 2:
        return ""
    sample = plain(values.flatten()[:: max(1, count // _SAMPLE)].cpu()).contiguous()
    numbers = sample.view(torch.uint8).view(len(sample), -1).tolist()
    return digest([sample]) if len({*map(tuple, numbers)}) > len(numbers) / 2 else ""


@dataclass(frozen=True)
class Comparison:
    """Compares the stages of all ranks, whose entries are in ``ranks``."""

    model: Model
    ties: Sequence[Tie]
    ranks: Sequence[Entries]

    def complaints(self) -> Iterator[str]:
        """Yields what is wrong, as messages."""
        firsts: dict[int, tuple[int, Sequence[Entry]]] = {}
        for rank, stages in enumerate(self.ranks):
            for stage, entries in stages.items():
                first, of_first = firsts.setdefault(stage, (rank, entries))
                yield from self._differences(stage, (first, rank), of_first, entries)
        yield from self._equal_names()

    def remark(self) -> str | None:
        """Returns a remark on trained parameters of different stages, or layers, that have equal values; else None."""
        ends_of: dict[tuple[str, str], dict[End, None]] = defaultdict(dict)
        for entry in sorted(self._all(), key=attrgetter("stage")):
            if entry.sample:
                ends_of[entry.traits, entry.sample][entry.end] = None
        groups = [[*ends] for ends in ends_of.values() if len({self.model.locate(*end)[:2] for end in ends}) > 1]
        if not groups:
            return None
        parameters = [*map(self.model.words, groups[0])]
        return mistakes.values_are_equal(self.model.file, parameters, len(groups) - 1, declaration(self.model, groups))

    def _all(self) -> Iterator[Entry]:
        return (entry for stages in self.ranks for entries in stages.values() for entry in entries)

    def _differences(
        self, stage: int, ranks: tuple[int, int], first: Sequence[Entry], other: Sequence[Entry]
    ) -> Iterator[str]:
        lists = [[entry for entry in entries if entry.traits] for entries in (first, other)]
        places = [[f"{entry.name} ({entry.traits})" for entry in entries] for entries in lists]
        if places[0] != places[1]:
            here, there = _apart(*places)
            yield parameters_differ(stage=stage, ranks=ranks, here=here, there=there)
        for entry, replica in zip(*lists, strict=False):
            if entry.digest != replica.digest:
                kind, _, inside = self.model.locate(*entry.end)
                if kind == "loss":
                    yield initial_loss_differs(parameter=inside, ranks=ranks)
                yield initial_weights_differ(stage=stage, parameter=entry.name, ranks=ranks)
        names = {entry.end: entry.in_model for entry in first}
        for end, name in ((entry.end, entry.in_model) for entry in other):
            if names.get(end, name) != name:
                yield mistakes.names_differ(
                    file=self.model.file, entry=self.model.words(end), name=names[end], other_name=name, ranks=ranks
                )

    def _equal_names(self) -> Iterator[str]:
        """Yields complaints about names that two entries have; all ends of a tied parameter are one."""
        aliases = [
            Entry(*ends[0], name_in_model(self.model, *end))
            for tie in self.ties
            for ends in tie.parameters
            for end in ends[1:]
        ]
        owners: dict[str, End] = {}
        for entry in (*self._all(), *aliases):
            owner = owners.setdefault(entry.in_model, entry.end)
            if owner != entry.end:
                first, second = map(self.model.words, (owner, entry.end))
                yield mistakes.names_are_equal(file=self.model.file, name=entry.in_model, first=first, second=second)


def _apart(first: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    length = max(len(first), len(other))
    padded = [[*entries, *["no further parameter"] * (length - len(entries))] for entries in (first, other)]
    return next(pair for pair in zip(*padded, strict=True) if pair[0] != pair[1])
