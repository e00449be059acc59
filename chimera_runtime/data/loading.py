"""How items become micro-batches, in a rank or in its data workers: what is drawn depends on the item alone."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import default_collate

from chimera_runtime.blame import ModelError, RemoteTraceback, UserCode
from chimera_runtime.data.item_order import Share, in_items
from chimera_runtime.errors import MISUSED, Misuse
from chimera_runtime.values.keywords import KeywordNames, Keywords
from chimera_runtime.values.nested import is_rows, joined, lengths, mapped, obstacle, rows, taken_apart
from chimera_runtime.values.tensors import draw_seed, seed_all

Triple = tuple[Any, Any, Keywords]
"""An input, a target and keyword arguments, as pytrees."""

Uses = Mapping[int, frozenset[int]]
"""By micro-batch, what a rank uses of its triple: 0 the input, 1 the target, 2 the keyword arguments."""

POSITION = ("seed", "shuffle", "items of the epoch", "epoch", "item", "key")
"""What tells mini-batches of a loader apart, as far as it can be known without loading; keys are those of samplers."""

ALL = frozenset({0, 1, 2})

_COLLATING = UserCode("default_collate of a micro-batch", MISUSED)
_COLLATING_OWN = UserCode("collate of a micro-batch", MISUSED)


@dataclass(frozen=True)
class Loading:
    """Loads items and collates them, with ``collate``, or with torch's default_collate if that is None.

    ``collate`` gets the items of a micro-batch in a list, and returns a pair or a triple. Messages call the dataset by
    ``name``. Where ``names`` are given, keyword arguments have these.
    """

    dataset: Any
    seed: int
    collate: Callable[[list[Any]], Any] | None = None
    name: str = "the dataset"
    names: KeywordNames | None = None

    def items(self, epoch: int, keys: Sequence[Any]) -> list[Any]:
        """Items of a map-style dataset, each drawn from the generators as its seed has it."""
        loaded = []
        for key in keys:
            seed_all(draw_seed("item", self.seed, epoch, key))
            with UserCode(f"item {key} of {self.name}", MISUSED):
                loaded.append(self.dataset[key])
        return loaded

    def collated(
        self, items: list[Any], epoch: int, place: int, names: Sequence[Any], uses: frozenset[int] = ALL
    ) -> Triple:
        """The micro-batch of some items, of which the first has a place in the epoch; what is not used is None.

        Raises
        ------
        Misuse
            If an item, or what ``collate`` returns, is no pair and no triple, or has other keyword arguments than
            ``names`` or other items; if what ``collate`` returns has another number of items.
        ModelError
            If collating fails.
        """
        if self.collate is None:
            triples = [
                self._triple(item, f"item {name} of {self.name}") for item, name in zip(items, names, strict=True)
            ]
            for name, (*_, keywords) in zip(names, triples, strict=True):
                if differing := sorted(keywords.keys() ^ triples[0][2].keys()):
                    raise Misuse(
                        f"of items {names[0]} and {name} of {self.name} only one has the keyword argument "
                        f"{differing[0]}: give all items of a micro-batch the same names"
                    )
            with _COLLATING:
                parts = [
                    default_collate(list(part)) if i in uses else None
                    for i, part in enumerate(zip(*triples, strict=True))
                ]
            return parts[0], parts[1], parts[2] or {}
        seed_all(draw_seed("collate", self.seed, epoch, place))
        with _COLLATING_OWN:
            value = self.collate(items)
        inputs, target, keywords = triple = self._triple(value, "what collate returned")
        if other := lengths(triple) - {len(items)}:
            raise Misuse(
                f"collate returned a tensor with {min(other)} in dimension 0 for {in_items(len(items))}: return the "
                "items of a micro-batch along dimension 0"
            )
        return inputs if 0 in uses else None, target if 1 in uses else None, keywords if 2 in uses else {}

    def _triple(self, value: Any, what: str) -> Triple:
        triple = as_triple(value, what)
        if self.names is not None:
            self.names.require(triple[2], what)
        return triple


@dataclass(frozen=True)
class MiniBatch:
    """What a rank needs of a mini-batch of its copy: `Pipeline.step`, ``evaluate`` and ``predict`` take it.

    Attributes
    ----------
    items
        The items of the copy: B*N, or fewer in the last mini-batch of an epoch.
    position
        Where it begins in the data, the same on all ranks: see `POSITION`.
    """

    items: int
    share: Share
    micro_batches: Mapping[int, Triple] = field(default_factory=dict)
    position: tuple[int, ...] = ()

    def __call__(self, micro: int) -> Triple:
        """The (input, target, keywords) of a micro-batch that this rank uses; None in the place of what it does not."""
        if micro not in self.micro_batches:
            raise Misuse(f"micro-batch {micro} was not loaded: this rank does not use it in a step")
        return self.micro_batches[micro]

    def require_whole(self) -> None:
        """Passes if an update can be made with it.

        Raises
        ------
        Misuse
            If it lacks items, as the last one of an epoch may.
        """
        if self.items != self.share.held(self.share.items):
            raise Misuse(
                f"the last mini-batch of an epoch has {in_items(self.items)}, and an update takes B*N = "
                f"{self.share.micro_batch_size}*{self.share.micro_batches}: make the loader with drop_last=True"
            )

    def pin_memory(self) -> "MiniBatch":
        """The same in memory that is locked, from which a GPU copies beside its work."""
        pinned = {micro: mapped(triple, torch.Tensor.pin_memory) for micro, triple in self.micro_batches.items()}
        return MiniBatch(self.items, self.share, pinned)


@dataclass(frozen=True)
class Failure:
    """An error of a data worker on its way to the rank."""

    doing: str
    status: int
    report: RemoteTraceback | None

    def raise_again(self) -> None:
        """Raises what was raised there."""
        if self.report is None:
            raise Misuse(self.doing)
        raise ModelError(self.doing, self.status) from self.report


def failure(error: ModelError | Misuse) -> Failure:
    """An error as it can travel: with the user's traceback as a text."""
    match error:
        case ModelError():
            return Failure(error.doing, error.status, RemoteTraceback.of(error))
        case _:
            return Failure(str(error), MISUSED, None)


