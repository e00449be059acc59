"""What messages are called under the strict backend: by their lines in schedule.sir, and their update."""

import itertools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any


class Now:
    """What the runtime is about to post, as far as it says so."""

    def __init__(self) -> None:
        self.update: Callable[[int | None], str] = lambda _micro: ""
        self._posting: tuple[str, int] | None = None
        self._parts = 0

    def begin(self, update: Callable[[int | None], str]) -> None:
        """From now on messages are of the update that a function says, by their micro-batch; None stands for sums."""
        self.update = update

    def post(self, tag: int, stages: int, post: Callable[[], object]) -> object:
        """Posts the tensors of a message between two of so many stages, known by a tag of `tag_of`."""
        place, target = divmod(tag // 2, stages)
        micro, source = divmod(place, stages)
        self._posting = f"m{micro} s{source}->s{target}", micro
        self._parts = 0
        try:
            return post()
        finally:
            self._posting = None

    def message(self, tag: int) -> str:
        """The message that is posted: by its line and its update, else by its tag."""
        if self._posting is None:
            return f"tag {tag}"
        line, micro = self._posting
        self._parts += 1
        return f"{line}{f' part {self._parts}' if self._parts > 1 else ''}{self.update(micro)}"

    def of_update(self) -> str:
        """The update of a collective, where an update ends before the next."""
        return self.update(None)


NOW = Now()


def _of_stream(lane: Any, first: int, micro: int | None) -> str:
    """Where updates overlap, the micro-batch says which: they are counted from the first update of a run."""
    return "" if micro is None else f" of update {first + micro // lane.run.per_update}"


def listen() -> None:
    """Has chimera_runtime, if this is a program of it, say which message of which update it posts."""
    names = ("lane.lane", "lane.stream_lane", "ranks.messages", "evaluate.evaluation")
    lanes, turns, messages, evaluation = (sys.modules.get(f"chimera_runtime.{name}") for name in names)
    if lanes is None or turns is None or messages is None or evaluation is None:
        return
    begin, post = lanes.Lane.begin, messages.Peer._post
    make, run, rounds = turns.StreamLane.__init__, evaluation.Evaluation.run, itertools.count()

    def made(stream: Any, *args: Any, **options: Any) -> None:
        make(stream, *args, **options)
        NOW.begin(partial(_of_stream, stream, 0))

    def begun(lane: Any, update: int) -> None:
        is_stream = isinstance(lane, turns.StreamLane)
        NOW.begin(partial(_of_stream, lane, update) if is_stream else lambda _micro: f" of update {update}")
        begin(lane, update)

    def evaluated(of: Any, micro_batches: Any) -> None:
        number, before = next(rounds), NOW.update
        NOW.begin(lambda _micro: f" of evaluation {number}")
        run(of, micro_batches)
        NOW.begin(before)

    def posted(peer: Any, verb: str, tensors: Any, tag: int) -> Any:
        return NOW.post(tag, peer._names.stages, lambda: post(peer, verb, tensors, tag))

    lanes.Lane.begin, messages.Peer._post = begun, posted
    turns.StreamLane.__init__, evaluation.Evaluation.run = made, evaluated
