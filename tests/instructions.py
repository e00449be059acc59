"""What tests ask of instructions of all types at once."""

from chimera_ir.ir.kinds import Kind
from chimera_ir.ir.ops import Compute, Instruction


def what(instruction: Instruction | object) -> Kind | type:
    """The kind of a compute operation, and the type of anything else."""
    return instruction.kind if isinstance(instruction, Compute) else type(instruction)
