"""Decides where a lane waits for memory that moves between the worker and its host, that is for offloads and reloads.

    worker 0:                    worker 0:
      F m0 s0                      F m0 s0
      offload m0 s0                offload m0 s0         (launched: the lane goes on)
      F m1 s0                      F m1 s0
      offload m1 s0                wait offload m0 s0
      F m2 s0                      offload m1 s0
      reload m0 s0                 F m2 s0
      B m0 s0                      wait offload m1 s0
                                   reload m0 s0
                                   wait reload m0 s0
                                   B m0 s0

A lane waits for any move before the next operation on the same micro-batch and stage. It also waits for the oldest
offload before an operation with which it would keep more activations than the declared bound. So a copy has all the
time that memory allows. If no bound is declared, the bound is what the lane would keep if it waited for each offload
after the next operation that occupies the lane. The lanes of a stream wait where its turn does in the steady state.
`live` counts what is kept by these waits, `net` lets operations wait for the moves, and `lower` writes the waits as
lines.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from chimera_ir.ir.ids import Micro, Stage
from chimera_ir.ir.kinds import ON_WORKER, Kind
from chimera_ir.ir.levels import Header
from chimera_ir.ir.memory_bounds import Quantity
from chimera_ir.ir.ops import Compute, Instruction, Operation, WaitMove, singles
from chimera_ir.ir.streams import computes, turn_in
from chimera_ir.ir.turns import Turn, moved, unroll

MoveStep = Compute | WaitMove
"""A step of a lane at which what it keeps may change: an operation, or the wait for a move."""

MoveWaits = Mapping[int, Sequence[int]]
"""Maps a place of a lane to the moves that the lane waits for before it, each by its own place in the lane.

