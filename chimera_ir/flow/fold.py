"""Folding an asynchronous schedule into one turn: each operation stands for that operation in every turn.

worker 0: ...                0  F m0 s0   waits for 3, two turns ago
  F m4 s0 v3                 1  F m0 s1   waits for 0, and for 2 a turn ago
  B m3 s0 v2                 2  B m0 s1   waits for 1
  F m5 s0 v4                 3  B m0 s0   waits for 0 a turn later, for 2, and for 3 a turn ago
worker 1: ...
  F m3 s1 v3
  B m3 s1 v3
  F m4 s1 v4
"""

from dataclasses import dataclass

from chimera_ir.flow.cycles import Waits
from chimera_ir.flow.net import Net
from chimera_ir.ir.kinds import Kind
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Compute


@dataclass(frozen=True, slots=True)
class FoldedTurn:
    """A turn as a graph.

    ``numbers[n]`` is the number in the net of node n's operation in the first turn, and ``waits[n]`` what node n waits
    for: pairs of a node and how many turns ago.
    """

    numbers: tuple[int, ...]
    waits: Waits


def fold(net: Net, header: Header) -> FoldedTurn:
    """The turn that the net of an asynchronous schedule repeats, if the net shows all waits of the steady state.

    The last turn shows the waits for earlier turns, the first turn those for later turns; no version below 0 hides
    either. Warm-up and drain lack operations, so an operation there may also wait directly for one that it follows by
    way of others in the steady state. Such a wait is harmless: the path through the others takes longer.
    """
    operations, period = net.operations, header.period
    ends = {0, header.micro_batches // period - 1}
    nodes: dict[tuple[Kind, int, tuple[int, ...]], int] = {}
    numbers: list[int] = []
    inside: list[int] = []
    for number in net.order:
        turn = operations[number].micros[0] // period
        if turn in ends:
            inside.append(number)
            if turn == 0:
                nodes[_reduced(operations[number], period)[0]] = len(numbers)
                numbers.append(number)
    nearest: list[dict[int, int]] = [{} for _ in numbers]
    for number in inside:
        residue, turn = _reduced(operations[number], period)
        waits = nearest[nodes[residue]]
        for before in net.predecessors[number]:
            earlier, earlier_turn = _reduced(operations[before], period)
            node, ago = nodes[earlier], turn - earlier_turn
            waits[node] = min(ago, waits.get(node, ago))
    return FoldedTurn(tuple(numbers), [tuple(waits.items()) for waits in nearest])


def _reduced(operation: Compute, period: int) -> tuple[tuple[Kind, int, tuple[int, ...]], int]:
    """An operation with its micro-batches counted from the start of its turn, and the number of the turn."""
    turn = operation.micros[0] // period
    within = tuple(micro - turn * period for micro in operation.micros)
    return (operation.kind, operation.stage, within), turn
