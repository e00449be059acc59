"""The operations of a plan: with a clock, or without one."""

from typing import NamedTuple

from chimera_ir.ir import ops
from chimera_ir.ir.ids import Clock, Worker


class Planned(NamedTuple):
    """An operation with its worker and its clock."""

    clock: Clock
    worker: Worker
    operation: ops.Operation


class Unclocked(NamedTuple):
    """An operation without a clock, with its worker and the value of its ``prefer``, if its line has one."""

    preference: int | None
    worker: Worker
    operation: ops.Operation
