"""Named ranges for profilers, one for each line of the program: of torch.profiler, and on a GPU also of NVTX."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import torch
from torch.profiler import record_function

from chimera_runtime.lane.lane import LaneComponents
from chimera_runtime.program.numbering import Micros
from chimera_runtime.program.operations import OPERATIONS, PAIRED
from chimera_runtime.program.rank_facts import Route
from chimera_runtime.program.weight_groups import Group, group_text

Within = Callable[[str], AbstractContextManager[Any]]
"""Function that returns a context: the range with the given name."""

Lines = Mapping[str, Callable[..., Any]]
"""Functions by the name of a method, each from the arguments of a call to what is noted of the line that it runs."""

Around = Callable[[Callable[..., Any], Callable[..., Any]], Callable[..., Any]]
"""Function that makes from a method, and a function of `Lines`, what is called in place of the method."""


class WrappedPart:
    """Wrapper of a stage, a tie or a link: ``around`` replaces each method that runs a line of the program."""

    def __init__(self, part: Any, lines: Lines, around: Around) -> None:
        self._part = part
        for name in filter(lines.__contains__, dir(part)):
            setattr(self, name, around(getattr(part, name), lines[name]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


class WrappedStage(WrappedPart):
    """Wrapper of a stage, which other wrapped stages may take as the second one of a pair."""

    pair: Any

    def __init__(self, part: Any, lines: Lines, around: Around) -> None:
        super().__init__(part, lines, around)
        if hasattr(part, PAIRED):  # stages of an evaluation run forwards alone
            run_pair = self.pair
            self.pair = lambda forward, other, backward: run_pair(forward, other._part, backward)

    def at(self, version: int) -> Self:
        """Chooses the version of the weights for the next operation, and returns this wrapper."""
        self._part.at(version)
        return self


class _RangedStage(WrappedStage):
    """The name of an operation has the version that `at` has chosen, if any."""

    version = ""

    def at(self, version: int) -> Self:
        self.version = f" v{version}"
        return super().at(version)


def ranged(components: LaneComponents, within: Within) -> LaneComponents:
    """Wraps the components of a lane: a call that runs a line of the program is a range, named as in schedule.sir."""

    def around(method: Callable[..., Any], line: Callable[..., str]) -> Callable[..., Any]:
        def in_range(*arguments: Any, **keywords: Any) -> Any:
            with within(line(*arguments, **keywords)):
                return method(*arguments, **keywords)

        return in_range

    def stage(number: int, part: Any) -> WrappedStage:
        def operation(letter: str) -> Callable[..., str]:
            return lambda micros, *_values: f"{letter} {_text(micros)} s{number}{wrapped.version}"

        def pair(forward: Any, other: Any, backward: Any) -> str:
            return f"F {_text(forward[0])} s{number} & B {_text(backward[0])} s{other.number}"

        operations: Lines = {call: operation(letter) for letter, call in OPERATIONS.items()}
        wrapped = _RangedStage(part, {**operations, PAIRED: pair, **lines_of_weights((number,))}, around)
        return wrapped

    def link(kind: str, route: Route, part: Any) -> WrappedPart:
        ends, worker, verb = f"s{route.source}->s{route.target}", route.worker, f"{kind} {route.value}".rstrip()
        lines: Lines = {
            "isend": lambda micros, _tensors: f"{verb} {_text(micros)} {ends} to w{worker}",
            "irecv": lambda micros, into: f"{verb} {_text(micros)} {ends} from w{worker} into {into}",
            "wait": lambda micros: f"wait {verb} {_text(micros)} {ends}",
        }
        return WrappedPart(part, lines, around)

    return components._replace(
        stages={number: stage(number, part) for number, part in components.stages.items()},
        incoming={route: link("recv", route, part) for route, part in components.incoming.items()},
        outgoing={route: link("send", route, part) for route, part in components.outgoing.items()},
        ties={group: WrappedPart(tie, lines_of_weights(group), around) for group, tie in components.ties.items()},
    )


def _text(micros: Micros) -> str:
    return ",".join(f"m{micro}" for micro in (micros if isinstance(micros, tuple) else (micros,)))


def lines_of_weights(group: Group) -> dict[str, Callable[..., str]]:
    """Returns the lines that the methods of a weight group run, as in schedule.sir."""
    weights = group_text(group)
    return {
        "all_reduce": lambda: f"all_reduce {weights}",
        "wait_all_reduce": lambda: f"wait all_reduce {weights}",
        "step": lambda: f"step {weights}",
        "stash": lambda version: f"stash {weights} v{version}",
        "drop": lambda version: f"drop {weights} v{version}",
    }


def ranges_on(device: torch.device) -> Within:
    """Returns a function of a name that makes a context: a range of torch.profiler, on a GPU also of NVTX."""
    return _range_on_gpu if device.type == "cuda" else record_function


@contextmanager
def _range_on_gpu(name: str) -> Iterator[None]:
    with record_function(name), torch.cuda.nvtx.range(name):
        yield
