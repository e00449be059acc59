"""Named ranges for profilers, one for each line of the program: of torch.profiler, and on a GPU also of NVTX."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self

import torch
from torch.profiler import record_function

from chimera_runtime.lane.message_links import Outgoing
from chimera_runtime.program.numbering import Micros
from chimera_runtime.program.operations import OPERATIONS
from chimera_runtime.program.weight_groups import Group, group_text

Within = Callable[[str], AbstractContextManager[Any]]
"""Function that returns a context: the range with the given name."""

Lines = Mapping[str, Callable[..., str]]
"""Functions by the name of a method, each from the arguments of a call to the line of the program that it runs."""


class Ranged:
    """Wrapper of a tie or a link. A call of a method in ``lines`` is a range with the name of its program line."""

    def __init__(self, part: Any, within: Within, lines: Lines) -> None:
        self._part = part
        self._within = within
        self._lines = lines

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._part, name)
        line = self._lines.get(name)
        if line is None:
            return method

        def ranged(*arguments: Any, **keywords: Any) -> Any:
            with self._within(line(*arguments, **keywords)):
                return method(*arguments, **keywords)

        return ranged


class RangedStage(Ranged):
    """Wrapper of a stage whose calls are ranges. The name of an operation has the version chosen by `at`, if any."""

    def __init__(self, number: int, stage: Any, within: Within) -> None:
        self._version = ""
        self._number = number

        def operation(letter: str) -> Callable[..., str]:
            return lambda micros, *_values: f"{letter} {_text(micros)} s{number}{self._version}"

        lines = {call: operation(letter) for letter, call in OPERATIONS.items()}
        super().__init__(stage, within, lines | _of_weights((number,)))

    def at(self, version: int) -> Self:
        """Chooses the version of the weights for the next operation, and returns this wrapper."""
        self._part.at(version)
        self._version = f" v{version}"
        return self

    def pair(self, forward: tuple[Any, ...], other: Self, backward: tuple[Any, ...]) -> None:
        """Runs a pair as one range."""
        line = f"F {_text(forward[0])} s{self._number} & B {_text(backward[0])} s{other._number}"
        with self._within(line):
            self._part.pair(forward, other._part, backward)


class Unranged:
    """Stand-in for `Ranges` when no ranges are recorded: it returns stages, ties and links unchanged."""

    def update(self, number: int) -> AbstractContextManager[Any]:
        """Returns a context that does nothing, in place of the range of an update."""
        return nullcontext()

    def stage(self, number: int, stage: Any) -> Any:
        """Returns the stage unchanged."""
        return stage

    def tie(self, group: Group, tie: Any) -> Any:
        """Returns the tie unchanged."""
        return tie

    def link(self, link: Any, source: int, target: int, worker: int) -> Any:
        """Returns the link unchanged."""
        return link


class Ranges(Unranged):
    """Wrapper of the parts of a lane that records a range for each update and each line, named as in schedule.sir."""

    def __init__(self, device: torch.device) -> None:
        self._within = _range_on_gpu if device.type == "cuda" else record_function

    def update(self, number: int) -> AbstractContextManager[Any]:
        """Returns a context: the range of an update, counted from 0."""
        return self._within(f"update {number}")

    def stage(self, number: int, stage: Any) -> Any:
        """Returns a wrapper of a stage whose operations, sums, steps and versions are ranges."""
        return RangedStage(number, stage, self._within)

    def tie(self, group: Group, tie: Any) -> Any:
        """Returns a wrapper of a tie whose sums, steps and versions are ranges."""
        return Ranged(tie, self._within, _of_weights(group))

    def link(self, link: Any, source: int, target: int, worker: int) -> Any:
        """Returns a wrapper of a link whose messages and waits are ranges."""
        ends = f"s{source}->s{target}"
        verb = "send" if isinstance(link, Outgoing) else "recv"
        lines: Lines = {
            "isend": lambda micros, _tensors: f"send {_text(micros)} {ends} to w{worker}",
            "irecv": lambda micros, into: f"recv {_text(micros)} {ends} from w{worker} into {into}",
            "wait": lambda micros: f"wait {verb} {_text(micros)} {ends}",
        }
        return Ranged(link, self._within, lines)


def _text(micros: Micros) -> str:
    return ",".join(f"m{micro}" for micro in (micros if isinstance(micros, tuple) else (micros,)))


def _of_weights(group: Group) -> dict[str, Callable[..., str]]:
    weights = group_text(group)
    return {
        "all_reduce": lambda: f"all_reduce {weights}",
        "wait_all_reduce": lambda: f"wait all_reduce {weights}",
        "step": lambda: f"step {weights}",
        "stash": lambda version: f"stash {weights} v{version}",
        "drop": lambda version: f"drop {weights} v{version}",
    }


@contextmanager
def _range_on_gpu(name: str) -> Iterator[None]:
    with record_function(name), torch.cuda.nvtx.range(name):
        yield
