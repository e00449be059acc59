"""The copies of weights that a lane keeps and needs: a part of the rules "versions" and "memory".

The newest version of a stage is a copy, and so is every stashed version from its `stash` to its `drop`. The copies that
a lane needs follow from the readers alone: after a step, the version that it made and the older versions still read.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter

from chimera_ir.diagnostics.catalogue.program import TooManyCopies
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.ir.ids import Stage, Version
from chimera_ir.ir.levels import Parts, Program
from chimera_ir.ir.ops import Drop, Instruction, Stash, Step
from chimera_ir.ir.text.printer import line

Lane = tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class CopyPeak:
    """The most copies of a stage that a lane keeps, the place where it first does, and the stashed ones among them."""

    copies: int
    place: int
    stashed: tuple[Version, ...]


_ONE = CopyPeak(1, 0, ())


def copies(program: Program) -> tuple[int, ...]:
    """Per worker the most weights that it keeps, in M_theta: the sum of the peaks of its stages."""
    if not program.header.asynchronous:
        return tuple(map(len, program.header.stages_of))
    return tuple(
        sum(peaks.get(stage, _ONE).copies for stage in stages)
        for peaks, stages in zip(map(kept, program.parts), program.header.stages_of, strict=True)
    )


def kept(parts: Parts) -> dict[Stage, CopyPeak]:
    """The peak of every stage that has a stash in a lane."""
    stashed: dict[Stage, dict[Version, None]] = {}
    peaks: dict[Stage, CopyPeak] = {}
    for place, instruction in parts.updates:
        if isinstance(instruction, Drop):
            stashed.get(instruction.stage, {}).pop(instruction.version, None)
        elif isinstance(instruction, Stash):
            shelf = stashed.setdefault(instruction.stage, {})
            shelf[instruction.version] = None
            if 1 + len(shelf) > peaks.get(instruction.stage, _ONE).copies:
                peaks[instruction.stage] = CopyPeak(1 + len(shelf), place, tuple(shelf))
    return peaks


def needed(parts: Parts) -> dict[Stage, int]:
    """The copies that the readers of every stage need: the most after any of its steps."""
    last = last_reads(parts)
    steps: dict[Stage, list[tuple[int, Version]]] = {}
    for place, instruction in parts.updates:
        if isinstance(instruction, Step) and instruction.version is not None:
            steps.setdefault(instruction.stage, []).append((place, Version(instruction.version - 1)))
    return {
        stage: 1 + _most(superseded, {version: last.get((stage, version), -1) for _, version in superseded})
        for stage, superseded in steps.items()
    }


def _most(steps: list[tuple[int, Version]], last: dict[Version, int]) -> int:
    """The most superseded versions that are still read after any step.

    A version counts from the step that supersedes it to the last step before its last reader.
    """
    changes = [0] * (len(steps) + 1)
    for number, (_, version) in enumerate(steps):
        changes[number] += 1
        changes[max(number, bisect_left(steps, last[version], key=itemgetter(0)))] -= 1
    return max(accumulate(changes))


def last_reads(parts: Parts) -> dict[tuple[Stage, Version], int]:
    """The place of the last operation that reads a version of a stage."""
    return {
        (operation.stage, operation.version): place
        for place, operation in parts.computes
        if operation.version is not None
    }


def surplus(program: Program) -> Iterator[Diagnostic]:
    """The stages of which a lane keeps more copies at its peak than it needs.

    Parameters
    ----------
    program
        Without errors by the rule "versions", with enough updates to show the steady state: the first and the last
        updates keep versions that only further updates would read.
    """
    for worker, (lane, parts) in enumerate(zip(program.lanes, program.parts, strict=True)):
        enough = needed(parts)
        for stage, peak in kept(parts).items():
            number = enough.get(stage, 1)
            if peak.copies > number:
                origin = lane[peak.place].origin
                yield TooManyCopies(
                    origin, worker, stage, peak.copies, number, _advice(lane, last_reads(parts), stage, peak)
                )


def _advice(lane: Lane, last: Mapping[tuple[Stage, Version], int], stage: Stage, peak: CopyPeak) -> str:
    """The change that lowers a peak: one of its versions was kept in vain, for too long, or from too early on."""
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
    return next(
        place for place in places if isinstance(instruction := lane[place], Step) and instruction.stage == stage
    )
