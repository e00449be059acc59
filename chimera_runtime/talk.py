"""What ranks tell each other outside of training: values of any kind, and complaints that all of them raise."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from chimera_runtime.errors import PeerLost


class Talk:
    """Ranks that talk, over a group of gloo; all of them call each method.

    Raises
    ------
    PeerLost
        In every method, if a rank has ended or does not answer.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def told(self, value: Any) -> Any:
        """What the first rank knows."""
        return self.heard(value if self.rank == 0 else None)[0]

    def heard(self, value: Any) -> list[Any]:
        """What each rank knows, in the order of ranks."""
        values: list[Any] = [None] * self.size
        with self.lost():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def require_none(self, complaint: str | None, kind: type[Exception]) -> None:
        """Raises the first complaint of any rank on all of them."""
        first = next(filter(None, self.heard(complaint)), None)
        if first is not None:
            raise kind(first)

    @contextmanager
    def lost(self) -> Iterator[None]:
        """Turns errors of the communication inside into `PeerLost`."""
        try:
            yield
        except RuntimeError as error:
            said = str(error).splitlines()[0]
            raise PeerLost(f"rank {dist.get_rank()}: wait for what other ranks say of a checkpoint: {said}") from error
