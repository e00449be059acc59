"""Messages of train.py about its files, its options and the model file."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from chimera_runtime.errors import CheckFailed, Misuse, NotFinite, Unwritable, worded

# Messages of `--check`: what the ranks, or the stages, compute otherwise than they should.

_FAILED = "check: FAILED\n  "
ranks_differ_from_one_process = CheckFailed.worded("{verdict}")
"""``verdict`` has all figures, and begins with the word FAILED."""

steps_are_not_updates = CheckFailed.worded(
    _FAILED + "{group} on rank {rank}: the optimizer has made {steps:step} in {updates} updates"
)
begins_otherwise = worded(
    "stage {stage} begins with other values of {names:first 3} than modules that are made anew in one process: they "
    "were loaded or changed since, or build_stage gives others each time"
)
check_has_ended = Misuse.worded("the check has ended on rank 0: {message}")
"""Rank 0, where the one process runs, has raised an error with this message."""

CHECK_TAKES_ONE_OF_TWO = "check takes either a batch or micro_batches, as step does"
parameter_is_spread = Misuse.worded(
    "{name} of stage {stage} is spread over a mesh, and a check holds the whole model on one rank: check the plain "
    "modules, in a pipeline of their own"
)
module_cannot_be_sent = Misuse.worded(
    "the module of stage {stage} cannot be copied to rank 0, which is to run all stages: {cause}; define its classes "
    "and functions at the top of a file, so that they can be pickled"
)
part_is_missing = CheckFailed.worded(
    _FAILED + "stage {stage} has a module {place} that build_stage does not make in one process: make all modules in "
    "build_stage"
)
parameter_is_another = CheckFailed.worded(
    _FAILED + "stage {stage}: {name} is on one side alone, or has another shape or dtype than build_stage gives it in "
    "one process: make parameters in build_stage, the same each time"
)


# The user's own model, as `reference()` of the model file returns it.


def parameters_do_not_match(complaints: Iterable[str]) -> CheckFailed:
    return CheckFailed("\n  ".join(["check: FAILED", *(f"reference(): {line}" for line in complaints)]))


losses_differ = CheckFailed.worded(
    _FAILED + "reference(): the loss of an update is {reference:.9g} and that of the stages {stages:.9g}: a stage "
    "lacks something that has no parameters, or does it in another order"
)
gradients_differ = CheckFailed.worded(
    _FAILED + "reference(): gradients differ by {error:.2e} of the largest of their stage, most those of {parameter}; "
    "{bound:.0e} is allowed"
)


# Slices of sequences.


def slice_differs(stage: int, place: int | None, error: float) -> CheckFailed:
    """The outputs of a stage for slice ``place`` differ from those for the whole sequence; if it is None, the loss.

    ``error`` is the relative difference.
    """
    what = "the loss differs" if place is None else f"slice {place} of the outputs of stage {stage} differs"
    cause = (
        f"stage {stage} is not causal: a position depends on later ones"
        if place == 0
        else f"the carry of stage {stage} lacks something, or it does not count positions from start, or is not causal"
    )
    return CheckFailed(
        f"{_FAILED}slices: {what} by {error:.2e} from that of the whole sequence: {cause}; let "
        "positions depend on earlier ones alone, through their slice and the carry of the slices before"
    )


carry_loses_gradients = CheckFailed.worded(
    _FAILED + "slices: outputs are those of whole sequences, and the gradients of stage {stage} differ by "
    "{error:.2e} of the largest: return the carry with its graph, without detach() or no_grad()"
)


# Complaints for `parameters_do_not_match`.


def parameters_are_missing(names: Sequence[str], stage: int, nearest: str | None) -> str:
    """The user's model lacks the parameters ``names`` of a stage; its name ``nearest`` is most like the first one."""
    hint = "" if nearest is None else f"; the nearest to the first is {nearest}"
    return f"it has no {', '.join(names)} of stage {stage}{hint}. name(stage, parameter) returns its names"


