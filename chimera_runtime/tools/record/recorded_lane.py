"""``--trace``: wrappers of the parts of a lane, which record the begin and the end of each call.

On a GPU calls only put work into a CUDA stream; the times are then those of events in the stream (`event_clock`).
"""

from collections.abc import Callable
from typing import Any

from chimera_runtime.lane.lane import LaneComponents
from chimera_runtime.lane.profiler_ranges import Lines, WrappedPart, WrappedStage, lines_of_weights
from chimera_runtime.program.operations import OPERATIONS, PAIRED
from chimera_runtime.program.rank_facts import Route
from chimera_runtime.program.weight_groups import Group
from chimera_runtime.tools.record.recorder import Recorder


def traced(parts: LaneComponents, recorder: Recorder) -> LaneComponents:
    """Wraps the components of a lane to record every call."""

    def link(verb: str, route: Route, part: Any) -> WrappedPart:
        ends, post = f"s{route.source}->s{route.target}", {"send": "isend", "recv": "irecv"}[verb]
        words = f"{verb} {route.value}".rstrip()
        lines: Lines = {
            post: lambda micros, _into: recorder.line(words, micros, ends),
            "wait": lambda micros: recorder.line(f"wait {words}", micros, ends),
        }
        return WrappedPart(part, lines, recorder.timed)

    def load(kind: str) -> Callable[[int, int], tuple[int, str]]:
        return lambda _update, micro: recorder.line(kind, micro)

    return LaneComponents(
        stages={number: TracedStage(number, stage, recorder) for number, stage in parts.stages.items()},
        incoming={route: link("recv", route, part) for route, part in parts.incoming.items()},
        outgoing={route: link("send", route, part) for route, part in parts.outgoing.items()},
        load_input=recorder.timed(parts.load_input, load("load input")),
        load_target=recorder.timed(parts.load_target, load("load target")),
        ties={group: WrappedPart(tie, _of_weights(group, tie), recorder.timed) for group, tie in parts.ties.items()},
    )


class TracedStage(WrappedStage):
    """Stage whose calls are recorded; an operation over several micro-batches as one over the first."""

    def __init__(self, number: int, stage: Any, recorder: Recorder) -> None:
        def operation(letter: str) -> Callable[..., tuple[int, str]]:
            return lambda micros, *_values: recorder.line(letter, micros, f"s{number}")

        def pair(forward: Any, other: Any, backward: Any) -> tuple[int, str]:
            update, first = recorder.line("F", forward[0], f"s{number}")
            return update, f"{first} & {recorder.line('B', backward[0], f's{other.number}')[1]}"

        operations: Lines = {method: operation(letter) for letter, method in OPERATIONS.items()}
        super().__init__(stage, {**operations, PAIRED: pair, **_of_weights((number,), stage)}, recorder.timed)
        self._recorder = recorder

    def begin(self, update: int) -> None:
        """Begins an update, whose first micro-batch has number 0."""
        self._recorder.first = update
        self._part.begin(update)


def _of_weights(group: Group, weights: Any) -> Lines:
    """Lines of a weight group, with the version that they name, or the number of the update that is summed and made."""

    def noted(line: Callable[..., str]) -> Callable[..., tuple[int, str]]:
        return lambda *version: (*(version or (weights.updates,)), line(*version))

    return {method: noted(line) for method, line in lines_of_weights(group).items()}
