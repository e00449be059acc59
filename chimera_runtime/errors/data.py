"""Messages about datasets, the batches of a loop, and the processes that load them."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from chimera_runtime.errors import BadCheckpoint, Misuse

# Messages about checkpoints: what cannot be saved, and what cannot be resumed from.

IS_NOT_OURS = "it is not one that a Checkpoints of chimera_runtime has written"
SCHEDULER_IS_MISSING = "it has no scheduler, and here is one"
FORMAT_1_HAS_LESS = (
    "the checkpoint is of format 1: of several schedulers each takes the state of the first, and what "
    "modules have in their state_dict beside parameters and buffers, or optimizers beside settings and the "
    "state of parameters, begins anew"
)

_ONE_MODEL = (
    "all ranks save one model in one directory; of pipelines of several models save pipe.state_dict() with "
    "torch.distributed.checkpoint, each over the process group of its pipeline"
)


# Making a Checkpoints.


def copies_are_too_few(keep: int) -> Misuse:
    return Misuse(f"keep={keep}: at least one checkpoint stays")


def is_not_an_optimizer(name: str) -> Misuse:
    return Misuse(
        f"optimizers= has a {name}, which is not a torch.optim.Optimizer: of_rank= keeps any "
        "object that has a state_dict"
    )


def directories_differ(directories: Iterable[str]) -> Misuse:
    return Misuse(f"Checkpoints of {' and '.join(sorted({*directories}))} at once: {_ONE_MODEL}")


def models_differ(parameter: str, rank: int, first: int) -> Misuse:
    return Misuse(f"{parameter} of rank {rank} is not that of rank {first}: {_ONE_MODEL}")


# Saving.


def gradients_are_not_applied(update: int) -> Misuse:
    return Misuse(
        f"the gradients of update {update} are there and no optimizer has stepped with them: save "
        "after optimizer.step() and optimizer.zero_grad(), as gradients are not saved"
    )


def save_is_late(update: int, directory: Path, seconds: float) -> BadCheckpoint:
    return BadCheckpoint(
        f"{_checkpoint(update, directory)} is not written after {seconds:g} s; those before it are whole"
    )


def save_has_failed(update: int, directory: Path, why: str) -> BadCheckpoint:
    return BadCheckpoint(f"{_checkpoint(update, directory)} was not written: {why}; those before it are whole")


def _checkpoint(update: int, directory: Path) -> str:
    return f"the checkpoint after update {update} in {directory}"


def later_checkpoints_are_there(directory: Path, names: Sequence[str], update: int) -> BadCheckpoint:
    return BadCheckpoint(
        f"{directory} has {', '.join(names)}, which would count as newer than what is saved "
        f"from update {update} on: save elsewhere, or remove what you do not want"
    )


def another_job_saves_there(directory: Path) -> BadCheckpoint:
    return BadCheckpoint(f"another job saves its checkpoints in {directory}: choose another directory, or end that job")


def directory_cannot_be_written(directory: Path, why: str | None) -> BadCheckpoint:
    return BadCheckpoint(f"checkpoints cannot be saved in {directory}: {why}")


def directory_cannot_be_read(directory: Path, why: str | None) -> BadCheckpoint:
    return BadCheckpoint(f"{directory}: {why}")


def states_are_missing(what: str, name: str, rank: int, without: int) -> Misuse:
    return Misuse(f"{what}= has {name!r} on rank {rank}, and not on rank {without}")


def states_differ(
    what: str, name: str, ranks: tuple[int, int], key: str, values: tuple[str | None, str | None], instead: str
) -> Misuse:
    """The state of object ``name`` in the argument ``what`` of `Checkpoints` differs between two ranks.

    It differs at ``key``, where the ranks have the two ``values``. ``instead`` names arguments that may differ.
    """
    (first, rank), (value, other) = ranks, ("absent" if value is None else value for value in values)
    return Misuse(
        f"{what}[{name!r}] is not the same on rank {first} and on rank {rank}: {key} is "
        f"{value} and {other}; {instead} keeps what differs"
    )


# Resuming: what `cannot_be_resumed` gives as the reason.


def cannot_be_resumed(path: Path, why: str, others: Sequence[str]) -> BadCheckpoint:
    """The checkpoint at ``path`` is of no use; ``others`` are the names of the other ones in its directory."""
    instead = f"; beside it there is {', '.join(others)}" if others else ""
    return BadCheckpoint(f"{path} cannot be resumed from: {why}{instead}")


def format_is_unknown(path: Path, number: int, known: Iterable[int]) -> BadCheckpoint:
    return BadCheckpoint(
        f"{path} has format {number}, and this version of chimera_runtime reads the formats "
        f"{' and '.join(map(str, known))}"
    )


def shapes_differ(name: str, saved: tuple[int, ...], here: tuple[int, ...]) -> str:
    return f"{name} is {saved} in it, and {here} in this model"


def model_entry_is_missing(kind: str, name: str, saved: Iterable[str]) -> str:
    """The checkpoint lacks an entry of the model; ``saved`` are the names of the entries of that kind that it has.

    ``kind`` is the first part of a path in the checkpoint: ``model``, ``replicas`` or ``extra``.
    """
    near = get_close_matches(name, [*saved], 1)
    noun = {"model": "parameter", "replicas": "buffer", "extra": "entry of a state_dict"}[kind]
    return f"it has no {noun} {name}, which this model has{f' (but {near[0]})' if near else ''}"


def average_is_missing(average: str, name: str) -> str:
    return f"it has no average {average!r} of {name}: resume without it, and begin it with these weights"


def state_of_rank_is_missing(name: str) -> str:
    return (
        f"it has no state of of_rank[{name!r}] for this rank: what each rank has of its own is resumed under "
        "the same schedule with as many copies"
    )


def state_is_missing(name: str) -> str:
    return f"it has no state of {name}, which is to be resumed here"


_UNKNOWN = {
    "model": "which this model has not",
    "replicas": "which this model has not (yet): register it when the module is made, in the shape that it will have; "
    "or with persistent=False, so that it is not saved",
    "extra": "which no module of this model has in its state_dict when it is made",
    "optimizer": "which no optimizer steps here: give one that parameter, as before; or read the weights alone, with "
    "torch.distributed.checkpoint.load into pipe.state_dict()",
}


def name_is_unknown(kind: str, name: str) -> str:
    """The checkpoint has an entry that no rank has; ``kind`` is the first part of its path, or ``optimizer``."""
    entry = {"replicas": "the buffer ", "optimizer": "the optimizer state of "}.get(kind, "")
    return f"it has {entry}{name}, {_UNKNOWN[kind]}"


# Files that have changed since they were written.


def hash_is_missing(hashes: Path, name: str) -> str:
    return f"{hashes} is not as it was written: it lacks the hash of {name}"


def file_is_damaged(path: Path) -> str:
    return f"{path} is not as it was written"


# Remarks about a checkpoint that was resumed from.


def buffers_are_of_first_replicas(schedule: str, copies: int) -> str:
    layout = f"{schedule} on {copies} {'copies' if copies > 1 else 'copy'}"
    return f"buffers are those of the first replica of each stage: the checkpoint is of {layout}"


def buffer_was_not_saved(name: str) -> str:
    return (
        f"the buffer {name} (persistent=False) had changed when the checkpoint was saved and is in "
        "no checkpoint: it begins as it is made"
    )


def objects_are_not_given(names: Sequence[str]) -> str:
    return f"the checkpoint has {', '.join(names)}, and Checkpoints was given no such object"


DATASET_IS_EMPTY = "the dataset has no item"
EVALUATION_BATCH_IS_EMPTY = "a batch of an evaluation has no item"


def items_text(count: int) -> str:
    return "1 item" if count == 1 else f"{count} items"


# Datasets.


def dataset_has_neither_keys_nor_order(kind: str) -> Misuse:
    return Misuse(
        f"the dataset, of type {kind}, is none: a map-style one has __len__ and __getitem__, an iterable one an "
        "__iter__ that begins anew every time"
    )


def order_of_iterable(name: str) -> Misuse:
    return Misuse(
        f"{name} is for a map-style dataset; this one is iterable and comes in its own order: leave that out, or give "
        "the dataset __len__ and __getitem__"
    )


def dataset_is_too_small(items: int, formula: str) -> Misuse:
    return Misuse(
        f"the dataset has {items_text(items)} and one update takes B*N*W = {formula}; use a larger dataset, smaller "
        "micro-batches or fewer ranks"
    )


def dataset_ended_in_first_mini_batch(items: int, formula: str) -> Misuse:
    return Misuse(f"the dataset ended after {items_text(items)}, and a mini-batch takes B*N*W = {formula}")


def dataset_ended_before_checkpoint(items: int, place: int) -> Misuse:
    return Misuse(
        f"the dataset ended after {items_text(items)}, and training was at item {place} of it: is it the same one?"
    )


def dataset_ended_before_its_length(items: int, length: int) -> Misuse:
    return Misuse(f"the dataset ended after {items_text(items)}, and its __len__ says {length}")


# Resuming.


def length_has_changed(length: int | None, before: int | None) -> BadCheckpoint:
    return BadCheckpoint(
        f"the dataset has {_length_text(length)}, and had {_length_text(before)} when the checkpoint was saved: its "
        "order would be another one; take the weights alone, with load_weights (in train.py with --load)"
    )


def _length_text(length: int | None) -> str:
    return "a length that it does not say" if length is None else items_text(length)


def no_mini_batch_begins_there(items: int, formula: str) -> Misuse:
    return Misuse(
        f"training was at item {items} of the data, and B*N*W = {formula} does not divide that: choose B, N or W so "
        "that it does"
    )


# Items of a dataset and micro-batches of them.


def keyword_argument_is_in_one(names: Iterable[object], dataset: str, keyword: str) -> Misuse:
    first, other = names
    return Misuse(
        f"of items {first} and {other} of {dataset} only one has the keyword argument {keyword}: give all items of a "
        "micro-batch the same names"
    )


def items_differ_in_whole(names: Iterable[object], dataset: str, keyword: str) -> Misuse:
    first, other = names
    return Misuse(
        f'items {first} and {other} of {dataset} differ in {keyword}, which whole("{keyword}") gives a micro-batch as '
        "it is: let a collate function make one value for the micro-batch, or leave whole out"
    )


def micro_batch_was_not_loaded(micro: int) -> Misuse:
    return Misuse(f"micro-batch {micro} was not loaded: this rank does not use it in a step")


def mini_batch_lacks_items(items: int, micro_batch_size: int, micro_batches: int) -> Misuse:
    return Misuse(
        f"the last mini-batch of an epoch has {items_text(items)}, and an update takes B*N = "
        f"{micro_batch_size}*{micro_batches}: make the loader with drop_last=True"
    )


def neither_pair_nor_triple(name: str, kind: str) -> Misuse:
    return Misuse(f"{name} is a {kind}, not a pair (input, target); keyword arguments of stages stand third, in a dict")


def requires_a_gradient(name: str, place: str) -> Misuse:
    return Misuse(
        f"{name}: {place} requires a gradient, of which each rank would have a part: detach() it; or, to train what it "
        "comes from, move that into the stage or the loss that takes it, and give what it is computed from as data"
    )


def cannot_be_cut(name: str, place: str, kind: str, keyword: str) -> Misuse:
    remedy = f"; {_goes_whole(keyword)}" if keyword else ""
    return Misuse(
        f"{name}: {place} is {kind}, which cannot be cut into micro-batches: give tensors with the items in dimension "
        "0, in structures that torch.utils._pytree knows; or give the micro-batches one by one, by a function of their "
        f"number (step also takes micro_batches=){remedy}"
    )


# Slices of a micro-batch.


def has_no_sequence(name: str, place: str, shape: tuple[int, ...] | None) -> Misuse:
    what = "no tensor" if shape is None else f"a tensor of shape {shape}"
    return Misuse(
        f"{name}: {place} is {what}, which cannot be cut into slices: give tensors with the items in dimension 0 and "
        "the sequence in dimension 1, or compile a scheme without slices"
    )


def sequences_differ(name: str, places: Mapping[int, str]) -> Misuse:
    lengths = " and ".join(f"{length} in {place}" for length, place in places.items())
    return Misuse(
        f"{name}: dimension 1 is {lengths}; slices are cut along dimension 1: let all tensors have the sequence there"
    )


def sequence_is_not_divided(name: str, length: int, slices: int) -> Misuse:
    return Misuse(
        f"{name}: dimension 1 is {length}, and slices of equal lengths need a multiple of their number, {slices}; pad "
        "the sequences, leave out the rest, or compile the scheme with unequal lengths (--slice-lengths)"
    )


def sequence_is_too_short(name: str, length: int, slices: int) -> Misuse:
    return Misuse(
        f"{name}: dimension 1 is {length}, and each of {slices} slices needs an item; pad the sequences, or compile "
        "the scheme with fewer slices"
    )


CUT_SLICE_LACKS_BOUNDS = (
    "the slices of this program have unequal lengths, and cut_slice of the model file takes no bounds: give it a fifth "
    "parameter, a function that returns the start and the end of the slice in a sequence of the given length; or "
    "compile the scheme without --slice-lengths"
)


# Batches of a loop.


def wrong_number_of_pairs(program: str, micro_batches: int, pairs: int) -> Misuse:
    return Misuse(f"{program} has N = {micro_batches}: a step takes so many pairs, not {pairs}")


def mini_batch_was_written(update: int) -> Misuse:
    return Misuse(
        f"the mini-batch of update {update} was written after its step, and is still under way; give each step tensors "
        "of its own, as .clone() makes them"
    )


def has_no_rows(name: str) -> Misuse:
    return Misuse(f"{name} has no tensor with items in dimension 0: give (input, target) tensors that have")


def has_other_rows(name: str, place: str, shape: tuple[int, ...], wanted: str, keyword: str) -> Misuse:
    """A tensor has other rows than are ``wanted``; ``keyword`` is the name that `whole` could declare, or empty."""
    remedy = f"; {_goes_whole(keyword)}" if keyword else ""
    return Misuse(f"{name}: dimension 0 of {place} is {shape[0]}, of shape {shape}, and {wanted}{remedy}")


def _goes_whole(keyword: str) -> str:
    return (
        "what goes with all items and not with each is a keyword argument that the example declares, "
        + _declaration_of(keyword)
    )


def _declaration_of(keyword: str) -> str:
    return '{whole("' + keyword + '"): ..} with chimera_runtime.whole'


def as_in_first(items: int, place: str) -> str:
    return f"{place} has {items}"


def as_many_as_items(items: int) -> str:
    return f"there {'is' if items == 1 else 'are'} {items_text(items)}"


def as_in_example(size: int) -> str:
    return f"was B = {size} in the example"


def all_of_step(size: int, micro_batches: int) -> str:
    return (
        f"a step takes B*N = {size}*{micro_batches} = {size * micro_batches} on every rank: micro-batches as large as "
        "the example"
    )


def looks_like_borders(name: str) -> str:
    return (
        f"the keyword argument {name} of the first mini-batch has whole numbers that rise from 0, as borders of "
        "documents would, and it is cut into micro-batches by items. If it is one list for the whole mini-batch, "
        f"declare it in the example: {_declaration_of(name)}"
    )


def evaluated_micro_batch_has_another_size(micro: int, items: int, size: int) -> Misuse:
    return Misuse(
        f"micro-batch {micro} of an evaluation: dimension 0 of its tensors is {items}, and was {size} in the example"
    )


# Data workers: the words of a `ModelError` and of its note.

WORKER_ENDED = "a data worker has ended"
WORKER_ENDED_NOTE = (
    "The system may have ended it for lack of memory, or for lack of shared memory (/dev/shm): take fewer "
    "data workers, or smaller items. Or the dataset's own code has crashed or ended the process."
)
WORKER_HANGS_NOTE = (
    "The dataset's own code may hang in a data worker, as where it takes a lock that was held when it was forked "
    '(multiprocessing_context="spawn" starts it afresh), or waits for a file system. If it is slow, take more '
    "data workers or a longer timeout."
)


def worker_hangs(seconds: float) -> str:
    return f"no data worker has handed over a mini-batch for {seconds:g} s"
