"""What ranks tell each other outside of training: values of any kind, and complaints that all of them raise."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from chimera_runtime.blame import ModelError, describe
from chimera_runtime.errors import BadCheckpoint, Misuse, PeerLost

T = TypeVar("T")


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

    def gathered(self, call: Callable[[], T], refused: Callable[[str], str] = str) -> list[T]:
        """What a call returns on each rank; if it raises an error on any rank, all ranks raise one.

        A rank whose own call failed raises that error, the others the first one in the order of ranks. An error that
        is neither a `Misuse` nor one of the user's code becomes a `BadCheckpoint`.

        Parameters
        ----------
        refused
            Makes the message of a `BadCheckpoint` of what is wrong.
        """
        value: T | None = None
        error: Exception | None = None
        try:
            value = call()
        except (Misuse, ModelError) as raised:
            error = raised
        except BadCheckpoint as raised:
            error = BadCheckpoint(refused(f"{raised}"))
        except PeerLost:
            raise
        except Exception as raised:
            error = BadCheckpoint(refused(f"rank {self.rank}: {type(raised).__name__}: {raised}"))
            error.__cause__ = raised
        heard = self.heard((_in_words(error), value))
        if error is not None:
            raise error
        for failure, _ in heard:
            if failure is not None:
                kind, words = failure
                raise kind(words)
        return [value for _, value in heard]

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
                said = f"no answer from rank {late[1]} within {self._timeout.total_seconds():g} s (timeout)"
            raise PeerLost(f"rank {self.rank}: wait for what other ranks say of {self._what}: {said}") from None


def _in_words(error: Exception | None) -> tuple[type[Exception], str] | None:
    """What other ranks raise for an error of this one."""
    if error is None:
        return None
    if isinstance(error, ModelError):
        return BadCheckpoint, describe(error)
    return type(error), f"{error}"
