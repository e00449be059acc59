"""Facts about a worker's part of the program: its stages, buffers, links and turns."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# Values that pass between stages. `Job` has the graph of stages: which stages feed which.


class EdgeValue(NamedTuple):
    """A value that a stage makes for other stages: those that it feeds if it is ``onward``, else those that feed it.

    `Stage.<made>` returns the value. `Stage.<slots>` has the receive buffers for it, which `Boundary.<buffers>`
    allocates and of which `Boundary.<views>` returns the part that a message uses.
    """

    onward: bool
    made: str
    slots: str
    buffers: str
    views: str


VALUES = {
    "y": EdgeValue(True, made="outputs", slots="inputs", buffers="buffers", views="views"),
    "dx": EdgeValue(
        False, made="input_gradients", slots="gradients", buffers="gradient_buffers", views="gradient_views"
    ),
}
"""The values by their letters, as the compiler's table of kinds has them."""


def implied(source: int, target: int) -> str:
    """Returns the letter of the value in a message that names only its stages: the first that goes this way. A stage
    feeds stages of higher numbers.
    """
    return next(letter for letter, value in VALUES.items() if value.onward == (source < target))


# Weight groups: the stages whose weights are summed and stepped together.

Group = tuple[int, ...]
"""A weight group: a stage by itself, or stages that share parameters, ascending."""


def group_text(group: Group) -> str:
    """Returns a weight group as in schedule.sir: ``s1``, or ``s0+s3``."""
    return "+".join(f"s{stage}" for stage in group)


def group_key(group: Group) -> int | Group:
    """Returns a weight group as users write it: the number of a stage, or a tuple of stages that share parameters."""
    return group[0] if len(group) == 1 else group


def group_name(group: Group) -> str:
    """Returns a weight group as in messages: ``stage 1``, or ``the tie of stages 0 and 3``."""
    *most, last = map(str, group)
    return f"the tie of stages {', '.join(most)} and {last}" if most else f"stage {last}"


class Route(NamedTuple):
    """Route of messages: the stages that send and receive, the other worker, the value if it is not implied."""

    source: int
    target: int
    worker: int
    value: str = ""


Rooms = tuple[tuple[int, ...], ...]
"""Sizes of the receive buffers of a stage for a value, in micro-batches, for each of the stages that make the value.

Those are in the order of the stage's arguments, or ascending if the value goes back.
"""


@dataclass(frozen=True)
class StageFacts:
    """Facts for a worker about a stage that it holds.

    Attributes
    ----------
    slots
        Sizes of the receive buffers (slots), in micro-batches, for each value that the stage receives, by its letter:
        those for each stage that makes the value.
    copies
        Number of copies of the stage's weights.
    sending
        The most micro-batches, or parts of them, that are being sent at one time, for each value, by its letter.
    recomputed
        The micro-batches that are recomputed, counted within a cycle of the schedule: half-open runs (start, stop).
    initial
        Two version numbers, 0 or less, which both mean the initial weights: the first is in the `stash` line that keeps
        these weights, the second in the `drop` line that frees them.
    """

    slots: dict[str, Rooms]
    copies: int
    sending: dict[str, int]
    recomputed: tuple[tuple[int, int], ...]
    initial: tuple[int, int]


@dataclass(frozen=True)
class TieFacts:
    """Facts as in `StageFacts` about the parameters that ``stages`` share, of which the worker holds at least one."""

    stages: Group
    copies: int
    initial: tuple[int, int]


@dataclass(frozen=True)
class Turns:
    """The turns of a worker in a run: numbers from ``first`` to below updates plus ``behind``, in steps of ``step``.

    Turn t can run to its end once update t + ``ahead`` has been started; before, it might wait for ever.
    """

    first: int
    behind: int
    step: int
    ahead: int

    def of(self, updates: int) -> range:
        """Returns the numbers of the turns of a run of ``updates`` updates."""
        return range(self.first, updates + self.behind, self.step)

    def safe(self, updates: int) -> range:
        """Returns the numbers of the turns that can run to their end once ``updates`` updates have been started."""
        return range(self.first, updates - self.ahead, self.step)