def sendable(batch: MiniBatch) -> MiniBatch:
    """The same for another process: few pieces of memory, and nothing that cannot be sent.

    Raises
    ------
    ModelError
        If something in it cannot be pickled.
    """
    for triple in batch.micro_batches.values():
        with UserCode("sending a micro-batch from a data worker", MISUSED):
            pickle.dumps(taken_apart(triple)[1])
    parts = [
        _in_one_piece(
            {micro: mapped(triple[part], torch.Tensor.detach) for micro, triple in batch.micro_batches.items()}
        )
        for part in range(3)
    ]
    triples = {micro: (parts[0][micro], parts[1][micro], parts[2][micro]) for micro in batch.micro_batches}
    return MiniBatch(batch.items, batch.share, triples)


def _in_one_piece(values: dict[int, Any]) -> dict[int, Any]:
    """The values of micro-batches as views of one value if they are alike: each tensor of it is a file to be opened."""
    present = {micro: value for micro, value in values.items() if is_rows(value) and lengths(value)}
    kinds = set()
    for value in present.values():
        tensors, form = taken_apart(value)
        kinds.add((str(form), tuple((t.dtype, t.shape[1:], t.layout) for t in tensors)))
    if len(kinds) != 1 or len(present) == 1 or any(len(lengths(value)) > 1 for value in present.values()):
        return values
    whole, start, views = joined([*present.values()]), 0, dict(values)
    for micro, value in present.items():
        (count,) = lengths(value)
        views[micro] = rows(whole, start, count)
        start += count
    return views


def as_triple(value: Any, what: str) -> Triple:
    """Input, target and keyword arguments: a pair has none of these.

    Raises
    ------
    Misuse
        If it is neither a pair nor a triple with a dict of names.
    """
    match value:
        case (inputs, target):
            return inputs, target, {}
        case (inputs, target, dict() as keywords) if all(isinstance(name, str) for name in keywords):
            return inputs, target, keywords
        case _:
            raise Misuse(
                f"{what} is a {type(value).__name__}, not a pair (input, target); keyword arguments of stages stand "
                "third, in a dict"
            )


_PLACES = {"[0]": "the input", "[1]": "the target", "[2]": "the keyword arguments"}


def require_cut(triple: Triple, items: int, what: str) -> None:
    """Passes if inputs, target and keyword arguments of so many items can be cut into parts of fewer.

    Raises
    ------
    Misuse
        If something in them would go whole to each part, though it may have something of its own for each item.
    """
    uncut = obstacle(triple, items)
    if uncut is not None:
        place, kind = uncut
        raise Misuse(
            f"{what}: {_PLACES[place[:3]]}{place[3:]} is {kind}, which cannot be cut into micro-batches: give tensors "
            "with the items in dimension 0, in structures that torch.utils._pytree knows; or give the micro-batches "
            "one by one, by a function of their number (step also takes micro_batches=)"
        )
