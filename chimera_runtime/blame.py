"""Blame: errors of the user's code are told apart from ours, and shown with the user's part of the traceback."""

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
class LaneOperation:
    """An operation of a lane, for messages: its kind as in schedule.sir, its micro-batches and its update.

    Micro-batches are numbered as in schedule.sir; a step has none. Updates count from 0, in words from 1. The step of
    parameters that stages share has a tuple of these as its stage.
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
        """Text for messages, as in ``micro-batch 2 of update 4, F m2 s1``."""
        if not self.micro_batches:
            return f"update {self.update + 1}, {self}"
        noun = "micro-batch" if len(self.micro_batches) == 1 else "micro-batches"
        return f"{noun} {', '.join(map(str, self.micro_batches))} of update {self.update + 1}, {self}"


class ModelError(Exception):
    """Wrapper of an error that the user's code raised: its cause, with a traceback that begins in that code.

    Attributes
    ----------
    doing
        The purpose of the call.
    status
        The exit status of a rank of train.py.
    operation
        The operation of the schedule that made the call, with stage, micro-batch and update, if there is one.
    rank, worker
        The place of the call, set by `Located`.
    """

    def __init__(self, doing: str, status: int) -> None:
        super().__init__(doing)
        self.doing = doing
        self.status = status
        self.operation: LaneOperation | None = None
        self.rank: int | None = None
        self.worker: int | None = None

    def during(self, operation: LaneOperation) -> None:
        """Notes the operation of the schedule in which the error was, unless an inner one is noted already."""
        self.operation = self.operation or operation

    def __str__(self) -> str:
        """Returns a line: rank, worker, purpose of the call, operation, place in the user's code, and the error."""
        place = "" if self.rank is None else f"rank {self.rank}: "
        if self.worker is not None:
            place = f"rank {self.rank} (worker {self.worker}): "
        doing = self.doing if self.operation is None else f"{self.doing} ({self.operation.words})"
        return f"{place}{doing}{'' if self.__cause__ is None else f': {_cause(self.__cause__)}'}"


class UserCode:
    """Context for calls of the user's code, which may be entered many times: errors inside become a `ModelError`.

    SystemExit becomes one as well, and KeyboardInterrupt unless Ctrl-C raises it. A `ModelError` of an inner context
    and the loss of another rank stay as they are.
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
    """Context for the calls of a rank: a `ModelError` gets its rank and worker, and our errors lose the frames inside.

    An uncaught error is then shown as the user's traceback, or as a message, and the user's line that called us. An
    error for lack of memory gets a note with the text of ``memory_report``. ``leak_groups`` is called with the error
    when another rank is lost. ``failed`` is true after an error: messages may still be under way, and the rank must run
    nothing more. ``closed`` says that the pipeline was closed.
    """

    def __init__(
        self,
        rank: int,
        worker: int,
        memory_report: Callable[[], str],
        leak_groups: Callable[[PeerLost], None] = lambda _error: None,
    ) -> None:
        self._rank = rank
        self._worker = worker
        self._memory_report = memory_report
        self._leak_groups = leak_groups
        self.failed = self.closed = False

    def for_loader(self) -> "Located":
        """Returns a context of the same place for loading data: its errors do not set ``failed`` here."""
        return Located(self._rank, self._worker, self._memory_report, self._leak_groups)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.failed = self.failed or error is not None
        if isinstance(error, PeerLost):
            self._leak_groups(error)
        if error is not None and not hasattr(error, "__notes__") and (ran_out(error) or ran_out(error.__cause__)):
            error.add_note(self._memory_report())
        if isinstance(error, ModelError):
            error.rank, error.worker = self._rank, self._worker
        if isinstance(error, ModelError | PeerLost | BadModel | Misuse | BadCheckpoint):
            error.__traceback__ = None


def ran_out(error: BaseException | None) -> bool:
    """Whether an error means that a GPU or the host is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _ctrl_c_raises() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


class RemoteTraceback(Exception):
    """An error of the user's code in another process, as text: a line, and the traceback, which str returns."""

    def __init__(self, line: str, trace: str) -> None:
        super().__init__(line, trace)
        self.line = line
        self.trace = trace

    @classmethod
    def of(cls, error: ModelError) -> "RemoteTraceback":
        """Returns the cause of an error in a form that can always be pickled."""
        assert error.__cause__ is not None
        return cls(_cause(error.__cause__), _trace(error.__cause__))

    def __str__(self) -> str:
        return self.trace


def describe(error: ModelError) -> str:
    """Returns the error in a line, and below it the traceback of the user's code, if there is one, and the notes."""
    cause = error.__cause__
    assert cause is not None
    text = _trace(cause)
    return "\n".join([str(error), *([text] if "\n" in text else []), *getattr(error, "__notes__", ())])


def _trace(cause: BaseException) -> str:
    """The traceback of an error, or the error alone where there is none."""
    if isinstance(cause, RemoteTraceback):
        return cause.trace
    shown = traceback.TracebackException.from_exception(cause)
    return "".join(shown.format_exception_only() if cause.__traceback__ is None else shown.format()).rstrip()


def _cause(error: BaseException) -> str:
    return error.line if isinstance(error, RemoteTraceback) else f"{_place(error)}{type(error).__name__}{_words(error)}"


def _words(error: BaseException) -> str:
    try:
        lines = str(error).strip().splitlines()
    except BaseException:
        return ": (its message cannot be shown: __str__ raises an error)"
    return f": {lines[0]}" if lines else ""


def _behind(trace: TracebackType | None, *prefixes: str) -> TracebackType | None:
    """The traceback without its first frames, as long as their files begin with a prefix."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(prefixes):
        trace = trace.tb_next
    return trace


def _place(error: BaseException) -> str:
    """Text for the last line that ran in the user's files.

    If that is not the file that was called, the last line there is added. Without a line in the user's files it is
    the last line outside of torch.
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
