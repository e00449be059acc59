"""Wraps stages, ties and links of a lane, so that a function is called around each line of schedule.sir that runs.

`ranged` makes each line a named range for profilers: of torch.profiler, and on a GPU also of NVTX. `tools.record` uses
the wrappers to record times.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Self

import torch
from torch.profiler import record_function

from chimera_runtime.blame import micro_text
from chimera_runtime.lane.lane import LaneComponents
from chimera_runtime.program.numbering import numbers_of
from chimera_runtime.program.operations import MOVES, OPERATIONS, PAIRED
from chimera_runtime.program.rank_facts import Group, Route, group_text

Within = Callable[[str], AbstractContextManager[Any]]
"""Function that returns a context: the range with the given name."""


class ProgramLine(NamedTuple):
    """A line of schedule.sir in parts: ``verb``, micro-batches, ``place`` (stages), and the ``rest`` of its words.

    ``also`` is the second operation of a pair. For a line without micro-batches, ``update`` is the version of the
    weights that it names or, if it names none, the number of the update whose gradients are summed.
    """

    verb: str
    micros: tuple[int, ...]
    place: str
    rest: str = ""
    also: "ProgramLine | None" = None
    update: int = 0

    def __str__(self) -> str:
        return self.text(slices=1)

    def text(self, slices: int) -> str:
        """Returns the line as schedule.sir has it, if a micro-batch has ``slices`` slices, each of which is counted."""
        micros = ",".join(micro_text(micro, slices) for micro in self.micros)
        line = " ".join(filter(None, (self.verb, micros, self.place, self.rest)))
        return line if self.also is None else f"{line} & {self.also.text(slices)}"


Lines = Mapping[str, Callable[..., ProgramLine]]
"""Function, for each method by its name, that makes from the arguments of a call the line that the call runs."""

Around = Callable[[Callable[..., Any], Callable[..., ProgramLine]], Callable[..., Any]]
"""Function (method, its function in `Lines`) that returns what is called in place of the method."""


class WrappedPart:
    """Wrapper of a stage, a tie or a link: has its methods, but those that run a line of the program are replaced.

    ``lines`` has, for the name of each such method, how a call becomes a line; ``around`` makes the replacement.
    """

    def __init__(self, part: Any, lines: Lines, around: Around) -> None:
        self._part = part
        for name in filter(lines.__contains__, dir(part)):
            setattr(self, name, around(getattr(part, name), lines[name]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


class WrappedStage(WrappedPart):
    """Wrapper of a stage; ``begun`` is called with the number of an update before the stage begins it."""

    pair: Any

    def __init__(self, number: int, part: Any, around: Around, begun: Callable[[int], None]) -> None:
        def operation(letter: str) -> Callable[..., ProgramLine]:
            return lambda micros, *_values: ProgramLine(letter, numbers_of(micros), f"s{number}", self._version)

        def move(verb: str) -> Callable[..., ProgramLine]:
            return lambda micros: ProgramLine(verb, numbers_of(micros), f"s{number}")

        def pair(forward: Any, other: Any, backward: Any) -> ProgramLine:
            second = ProgramLine("B", numbers_of(backward[0]), f"s{other.number}")
            return ProgramLine("F", numbers_of(forward[0]), f"s{number}", also=second)

        operations: Lines = {method: operation(letter) for letter, method in OPERATIONS.items()}
        launches: Lines = {method: move(letter) for letter, method in MOVES.items()}
        waits: Lines = {f"wait_{method}": move(f"wait {letter}") for letter, method in MOVES.items()}
        lines = {**operations, **launches, **waits, PAIRED: pair, **_lines_of_weights((number,), part)}
        super().__init__(part, lines, around)
        self._version = ""
        self._begun = begun
        if hasattr(part, PAIRED):  # stages of an evaluation run forwards alone
            run_pair = self.pair
            self.pair = lambda forward, other, backward: run_pair(forward, other._part, backward)

    def at(self, version: int) -> Self:
        """Chooses the version of the weights for the next operation, and returns this wrapper."""
        self._version = f"v{version}"
        self._part.at(version)
        return self

    def begin(self, update: int) -> None:
        """Begins an update, whose first micro-batch has number 0."""
        self._begun(update)
        self._part.begin(update)


def wrapped(
    components: LaneComponents, around: Around, begun: Callable[[int], None] = lambda _update: None
) -> LaneComponents:
    """Wraps stages, ties and links of a lane as `WrappedPart`; ``begun`` is called with an update before a stage begins
    it.
    """

    def link(kind: str, route: Route, part: Any) -> WrappedPart:
        ends, worker, verb = f"s{route.source}->s{route.target}", route.worker, f"{kind} {route.value}".rstrip()
        lines: Lines = {
            "isend": lambda micros, _: ProgramLine(verb, numbers_of(micros), ends, f"to w{worker}"),
            "irecv": lambda micros, into: ProgramLine(verb, numbers_of(micros), ends, f"from w{worker} into {into}"),
            "wait": lambda micros: ProgramLine(f"wait {verb}", numbers_of(micros), ends),
        }
        return WrappedPart(part, lines, around)

    return components._replace(
        stages={number: WrappedStage(number, part, around, begun) for number, part in components.stages.items()},
        incoming={route: link("recv", route, part) for route, part in components.incoming.items()},
        outgoing={route: link("send", route, part) for route, part in components.outgoing.items()},
        ties={group: WrappedPart(tie, _lines_of_weights(group, tie), around) for group, tie in components.ties.items()},
    )


def _lines_of_weights(group: Group, weights: Any) -> Lines:
    def line(verb: str) -> Callable[..., ProgramLine]:
        def of_version(*version: int) -> ProgramLine:
            (update,) = version or (weights.updates,)
            return ProgramLine(verb, (), group_text(group), " ".join(f"v{v}" for v in version), update=update)

        return of_version

    return {verb.replace(" ", "_"): line(verb) for verb in ("all_reduce", "wait all_reduce", "step", "stash", "drop")}


def ranged(components: LaneComponents, within: Within, slices: int = 1) -> LaneComponents:
    """Wraps the components of a lane: a call that runs a line of the program is a range, named as in schedule.sir."""

    def around(method: Callable[..., Any], line: Callable[..., ProgramLine]) -> Callable[..., Any]:
        def in_range(*arguments: Any, **keywords: Any) -> Any:
            with within(line(*arguments, **keywords).text(slices)):
                return method(*arguments, **keywords)

        return in_range

    return wrapped(components, around)


def ranges_on(device: torch.device) -> Within:
    """Returns a function of a name that makes a context: a range of torch.profiler, on a GPU also of NVTX."""
    return _range_on_gpu if device.type == "cuda" else record_function


@contextmanager
def _range_on_gpu(name: str) -> Iterator[None]:
    with record_function(name), torch.cuda.nvtx.range(name):
        yield
