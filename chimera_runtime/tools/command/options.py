"""Command line of train.py, and what its options require of the program.

The module is imported without torch: `chimera run` parses before it starts torchrun.
"""

import argparse
import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from chimera_runtime.errors import tools as mistakes
from chimera_runtime.program.job import Job
from chimera_runtime.program.operations import OPERATIONS, PAIRED
from chimera_runtime.ranks.communicators import CHOICES, chosen
from chimera_runtime.tools.open.stdio import write_line
from chimera_runtime.values.byte_text import UNITS

BUILT_IN = ("gloo", "nccl")
"""The backends that need no module."""

KINDS = (*OPERATIONS, PAIRED)
_LONGEST = 10**9
"""Longest time-out, in seconds: the clocks behind a wait count nanoseconds in 63 bits."""


class _Parser(argparse.ArgumentParser):
    def print_help(self, _file: object = None) -> None:
        write_line(self.format_help().rstrip())

    def error(self, message: str) -> NoReturn:
        raise mistakes.cannot_be_parsed(message=message)


def _refused(text: str, complaint: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{text!r} {complaint}")


def _positive(text: str, complaint: str, most: float = math.inf) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= most or value == math.inf:
        raise _refused(text, complaint)
    return value


def _seconds(text: str) -> float:
    return _positive(text, mistakes.not_seconds(most=_LONGEST), _LONGEST)


def _norm(text: str) -> float:
    return _positive(text, mistakes.NOT_POSITIVE)


def path(text: str) -> Path:
    """Parses a path. An unset variable of the shell leaves an empty one, which would be the current directory."""
    if not text:
        raise argparse.ArgumentTypeError(mistakes.EMPTY_PATH)
    return Path(text)


def _peak(text: str) -> float | str:
    return text if text == "auto" else _norm(text)


def _count(text: str) -> int:
    if not re.fullmatch(r"\d{1,18}", text) or int(text) < 1:
        raise _refused(text, mistakes.NOT_A_COUNT)
    return int(text)


def _number(text: str) -> int:
    if not re.fullmatch(r"\d{1,4}", text, re.ASCII):
        raise _refused(text, mistakes.NOT_A_WHOLE_NUMBER)
    return int(text)


def _split(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text, re.ASCII):
        raise _refused(text, mistakes.NOT_A_SPLIT)
    return tuple(map(int, text.split(",")))


def _limit(text: str) -> int | str:
    if text == "device":
        return text
    size = re.fullmatch(r"(\d+(?:\.\d+)?) ?(|[KMGT]iB)", text)
    count = float(size[1]) * 2 ** (10 * ("", *UNITS).index(size[2])) if size else 0
    if not 1 <= count < math.inf:
        raise _refused(text, mistakes.NOT_BYTES)
    return int(count)


def _durations(text: str) -> dict[str, float]:
    durations: dict[str, float] = {}
    for part in text.split(","):
        kind, _, value = part.partition("=")
        if kind not in KINDS or not value or kind in durations:
            raise _refused(text, mistakes.NOT_DURATIONS)
        durations[kind] = _seconds(value)
    if not durations.keys() >= {"F", "B"} and not durations.keys() >= {"F", "I", "W"}:
        raise _refused(text, mistakes.DURATIONS_ARE_MISSING)
    return durations


class Option(NamedTuple):
    """An option of train.py, as argparse takes it; without a ``type`` it is a flag, which has no value."""

    name: str
    help: str
    metavar: str | None = None
    type: Callable[[str], Any] | None = None
    default: Any = None
    choices: Sequence[str] | None = None


MODEL, BACKEND, COMMUNICATORS, KEEP = "--model", "--backend", "--communicators", "--keep"
HF, TEXT = "--hf", "--text"
_OF_HF = (TEXT, "--tokenizer", "--length", "--learning-rate", "--checkpoint-layers")
"""Options that only go with a model of transformers."""

_EXCLUSIVE = ("--check", "--check-only", "--rehearse")

OPTIONS = (
    Option(MODEL, "Python file with build_stage or layers, loss, dataset, optimizer", "MODEL.py", path),
    Option(HF, "in its place a model of transformers: a directory, a configuration, a name", "PATH_OR_NAME", str),
    Option(TEXT, "with --hf: train on this file", "FILE", path),
    Option("--tokenizer", "tokens of the text (default: that of --hf, else its bytes)", "DIR", path),
    Option("--length", "tokens of an item (default: 512, or as many as the model has positions)", "T", _count),
    Option("--learning-rate", "of AdamW, with --hf (default: 5e-5)", "RATE", _norm, 5e-5),
    Option("--checkpoint-layers", "with --hf: transformer layers keep only inputs, and run again"),
    Option("--split", "first layer of each stage (default: equal numbers of layers)", "0,L,..", _split),
    Option("--steps", "weight updates (default: 10)", "STEPS", _count, 10),
    Option("--micro-batch-size", "items of a micro-batch (default: 1)", "B", _count, 1),
    Option("--seed", "of weights, data order and dropout (default: 0)", "SEED", int, 0),
    Option("--data-workers", "processes of each rank that load items (default: 0)", "K", _number, 0),
    Option("--check", "first compare with one-process training"),
    Option("--check-only", "compare, then stop"),
    Option(
        "--rehearse",
        "sleep instead of computing; S in seconds (F=S,I=S,W=S where backwards are split; pair=S for pairs)",
        "F=S,B=S",
        _durations,
    ),
    Option("--clip-norm", "scale gradients down to this norm of the whole model", "NORM", _norm),
    Option("--shard-optimizer", "each replica of a stage keeps a share of the optimizer's state"),
    Option("--save", "save checkpoints there: the last, and at Ctrl-C or SIGTERM", "DIR", path),
    Option("--save-every", "save after every K updates, too", "K", _count),
    Option(KEEP, "checkpoints that stay (default: 3)", "K", _count, 3),
    Option("--resume", "go on from a checkpoint, or from the newest in a directory, if any", "DIR", path),
    Option("--load", "begin with the weights of one file", "FILE", path),
    Option("--export", "write the weights into one file at the end: .pt or .safetensors", "FILE", path),
    Option("--stop-on-nan", "end when the loss of an update is no finite number"),
    Option("--log-file", "append a line of JSON for every update, at once", "FILE", path),
    Option("--tensorboard", "the same as curves, by the package tensorboard", "DIR", path),
    Option("--eval-every", "evaluate the model file's validation() every K updates", "K", _count),
    Option("--autocast", "run stages and loss under torch.autocast; bf16: in bfloat16", type=str, choices=["bf16"]),
    Option("--device-peak", "tell the share of it that updates use; auto: by the device", "TFLOPS", _peak),
    Option("--peak-memory", "tell at the end what each rank has used and needs"),
    Option("--bundle", "if the run fails: a zip file for a bug report", "FILE", path),
    Option("--metrics", "write losses and times of all updates as JSON", "FILE", path),
    Option("--trace", "record every operation of the training, by rank", "DIR", path),
    Option("--torch-profile", "what torch.profiler sees of three updates, by rank", "DIR", path),
    Option("--ranges", "a range for NVTX and torch.profiler for each line of the program"),
    Option(
        "--memory-limit",
        "stop before training if a rank needs more, as in 16GiB; device: than its GPU has",
        "SIZE",
        _limit,
    ),
    Option("--timeout", "seconds that any wait may take (default: 60)", "SECONDS", _seconds, 60.0),
    Option(BACKEND, "of messages: gloo, nccl (GPUs), or another one (default: gloo)", "NAME", str, "gloo"),
    Option("--device", "where stages are (default: as the backend has it)", type=str, choices=["cpu", "cuda"]),
    Option("--backend-module", "a Python file that registers the backend", "FILE", path),
    Option("--layout", "which ranks are neighbours", type=str, default="pipeline", choices=["pipeline", "replica"]),
    Option(
        COMMUNICATORS,
        "of messages: one for each direction between two workers, or for both (default: as compiled)",
        type=str,
        choices=CHOICES,
    ),
)
"""The options of train.py, which are those of `chimera run`, too."""


@cache
def parser_of_options() -> argparse.ArgumentParser:
    """Parser of `OPTIONS`, made once in a process."""
    parser = _Parser(prog="train.py", description="Trains a model with the program beside it. Start it with torchrun.")
    exclusive = parser.add_mutually_exclusive_group()
    for name, help, metavar, type, default, choices in OPTIONS:
        add = (exclusive if name in _EXCLUSIVE else parser).add_argument
        if type is None:
            add(name, action="store_true", help=help)
        else:
            add(name, help=help, metavar=metavar, type=type, default=default, choices=choices)
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the options of train.py; the words after ``--`` become ``args``, for the model file.

    Raises `Misuse` if an option is unknown, missing or has a value that it cannot have.
    """
    parser = parser_of_options()

    # The words after -- belong to the model file.
    words, for_model = list(arguments), []
    if "--" in words:
        words, for_model = words[: words.index("--")], words[words.index("--") + 1 :]
    options = parser.parse_args(words)
    options.args = for_model

    # Combinations that argparse cannot exclude.
    if options.model is None and options.hf is None:
        raise mistakes.cannot_be_parsed(message=mistakes.MODEL_IS_MISSING)
    if options.hf is None and (option := next((name for name in _OF_HF if _differs(parser, options, name)), None)):
        raise mistakes.cannot_be_parsed(message=mistakes.needs_transformers(option=option))
    if options.hf is not None and (option := _first_given(options, MODEL) or (options.args and "--")):
        raise mistakes.cannot_be_parsed(message=mistakes.excludes_a_model_file(option=option))
    if options.hf is not None and options.text is None:
        raise mistakes.cannot_be_parsed(message=mistakes.TEXT_IS_MISSING)
    if options.backend in BUILT_IN and options.backend_module is not None:
        raise mistakes.cannot_be_parsed(message=mistakes.BACKEND_HAS_NO_NAME)
    if options.backend not in BUILT_IN and options.backend_module is None:
        raise mistakes.backend_is_unknown(backend=options.backend)
    if options.backend == "nccl" and options.device == "cpu":
        raise mistakes.cannot_be_parsed(message=mistakes.NCCL_IS_FOR_GPUS)
    if options.rehearse:
        if _first_given(options, "--clip-norm", "--stop-on-nan"):
            raise mistakes.rehearsal_excludes(why=mistakes.NO_GRADIENTS, options="--clip-norm and --stop-on-nan")
        if option := _first_given(options, "--save", "--resume", "--load", "--export"):
            raise mistakes.rehearsal_excludes(why=mistakes.WEIGHTS_STAY, options=option)
        if option := _first_given(options, "--eval-every", "--autocast", "--device-peak", "--peak-memory"):
            raise mistakes.rehearsal_excludes(why=mistakes.NOTHING_COMPUTED, options=option)
    if options.save_every is not None and options.save is None:
        raise mistakes.cannot_be_parsed(message=mistakes.SAVE_HAS_NO_DIRECTORY)
    if options.check_only and (option := _first_given(options, "--trace", "--torch-profile")):
        raise mistakes.check_only_records_nothing(option=option)
    options.ranges |= options.torch_profile is not None
    return options


def _differs(parser: argparse.ArgumentParser, options: argparse.Namespace, name: str) -> bool:
    """Whether an option has another value than its default."""
    attribute = name[2:].replace("-", "_")
    return bool(getattr(options, attribute) != parser.get_default(attribute))


def _first_given(options: argparse.Namespace, *names: str) -> str | None:
    return next((name for name in names if getattr(options, name[2:].replace("-", "_"))), None)


def require_fitting(options: argparse.Namespace, job: Job) -> None:
    """Raises `Misuse` if the program cannot do what the options ask for; reads no model file and asks no other rank."""
    if options.clip_norm is not None and job.period:
        raise mistakes.clipping_needs_a_flush(schedule=job.name)
    if options.shard_optimizer and job.period:
        raise mistakes.sharding_needs_a_flush(schedule=job.name)
    if options.hf and job.feeds:
        raise mistakes.transformers_are_a_chain(schedule=job.name)
    size = options.micro_batch_size
    if size % job.row_parts:
        raise mistakes.micro_batch_is_not_divisible(size=size, schedule=job.name, parts=job.row_parts)
    seconds = options.rehearse
    if seconds is not None and (lacking := [kind for kind in job.kinds if kind not in seconds]):
        durations = dict.fromkeys(KINDS, 0.005) | seconds
        durations["pair"] = seconds.get("pair", durations["F"] + durations["B"])
        raise mistakes.rehearsal_lacks_durations(lacking, job.name, {kind: durations[kind] for kind in job.kinds})
    chosen(job, options.backend, options.communicators)
