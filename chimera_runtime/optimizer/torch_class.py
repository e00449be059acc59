"""Class of an optimizer or a scheduler as a checkpoint names it, and whether a class can read another's state."""

from dataclasses import dataclass
from typing import Any

_TORCH_OPTIM = "torch.optim"
_ABSTRACT = ("Optimizer", "LRScheduler", "_LRScheduler")


@dataclass(frozen=True)
class TorchClass:
    """Name of a class, and of the class of torch.optim that it is or is derived from; empty if there is none."""

    name: str
    of_torch: str

    def __str__(self) -> str:
        return self.name if self.of_torch in ("", self.name) else f"{self.name} ({self.of_torch})"


def class_of(value: Any) -> TorchClass:
    """Returns the class of an optimizer or a scheduler; for a sharded optimizer, the class that steps the shards."""
    of_value = type(getattr(value, "of_shards", value))
    of_torch = [
        base.__name__
        for base in of_value.__mro__
        if base.__module__.startswith(_TORCH_OPTIM) and base.__name__ not in _ABSTRACT
    ]
    return TorchClass(of_value.__name__, of_torch[0] if of_torch else "")


def share_state(saved: TorchClass | None, here: TorchClass | None) -> bool:
    """Whether one class can read the state of the other: same name, or derived from the same class of torch.optim.

    AdamW and Adam differ. A class that is not known (None) can read any state.
    """
    if saved is None or here is None:
        return True
    return saved.name == here.name or (saved.of_torch == here.of_torch != "")
