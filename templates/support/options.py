"""The command line of train.py."""

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from support.faults import Misuse
from support.streams import say

UNITS = ("KiB", "MiB", "GiB", "TiB")


class _Parser(argparse.ArgumentParser):
    def print_help(self, _file: object = None) -> None:
        say(self.format_help().rstrip())

    def error(self, message: str) -> NoReturn:
        raise Misuse(f"{message} (see --help)")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(|[KMGT]iB)", text)
    count = float(found[1]) * 2 ** (10 * ("", *UNITS).index(found[2])) if found else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, as in 16GiB, 1.5TiB or 4096")
    return int(count)


def _durations(text: str) -> dict[str, float]:
    durations: dict[str, float] = {}
    for part in text.split(","):
        kind, _, value = part.partition("=")
        if kind not in ("F", "B") or not value or kind in durations:
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form F=SECONDS,B=SECONDS")
        durations[kind] = _seconds(value)
    if durations.keys() != {"F", "B"}:
        raise argparse.ArgumentTypeError(f"{text!r} needs both F and B, as in F=0.005,B=0.010")
    return durations


def parse(arguments: Sequence[str], scheme: str) -> argparse.Namespace:
    """The options.

    Raises
    ------
    Misuse
        If an option is unknown, missing or has a value that it cannot have.
    """
    parser = _Parser(prog="train.py", description=f"Trains a model with {scheme}. Start it with torchrun.")
    parser.add_argument(
        "--model", type=Path, required=True, help="Python file with build_stage, loss, dataset, optimizer"
    )
    parser.add_argument("--steps", type=_count, default=10, help="weight updates (default: 10)")
    parser.add_argument(
        "--micro-batch-size", type=_count, default=1, metavar="B", help="items per micro-batch (default: 1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, data order and dropout (default: 0)")
    check = parser.add_mutually_exclusive_group()
    check.add_argument("--check", action="store_true", help="first compare with one-process training")
    check.add_argument("--check-only", action="store_true", help="compare, then stop")
    check.add_argument(
        "--rehearse", type=_durations, metavar="F=S,B=S", help="sleep instead of computing; S in seconds"
    )
    parser.add_argument("--metrics", type=Path, metavar="FILE", help="write losses and times of all updates as JSON")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="record every operation of the training, by rank")
    parser.add_argument(
        "--memory-limit", type=_bytes, metavar="SIZE", help="stop before training if a rank needs more, as in 16GiB"
    )
    parser.add_argument("--timeout", type=_seconds, default=60.0, help="seconds that any wait may take (default: 60)")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo", help="gloo: CPU; nccl: one GPU per rank")
    parser.add_argument(
        "--layout", choices=["pipeline", "replica"], default="pipeline", help="which ranks are neighbours"
    )
    options = parser.parse_args(arguments)
    if options.trace is not None and options.check_only:
        parser.error("--trace records the training, of which --check-only does none: give --check instead")
    return options