The key ``len(lane)`` stands for the end of the lane.
"""


def waits_of(header: Header, lane: Sequence[Operation]) -> MoveWaits:
    """Returns where a lane waits for its moves, by the rule at the top of this file.

    A lane that shows some updates of a stream waits where the turn of the stream does.
    """
    if not any(operation.kind.moves for operation in lane):
        return {}
    if header.asynchronous:
        turn = turn_in(header, singles(lane))
        shown = _shown(header, singles(lane), turn) if turn else None
        if shown is not None:
            return shown
    return _waits(header, lane)


def _waits(header: Header, lane: Sequence[Operation]) -> MoveWaits:
    """Returns where a lane that has moves, and is not part of a stream, waits for them."""
    moving = next(operation.parts[0] for operation in lane if operation.kind.moves)
    worker = header.worker(moving.micros[0], moving.stage)
    declared = [bound.limits[worker] for bound in header.bounds if bound.quantity is Quantity.ACTIVATIONS]
    limit = int(min(declared) * header.units) if declared else _MovingLane(header, lane, None).peak
    return _MovingLane(header, lane, limit).waits


def _shown(header: Header, lane: Sequence[Compute], turn: Turn) -> MoveWaits | None:
    """Returns where a lane waits for its moves, if the lane shows the first updates of the stream with this ``turn``.

    Returns None if it does not: if the first updates of that stream are other operations than those of ``lane``.
    """
    lines = [*computes(turn.instructions)]
    waits = waits_in_turn(header, lines)
    steps: list[Instruction] = []
    for place, line in enumerate(lines):
        steps += [*waited(lines, waits.get(place, ()), header.period), line]
    launched: dict[tuple[Kind, tuple[Micro, ...], Stage], int] = {}
    places: dict[int, list[int]] = {}
    place = 0
    for step in unroll(header, Turn(tuple(steps)), header.updates):
        assert isinstance(step, Compute | WaitMove)
        move = step.kind, step.micros, step.stage
        if isinstance(step, WaitMove):
            places.setdefault(place, []).append(launched[move])
            continue
        if place == len(lane) or move != (lane[place].kind, lane[place].micros, lane[place].stage):
            return None
        launched[move] = place
        place += 1
    return places if place == len(lane) else None


class _MovingLane:
    """A walk along a lane that finds where the lane waits for its moves (``waits``), and the most that it keeps.

    ``peak`` counts activations, in `Header.units`. With a ``limit`` the lane waits for an offload only where it would
    otherwise keep more than ``limit``; without a limit, after the next operation that occupies the lane.
    """

    def __init__(self, header: Header, lane: Sequence[Operation], limit: int | None) -> None:
        self._header, self._lane = header, lane
        self.waits: dict[int, list[int]] = {}
        self.peak = self._kept = 0
        # The moves under way by micro-batch and stage, and the offloads among them, as they were launched.
        self._under_way: dict[tuple[Micro, Stage], int] = {}
        self._leaving: dict[int, None] = {}
        for place, operation in enumerate(lane):
            self._wait(place, dict.fromkeys(self._under_way[c] for c in _cells(operation) if c in self._under_way))
            made, freed = made_and_freed(header, operation)
            while limit is not None and self._leaving and self._kept + made > limit:
                self._wait(place, [next(iter(self._leaving))])
            self._kept += made
            self.peak = max(self.peak, self._kept)
            if operation.kind.moves:
                self._under_way.update(dict.fromkeys(_cells(operation), place))
                self._leaving |= {place: None} if leaves(operation) else {}
                continue
            self._kept -= freed
            self._wait(place + 1, [] if limit is not None else [*self._leaving])
        self._wait(len(lane), dict.fromkeys(self._under_way.values()))

    def _wait(self, before: int, moves: Iterable[int]) -> None:
        for move in moves:
            self.waits.setdefault(before, []).append(move)
            for cell in _cells(self._lane[move]):
                self._under_way.pop(cell, None)
            if move in self._leaving:
                del self._leaving[move]
                self._kept -= made_and_freed(self._header, self._lane[move])[1]


def made_and_freed(header: Header, operation: Operation) -> tuple[int, int]:
    """Returns how much memory an operation adds to the worker when it starts, and how much it frees when it ends.

    Both are in units of which M_a has `Header.units`. An operation that makes one value and frees another, as `I` makes
    operands and frees activations, only swaps them: it adds nothing and frees nothing.
    """
    made = freed = 0
    for part in operation.parts:
        size, kind = header.length(part.micros), part.kind
        added = sum(value.counted in ON_WORKER for value in kind.makes)
        removed = sum(value.counted in ON_WORKER for value in kind.frees)
        made += size * max(0, added - removed)
        freed += size * max(0, removed - added)
    return made, freed


def waits_in_turn(header: Header, operations: Sequence[Operation]) -> MoveWaits:
    """Returns where a turn of a stream waits for moves in the steady state; ``operations`` are those of the turn.

    Places are counted from the first operation of the turn, so the moves of earlier turns have negative places.
    """
    if not any(operation.kind.moves for operation in operations):
        return {}
    steps = _until_settled(header, singles(operations))
    start = len(steps) - len(operations)
    waits = _waits(header, steps).items()
    return {before - start: [move - start for move in moves] for before, moves in waits if start <= before < len(steps)}


def _until_settled(header: Header, turn: Sequence[Compute]) -> list[Compute]:
    """Returns the operations of the first turns of a stream, until a turn waits for moves as all later turns do.

    That is so soon after the warm-up: then the oldest offload that may still be under way depends only on the turn
    before.
    """
    turns = [micro // header.period for operation in turn for micro in operation.micros]
    settled = max(turns) - 2 * min(turns) + 2
    numbers = range(-max(turns), settled + 1)
    later = ((operation, moved(operation.micros, n * header.period)) for n in numbers for operation in turn)
    return [replace(operation, micros=micros) for operation, micros in later if min(micros) >= 0]


def most_kept(header: Header, lane: Sequence[Operation], limit: int) -> int:
    """Returns the most activations that a lane keeps, in `Header.units`.

    The lane waits for an offload only where it would otherwise keep more than ``limit``. Of a stream, ``lane`` is the
    turn.
    """
    steps = _until_settled(header, singles(lane)) if header.asynchronous and lane else lane
    return _MovingLane(header, steps, limit).peak


def leaves(move: Operation) -> bool:
    """Whether a move is an offload, so that what it moves leaves the worker."""
    return any(part.kind.offloads for part in move.parts)


def _cells(operation: Operation) -> Iterator[tuple[Micro, Stage]]:
    """The micro-batches of an operation, each with its stage."""
    return ((micro, part.stage) for part in operation.parts for micro in part.micros)


def waited(lane: Sequence[Operation], moves: Iterable[int], period: int = 0) -> Iterator[WaitMove]:
    """Yields the lines that wait for some moves of a lane; ``moves`` are their places in it.

    If the lane is a turn of a stream, ``period`` is the period of the stream, and places of earlier turns are negative.
    """
    for turn, place in (divmod(move, len(lane)) for move in moves):
        for part in lane[place].parts:
            yield WaitMove(part.kind, moved(part.micros, turn * period), part.stage, part.origin)


def to_its_end(operation: Operation) -> tuple[MoveStep, ...]:
    """Returns the steps that run an operation until it is over.

    They are the operation, or the two sides of a pair; after a move of memory follows the wait for it.
    """
    return (*operation.parts, *waited([operation], [0] if operation.kind.moves else []))


def with_waits(header: Header, lane: Sequence[Operation]) -> Iterator[MoveStep]:
    """Yields the operations of a lane (a pair as its two sides) and, where the lane waits for its moves, the waits."""
    waits = waits_of(header, lane)
    for place, operation in enumerate(lane):
        yield from waited(lane, waits.get(place, ()))
        yield from operation.parts
    yield from waited(lane, waits.get(len(lane), ()))
