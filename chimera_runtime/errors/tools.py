"""Messages of train.py about its files, its options and the model file."""

from pathlib import Path

from chimera_runtime.errors import Misuse, NotFinite, Unwritable

LOG_IS_OF_ANOTHER_RUN = "another run appends to it; give each run a file of its own"
FILE_IS_OF_ANOTHER_RUN = "another run will write it; give each run a file of its own, or end that run"
DIRECTORY_IS_OF_ANOTHER_RUN = "another run records there; give each run a directory of its own, or end that run"
REHEARSAL_IS_FOR_CPUS = "--rehearse: sleeps on the CPU say nothing about a GPU; use --device cpu --backend gloo"
LOSS_IS_GATHERED_ELSEWHERE = (
    "the loss of an update is gathered on rank 0 by the progress of train.py, which writes it to --metrics and "
    "--log-file: to read outcome.loss leave out hooks="
)
VALIDATION_IS_NOT_MAP_STYLE = (
    "validation() must return a map-style dataset, one with __len__ and __getitem__, with an item"
)
DEVICE_HAS_NO_MEMORY_OF_ITS_OWN = (
    "--memory-limit device: the ranks are on the CPU; give a size, as in --memory-limit 16GiB"
)


def program_is_another(script: Path) -> Misuse:
    return Misuse(f"{script} is of another program than what lies beside it: compile again")


def program_was_replaced(directory: Path) -> Misuse:
    return Misuse(f"another program has come into {directory} since this run compiled: give each run its --out")


# Files and streams.


def stdout_cannot_be_written(why: str | None) -> Unwritable:
    return Unwritable(f"standard output: {why}")


def file_cannot_be_written(option: str, path: Path, why: str | None) -> Unwritable:
    return Unwritable(f"{option} {path}: {why}")


def directory_cannot_be_written(option: str, path: Path | str, why: str | None) -> Misuse:
    return Misuse(f"{option} {path}: {why}")


def path_is_yours(option: str, path: Path, other: str) -> Misuse:
    """The path has a file or directory of the user's; ``other`` is the word for what to choose instead."""
    return Misuse(f"{option} {path}: exists and was not written by {option}; choose another {other} or remove it")


def metrics_are_incomplete(path: Path, why: str | None, saved: int, count: int) -> Unwritable:
    """The file of metrics could not be written, for the reason ``why``; it has ``saved`` of ``count`` updates."""
    noun = "update" if count == 1 else "updates"
    left = f"; what was written before has {saved} of {count} {noun}"
    return Unwritable(f"--metrics {path}: {why}{left if saved else ''}")


def package_is_missing(error: str) -> Misuse:
    return Misuse(
        f"--tensorboard needs a package that is not there ({error}): pip install tensorboard; --log-file "
        "writes the same numbers without it"
    )


def updates_are_too_few_to_profile(updates: int) -> Misuse:
    return Misuse(
        f"--torch-profile records updates after the first of a run, and this run has {updates}: "
        "give a larger number of --steps"
    )


# Losses and held-out items.


def loss_is_not_finite(update: int, loss: float) -> NotFinite:
    return NotFinite(f"--stop-on-nan: the loss of update {update} is {loss}")


def validation_is_missing(file: str) -> Misuse:
    return Misuse(
        f"--eval-every: {file} has no function validation() -> torch.utils.data.Dataset, with held-out "
        "items like those of dataset()"
    )


def optimizer_cannot_be_saved(name: str) -> Misuse:
    return Misuse(f"a {name} cannot be saved: --save needs optimizers of torch.optim")


# Devices.


def peak_is_unknown(device: str, dtype: str) -> Misuse:
    return Misuse(
        f"--device-peak auto: the peak of {device} in {dtype} is not known; give "
        "its TFLOPS from the data sheet, without sparsity, as in --device-peak 312"
    )


def memory_is_too_little(limit: str, need: str, others: int, can_shard: bool) -> Misuse:
    """The fullest rank needs more than the limit, ``need`` in words; ``others`` is how many other ranks do as well."""
    more = f"; {others} other rank{'s need' if others > 1 else ' needs'} too much as well" if others else ""
    further = ", or --shard-optimizer" if can_shard else ""
    return Misuse(
        f"--memory-limit {limit}: {need}{more}; "
        f"choose a smaller --micro-batch-size, a scheme that recomputes, or more stages{further}"
    )
