"""Which class an optimizer or a scheduler is of, as a checkpoint says it, and which classes read each other's state."""

from dataclasses import dataclass
from typing import Any

_OF_TORCH = "torch.optim"
_ABSTRACT = ("Optimizer", "LRScheduler", "_LRScheduler")


@dataclass(frozen=True)
class Kind:
    """The name of a class, and that of the class of torch.optim that it is, or is derived from; empty if nsaved."""

    name: str
    of_torch: str

    def __str__(self) -> str:
        return self.name if self.of_torch in ("", self.name) else f"{self.name} ({self.of_torch})"


def kind_of(value: Any) -> Kind:
    """The kind of an optimizer or a scheduler; of a sharded optimizer that of the one that steps the shards."""
    kind = type(getattr(value, "of_shards", value))
    of_torch = [
        base.__name__
        for base in kind.__mro__
        if base.__module__.startswith(_OF_TORCH) and base.__name__ not in _ABSTRACT
    ]
    return Kind(kind.__name__, of_torch[0] if of_torch else "")


def is_same_kind(saved: Kind | None, here: Kind | None) -> bool:
    """Whether one may take the state of the other: their names are the same, or they are derived from the same class.

    That is the nearest class of torch.optim: AdamW and Adam differ. A kind that is not known goes with any.
    """
    if saved is None or here is None:
        return True
    return saved.name == here.name or (saved.of_torch == here.of_torch != "")
