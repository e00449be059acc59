"""Messages about the command line of train.py, and about options that do not fit the program."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from chimera_runtime.errors import Misuse


def cannot_be_parsed(message: str) -> Misuse:
    """The command line is wrong: ``message`` is argparse's, or one of this file about options that do not fit."""
    return Misuse(f"{message} (see --help)")


# Values that an option cannot have: argparse puts the option before them.

NOT_POSITIVE = "is not a positive number"
NOT_A_COUNT = "is not a positive whole number"
NOT_A_WHOLE_NUMBER = "is not a whole number, 0 or more"
NOT_A_SPLIT = "does not list the first layer of each stage, as in 0,9,17,25"
NOT_BYTES = "is not a number of bytes, as in 16GiB, 1.5TiB or 4096"
NOT_DURATIONS = "is not of the form F=SECONDS,B=SECONDS"
DURATIONS_ARE_MISSING = "needs both F and B, as in F=0.005,B=0.010, or F, I and W where backwards are split"
EMPTY_PATH = "an empty path"


def not_seconds(most: int) -> str:
    return f"is not a positive number of seconds, {most} at most"


# Options that do not fit each other.

MODEL_IS_MISSING = "the following arguments are required: --model, or --hf and --text"
TEXT_IS_MISSING = "--hf needs --text FILE, to train on"

BACKEND_HAS_NO_NAME = "--backend-module: --backend NAME says which backend the file registers"
NCCL_IS_FOR_GPUS = "--device cpu --backend nccl: NCCL is for GPUs; leave --device out, or take --backend gloo"
SAVE_HAS_NO_DIRECTORY = "--save-every says when: give --save DIR to say where"

NO_GRADIENTS = "computes no gradients and no loss"
WEIGHTS_STAY = "leaves the weights alone"
NOTHING_COMPUTED = "computes nothing"


def needs_transformers(option: str) -> str:
    return f"{option} goes with --hf: with --model the model file decides"


def excludes_a_model_file(option: str) -> str:
    return f"--hf: a model of transformers needs no model file; leave {option} out"


def backend_is_unknown(backend: str) -> Misuse:
    return cannot_be_parsed(f"--backend {backend}: gloo, nccl, or a backend that --backend-module FILE registers")


def rehearsal_excludes(why: str, options: str) -> Misuse:
    return cannot_be_parsed(f"--rehearse {why}: leave {options} out")


def check_only_records_nothing(option: str) -> Misuse:
    return cannot_be_parsed(f"{option} records the training, of which --check-only does none: give --check instead")


# Options that do not fit the program.


def clipping_needs_a_flush(schedule: str) -> Misuse:
    return Misuse(
        f"--clip-norm: {schedule} has no flush, and its stages make an update at different times: there is no norm "
        "of all its gradients; take a scheme with a flush, or clip in the step of the model file's optimizer, "
        "which sees one stage"
    )


def sharding_needs_a_flush(schedule: str) -> Misuse:
    return Misuse(
        f"--shard-optimizer: {schedule} has no flush, and its stages step inside the schedule, which leaves no "
        "place to gather their weights; take a scheme with a flush, or leave the option out"
    )


def micro_batch_is_not_divisible(size: int, schedule: str, parts: int) -> Misuse:
    return Misuse(
        f"--micro-batch-size {size}: {schedule} cuts every micro-batch into {parts} halves; choose an even "
        "size, as in --micro-batch-size 2"
    )


def rehearsal_lacks_durations(kinds: Iterable[str], schedule: str, example: Mapping[str, float]) -> Misuse:
    """The program has operations of ``kinds`` without a duration; ``example`` has one for each kind that it has."""
    durations = ",".join(f"{kind}={seconds:g}" for kind, seconds in example.items())
    return Misuse(f"--rehearse lacks {' and '.join(kinds)}: {schedule} has such operations; give {durations}")


# A backend of the user's own.


NO_SUCH_FILE = "there is no such file"
NOT_PYTHON = "not a Python file (its name must end in .py)"


def backend_is_not_registered(backend: str, module: Path) -> Misuse:
    return Misuse(
        f"--backend {backend}: {module} registers no backend of that name; it has to call "
        f"torch.distributed.Backend.register_backend({backend!r}, ..)"
    )
