"""Collects the values with which the templates of scripts are filled."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from chimera_ir.codegen.loops import counter, lane_lines, turn_lines
from chimera_ir.codegen.notation import Notation
from chimera_ir.codegen.rolling import Loop, roll
from chimera_ir.codegen.statements import LinkVariables, Scribe, links, weights
from chimera_ir.ir.ids import WeightGroup, Worker
from chimera_ir.ir.lane_parts import LaneParts
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import singles
from chimera_ir.ir.streams import ProgramStream
from chimera_ir.plural import counted, listed
from chimera_ir.verify.verify import Verified


@dataclass(frozen=True, slots=True)
class BodyView:
    """The body of a function of a rank's script.

    ``bindings`` are assignments that give stages and links the names by which ``lines`` call them. ``lines`` are the
    statements of the lane, with their indentation. ``has_loops`` says whether there is a loop in ``lines``.
    """

    bindings: tuple[str, ...]
    lines: tuple[str, ...]
    has_loops: bool


@dataclass(frozen=True, slots=True)
class RankView:
    """The values for a rank's script: two bodies of functions, and the words and numbers around them.

    ``training`` is the body for an update (or a turn of a stream), ``evaluation`` that for an evaluation. ``counting``
    is a remark on how micro-batches are counted, ``counter`` is the variable that counts the turns of a stream, and
    ``per_update`` is the number of micro-batches of an update.
    """

    worker: int
    title: str
    micro_batches_text: str
    evaluated_text: str
    counting: str
    counter: str
    per_update: int
    stages_text: str
    training: BodyView
    evaluation: BodyView

    @property
    def has_loops(self) -> bool:
        """Whether either function of the script has a loop."""
        return self.training.has_loops or self.evaluation.has_loops


def rank_view(verified: Verified, evaluation: Verified, worker: Worker) -> RankView:
    """The values of a rank's script: the worker's lane, or its turn, and its lane of the evaluation."""
    header = verified.program.header
    stages = header.stages_of[worker]
    return RankView(
        worker=worker,
        title=header.title,
        micro_batches_text=counted(header.whole_micro_batches, "micro-batch"),
        evaluated_text=counted(evaluation.program.header.whole_micro_batches, "micro-batch"),
        counting=_counting(header),
        counter=counter(header) if header.period else "",
        per_update=header.per_update,
        stages_text=f"stage{'s' if len(stages) > 1 else ''} {listed(stages)}" if stages else "no stage",
        training=_body(verified, worker),
        evaluation=_body(evaluation, worker),
    )


def _counting(header: Header) -> str:
    if header.slices > 1:
        return f" (counted in slices: {header.slices} of each)"
    return " (counted in halves)" if header.halves else ""


def _body(verified: Verified, worker: Worker) -> BodyView:
    header, parts = verified.program.header, verified.program.parts[worker]
    used = links(parts)
    scribe = Scribe(header, worker, used, Notation())
    has_loops = False
    if isinstance(verified.level, ProgramStream):
        lines = list(turn_lines(scribe, verified.level.turns[worker]))
    else:
        pieces = roll(header, verified.program.lanes[worker])
        has_loops = any(isinstance(piece, Loop) for piece in pieces)
        lines = list(lane_lines(scribe, pieces))
    return BodyView(
        bindings=tuple(_bindings(_groups(parts), used)),
        lines=tuple(f"    {line}" if line else "" for line in lines),
        has_loops=has_loops,
    )


def _groups(parts: LaneParts) -> list[WeightGroup]:
    """The weight groups that a lane runs or updates: stages, ascending, then ties."""
    stages = {operation.stage for operation in singles(parts.computes.lines)}
    groups = {(stage,) for stage in stages} | {update.group for update in parts.updates.lines}
    return sorted(groups, key=lambda group: (len(group) > 1, group))


def _bindings(groups: Iterable[WeightGroup], used: LinkVariables) -> Iterator[str]:
    for group in groups:
        call = "stage" if len(group) == 1 else "tie"
        yield f"{weights(group)} = lane.{call}({', '.join(map(str, group))})"
    for method, names in (("incoming", used.incoming), ("outgoing", used.outgoing)):
        for route, name in names.items():
            source, target, worker, *values = route
            value = "".join(f', value="{letter}"' for letter in values)
            yield f"{name} = lane.{method}({source}, {target}, worker={worker}{value})"