@dataclass(frozen=True)
class EvaluationFacts:
    """Facts for a worker about an evaluation: by stage, the sizes of receive buffers (``slots``); and its links."""

    slots: dict[int, Rooms]
    incoming: tuple[Route, ...]
    outgoing: tuple[Route, ...]


class KeptMicros(NamedTuple):
    """Numbers of micro-batches, or slices, of which a stage keeps something at one moment.

    ``activations`` counts those of which all activations are kept, ``inputs`` those of which only the input is kept, to
    recompute the rest, ``begun`` those between the two halves of their backward. ``carries`` counts slices whose carry
    is kept, ``carry_gradients`` slices whose carry has a gradient that waits for their backward. The last two count
    those whose activations, or whose operands between the halves, are in the memory of the host.
    """

    stage: int
    activations: int
    inputs: int
    begun: int = 0
    carries: int = 0
    carry_gradients: int = 0
    on_host: int = 0
    operands_on_host: int = 0


class HostedMicros(NamedTuple):
    """Numbers of micro-batches whose activations, or operands between the halves, a stage has on the host."""

    stage: int
    activations: int
    operands: int = 0


@dataclass(frozen=True)
class RankFacts:
    """Facts for a worker, in addition to its script.

    ``kept`` are the moments at which the worker keeps most, each with an entry for every stage, ``on_host`` those at
    which it has most on the host. ``turns`` is None if every update ends before the next begins. ``inputs`` and
    ``targets`` are the micro-batches of a cycle that the worker loads them of, as half-open runs (start, stop).
    """

    stages: dict[int, StageFacts]
    incoming: tuple[Route, ...]
    outgoing: tuple[Route, ...]
    kept: tuple[tuple[KeptMicros, ...], ...]
    turns: Turns | None
    inputs: tuple[tuple[int, int], ...]
    targets: tuple[tuple[int, int], ...]
    evaluation: EvaluationFacts
    ties: tuple[TieFacts, ...] = ()
    on_host: tuple[tuple[HostedMicros, ...], ...] = ()

    @property
    def initial(self) -> dict[Group, tuple[int, int]]:
        """Two version numbers for each weight group, which mean its initial weights: see `StageFacts`."""
        stages = {(stage,): facts.initial for stage, facts in self.stages.items()}
        return stages | {tie.stages: tie.initial for tie in self.ties}


def facts_of_rank(facts: dict[str, Any]) -> RankFacts:
    """Returns the facts for a worker from its entry in program.json, which has tuples in place of lists."""
    turns, evaluation = facts["turns"], facts["evaluation"]
    slots = {int(stage): _by_maker(rooms) for stage, rooms in evaluation["slots"].items()}
    return RankFacts(
        stages={int(stage): _stage(of_stage) for stage, of_stage in facts["stages"].items()},
        ties=tuple(TieFacts(**of_tie) for of_tie in facts["ties"]),
        incoming=_routes(facts["incoming"]),
        outgoing=_routes(facts["outgoing"]),
        kept=tuple(tuple(KeptMicros(*of_stage) for of_stage in moment) for moment in facts["kept"]),
        on_host=tuple(tuple(HostedMicros(*of_stage) for of_stage in moment) for moment in facts.get("on_host", ())),
        turns=None if turns is None else Turns(**turns),
        inputs=facts["inputs"],
        targets=facts["targets"],
        evaluation=EvaluationFacts(slots, _routes(evaluation["incoming"]), _routes(evaluation["outgoing"])),
    )


def _stage(facts: dict[str, Any]) -> StageFacts:
    slots = {letter: _by_maker(facts.pop(value.slots)) for letter, value in VALUES.items()}
    sending = dict(zip(VALUES, facts.pop("sending"), strict=True))
    return StageFacts(slots, sending=sending, **facts)


def _by_maker(slots: tuple[Any, ...]) -> Rooms:
    """Returns slots for each stage that makes a value; program.json has a list of their sizes if that is one stage."""
    return slots if slots and isinstance(slots[0], tuple) else (slots,)


def _routes(routes: Iterable[Iterable[Any]]) -> tuple[Route, ...]:
    return tuple(Route(*route) for route in routes)


def spread(runs: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Yields the numbers in half-open runs (start, stop)."""
    for start, stop in runs:
        yield from range(start, stop)
