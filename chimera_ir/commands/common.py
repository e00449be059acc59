"""Exit statuses, standard streams and error handling that all commands share."""

import codecs
import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from errno import ENAMETOOLONG
from functools import reduce
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar, cast

import click

from chimera_ir import __version__
from chimera_ir.diagnostics.model import closest
from chimera_ir.errors import CompileError, DoesNotFit, NotFitted, TextError
from chimera_ir.escapes import visible, visible_lines

# Commands whose help has its options in sections, and the options that every command has.

Function = TypeVar("Function", bound=Callable[..., Any])

GENERAL = "Other options"
"""The last section of a help: the options that no other section names."""

WIDEST = 120
"""The most columns of a help; fewer where the terminal, or ``COLUMNS``, has fewer."""

_QUIET = f"{__name__}.quiet"
SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": WIDEST}


class SectionedCommand(click.Command):
    """A command whose help shows its options in ``sections``; those that no section names are in the last."""

    def __init__(self, name: str | None, *, sections: Mapping[str, str], **rest: Any) -> None:
        super().__init__(name, **rest, context_settings=SETTINGS)
        self.sections = {heading: names.split() for heading, names in sections.items()}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes a section for each heading, and a last one for the other options."""
        options = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        heading_of = {name: heading for heading, names in self.sections.items() for name in names}
        for heading in (*self.sections, GENERAL):
            chosen = [option for option in options if heading_of.get(option.opts[-1], GENERAL) == heading]
            names = self.sections.get(heading, [])
            chosen.sort(key=lambda option: names.index(option.opts[-1]) if names else 0)
            records = [record for option in chosen if (record := option.get_help_record(ctx))]
            if records:
                with formatter.section(heading if self.sections else "Options"):
                    formatter.write_dl(records)


def all_of(*decorators: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Decorator that applies several others as if they stood one below the other above the function."""
    return lambda function: reduce(lambda decorated, decorate: decorate(decorated), reversed(decorators), function)


def general(function: Function) -> Function:
    """Adds to a command's function the options that every command has: ``--quiet`` and ``--version``."""
    quiet = click.option(
        "-q",
        "--quiet",
        is_flag=True,
        expose_value=False,
        callback=_hush,
        help="Print errors, and what is asked for; no report and no warnings.",
    )
    return quiet(click.version_option(__version__)(function))


def as_json(help: str) -> Callable[[Function], Function]:
    """Decorator that adds to a command's function the option ``--json``, described by ``help``."""
    return click.option("--json", "as_json", is_flag=True, help=help)


def _hush(context: click.Context, _: click.Parameter, given: bool) -> None:
    if given:
        context.meta[_QUIET] = True


def is_quiet() -> bool:
    """Whether the command that runs was called with ``--quiet``."""
    context = click.get_current_context(silent=True)
    return context is not None and _QUIET in context.meta


def report(text: str) -> None:
    """Writes to standard output what goes beyond the answer, such as where it was written; nothing with ``--quiet``."""
    if not is_quiet():
        click.echo(text, nl=False, color=colored(sys.stdout))


def remark(text: str) -> None:
    """Writes a remark or a warning to standard error; nothing with ``--quiet``."""
    if not is_quiet():
        click.echo(text, err=True, color=colored(sys.stderr))


def colored(stream: TextIO) -> bool:
    """Whether a stream gets colours: never if ``NO_COLOR`` is set, else with ``FORCE_COLOR`` or on a terminal."""
    if os.environ.get("FORCE_COLOR"):
        return not os.environ.get("NO_COLOR")
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in ("dumb", "unknown")


WRONG_TEXT = 1
WRONG_COMMAND = 2
DOES_NOT_FIT = 3
OUR_FAULT = 70
INTERRUPTED = 130


class WrongCommand(click.ClickException):
    """A mistake on the command line."""

    exit_code = WRONG_COMMAND


class WrongText(click.ClickException):
    """A mistake in a file that the command line names."""

    exit_code = WRONG_TEXT


class FiniteRange(click.FloatRange):
    """A range of finite numbers; click's own range accepts ``nan``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; a usage error if it is not finite, or out of the range."""
        number = super().convert(value, param, ctx)
        if not isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number


MOST_FOLDERS = 200
"""The most names in a path: Python makes missing folders by recursion."""


class GivenPath(click.Path):
    """A path that is neither empty, as an unset variable leaves it (the current directory), nor too long."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; a usage error if it is empty, or has a name or more names than a system takes."""
        if value == "":
            self.fail("an empty path.", param, ctx)
        if _is_too_long(value):
            self.fail(f"{visible(str(value)):.60} ..: {os.strerror(ENAMETOOLONG)}.", param, ctx)
        return super().convert(value, param, ctx)


