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

A lane waits for an offload after the next operation that occupies the lane, so that the copy has the time of an
operation, and for any move before the next operation on the same micro-batch and stage. `live` counts what is kept by
these waits, `net` lets operations wait for the moves, and `lower` writes the waits as lines.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter

from chimera_ir.ir.ids import Micro, Stage
from chimera_ir.ir.kinds import Counted
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Compute, Operation, WaitMove
from chimera_ir.ir.turns import moved

MoveStep = Compute | WaitMove
"""A step of a lane at which what it keeps may change: an operation, or the wait for a move."""

Waits = Mapping[int, Sequence[int]]
"""The moves, by place, that a lane waits for before the operation at each place; the lane's length is its end."""


def waits_of(lane: Sequence[Operation]) -> Waits:
    """The waits of a lane, by the rule above."""
    waits: dict[int, list[int]] = defaultdict(list)
    # The moves under way by micro-batch and stage, and the offloads among them that no operation has followed.
    under_way: dict[tuple[Micro, Stage], int] = {}
    followed_by_none: dict[int, None] = {}

    def wait(before: int, moves: Iterable[int]) -> None:
        for move in moves:
            waits[before].append(move)
            followed_by_none.pop(move, None)
            for cell in _cells(lane[move]):
                under_way.pop(cell, None)

    for place, operation in enumerate(lane):
        wait(place, dict.fromkeys(under_way[cell] for cell in _cells(operation) if cell in under_way))
        if operation.kind.moves:
            under_way.update(dict.fromkeys(_cells(operation), place))
            followed_by_none |= {place: None} if _goes_out(operation) else {}
        else:
            wait(place + 1, [*followed_by_none])
    wait(len(lane), dict.fromkeys(under_way.values()))
    return {place: sorted(moves) for place, moves in waits.items()}


def waits_in_turn(header: Header, lane: Sequence[Compute]) -> Mapping[int, Sequence[WaitMove]]:
    """The lines of a turn of a stream that wait for moves, by the place before which each stands; the rule as above.

    What a lane launches in one turn it may wait for in a later one.
    """
    length, period = len(lane), header.period
    # Places counted on from turn to turn, as those of the operations on the micro-batches of turn 0.
    touched: dict[tuple[Micro, Stage], list[int]] = defaultdict(list)
    for place, operation in enumerate(lane):
        for micro, stage in _cells(operation):
            touched[Micro(micro % period), stage].append(place - micro // period * length)
    following = [place for place, operation in enumerate(lane) if not operation.kind.moves]
    waits: dict[int, list[tuple[int, WaitMove]]] = defaultdict(list)
    for place, move in enumerate(lane):
        if not move.kind.moves:
            continue
        turn = move.micros[0] // period
        launched = place - turn * length
        cells = [(Micro(micro % period), stage) for micro, stage in _cells(move)]
        ends = [other for cell in cells for other in touched[cell] if other > launched]
        if _goes_out(move) and following:
            after = next((other for other in following if other > place), following[0] + length)
            ends.append(launched + after - place + 1)
        number, before = divmod(min(ends, default=launched + length), length)
        line = WaitMove(move.kind, moved(move.micros, -(turn + number) * period), move.stage, move.origin)
        waits[before].append((launched - number * length, line))
    return {before: [line for _, line in sorted(lines, key=itemgetter(0))] for before, lines in waits.items()}


def _goes_out(move: Operation) -> bool:
    """Whether a move is one to the host."""
    return any(value.counted is Counted.HOST for part in move.parts for value in part.kind.makes)


def _cells(operation: Operation) -> Iterator[tuple[Micro, Stage]]:
    """The micro-batches of an operation, each with the stage."""
    return ((micro, part.stage) for part in operation.parts for micro in part.micros)


def waited(lane: Sequence[Operation], moves: Iterable[int]) -> Iterator[WaitMove]:
    """The lines that wait for some moves of a lane, which are given by their places."""
    parts = (part for move in moves for part in lane[move].parts)
    return (WaitMove(part.kind, part.micros, part.stage, part.origin) for part in parts)


def to_its_end(operation: Operation) -> tuple[MoveStep, ...]:
    """The computations of an operation, and the wait for it if it moves memory."""
    return (*operation.parts, *waited([operation], [0] if operation.kind.moves else []))


def with_waits(lane: Sequence[Operation]) -> Iterator[MoveStep]:
    """The computations of a lane one by one, with the waits for its moves."""
    waits = waits_of(lane)
    for place, operation in enumerate(lane):
        yield from waited(lane, waits.get(place, ()))
        yield from operation.parts
    yield from waited(lane, waits.get(len(lane), ()))
