"""Command line of train.py. The module is imported without torch: `chimera run` parses before it starts torchrun."""

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from chimera_runtime.errors import tools_command as mistakes
from chimera_runtime.ranks.communicators import CHOICES
from chimera_runtime.tools.open.stdio import write_line
from chimera_runtime.values.byte_text import UNITS

_BUILT_IN = ("gloo", "nccl")
KINDS = ("F", "B", "I", "W", "pair")
_LONGEST = 10**9
"""Longest time-out, in seconds: the clocks behind a wait count nanoseconds in 63 bits."""


class _Parser(argparse.ArgumentParser):
    def print_help(self, _file: object = None) -> None:
        write_line(self.format_help().rstrip())

    def error(self, message: str) -> NoReturn:
        raise mistakes.cannot_be_parsed(message)


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
    return _positive(text, mistakes.not_seconds(_LONGEST), _LONGEST)


def _norm(text: str) -> float:
    return _positive(text, mistakes.NOT_POSITIVE)


def _path(text: str) -> Path:
    """Parses a path. An unset variable of the shell leaves an empty one, which would be the current directory."""
    if not text:
        raise argparse.ArgumentTypeError(mistakes.EMPTY_PATH)
    return Path(text)


def _peak(text: str) -> float | str:
    """Parses a number of TFLOPS, or ``auto``."""
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
    """Parses a number of bytes, or ``device``."""
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


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the options of train.py; the words after ``--`` become ``args``, for the model file.

    Raises `Misuse` if an option is unknown, missing or has a value that it cannot have.
    """
    parser = _Parser(prog="train.py", description="Trains a model with the program beside it. Start it with torchrun.")
    add = parser.add_argument
    add("--model", type=_path, required=True, help="Python file with build_stage or layers, loss, dataset, optimizer")
    add("--split", type=_split, metavar="0,L,..", help="first layer of each stage (default: equal numbers of layers)")
    add("--steps", type=_count, default=10, help="weight updates (default: 10)")
    add("--micro-batch-size", type=_count, default=1, metavar="B", help="items per micro-batch (default: 1)")
    add("--seed", type=int, default=0, help="of weights, data order and dropout (default: 0)")
    add("--data-workers", type=_number, default=0, metavar="K", help="processes per rank that load items (default: 0)")
    check = parser.add_mutually_exclusive_group()
    check.add_argument("--check", action="store_true", help="first compare with one-process training")
    check.add_argument("--check-only", action="store_true", help="compare, then stop")
    check.add_argument(
        "--rehearse",
        type=_durations,
        metavar="F=S,B=S",
        help="sleep instead of computing; S in seconds (F=S,I=S,W=S where backwards are split; pair=S for pairs)",
    )
    add("--clip-norm", type=_norm, metavar="NORM", help="scale gradients down to this norm of the whole model")
    add("--shard-optimizer", action="store_true", help="each replica of a stage keeps a share of the optimizer's state")
    add("--save", type=_path, metavar="DIR", help="save checkpoints there: the last, and at Ctrl-C or SIGTERM")
    add("--save-every", type=_count, metavar="K", help="save after every K updates, too")
    add("--keep", type=_count, default=3, metavar="K", help="checkpoints that stay (default: 3)")
    add(
        "--resume", type=_path, metavar="DIR", help="go on from a checkpoint, or from the newest in a directory, if any"
    )
    add("--load", type=_path, metavar="FILE", help="begin with the weights of one file")
    add("--export", type=_path, metavar="FILE", help="write the weights into one file at the end: .pt or .safetensors")
    add("--stop-on-nan", action="store_true", help="end when the loss of an update is no finite number")
    add("--log-file", type=_path, metavar="FILE", help="append a line of JSON for every update, at once")
    add("--tensorboard", type=_path, metavar="DIR", help="the same as curves, by the package tensorboard")
    add("--eval-every", type=_count, metavar="K", help="evaluate the model file's validation() every K updates")
    add("--autocast", choices=["bf16"], help="run stages and loss under torch.autocast; bf16: in bfloat16")
    add(
        "--device-peak", type=_peak, metavar="TFLOPS", help="tell the share of it that updates use; auto: by the device"
    )
    add("--peak-memory", action="store_true", help="tell at the end what each rank has used and needs")
    add("--bundle", type=_path, metavar="FILE", help="if the run fails: a zip file for a bug report")
    add("--metrics", type=_path, metavar="FILE", help="write losses and times of all updates as JSON")
    add("--trace", type=_path, metavar="DIR", help="record every operation of the training, by rank")
    add("--torch-profile", type=_path, metavar="DIR", help="what torch.profiler sees of three updates, by rank")
    add("--ranges", action="store_true", help="a range for NVTX and torch.profiler for each line of the program")
    add(
        "--memory-limit",
        type=_limit,
        metavar="SIZE",
        help="stop before training if a rank needs more, as in 16GiB; device: than its GPU has",
    )
    add("--timeout", type=_seconds, default=60.0, help="seconds that any wait may take (default: 60)")
    add("--backend", default="gloo", help="of messages: gloo, nccl (GPUs), or another one")
    add("--device", choices=["cpu", "cuda"], help="where stages are (default: as the backend has it)")
    add("--backend-module", type=_path, metavar="FILE", help="a Python file that registers the backend")
    add("--layout", choices=["pipeline", "replica"], default="pipeline", help="which ranks are neighbours")
    add(
        "--communicators",
        choices=CHOICES,
        help="of messages: one for each direction between two workers, or for both (default: as compiled)",
    )

    # The words after -- belong to the model file.
    words, for_model = list(arguments), []
    if "--" in words:
        words, for_model = words[: words.index("--")], words[words.index("--") + 1 :]
    options = parser.parse_args(words)
    options.args = for_model

    # Combinations that argparse cannot exclude.
    if options.backend in _BUILT_IN and options.backend_module is not None:
        raise mistakes.cannot_be_parsed(mistakes.BACKEND_HAS_NO_NAME)
    if options.backend not in _BUILT_IN and options.backend_module is None:
        raise mistakes.backend_is_unknown(options.backend)
    if options.backend == "nccl" and options.device == "cpu":
        raise mistakes.cannot_be_parsed(mistakes.NCCL_IS_FOR_GPUS)
    if options.rehearse:
        if _first_given(options, "--clip-norm", "--stop-on-nan"):
            raise mistakes.rehearsal_excludes(mistakes.NO_GRADIENTS, "--clip-norm and --stop-on-nan")
        if option := _first_given(options, "--save", "--resume", "--load", "--export"):
            raise mistakes.rehearsal_excludes(mistakes.WEIGHTS_STAY, option)
        if option := _first_given(options, "--eval-every", "--autocast", "--device-peak", "--peak-memory"):
            raise mistakes.rehearsal_excludes(mistakes.NOTHING_COMPUTED, option)
    if options.save_every is not None and options.save is None:
        raise mistakes.cannot_be_parsed(mistakes.SAVE_HAS_NO_DIRECTORY)
    if options.check_only and (option := _first_given(options, "--trace", "--torch-profile")):
        raise mistakes.check_only_records_nothing(option)
    options.ranges |= options.torch_profile is not None
    return options


def _first_given(options: argparse.Namespace, *names: str) -> str | None:
    return next((name for name in names if getattr(options, name[2:].replace("-", "_"))), None)
