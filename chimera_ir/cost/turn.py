"""One turn of an asynchronous schedule: its operations, each for those of all turns, and what waits for what."""

from collections import defaultdict
from dataclasses import dataclass

from chimera_ir.cost.cycles import Waits
from chimera_ir.cost.precedence import Precedence
from chimera_ir.ir.ops import Compute, Forward


@dataclass(frozen=True, slots=True)
class Turn:
    """``numbers[n]`` is the number, in the precedence, of the first operation like node n; ``waits`` are its waits."""

    numbers: tuple[int, ...]
    waits: Waits


def fold(precedence: Precedence, period: int) -> Turn:
    """The turn that a precedence repeats every ``period`` micro-batches, if it shows all waits of the steady state.

    Warm-up and drain lack operations, so there an operation also follows one that in the steady state it follows by way
    of others. Such a wait does no harm: the way there is longer.
    """
    numbers: list[int] = []
    known: dict[tuple[bool, int, tuple[int, ...]], int] = {}
    placed: dict[int, tuple[int, int]] = {}
    nearest: dict[int, dict[int, int]] = defaultdict(dict)
    for number in precedence.order:
        alike, turn = _reduced(precedence.operations[number], period)
        node = known.setdefault(alike, len(known))
        if node == len(numbers):
            numbers.append(number)
        placed[number] = node, turn
        for before, its_turn in map(placed.__getitem__, precedence.predecessors[number]):
            ago = turn - its_turn
            nearest[node][before] = min(ago, nearest[node].get(before, ago))
    return Turn(tuple(numbers), [tuple(nearest[node].items()) for node in range(len(numbers))])


def _reduced(operation: Compute, period: int) -> tuple[tuple[bool, int, tuple[int, ...]], int]:
    """What an operation is within its turn, and the turn."""
    turn = operation.micros[0] // period
    within = tuple(micro - turn * period for micro in operation.micros)
    return (isinstance(operation, Forward), operation.stage, within), turn
