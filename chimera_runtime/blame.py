"""Blame: tells errors of the user's code from errors of this package, and shows the user's part of the traceback."""

import os
import signal
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from chimera_runtime.errors import BadModel, PeerLost, PlacedError, ScriptPlace, visible
from chimera_runtime.errors.stage import LEAF_WAS_WRITTEN, SAVED_WAS_WRITTEN

_OURS = str(Path(__file__).parent) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIBRARY = str(Path(sysconfig.get_paths()["stdlib"])) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_IMPORTING = "<frozen "

_NOTES = {
    "leaf Variable that requires grad is being used in an in-place operation": LEAF_WAS_WRITTEN,
    "has been modified by an inplace operation": SAVED_WAS_WRITTEN,
}
"""Notes on errors of torch, by a part of its message: a write into a parameter, or into what a stage has received; and
into what a backward needs."""

_TRAINING = ("update", "turn")
"""Functions of a rank's script that train."""


@dataclass(frozen=True)
class LaneOperation:
    """An operation of a lane, for error messages; its text is as in schedule.sir, such as ``F m2 s1``.

    ``stage`` is a tuple of stages for the step of parameters that they share. A step has no ``micro_batches``.
    ``update`` counts from 0, but `words` counts it from 1. With ``slices`` > 1 ``micro_batches`` count slices.
    """

    kind: str
    stage: int | tuple[int, ...]
    micro_batches: tuple[int, ...]
    update: int
    slices: int = 1

    def __str__(self) -> str:
        stages = self.stage if isinstance(self.stage, tuple) else (self.stage,)
        group = "+".join(f"s{stage}" for stage in stages)
        micro_batches = ",".join(micro_text(micro, self.slices) for micro in self.micro_batches)
        return " ".join(filter(None, (self.kind, micro_batches, group)))

    @property
    def words(self) -> str:
        """The operation as text for error messages, such as ``micro-batch 2 of update 4, F m2 s1``."""
        if not self.micro_batches:
            return f"update {self.update + 1}, {self}"
        if self.slices > 1:
            micro, place = divmod(self.micro_batches[0], self.slices)
            return f"slice {place} of micro-batch {micro} of update {self.update + 1}, {self}"
        noun = "micro-batch" if len(self.micro_batches) == 1 else "micro-batches"
        return f"{noun} {', '.join(map(str, self.micro_batches))} of update {self.update + 1}, {self}"


def micro_text(micro: int, slices: int) -> str:
    """Returns a micro-batch as in schedule.sir: ``m2``, or ``m2 q1`` if slices are counted."""
    return f"m{micro}" if slices == 1 else f"m{micro // slices} q{micro % slices}"


class ModelError(PlacedError):
    """Error of the user's code; its cause is the original error, with a traceback that begins in the user's code.

    ``doing`` says in words what the user's code was called for, such as ``the loss``. ``status`` is the exit status of
    this rank of train.py. `during` sets the ``operation`` of the schedule, `Located` the ``rank`` and the ``worker``.
    """

    def __init__(self, doing: str, status: int) -> None:
        super().__init__(doing)
        self.doing = doing
        self.status = status
        self.operation: LaneOperation | None = None
        self.rank: int | None = None
        self.worker: int | None = None

    def __reduce__(self) -> Any:
        """Pickles the error with its cause as text, as the user's error may not be one that can be pickled."""
        return _received, (self.doing, self.status, None if self.__cause__ is None else RemoteTraceback.of(self))

    def __str__(self) -> str:
        """Returns a line: rank, worker, purpose of the call, operation, place in the user's code, and the error."""
        place = "" if self.rank is None else f"rank {self.rank}: "
        if self.worker is not None:
            place = f"rank {self.rank} (worker {self.worker}): "
        doing = self.doing if self.operation is None else f"{self.doing} ({self.operation.words})"
        return visible(f"{place}{doing}{'' if self.__cause__ is None else f': {_cause(self.__cause__)}'}")


def _received(doing: str, status: int, cause: "RemoteTraceback | None") -> ModelError:
    error = ModelError(doing, status)
    error.__cause__ = cause
    return error


@contextmanager
def during(operation: Callable[[], LaneOperation]) -> Iterator[None]:
    """Context in which an operation of the schedule runs; a `ModelError` inside names the innermost operation.

    What runs for every micro-batch catches the error itself, which costs nothing while there is none.
    """
    try:
        yield
    except ModelError as error:
        error.operation = error.operation or operation()
        raise


@dataclass(frozen=True, slots=True)
class UserCode:
    """Context in which the user's code is called: an error of that code becomes a `ModelError`.

    The context can be entered many times. SystemExit becomes a `ModelError`, too, and so does a KeyboardInterrupt that
    cannot come from Ctrl-C. A `ModelError` of an inner context and a `PeerLost` pass unchanged. A `BadModel` that was
    raised by no line of the user's code is shown without a traceback.
    """

    doing: str
    status: int

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.blame(error)

    def blame(self, error: BaseException) -> None:
        """Raises the `ModelError` for an error that the user's code has just raised; returns if there is none."""
        if isinstance(error, ModelError | PeerLost):
            return
        if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            return  # from Ctrl-C
        trace = error.__traceback__
        inside = None if trace is None else trace.tb_next
        begin = _behind(inside, _OURS, _TORCH, _IMPORTING)
        if begin is None and not isinstance(error, BadModel):
            begin = _behind(inside, _OURS, _IMPORTING)
        raised = ModelError(self.doing, self.status)
        for words, note in _NOTES.items():
            if isinstance(error, RuntimeError) and words in _words(error):
                raised.add_note(note)
        raise raised from error.with_traceback(begin)


