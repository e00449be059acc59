"""Counts the copies of weights that a lane keeps, and those that it needs, for the rules "versions" and "memory".

The newest version of a weight group is one copy. Every stashed version is another, from its `stash` to its `drop`. What
a lane needs follows from the operations that read weights: after each step the new version, and every older version
that an operation still reads.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from chimera_ir.diagnostics.catalogue.program import CopyInVain, CopyKeptTooLong, TooManyCopies
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.flow.live import highest_by_key, most_at_once
from chimera_ir.ir.ids import Version, WeightGroup
from chimera_ir.ir.lane_parts import LaneParts
from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.ops import Drop, Instruction, Stash, Step
from chimera_ir.ir.text.printer import group_name, line
from chimera_ir.source import Span

Lane = tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class CopyPeak:
    """The most copies of a group's weights that a lane keeps at once.

    ``place`` is the first place in the lane with so many, ``stashed`` are the versions that are stashed there.
    """

    copies: int
    place: int
    stashed: tuple[Version, ...]


_ONE = CopyPeak(1, 0, ())


def copies(program: Program) -> tuple[int, ...]:
    """Returns the most weights that each worker keeps, in M_theta: the most copies of each of its stages, added up.

    Shared parameters count with each of their stages, as M_theta is all weights of a stage.
    """
    return tuple(
        sum(peaks.get((stage,), _ONE).copies for stage in stages)
        for peaks, stages in zip(map(copy_peaks, program.parts), program.header.stages_of, strict=True)
    )


def copy_peaks(parts: LaneParts) -> dict[WeightGroup, CopyPeak]:
    """Returns the most copies that a lane keeps of each weight group; groups that it never stashes are left out."""
    lines = [(place, line) for place, line in parts.updates if isinstance(line, Stash | Drop)]
    peaks = highest_by_key((line.group, 1 if isinstance(line, Stash) else -1) for _, line in lines)
    return {
        group: CopyPeak(1 + amount, lines[number][0], _stashed(group, [line for _, line in lines[: number + 1]]))
        for group, (amount, number) in peaks.items()
    }


def _stashed(group: WeightGroup, lines: Sequence[Stash | Drop]) -> tuple[Version, ...]:
    """Returns the versions of a group that ``lines`` stash and do not drop."""
    dropped = {line.version for line in lines if isinstance(line, Drop) and line.group == group}
    stashes = [line.version for line in lines if isinstance(line, Stash) and line.group == group]
    return tuple(version for version in stashes if version not in dropped)


def needed(header: Header, parts: LaneParts) -> dict[WeightGroup, int]:
    """Returns, for each weight group of which a lane ever needs more than one copy, the most that it needs at once.

    After a step a lane needs the version that the step made, and each older version until its last reader.
    """
    last = last_reads(header, parts)
    superseded = [
        (instruction.group, place, last.get((instruction.group, Version(instruction.version - 1)), -1))
        for place, instruction in parts.updates
        if isinstance(instruction, Step) and instruction.version is not None
    ]
    return {group: 1 + older for group, older in most_at_once(superseded).items()}


def last_reads(header: Header, parts: LaneParts) -> dict[tuple[WeightGroup, Version], int]:
    """Maps (group, version) to the place in a lane of the last operation that reads this version of the weights."""
    return {
        (group, operation.version): place
        for place, operation in parts.singles
        if operation.version is not None
        for group in header.groups_with[operation.stage]
    }


def surplus(program: Program) -> Iterator[Diagnostic]:
    """Yields a diagnostic for each weight group of which a lane keeps more copies at its peak than it needs.

    The program has no errors by the rule "versions". It has enough updates to show the steady state: the first and the
    last updates keep versions that only further updates would read.
    """
    for worker, (lane, parts) in enumerate(zip(program.lanes, program.parts, strict=True)):
        enough, last = needed(program.header, parts), last_reads(program.header, parts)
        for group, peak in copy_peaks(parts).items():
            number = enough.get(group, 1)
            if peak.copies > number:
                where = lane[peak.place].origin, worker, group_name(group), peak.copies, number
                yield _surplus(program.header, where, lane, last, group, peak)


def _surplus(
    header: Header,
    where: tuple[Span, int, str, int, int],
    lane: Lane,
    last: Mapping[tuple[WeightGroup, Version], int],
    group: WeightGroup,
    peak: CopyPeak,
) -> TooManyCopies:
    """Returns the diagnostic of too many copies of a group, with a remedy: drop a version earlier, or stash it later.

    ``where`` are the first fields of the diagnostic. ``last`` has the place in the lane of the last operation that
    reads each version. ``peak`` is the moment with the most copies.
    """
    for version in peak.stashed:
        stash, drop, end = Stash(group, version), line(Drop(group, version), header), last.get((group, version), -1)
        step = _step_after(lane, lane.index(stash), group)
        if end < step:
            return CopyInVain(*where, drop, line(lane[step], header), line(stash, header))
        if end < peak.place:
            return CopyKeptTooLong(*where, drop, line(lane[end], header))
    step = _step_after(lane, peak.place, group)
    return TooManyCopies(*where, line(lane[peak.place], header), line(lane[step], header))


def _step_after(lane: Lane, start: int, group: WeightGroup) -> int:
    places = range(start, len(lane))
    return next(
        place for place in places if isinstance(instruction := lane[place], Step) and instruction.group == group
    )
