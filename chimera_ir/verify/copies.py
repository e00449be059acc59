"""How many copies of its weights a lane keeps, and how many it needs: a part of the rules "versions" and "memory".

The newest version of a stage is one copy, every stashed one another, from its `stash` to its `drop`. What is needed
follows from the readers alone: behind a step the version that it made, and those older ones that are still read.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from chimera_ir.diagnostics.catalogue.program import TooManyCopies
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.ir.ids import Stage, Version
from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import Backward, Drop, Forward, Instruction, Stash, Step
from chimera_ir.ir.text.printer import line

Lane = tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Peak:
    """The most copies of a stage that a lane keeps, where it comes to them, and the stashed ones among them."""

    copies: int
    place: int
    stashed: tuple[Version, ...]


_ONE = Peak(1, 0, ())


def copies(program: Program) -> tuple[int, ...]:
    """Per worker the weights that it keeps at most, in M_theta: the peaks of the stages it holds, added up."""
    if not program.header.asynchronous:
        return tuple(map(len, program.header.stages_of))
    return tuple(
        sum(found.get(stage, _ONE).copies for stage in stages)
        for found, stages in zip(map(kept, program.lanes), program.header.stages_of, strict=True)
    )


def kept(lane: Lane) -> dict[Stage, Peak]:
    """The peak of every stage that is ever stashed in a lane."""
    stashed: dict[Stage, dict[Version, None]] = {}
    found: dict[Stage, Peak] = {}
    for place, each in enumerate(lane):
        if isinstance(each, Drop):
            stashed.get(each.stage, {}).pop(each.version, None)
        elif isinstance(each, Stash):
            shelf = stashed.setdefault(each.stage, {})
            shelf[each.version] = None
            if 1 + len(shelf) > found.get(each.stage, _ONE).copies:
                found[each.stage] = Peak(1 + len(shelf), place, tuple(shelf))
    return found


def needed(lane: Lane) -> dict[Stage, int]:
    """The copies that the readers of every stage need: the most behind any of its steps."""
    last = last_reads(lane)
    alive: dict[Stage, list[Version]] = {}
    found: dict[Stage, int] = {}
    for place, each in enumerate(lane):
        if isinstance(each, Step) and each.version is not None:
            older = [*alive.get(each.stage, ()), Version(each.version - 1)]
            alive[each.stage] = [version for version in older if last.get((each.stage, version), place) > place]
            found[each.stage] = max(found.get(each.stage, 1), 1 + len(alive[each.stage]))
    return found


def last_reads(lane: Lane) -> dict[tuple[Stage, Version], int]:
    """The place of the last operation that reads a version of a stage."""
    return {
        (each.stage, each.version): place
        for place, each in enumerate(lane)
        if isinstance(each, Forward | Backward) and each.version is not None
    }


def surplus(program: Program) -> Iterator[Diagnostic]:
    """The stages of which a lane keeps more copies at its peak than it needs.

    Parameters
    ----------
    program
        Without errors by the rule "versions", its updates enough to show the steady state: the first and the last keep
        versions that only more updates would read.
    """
    for worker, lane in enumerate(program.lanes):
        enough = needed(lane)
        for stage, peak in kept(lane).items():
            number = enough.get(stage, 1)
            if peak.copies > number:
                origin = lane[peak.place].origin
                yield TooManyCopies(origin, worker, stage, peak.copies, number, _advice(lane, stage, peak))


def _advice(lane: Lane, stage: Stage, peak: Peak) -> str:
    """What brings a peak down that is too high: of its versions one was kept in vain, or too long, or too early."""
    last = last_reads(lane)
    for version in peak.stashed:
        stash, drop, end = Stash(stage, version), line(Drop(stage, version)), last.get((stage, version), -1)
        step = _step_behind(lane, lane.index(stash), stage)
        if end < step:
            return f"remove `{line(stash)}` and `{drop}`: nothing reads that version after `{line(lane[step])}`"
        if end < peak.place:
            return f"run `{drop}` right after `{line(lane[end])}`, the last operation that reads it"
    step = _step_behind(lane, peak.place, stage)
    return f"run `{line(lane[peak.place])}` right before `{line(lane[step])}`"


def _step_behind(lane: Lane, start: int, stage: Stage) -> int:
    places = range(start, len(lane))
    return next(place for place in places if isinstance(each := lane[place], Step) and each.stage == stage)
