"""``--trace``: wrappers of the parts of a lane, which record the begin and the end of each call.

On a GPU calls only put work into a CUDA stream; the times are then those of events in the stream (`event_clock`).
"""

from collections.abc import Callable

from chimera_runtime.lane.lane import LaneComponents
from chimera_runtime.lane.profiler_ranges import ProgramLine, wrapped
from chimera_runtime.tools.record.recorder import Recorder


def traced(parts: LaneComponents, recorder: Recorder) -> LaneComponents:
    """Wraps the components of a lane to record every call."""

    def load(kind: str) -> Callable[[int, int], ProgramLine]:
        return lambda _update, micro: ProgramLine(kind, (micro,), "")

    return wrapped(parts, recorder.timed, recorder.begin)._replace(
        load_input=recorder.timed(parts.load_input, load("load input")),
        load_target=recorder.timed(parts.load_target, load("load target")),
    )
