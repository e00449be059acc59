"""What ranks tell each other outside of training: values of any kind, and complaints that all of them raise."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from chimera_runtime.errors import PeerLost


class Talk:
    """Ranks that talk, over a group of gloo; all of them call each method.

    Parameters
    ----------
    what
        What they talk about, for messages.
    timeout
        Seconds that one of them waits for another, which may have files to read or write first.

    Raises
    ------
    PeerLost
        In every method, if a rank has ended or does not answer in time.
    """

    def __init__(self, group: dist.ProcessGroup | None, what: str, timeout: float) -> None:
        self.group = group
        self._what = what
        self._timeout = timedelta(seconds=timeout)
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def told(self, value: Any) -> Any:
        """What the first rank knows."""
        return self.heard(value if self.rank == 0 else None)[0]

    def heard(self, value: Any) -> list[Any]:
        """What each rank knows, in the order of ranks."""
        values: list[Any] = [None] * self.size
        with self.lost():
            dist.monitored_barrier(self.group, self._timeout)  # the gather has no time-out of its own
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
            late = re.search(r"Rank (\d+) failed to pass", said)
            if late is not None:
                said = f"no answer from rank {late[1]} within {self._timeout.total_seconds():g} s (timeout=)"
            raise PeerLost(f"rank {self.rank}: wait for what other ranks say of {self._what}: {said}") from error