@dataclass(eq=False)
class Located:
    """Context for calls of this package by the user: adds facts to the errors inside, and shortens their tracebacks.

    A `ModelError` gets the rank and the worker. It, or an error of this package, loses the frames inside the call. An
    error for lack of memory gets a note with ``memory_report``. ``leak_groups`` is called with the error when another
    rank is lost, and ``tell`` with any other error of this package.

    ``failed`` is true after an error: messages may still be under way, and the rank must run nothing more. ``closed``
    is true once the pipeline was closed.
    """

    rank: int
    worker: int
    memory_report: Callable[[], str]
    leak_groups: Callable[[PeerLost], None] = lambda _error: None
    tell: Callable[[PlacedError], None] = lambda _error: None
    failed: bool = False
    closed: bool = False

    def for_loader(self, tell: Callable[[PlacedError], None] = lambda _error: None) -> "Located":
        """Returns a context of the same rank for loading data; an error in that does not set ``failed`` of this one."""
        return replace(self, failed=False, closed=False, tell=tell)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.failed = self.failed or error is not None
        if isinstance(error, PeerLost):
            self.leak_groups(error)
        elif isinstance(error, PlacedError):
            self.tell(error)
        if error is not None and not hasattr(error, "__notes__") and (ran_out(error) or ran_out(error.__cause__)):
            error.add_note(self.memory_report())
        if isinstance(error, ModelError):
            error.rank, error.worker = self.rank, self.worker
        if isinstance(error, PlacedError):
            error.place = error.place or place_of_error(error.__traceback__)
            error.__traceback__ = None


def place_of_error(trace: TracebackType | None) -> ScriptPlace | None:
    """Returns the line of a rank's script in a traceback; None if the error was raised outside of any update."""
    return _first_place(traceback.walk_tb(trace))


def place_of_thread(frame: FrameType | None) -> ScriptPlace | None:
    """Returns the line of a rank's script that a thread is running, by its ``frame``; None outside of updates."""
    return None if frame is None else _first_place(traceback.walk_stack(frame))


def _first_place(frames: Iterable[tuple[FrameType, int]]) -> ScriptPlace | None:
    """The first frame in the script's training function: a rank need not record, while it runs, how far it has come."""
    for frame, line in frames:
        if frame.f_code.co_name in _TRAINING and {"INTERFACE", "PROGRAM"} <= frame.f_globals.keys():
            variables = {**frame.f_locals}
            counters = {name: value for name, value in variables.items() if type(value) is int}
            first = getattr(variables.get("lane"), "first", None)
            return None if first is None else ScriptPlace(first, line, counters)
    return None


def ran_out(error: BaseException | None) -> bool:
    """Whether an error means that a GPU or the host is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


@dataclass(eq=False)
class RemoteTraceback(Exception):
    """The cause of a `ModelError` of another process, as text: type and message, and the traceback."""

    line: str
    trace: str

    @classmethod
    def of(cls, error: ModelError) -> "RemoteTraceback":
        """Returns the cause of a `ModelError` as text, which can always be pickled."""
        assert error.__cause__ is not None
        return cls(_cause(error.__cause__), _trace(error.__cause__))

    def __str__(self) -> str:
        return self.trace


def describe(error: ModelError) -> str:
    """Returns an error as text: its headline, the traceback of the user's code if there is one, and the notes."""
    cause = error.__cause__
    assert cause is not None
    text = _trace(cause)
    return "\n".join([str(error), *([text] if "\n" in text else []), *getattr(error, "__notes__", ())])


def _trace(cause: BaseException) -> str:
    if isinstance(cause, RemoteTraceback):
        return cause.trace
    shown = traceback.TracebackException.from_exception(cause)
    return "".join(shown.format_exception_only() if cause.__traceback__ is None else shown.format()).rstrip()


def _cause(error: BaseException) -> str:
    if isinstance(error, RemoteTraceback):
        return error.line
    name = "" if isinstance(error, BadModel) else type(error).__name__
    return f"{_place(error)}{name}{_words(error)}" if name else f"{_place(error)}{_words(error)[2:]}"


def _words(error: BaseException) -> str:
    try:
        lines = str(error).strip().splitlines()
    except BaseException:
        return ": (its message cannot be shown: __str__ raises an error)"
    return f": {lines[0]}" if lines else ""


def _behind(trace: TracebackType | None, *prefixes: str) -> TracebackType | None:
    """The rest of a traceback, from the first frame whose file does not begin with one of ``prefixes``."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(prefixes):
        trace = trace.tb_next
    return trace


def _place(error: BaseException) -> str:
    """File and line at which an error was raised in the user's files; empty if no line of a file ran.

    If this line is not in the file that this package called, the last line that ran in that file is added. If no line
    of the user's files ran, the text names the last line outside of this package and torch.
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
