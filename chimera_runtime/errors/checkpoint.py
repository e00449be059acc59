"""Messages about checkpoints: what cannot be saved, and what cannot be resumed from."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

from chimera_runtime.errors import BadCheckpoint, Misuse

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
