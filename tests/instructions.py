"""What tests ask of instructions of all types at once."""

from collections.abc import Iterable, Iterator

from chimera_ir.ir.kinds import Kind
from chimera_ir.ir.ops import Compute, Instruction, Pair


def what(instruction: Instruction | object) -> Kind | type:
    """The kind of a compute operation, and the type of anything else."""
    return instruction.kind if isinstance(instruction, Compute) else type(instruction)


def singly(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    """The instructions with the two of each pair one after the other."""
    for each in instructions:
        yield from [each.forward, each.backward] if isinstance(each, Pair) else [each]
