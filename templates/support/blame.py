"""Errors of the model file's code: kept apart from ours, and told with the user's part of the traceback."""

import os
import signal
import traceback
from pathlib import Path
from types import TracebackType

import torch

_OURS = str(Path(__file__).parent) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_IMPORTING = "<frozen "


class ModelError(Exception):
    """Code of the model file raised an error: the cause of this one.

    ``doing`` is what it was called for, ``status`` how a rank ends.
    """

    def __init__(self, doing: str, status: int) -> None:
        super().__init__(doing)
        self.doing = doing
        self.status = status


class Calling:
    """A context around calls of the model file's code, used again and again: what they raise becomes a `ModelError`.

    That holds for SystemExit as well, and for KeyboardInterrupt where Ctrl-C does not raise it.
    """

    __slots__ = ("_doing", "_status")

    def __init__(self, doing: str, status: int) -> None:
        self._doing = doing
        self._status = status

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, KeyboardInterrupt) and _ctrl_c_raises()):
            return
        raise ModelError(self._doing, self._status) from error


def _ctrl_c_raises() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def describe(error: ModelError, model: Path) -> str:
    """What was done, where it went wrong and how, in a line; below it the traceback from the user's code on."""
    cause = error.__cause__
    assert cause is not None
    trace = _behind(cause.__traceback__, _OURS, _TORCH, _IMPORTING) or _behind(cause.__traceback__, _OURS, _IMPORTING)
    shown = traceback.TracebackException(type(cause), cause, trace)
    text = "".join(shown.format_exception_only() if trace is None else shown.format()).rstrip()
    headline = f"{error.doing}: {_place(cause, trace, model)}{type(cause).__name__}{_words(cause)}"
    return f"{headline}\n{text}" if "\n" in text else headline


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


def _place(error: BaseException, trace: TracebackType | None, model: Path) -> str:
    """The last line of the model file that was running, else the last of other code than torch's, if there is one."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: "
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith((_TORCH, "<"))]
    frames = [frame for frame in frames if frame.filename == str(model)] or frames
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}: " if frames else ""
