"""Errors of the model file's code: kept apart from ours, and told with the user's part of the traceback."""

import os
import signal
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from chimera_runtime.errors import BadCheckpoint, BadModel, Misuse, PeerLost

_OURS = str(Path(__file__).parent) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIBRARY = str(Path(sysconfig.get_paths()["stdlib"])) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_IMPORTING = "<frozen "


@dataclass(frozen=True)
class Operation:
    """An operation of a lane: its kind as schedule.sir has it, on which micro-batches of which update.

    Micro-batches are numbered as in schedule.sir, none for a step; updates count from 0, and in words from 1. The step
    of parameters that stages share has these in place of a stage.
    """

    kind: str
    stage: int | tuple[int, ...]
    micro_batches: tuple[int, ...]
    update: int

    def __str__(self) -> str:
        stages = self.stage if isinstance(self.stage, tuple) else (self.stage,)
        group = "+".join(f"s{stage}" for stage in stages)
        return " ".join([self.kind, *([self._numbers] if self.micro_batches else []), group])

    @property
    def _numbers(self) -> str:
        return ",".join(f"m{micro}" for micro in self.micro_batches)

    @property
    def words(self) -> str:
        """As in ``micro-batch 2 of update 4, F m2 s1``."""
        if not self.micro_batches:
            return f"update {self.update + 1}, {self}"
        noun = "micro-batch" if len(self.micro_batches) == 1 else "micro-batches"
        return f"{noun} {', '.join(map(str, self.micro_batches))} of update {self.update + 1}, {self}"


class ModelError(Exception):
    """The user's code raised an error: the cause of this one, whose traceback begins in that code.

    Attributes
    ----------
    doing
        What the code was called for.
    status
        How a rank of train.py ends.
    operation
        The operation of the schedule in which that was, if it was in one; it has the stage, the micro-batch and the
        update.
    rank, worker
        Where that was, once it is known: see `Located`.
    """

    def __init__(self, doing: str, status: int) -> None:
        super().__init__(doing)
        self.doing = doing
        self.status = status
        self.operation: Operation | None = None
        self.rank: int | None = None
        self.worker: int | None = None

    def during(self, operation: Operation) -> None:
        """The error was in an operation of the schedule; of one within another, the inner one stays named."""
        self.operation = self.operation or operation

    def __str__(self) -> str:
        """Rank, worker, what was done in which operation, where in the user's code it went wrong and how: a line."""
        place = "" if self.rank is None else f"rank {self.rank}: "
        if self.worker is not None:
            place = f"rank {self.rank} (worker {self.worker}): "
        doing = self.doing if self.operation is None else f"{self.doing} ({self.operation.words})"
        return f"{place}{doing}{'' if self.__cause__ is None else f': {_cause(self.__cause__)}'}"


class Calling:
    """A context around calls of the user's code, used again and again: what they raise becomes a `ModelError`.

    That holds for SystemExit as well, and for KeyboardInterrupt where Ctrl-C does not raise it. What a call within the
    call has blamed already stays so, and so does the loss of another rank, which is nobody's code.
    """

    __slots__ = ("_doing", "_status")

    def __init__(self, doing: str, status: int) -> None:
        self._doing = doing
        self._status = status

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, ModelError | PeerLost):
            return
        if isinstance(error, KeyboardInterrupt) and _ctrl_c_raises():
            return
        inside = None if trace is None else trace.tb_next
        begin = _behind(inside, _OURS, _TORCH, _IMPORTING) or _behind(inside, _OURS, _IMPORTING)
        raise ModelError(self._doing, self._status) from error.with_traceback(begin)


class Located:
    """A context around what a rank does: a `ModelError` learns its rank and worker; our errors lose the frames inside.

    So an uncaught one is shown as the user's traceback and the line from which the user came here, or as that line and
    a message. An error for lack of memory, the user's or not, gets a note with what ``memory_state`` returns.
    ``abandon`` is called with the error when another rank is lost. Afterwards ``failed`` says that there was an error:
    messages may still be under way, and nothing more is to be run. ``closed`` says that the pipeline was closed.
    """

    def __init__(
        self,
        rank: int,
        worker: int,
        memory_state: Callable[[], str],
        abandon: Callable[[PeerLost], None] = lambda _error: None,
    ) -> None:
        self._rank = rank
        self._worker = worker
        self._memory_state = memory_state
        self._abandon = abandon
        self.failed = self.closed = False

    def alike(self) -> "Located":
        """A context of the same place, in which an error leaves this one as it is."""
        return Located(self._rank, self._worker, self._memory_state, self._abandon)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.failed = self.failed or error is not None
        if isinstance(error, PeerLost):
            self._abandon(error)
        if error is not None and not hasattr(error, "__notes__") and (ran_out(error) or ran_out(error.__cause__)):
            error.add_note(self._memory_state())
        if isinstance(error, ModelError):
            error.rank, error.worker = self._rank, self._worker
        if isinstance(error, ModelError | PeerLost | BadModel | Misuse | BadCheckpoint):
            error.__traceback__ = None


def ran_out(error: BaseException | None) -> bool:
    """Whether an error says that memory could not be had, on a GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _ctrl_c_raises() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Reported(Exception):
    """An error that the user's code raised in another process, in words: a line, and its traceback, which str has."""

    def __init__(self, line: str, trace: str) -> None:
        super().__init__(line, trace)
        self.line = line
        self.trace = trace

    @classmethod
    def of(cls, error: ModelError) -> "Reported":
        """The cause of an error, in a form that can be pickled whatever the cause is."""
        assert error.__cause__ is not None
        return cls(_cause(error.__cause__), _trace(error.__cause__))

    def __str__(self) -> str:
        return self.trace


def describe(error: ModelError) -> str:
    """The error in a line; below it the traceback of the user's code, if there is one, and what was noted."""
    cause = error.__cause__
    assert cause is not None
    text = _trace(cause)
    return "\n".join([str(error), *([text] if "\n" in text else []), *getattr(error, "__notes__", ())])


def _trace(cause: BaseException) -> str:
    """The traceback of an error; where there is none, the error."""
    if isinstance(cause, Reported):
        return cause.trace
    shown = traceback.TracebackException.from_exception(cause)
    return "".join(shown.format_exception_only() if cause.__traceback__ is None else shown.format()).rstrip()


def _cause(error: BaseException) -> str:
    return error.line if isinstance(error, Reported) else f"{_place(error)}{type(error).__name__}{_words(error)}"


def _words(error: BaseException) -> str:
    try:
        lines = str(error).strip().splitlines()
    except BaseException:
        return ": (its message cannot be shown: __str__ raises an error)"
    return f": {lines[0]}" if lines else ""


def _behind(trace: TracebackType | None, *left_out: str) -> TracebackType | None:
    """The traceback without the first frames that are in certain places."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(left_out):
        trace = trace.tb_next
    return trace


def _place(error: BaseException) -> str:
    """The last line of the user's own files that was running, and the one in the file that was called if it is another.

    Where there is none of these, the last line of other code than torch's.
    """
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}: "
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((_OURS, _TORCH, "<"))]
    frames = [frame for frame in frames if not _is_installed(frame.filename)] or frames
    if not frames:
        return ""
    *_, entry = (frame for frame in frames if frame.filename == frames[0].filename)
    came_from = "" if frames[-1].filename == entry.filename else f" (from {_line(entry)})"
    return f"{_line(frames[-1])}{came_from}: "


def _line(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def _is_installed(file: str) -> bool:
    return file.startswith(_LIBRARY) or any(folder in file for folder in _INSTALLED)