def parameters_are_on_no_stage(module: str | None, names: Sequence[str]) -> str:
    """No stage has the parameters ``names`` of the user's model.

    ``module`` is the name of the module whose parameters all of them are, None if there is no such module.
    """
    what = f"its {module} ({', '.join(names)})" if module is not None else f"its {', '.join(names)}"
    return f"no stage holds {what}: a layer that was left out, or another name in name(stage, parameter)"


def tie_is_not_declared(ends: Sequence[tuple[int, str]], name: str) -> str:
    return (
        f"{_ends(ends)} are one parameter, {name}, and train as so many: declare "
        f"tied(num_stages) -> [{[*ends]}], or give each a parameter of its own"
    )


def tie_is_not_in_the_model(ends: Sequence[tuple[int, str]], names: Iterable[str]) -> str:
    return (
        f"{_ends(ends)} are tied, and are different parameters in it, {' and '.join(names)}: let it share one, or take "
        "them out of tied(num_stages) and compile without --tied for them"
    )


def _ends(ends: Sequence[tuple[int, str]]) -> str:
    return " and ".join(f"{parameter} of stage {stage}" for stage, parameter in ends)


parameters_are_unlike = worded("its {name} is {reference}; {parameter} of stage {stage} is {stages}")

# Messages about the command line of train.py, and about options that do not fit the program.

cannot_be_parsed = Misuse.worded("{message} (see --help)")
"""The command line is wrong: ``message`` is argparse's, or one of this file about options that do not fit."""

# Values that an option cannot have: argparse puts the option before them.

NOT_POSITIVE = "is not a positive number"
NOT_A_COUNT = "is not a positive whole number"
NOT_A_WHOLE_NUMBER = "is not a whole number, 0 or more"
NOT_A_SPLIT = "does not list the first layer of each stage, as in 0,9,17,25"
NOT_BYTES = "is not a number of bytes, as in 16GiB, 1.5TiB or 4096"
NOT_DURATIONS = "is not of the form F=SECONDS,B=SECONDS"
DURATIONS_ARE_MISSING = "needs both F and B, as in F=0.005,B=0.010, or F, I and W where backwards are split"
EMPTY_PATH = "an empty path"
not_seconds = worded("is not a positive number of seconds, {most} at most")

# Options that do not fit each other.

MODEL_IS_MISSING = "the following arguments are required: --model, or --hf and --text"
TEXT_IS_MISSING = "--hf needs --text FILE, to train on"
BACKEND_HAS_NO_NAME = "--backend-module: --backend NAME says which backend the file registers"
NCCL_IS_FOR_GPUS = "--device cpu --backend nccl: NCCL is for GPUs; leave --device out, or take --backend gloo"
SAVE_HAS_NO_DIRECTORY = "--save-every says when: give --save DIR to say where"
NO_GRADIENTS = "computes no gradients and no loss"
WEIGHTS_STAY = "leaves the weights alone"
NOTHING_COMPUTED = "computes nothing"
needs_transformers = worded("{option} goes with --hf: with --model the model file decides")
excludes_a_model_file = worded("--hf: a model of transformers needs no model file; leave {option} out")
backend_is_unknown = Misuse.worded(
    "--backend {backend}: gloo, nccl, or a backend that --backend-module FILE registers (see --help)"
)
rehearsal_excludes = Misuse.worded("--rehearse {why}: leave {options} out (see --help)")
check_only_records_nothing = Misuse.worded(
    "{option} records the training, of which --check-only does none: give --check instead (see --help)"
)

# Options that do not fit the program.

