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
"""Seconds; the clocks behind a wait count nanoseconds in 63 bits."""


class _Parser(argparse.ArgumentParser):
    def print_help(self, _file: object = None) -> None:
        write_line(self.format_help().rstrip())

    def error(self, message: str) -> NoReturn:
        raise mistakes.cannot_be_parsed(message)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= _LONGEST:
        raise argparse.ArgumentTypeError(mistakes.is_not_seconds(text, _LONGEST))
    return value


def _norm(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(mistakes.is_not_a_positive_number(text))
    return value


def _path(text: str) -> Path:
    """Parses a path. An unset variable of the shell leaves an empty one, which would be the current directory."""
    if not text:
        raise argparse.ArgumentTypeError(mistakes.is_an_empty_path())
    return Path(text)


def _peak(text: str) -> float | str:
    """A number of TFLOPS, or ``auto``."""
    return text if text == "auto" else _norm(text)


def _count(text: str) -> int:
    if not re.fullmatch(r"\d{1,18}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(mistakes.is_not_a_count(text))
    return int(text)


def _number(text: str) -> int:
    if not re.fullmatch(r"\d{1,4}", text, re.ASCII):
        raise argparse.ArgumentTypeError(mistakes.is_not_a_whole_number(text))
    return int(text)


def _split(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text, re.ASCII):
        raise argparse.ArgumentTypeError(mistakes.is_not_a_split(text))
    return tuple(map(int, text.split(",")))


def _bytes(text: str) -> int:
    size = re.fullmatch(r"(\d+(?:\.\d+)?) ?(|[KMGT]iB)", text)
    count = float(size[1]) * 2 ** (10 * ("", *UNITS).index(size[2])) if size else 0
    if not 1 <= count < math.inf:
        raise argparse.ArgumentTypeError(mistakes.is_not_bytes(text))
    return int(count)


def _limit(text: str) -> int | str:
    """A number of bytes, or ``device``."""
    return text if text == "device" else _bytes(text)


def _durations(text: str) -> dict[str, float]:
    durations: dict[str, float] = {}
    for part in text.split(","):
        kind, _, value = part.partition("=")
        if kind not in KINDS or not value or kind in durations:
            raise argparse.ArgumentTypeError(mistakes.are_not_durations(text))
        durations[kind] = _seconds(value)
    if not durations.keys() >= {"F", "B"} and not durations.keys() >= {"F", "I", "W"}:
        raise argparse.ArgumentTypeError(mistakes.durations_are_missing(text))
    return durations


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the options of train.py; the words after ``--`` become ``args``, for the model file.

    Raises `Misuse` if an option is unknown, missing or has a value that it cannot have.
    """
    parser = _Parser(prog="train.py", description="Trains a model with the program beside it. Start it with torchrun.")
    parser.add_argument(
        "--model", type=_path, required=True, help="Python file with build_stage or layers, loss, dataset, optimizer"
    )
    parser.add_argument(
        "--split", type=_split, metavar="0,L,..", help="first layer of each stage (default: equal numbers of layers)"
    )
    parser.add_argument("--steps", type=_count, default=10, help="weight updates (default: 10)")
    parser.add_argument(
        "--micro-batch-size", type=_count, default=1, metavar="B", help="items per micro-batch (default: 1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, data order and dropout (default: 0)")
    parser.add_argument(
        "--data-workers", type=_number, default=0, metavar="K", help="processes per rank that load items (default: 0)"
    )
    check = parser.add_mutually_exclusive_group()
    check.add_argument("--check", action="store_true", help="first compare with one-process training")
    check.add_argument("--check-only", action="store_true", help="compare, then stop")
    check.add_argument(
        "--rehearse",
        type=_durations,
        metavar="F=S,B=S",
        help="sleep instead of computing; S in seconds (F=S,I=S,W=S where backwards are split; pair=S for pairs)",
    )
    parser.add_argument(
        "--clip-norm", type=_norm, metavar="NORM", help="scale gradients down to this norm of the whole model"
    )
    parser.add_argument(
        "--shard-optimizer", action="store_true", help="each replica of a stage keeps a share of the optimizer's state"
    )
    parser.add_argument(
        "--save", type=_path, metavar="DIR", help="save checkpoints there: the last, and at Ctrl-C or SIGTERM"
    )
    parser.add_argument("--save-every", type=_count, metavar="K", help="save after every K updates, too")
    parser.add_argument("--keep", type=_count, default=3, metavar="K", help="checkpoints that stay (default: 3)")
    parser.add_argument(
        "--resume", type=_path, metavar="DIR", help="go on from a checkpoint, or from the newest in a directory, if any"
    )
    parser.add_argument("--load", type=_path, metavar="FILE", help="begin with the weights of one file")
    parser.add_argument(
        "--export", type=_path, metavar="FILE", help="write the weights into one file at the end: .pt or .safetensors"
    )
    parser.add_argument("--stop-on-nan", action="store_true", help="end when the loss of an update is no finite number")
    parser.add_argument(
        "--log-file", type=_path, metavar="FILE", help="append a line of JSON for every update, at once"
    )
    parser.add_argument(
        "--tensorboard", type=_path, metavar="DIR", help="the same as curves, by the package tensorboard"
    )
    parser.add_argument(
        "--eval-every", type=_count, metavar="K", help="evaluate the model file's validation() every K updates"
    )
    parser.add_argument(
        "--autocast", choices=["bf16"], help="run stages and loss under torch.autocast; bf16: in bfloat16"
    )
    parser.add_argument(
        "--device-peak", type=_peak, metavar="TFLOPS", help="tell the share of it that updates use; auto: by the device"
    )
    parser.add_argument("--peak-memory", action="store_true", help="tell at the end what each rank has used and needs")
    parser.add_argument("--bundle", type=_path, metavar="FILE", help="if the run fails: a zip file for a bug report")
    parser.add_argument("--metrics", type=_path, metavar="FILE", help="write losses and times of all updates as JSON")
    parser.add_argument("--trace", type=_path, metavar="DIR", help="record every operation of the training, by rank")
    parser.add_argument(
        "--torch-profile", type=_path, metavar="DIR", help="what torch.profiler sees of three updates, by rank"
    )
    parser.add_argument(
        "--ranges", action="store_true", help="a range for NVTX and torch.profiler for each line of the program"
    )
    parser.add_argument(
        "--memory-limit",
        type=_limit,
        metavar="SIZE",
        help="stop before training if a rank needs more, as in 16GiB; device: than its GPU has",
    )
    parser.add_argument("--timeout", type=_seconds, default=60.0, help="seconds that any wait may take (default: 60)")
    parser.add_argument("--backend", default="gloo", help="of messages: gloo, nccl (GPUs), or another one")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="where stages are (default: as the backend has it)")
    parser.add_argument("--backend-module", type=_path, metavar="FILE", help="a Python file that registers the backend")
    parser.add_argument(
        "--layout", choices=["pipeline", "replica"], default="pipeline", help="which ranks are neighbours"
    )
    parser.add_argument(
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
        raise mistakes.backend_has_no_name()
    if options.backend not in _BUILT_IN and options.backend_module is None:
        raise mistakes.backend_is_unknown(options.backend)
    if options.backend == "nccl" and options.device == "cpu":
        raise mistakes.nccl_is_for_gpus()
    if options.rehearse and (options.clip_norm is not None or options.stop_on_nan):
        raise mistakes.rehearsal_has_no_gradients()
    weights = [f"--{name}" for name in ("save", "resume", "load", "export") if getattr(options, name) is not None]
    if options.rehearse and weights:
        raise mistakes.rehearsal_has_no_weights(weights[0])
    computing = ("--eval-every", "--autocast", "--device-peak", "--peak-memory")
    excluded = [name for name in computing if getattr(options, name[2:].replace("-", "_"))]
    if options.rehearse and excluded:
        raise mistakes.rehearsal_computes_nothing(excluded[0])
    if options.save_every is not None and options.save is None:
        raise mistakes.save_has_no_directory()
    recording = {"--trace": options.trace, "--torch-profile": options.torch_profile}
    excluded = [name for name, directory in recording.items() if directory is not None]
    if excluded and options.check_only:
        raise mistakes.check_only_records_nothing(excluded[0])
    options.ranges |= options.torch_profile is not None
    return options
