"""Messages about datasets, the batches of a loop, and the processes that load them."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from chimera_runtime.errors import BadCheckpoint, Misuse, RanksDiffer, worded

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

copies_are_too_few = Misuse.worded("keep={keep}: at least one checkpoint stays")
is_not_an_optimizer = Misuse.worded(
    "optimizers= has a {name}, which is not a torch.optim.Optimizer: of_rank= keeps any object that has a state_dict"
)
directories_differ = Misuse.worded("Checkpoints of {directories:and} at once: " + _ONE_MODEL)
models_differ = Misuse.worded("{parameter} of rank {rank} is not that of rank {first}: " + _ONE_MODEL)

# Saving.

gradients_are_not_applied = Misuse.worded(
    "the gradients of update {update} are there and no optimizer has stepped with them: save after optimizer.step() "
    "and optimizer.zero_grad(), as gradients are not saved"
)
save_is_late = BadCheckpoint.worded(
    "the checkpoint after update {update} in {directory} is not written after {seconds:g} s; those before it are whole"
)
save_has_failed = BadCheckpoint.worded(
    "the checkpoint after update {update} in {directory} was not written: {why}; those before it are whole"
)
later_checkpoints_are_there = BadCheckpoint.worded(
    "{directory} has {names:list}, which would count as newer than what is saved from update {update} on: save "
    "elsewhere, or remove what you do not want"
)
another_job_saves_there = BadCheckpoint.worded(
    "another job saves its checkpoints in {directory}: choose another directory, or end that job"
)
directory_cannot_be_written = BadCheckpoint.worded("checkpoints cannot be saved in {directory}: {why}")
directory_cannot_be_read = BadCheckpoint.worded("{directory}: {why}")
states_are_missing = Misuse.worded("{what}= has {name!r} on rank {rank}, and not on rank {without}")

states_differ = Misuse.worded(
    "{what}[{name!r}] is not the same on rank {ranks[0]} and on rank {ranks[1]}: {key} is {values[0]} and {values[1]}; "
    "{instead} keeps what differs"
)
"""``instead`` names the arguments of `Checkpoints` that take states which differ."""

# Resuming: what `cannot_be_resumed` gives as the reason.


def cannot_be_resumed(path: Path, why: str, others: Sequence[str]) -> BadCheckpoint:
    """The checkpoint at ``path`` is of no use; ``others`` are the names of the other ones in its directory."""
    instead = f"; beside it there is {', '.join(others)}" if others else ""
    return BadCheckpoint(f"{path} cannot be resumed from: {why}{instead}")


format_is_unknown = BadCheckpoint.worded(
    "{path} has format {number}, and this version of chimera_runtime reads the formats {known:and}"
)
shapes_differ = worded("{name} is {saved} in it, and {here} in this model")


def model_entry_is_missing(kind: str, name: str, saved: Iterable[str]) -> str:
    """The checkpoint lacks an entry of the model; ``saved`` are the names of the entries of that kind that it has.

    ``kind`` is the first part of a path in the checkpoint: ``model``, ``replicas`` or ``extra``.
    """
    near = get_close_matches(name, [*saved], 1)
    noun = {"model": "parameter", "replicas": "buffer", "extra": "entry of a state_dict"}[kind]
    return f"it has no {noun} {name}, which this model has{f' (but {near[0]})' if near else ''}"


average_is_missing = worded(
    "it has no average {average!r} of {name}: resume without it, and begin it with these weights"
)
state_of_rank_is_missing = worded(
    "it has no state of of_rank[{name!r}] for this rank: what each rank has of its own is resumed under the same "
    "schedule with as many copies"
)
state_is_missing = worded("it has no state of {name}, which is to be resumed here")
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


hash_is_missing = worded("{hashes} is not as it was written: it lacks the hash of {name}")
file_is_damaged = worded("{path} is not as it was written")


# Remarks about a checkpoint that was resumed from.


def buffers_are_of_first_replicas(schedule: str, copies: int) -> str:
    layout = f"{schedule} on {copies} {'copies' if copies > 1 else 'copy'}"
    return f"buffers are those of the first replica of each stage: the checkpoint is of {layout}"


buffer_was_not_saved = worded(
    "the buffer {name} (persistent=False) had changed when the checkpoint was saved and is in no checkpoint: it begins "
    "as it is made"
)
objects_are_not_given = worded("the checkpoint has {names:list}, and Checkpoints was given no such object")
DATASET_IS_EMPTY = "the dataset has no item"
EVALUATION_BATCH_IS_EMPTY = "a batch of an evaluation has no item"


def items_text(count: int) -> str:
    return "1 item" if count == 1 else f"{count} items"


# Datasets.


dataset_has_neither_keys_nor_order = Misuse.worded(
    "the dataset, of type {kind}, is none: a map-style one has __len__ and __getitem__, an iterable one an __iter__ "
    "that begins anew every time"
)
order_of_iterable = Misuse.worded(
    "{name} is for a map-style dataset; this one is iterable and comes in its own order: leave that out, or give the "
    "dataset __len__ and __getitem__"
)
dataset_is_too_small = Misuse.worded(
    "the dataset has {items:item} and one update takes B*N*W = {formula}; use a larger dataset, smaller micro-batches "
    "or fewer ranks"
)
dataset_ended_in_first_mini_batch = Misuse.worded(
    "the dataset ended after {items:item}, and a mini-batch takes B*N*W = {formula}"
)
dataset_ended_before_checkpoint = Misuse.worded(
    "the dataset ended after {items:item}, and training was at item {place} of it: is it the same one?"
)
dataset_ended_before_its_length = Misuse.worded("the dataset ended after {items:item}, and its __len__ says {length}")


# Resuming.


def length_has_changed(length: int | None, before: int | None) -> BadCheckpoint:
    return BadCheckpoint(
        f"the dataset has {_length_text(length)}, and had {_length_text(before)} when the checkpoint was saved: its "
        "order would be another one; take the weights alone, with load_weights (in train.py with --load)"
    )


def _length_text(length: int | None) -> str:
    return "a length that it does not say" if length is None else items_text(length)


no_mini_batch_begins_there = Misuse.worded(
    "training was at item {items} of the data, and B*N*W = {formula} does not divide that: choose B, N or W so that it "
    "does"
)

no_batch_of_sampler_begins_there = Misuse.worded(
    "training was at item {items} of epoch {epoch}, and no mini-batch of the batch sampler begins there: give it the "
    "mini-batches that it gave then"
)

# Items of a dataset and micro-batches of them.

keyword_argument_is_in_one = Misuse.worded(
    "of items {names:and} of {dataset} only one has the keyword argument {keyword}: give all items of a micro-batch "
    "the same names"
)
items_differ_in_whole = Misuse.worded(
    'items {names:and} of {dataset} differ in {keyword}, which whole("{keyword}") gives a micro-batch as it is: let a '
    "collate function make one value for the micro-batch, or leave whole out"
)
micro_batch_was_not_loaded = Misuse.worded("micro-batch {micro} was not loaded: this rank does not use it in a step")
mini_batch_lacks_items = Misuse.worded(
    "the last mini-batch of an epoch has {items:item}, and an update takes B*N = {micro_batch_size}*{micro_batches}: "
    "make the loader with drop_last=True"
)
neither_pair_nor_triple = Misuse.worded(
    "{name} is a {kind}, not a pair (input, target); keyword arguments of stages stand third, in a dict"
)
requires_a_gradient = Misuse.worded(
    "{name}: {place} requires a gradient, of which each rank would have a part: detach() it; or, to train what it "
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


sequence_is_not_divided = Misuse.worded(
    "{name}: dimension 1 is {length}, and slices of equal lengths need a multiple of their number, {slices}; pad the "
    "sequences, leave out the rest, or compile the scheme with unequal lengths (--slice-lengths)"
)
sequence_is_too_short = Misuse.worded(
    "{name}: dimension 1 is {length}, and each of {slices} slices needs an item; pad the sequences, or compile the "
    "scheme with fewer slices"
)
CUT_SLICE_LACKS_BOUNDS = (
    "the slices of this program have unequal lengths, and cut_slice of the model file takes no bounds: give it a fifth "
    "parameter, a function that returns the start and the end of the slice in a sequence of the given length; or "
    "compile the scheme without --slice-lengths"
)

# Batches of a loop.

wrong_number_of_pairs = Misuse.worded("{program} has N = {micro_batches}: a step takes so many pairs, not {pairs}")
mini_batch_was_written = Misuse.worded(
    "the mini-batch of update {update} was written after its step, and is still under way; give each step tensors of "
    "its own, as .clone() makes them"
)
has_no_rows = Misuse.worded("{name} has no tensor with items in dimension 0: give (input, target) tensors that have")


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


as_in_first = worded("{place} has {items}")


def as_many_as_items(items: int) -> str:
    return f"there {'is' if items == 1 else 'are'} {items_text(items)}"


as_in_example = worded("was B = {size} in the example")


def all_of_step(size: int, micro_batches: int) -> str:
    return (
        f"a step takes B*N = {size}*{micro_batches} = {size * micro_batches} on every rank: micro-batches as large as "
        "the example"
    )


# Numbers of micro-batches that differ from update to update.

BATCH_OF_SAMPLER_IS_EMPTY = "a mini-batch of the batch sampler has no items"
BATCH_SAMPLER_NEEDS_NUMBERS = (
    "a batch sampler gives mini-batches of any number of items, and there is a program for one number of micro-batches "
    "alone: compile with several, such as N=1..16"
)

NO_MICRO_BATCHES = "no copy has a micro-batch in this step: give at least one copy an item"
numbers_differ = RanksDiffer.worded(
    "ranks {ranks[0]} and {ranks[1]} of copy {copy} are given {numbers[0]} and {numbers[1]} micro-batches in one step: "
    "all ranks of a copy take the same mini-batch"
)
number_is_unknown = Misuse.worded(
    "what the ranks of copy {copy} are given does not show how many micro-batches it has: give at least one rank the "
    "tensors, or say number=.."
)
number_cannot_be_made = Misuse.worded(
    "{number} micro-batches cannot be made of programs for {programs:and}: compile one for {number}, or for 1"
)
number_is_of_functions = Misuse.worded("number= goes with a function of a micro-batch's number, not with {kind}")
number_has_no_program = worded(
    "an update of {total} micro-batches runs the programs for {numbers:list}, one after the other, as there is none "
    "for {total}; so do other numbers without a program, without a further word. A program of its own is faster"
)
items_fill_no_micro_batch = Misuse.worded(
    "{name} has {items} items, and micro-batches have B = {size}: give a multiple of that"
)

items_are_not_cut = Misuse.worded(
    "{name} has {items:item}, and {scheme} cuts every micro-batch into {parts}: give a multiple of that"
)


def looks_like_borders(name: str) -> str:
    return (
        f"the keyword argument {name} of the first mini-batch has whole numbers that rise from 0, as borders of "
        "documents would, and it is cut into micro-batches by items. If it is one list for the whole mini-batch, "
        f"declare it in the example: {_declaration_of(name)}"
    )


evaluated_micro_batch_has_another_size = Misuse.worded(
    "micro-batch {micro} of an evaluation: dimension 0 of its tensors is {items}, and was {size} in the example"
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
worker_hangs = worded("no data worker has handed over a mini-batch for {seconds:g} s")

# Micro-batches without an input for some of the stages that get one.

input_is_missing = Misuse.worded(
    "micro-batch {micro} of update {update} has no input for {name} here: give one, or on all ranks none, where the "
    "inputs of the example are a dict by source"
)
micro_batch_has_no_input = Misuse.worded(
    "micro-batch {micro} of copy {copy} has no input for any of {names:and}: give one for at least one of them"
)
output_would_be_unread = Misuse.worded(
    "micro-batch {micro} of copy {copy} has no input for {names:and}, so that nothing reads the output of {stage}: "
    "give an input for these, or none for what feeds {stage}"
)
block_lacks_a_stage = Misuse.worded(
    "micro-batch {micro} of copy {copy} has no input for {names:and}, and {stage} has operations over several "
    "micro-batches, which {scheme} cannot run in part: use a program with an operation for each micro-batch"
)
example_lacks_inputs = Misuse.worded(
    "no micro-batch of the example has an input for each of {names:and}: all stages are tried with one at start"
)