clipping_needs_a_flush = Misuse.worded(
    "--clip-norm: {schedule} has no flush, and its stages make an update at different times: there is no norm of all "
    "its gradients; take a scheme with a flush, or clip in the step of the model file's optimizer, which sees one stage"
)
sharding_needs_a_flush = Misuse.worded(
    "--shard-optimizer: {schedule} has no flush, and its stages step inside the schedule, which leaves no place to "
    "gather their weights; take a scheme with a flush, or leave the option out"
)
reference_gets_all = Misuse.worded(
    "reference() is called with every micro-batch as a whole, of which {scheme} leaves out groups: take reference() "
    "out, as --check compares with the same stages in one process"
)
transformers_are_a_chain = Misuse.worded(
    "--hf: the layers of a transformer are a chain, and the stages of {schedule} are none; take a scheme without the "
    "line `feeds`, or write a model file whose build_stage makes the stages of the graph"
)
micro_batch_is_not_divisible = Misuse.worded(
    "--micro-batch-size {size}: {schedule} cuts every micro-batch into {parts} halves; choose an even size, as in "
    "--micro-batch-size 2"
)


def rehearsal_lacks_durations(kinds: Iterable[str], schedule: str, example: Mapping[str, float]) -> Misuse:
    """The program has operations of ``kinds`` without a duration; ``example`` has one for each kind that it has."""
    durations = ",".join(f"{kind}={seconds:g}" for kind, seconds in example.items())
    return Misuse(f"--rehearse lacks {' and '.join(kinds)}: {schedule} has such operations; give {durations}")


# A backend of the user's own.


NO_SUCH_FILE = "there is no such file"
NOT_PYTHON = "not a Python file (its name must end in .py)"
backend_is_not_registered = Misuse.worded(
    "--backend {backend}: {module} registers no backend of that name; it has to call "
    "torch.distributed.Backend.register_backend({backend!r}, ..)"
)
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
program_is_another = Misuse.worded("{script} is of another program than what lies beside it: compile again")
program_was_replaced = Misuse.worded(
    "another program has come into {directory} since this run compiled: give each run its --out"
)

# Files and streams.

stdout_cannot_be_written = Unwritable.worded("standard output: {why}")
file_cannot_be_written = Unwritable.worded("{option} {path}: {why}")
directory_cannot_be_written = Misuse.worded("{option} {path}: {why}")
path_is_yours = Misuse.worded(
    "{option} {path}: exists and was not written by {option}; choose another {other} or remove it"
)
"""The path has a file or directory of the user's; ``other`` is the word for what to choose instead."""


def metrics_are_incomplete(path: Path, why: str | None, saved: int, count: int) -> Unwritable:
    """The file of metrics could not be written, for the reason ``why``; it has ``saved`` of ``count`` updates."""
    noun = "update" if count == 1 else "updates"
    left = f"; what was written before has {saved} of {count} {noun}"
    return Unwritable(f"--metrics {path}: {why}{left if saved else ''}")


package_is_missing = Misuse.worded(
    "--tensorboard needs a package that is not there ({error}): pip install tensorboard; --log-file writes the same "
    "numbers without it"
)
updates_are_too_few_to_profile = Misuse.worded(
    "--torch-profile records updates after the first of a run, and this run has {updates}: give a larger number of "
    "--steps"
)

# Losses and held-out items.

loss_is_not_finite = NotFinite.worded("--stop-on-nan: the loss of update {update} is {loss}")
validation_is_missing = Misuse.worded(
    "--eval-every: {file} has no function validation() -> torch.utils.data.Dataset, with held-out items like those of "
    "dataset()"
)
optimizer_cannot_be_saved = Misuse.worded("a {name} cannot be saved: --save needs optimizers of torch.optim")

# Devices.

peak_is_unknown = Misuse.worded(
    "--device-peak auto: the peak of {device} in {dtype} is not known; give its TFLOPS from the data sheet, without "
    "sparsity, as in --device-peak 312"
)


def memory_is_too_little(limit: str, need: str, others: int, can_shard: bool) -> Misuse:
    """The fullest rank needs more than the limit, ``need`` in words; ``others`` is how many other ranks do as well."""
    more = f"; {others} other rank{'s need' if others > 1 else ' needs'} too much as well" if others else ""
    further = ", or --shard-optimizer" if can_shard else ""
    return Misuse(
        f"--memory-limit {limit}: {need}{more}; "
        f"choose a smaller --micro-batch-size, a scheme that recomputes, or more stages{further}"
    )
