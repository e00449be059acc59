"""The waits for memory that moves between a worker and its host: where a lane waits for offloads and reloads.

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

A lane waits for any move before the next operation on the same micro-batch and stage, and for the oldest offload before
an operation with which it would keep more activations than the declared bound; so a copy has all the time that memory
allows. Without a bound it keeps as many as if it waited for each offload after the next operation that occupies the
lane. The turn of a stream waits there. `live` counts what is kept by these waits, `net` lets operations wait for the
moves, and `lower` writes the waits as lines.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from chimera_ir.ir.ids import Micro, Stage
from chimera_ir.ir.kinds import ON_WORKER
from chimera_ir.ir.levels import Header
from chimera_ir.ir.memory_bounds import Quantity
from chimera_ir.ir.ops import Compute, Operation, WaitMove, singles
from chimera_ir.ir.turns import moved

MoveStep = Compute | WaitMove
"""A step of a lane at which what it keeps may change: an operation, or the wait for a move."""

Waits = Mapping[int, Sequence[int]]
"""The moves, by place, that a lane waits for before the operation at each place; the lane's length is its end."""


def waits_of(header: Header, lane: Sequence[Operation]) -> Waits:
    """The waits of a lane, by the rule above."""
    hidden = _MovingLane(header, lane, None)
    moving = next((operation.parts[0] for operation in lane if operation.kind.moves), None)
    if moving is None:
        return {}
    worker = header.worker(moving.micros[0], moving.stage)
    bounds = [bound.limits[worker] * header.units for bound in header.bounds if bound.quantity is Quantity.ACTIVATIONS]
    return _MovingLane(header, lane, min(bounds, default=hidden.peak)).waits


class _MovingLane:
    """A walk along a lane that finds its ``waits``, and the most micro-batches whose activations it keeps.

    With a ``limit`` it waits for offloads where the lane would else keep more; without one after the next operation.
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
            made, freed = _made_and_freed(header, operation)
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
                self._kept -= _made_and_freed(self._header, self._lane[move])[1]


def _made_and_freed(header: Header, operation: Operation) -> tuple[int, int]:
    """The units (`Header.units`) of M_a that an operation adds from its start on, and that it frees at its end.

    Operands that take the place of activations are neither.
    """
    made = freed = 0
    for part in operation.parts:
        size, kind = header.length(part.micros), part.kind
        added = sum(value.counted in ON_WORKER for value in kind.makes)
        removed = sum(value.counted in ON_WORKER for value in kind.frees)
        made += size * max(0, added - removed)
        freed += size * max(0, removed - added)
    return made, freed


def waits_in_turn(header: Header, operations: Sequence[Operation]) -> Waits:
    """The waits of a turn of a stream; the place of a move of an earlier turn is negative, counted on to there."""
    lane, length, period = singles(operations), len(operations), header.period
    # Places counted on from turn to turn, as those of the operations on the micro-batches of turn 0.
    touched: dict[tuple[Micro, Stage], list[int]] = defaultdict(list)
    for place, operation in enumerate(lane):
        for micro, stage in _cells(operation):
            touched[Micro(micro % period), stage].append(place - micro // period * length)
    following = [place for place, operation in enumerate(lane) if not operation.kind.moves]
    waits: dict[int, list[int]] = defaultdict(list)
    for place, move in enumerate(lane):
        if not move.kind.moves:
            continue
        turn = move.micros[0] // period
        launched = place - turn * length
        cells = [(Micro(micro % period), stage) for micro, stage in _cells(move)]
        ends = [other for cell in cells for other in touched[cell] if other > launched]
        if leaves(move) and following:
            after = next((other for other in following if other > place), following[0] + length)
            ends.append(launched + after - place + 1)
        number, before = divmod(min(ends, default=launched + length), length)
        waits[before].append(launched - number * length)
    return {before: sorted(moves) for before, moves in waits.items()}


def leaves(move: Operation) -> bool:
    """Whether a move is one to the host."""
    return any(part.kind.offloads for part in move.parts)


def _cells(operation: Operation) -> Iterator[tuple[Micro, Stage]]:
    """The micro-batches of an operation, each with the stage."""
    return ((micro, part.stage) for part in operation.parts for micro in part.micros)


def waited(lane: Sequence[Operation], moves: Iterable[int], period: int = 0) -> Iterator[WaitMove]:
    """The lines that wait for some moves of a lane, which are given by their places.

    ``period`` is that of a stream of which the lane is a turn; moves may then be of earlier turns.
    """
    for turn, place in (divmod(move, len(lane)) for move in moves):
        for part in lane[place].parts:
            yield WaitMove(part.kind, moved(part.micros, turn * period), part.stage, part.origin)


def to_its_end(operation: Operation) -> tuple[MoveStep, ...]:
    """The computations of an operation, and the wait for it if it moves memory."""
    return (*operation.parts, *waited([operation], [0] if operation.kind.moves else []))


def with_waits(header: Header, lane: Sequence[Operation]) -> Iterator[MoveStep]:
    """The computations of a lane one by one, with the waits for its moves."""
    waits = waits_of(header, lane)
    for place, operation in enumerate(lane):
        yield from waited(lane, waits.get(place, ()))
        yield from operation.parts
    yield from waited(lane, waits.get(len(lane), ()))