def _is_too_long(path: str | Path) -> bool:
    if len(Path(path).parts) > MOST_FOLDERS:
        return True
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno == ENAMETOOLONG
    return False


FILE = GivenPath(path_type=Path)
"""The type of an option that names a file or a directory, whether it exists or not."""


@contextmanager
def as_misuse(*errors: type[Exception]) -> Iterator[None]:
    """Context in which errors of these types become errors of the command line, with the same text."""
    try:
        yield
    except errors as error:
        raise WrongCommand(str(error)) from error


def require_torch(doing: str) -> None:
    """Raises `WrongCommand` if torch is not installed, without importing it; ``doing`` is what needs torch."""
    if find_spec("torch") is None:
        raise WrongCommand(f"{doing} needs torch, which is not installed: pip install 'chimera_ir[train]'")


def write(text: str) -> None:
    """Writes to standard output."""
    click.echo(text, nl=False, color=colored(sys.stdout))


def write_json(data: object) -> None:
    """Writes data to standard output as JSON."""
    write(json.dumps(data, indent=2) + "\n")


_STAND_INS = str.maketrans("─═╌≡·▾└┘", "-=~#.*++")
"""For what a stream's encoding lacks, such as that of a terminal of Windows, a character that tells as much; else ?."""


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end].translate(_STAND_INS)
    return "".join(letter if letter.isascii() else "?" for letter in missing), error.end


class _StandardOutput:
    """Standard output: a closed pipe ends the output silently, any other error is reported to the user."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._handled():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._handled():
            self._stream.flush()

    @contextmanager
    def _handled(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            _discard(self._stream)
        except OSError as error:
            _discard(self._stream)
            raise WrongCommand(f"standard output: {error.strerror}") from error


class _Errors(_StandardOutput):
    """Standard error: a text that cannot be written is dropped; the exit status still tells how the command ended."""

    @contextmanager
    def _handled(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            _discard(self._stream)


def _discard(stream: TextIO) -> None:
    """Writes out what a stream buffers, else drops it and all later text, so that the last flush cannot fail."""
    try:
        stream.flush()
    except OSError:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_closed() -> None:
    """Opens closed standard streams, so that no other file gets their numbers; writing to them still fails."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def run(command: click.Command, name: str) -> NoReturn:
    """Runs a command, which messages call ``name``, and ends the process with one of the documented exit statuses."""
    _open_closed()
    codecs.register_error(_stand_in.__name__, _stand_in)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_stand_in.__name__)
    output, errors = cast(TextIO, _StandardOutput(sys.stdout)), cast(TextIO, _Errors(sys.stderr))
    with redirect_stdout(output), redirect_stderr(errors):
        status = _status(command, name)
    for stream in (sys.stdout, sys.stderr):
        _discard(stream)
    sys.exit(status)


def _status(command: click.Command, name: str) -> Any:
    try:
        return command.main(prog_name=name, standalone_mode=False)
    except click.ClickException as error:
        _show(error)
        _show_notes(error)
        return error.exit_code
    except TextError as error:
        color = colored(sys.stderr)
        click.echo(error.rendered(color), err=True, color=color)
        _show_notes(error)
        if sys.stderr.isatty():
            click.echo(f"\nmore on this message: chimera explain {error.diagnostics[0].code}", err=True)
        return WRONG_TEXT
    except CompileError as error:
        _show(click.ClickException(str(error)))
        _show_notes(error)
        return {DoesNotFit: DOES_NOT_FIT, NotFitted: WRONG_TEXT}.get(type(error), WRONG_COMMAND)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except SystemExit as end:
        return end.code
    except MemoryError:
        click.echo(f"{name}: there is not enough memory for this; choose smaller parameters", err=True)
        return WRONG_COMMAND
    except Exception:
        traceback.print_exc()
        click.echo(f"{name}: this is a fault of the compiler, not of your scheme; please report it", err=True)
        return OUR_FAULT


def _show(error: click.ClickException) -> None:
    if isinstance(error, click.NoSuchOption):
        near = closest(error.option_name.strip("-"), (name.strip("-") for name in error.possibilities or ()))
        error = click.NoSuchOption(error.option_name, None, [f"--{near}"] if near else None, error.ctx)
    shown = _ColouredText()
    error.show(shown)
    click.echo(visible_lines(shown.getvalue()), nl=False, err=True)


def _show_notes(error: Exception) -> None:
    for note in getattr(error, "__notes__", ()):
        click.echo(visible_lines(note), err=True)


class _ColouredText(io.StringIO):
    """A stream that looks like a terminal, so that click leaves colours in the text."""

    def isatty(self) -> bool:
        return True
