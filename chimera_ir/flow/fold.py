"""One turn of an asynchronous schedule: its operations, each for those of all turns, and what waits for what."""

from dataclasses import dataclass

from chimera_ir.flow.cycles import Waits
from chimera_ir.flow.net import Net
from chimera_ir.ir.kinds import Kind
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Compute


@dataclass(frozen=True, slots=True)
class FoldedTurn:
    """``numbers[n]`` is the number, in the net, of the first operation like node n; ``waits`` are its waits."""

    numbers: tuple[int, ...]
    waits: Waits


def fold(net: Net, header: Header) -> FoldedTurn:
    """The turn that the net of an asynchronous schedule repeats, if it shows all waits of the steady state.

    The last turn and the first show what any of them does: the last one the waits for earlier turns, the first one
    those for later turns, which no version below 0 hides. Warm-up and drain lack operations, so there an operation also
    follows one that in the steady state it follows by way of others. Such a wait does no harm: the way there is longer.
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
    """What an operation is within its turn, and the turn."""
    turn = operation.micros[0] // period
    within = tuple(micro - turn * period for micro in operation.micros)
    return (operation.kind, operation.stage, within), turn
