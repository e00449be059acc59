"""Messages about datasets, the batches of a loop, and the processes that load them."""

from collections.abc import Iterable, Mapping

from chimera_runtime.errors import BadCheckpoint, Misuse

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
