"""Exchange of objects outside of training: values of any kind, and errors that all ranks raise together."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from chimera_runtime.blame import ModelError, describe
from chimera_runtime.errors import BadCheckpoint, Misuse, PeerLost
from chimera_runtime.errors import ranks as mistakes



class ObjectExchange:
    """Exchange of Python objects among the ranks of a group of gloo; all ranks call each method.

    ``what`` says in messages what is exchanged. ``timeout`` is the number of seconds that a rank waits for another one,
    which may have files to read or write first.

    Every method raises `PeerLost` if a rank has ended or does not answer in time.
    """

    def __init__(self, group: dist.ProcessGroup | None, what: str, timeout: float) -> None:
        self.group = group
        self._what = what
        self._timeout = timedelta(seconds=timeout)
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def close(self) -> None:
        """Destroys the group; no exchange may follow."""
        dist.destroy_process_group(self.group)
        del self.group

    def all_gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in their order."""
        values: list[Any] = [None] * self.size
        with self.peer_lost_errors():
            dist.monitored_barrier(self.group, self._timeout)  # the gather has no time-out of its own
            dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_results(self, call: Callable[[], T], refused: Callable[[str], str] = str) -> list[T]:
        """Returns the results of a call on all ranks; if it raises an error on any rank, all ranks raise an error.

        A rank whose own call failed raises the error of that call; the other ranks raise the error of the first rank,
        in order of ranks, whose call failed. `Misuse` and errors of the user's code are raised as they are. Any other
        error becomes a `BadCheckpoint`, whose message is ``refused(cause)``, with the cause in words.
        """
        value: T | None = None
        error: Exception | None = None
        try:
            value = call()
        except (Misuse, ModelError) as raised:
            error = raised
        except BadCheckpoint as raised:
            error = mistakes.call_is_refused(refused(f"{raised}"))
        except PeerLost:
            raise
        except Exception as raised:
            error = mistakes.call_is_refused(refused(mistakes.error_of_a_rank(self.rank, raised)))
            error.__cause__ = raised
        results = self.all_gather((_error_text(error), value))
        if error is not None:
            raise error
        for failure, _ in results:
            if failure is not None:
                kind, words = failure
                raise kind(words)
        return [value for _, value in results]

    def on_all_ranks(self, call: Callable[[], T], refused: Callable[[str], str] = str) -> T:
        """Makes a call on every rank, and returns this rank's result; ``refused`` and errors as in `gather_results`."""
        results: list[T] = []
        self.gather_results(lambda: results.append(call()), refused)
        return results[0]

    def require_none(self, complaint: str | None, kind: type[Exception]) -> None:
        """Raises the first rank's complaint on all ranks, as an error of class ``kind``; passes if no rank has one."""
        first = next(filter(None, self.all_gather(complaint)), None)
        if first is not None:
            raise kind(first)

    @contextmanager
    def peer_lost_errors(self) -> Iterator[None]:
        """Turns errors of the communication inside into `PeerLost`."""
        try:
            yield
        except RuntimeError as error:
            cause = str(error).splitlines()[0]
            late = re.search(r"Rank (\d+) failed to pass", cause)
            if late is not None:
                cause = f"no answer from rank {late[1]} within {self._timeout.total_seconds():g} s (timeout)"
            raise mistakes.objects_are_late(self.rank, self._what, cause) from None


def _error_text(error: Exception | None) -> tuple[type[Exception], str] | None:
    """Class and message of ``error``, with which other ranks can raise the same error; None if there is no error."""
    if error is None:
        return None
    if isinstance(error, ModelError):
        return BadCheckpoint, describe(error)
    return type(error), f"{error}"
