"""Declared bounds on what each worker keeps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction

from chimera_ir.ir import ops
from chimera_ir.ir.ids import Worker
from chimera_ir.source import Span


class Quantity(Enum):
    """The quantity that a declared memory bound limits."""

    ACTIVATIONS = "activations"
    WEIGHTS = "weights"
    BYTES = "bytes"
    HOST = "host"
    HOST_BYTES = "host_bytes"

    @property
    def in_bytes(self) -> bool:
        """Whether the quantity is counted in bytes, which follow from a profile."""
        return self in (Quantity.BYTES, Quantity.HOST_BYTES)


@dataclass(frozen=True, slots=True)
class Bound:
    """A declared upper limit of a quantity of memory: ``limits[w]`` on worker w, declared by the line ``origin``.

    Activations and values in host memory are counted in M_a, weights in M_theta, and both kinds of memory in bytes.
    """

    quantity: Quantity
    limits: tuple[int | Fraction, ...]
    origin: Span = field(default=ops.NOWHERE, compare=False, repr=False)

    def exceeded(self, amounts: Sequence[int | Fraction]) -> Worker | None:
        """The worker whose amount exceeds its limit most; None if the limits of all workers hold."""
        worker = max(range(len(amounts)), key=lambda w: amounts[w] - self.limits[w])
        return Worker(worker) if amounts[worker] > self.limits[worker] else None
