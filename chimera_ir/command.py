"""What the commands share: exit statuses, ``--set``, standard output, and an end for whatever happens."""

import io
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import click
from rich.console import Console

WRONG_TEXT = 1
WRONG_COMMAND = 2
OUR_FAULT = 70
INTERRUPTED = 130

_WIDE = 160


class Misuse(click.ClickException):
    """Something on the command line is wrong."""

    exit_code = WRONG_COMMAND


def parse_settings(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, int]:
    """The values of a repeatable option ``--set NAME=VALUE``, by name."""
    values: dict[str, int] = {}
    for text in given:
        name, equals, value = text.partition("=")
        digits = value.removeprefix("-")
        if not (name and equals and digits.isascii() and digits.isdecimal()):
            raise Misuse(f"--set {text}: write NAME=INTEGER, as in --set D=8")
        if len(digits) > 18:
            raise Misuse(f"--set {name}: a value has at most 18 digits")
        if name in values:
            raise Misuse(f"--set {name}: given twice")
        values[name] = int(value)
    return values


def printed(draw: Callable[[Console], None]) -> str:
    """What a console as wide and as colourful as standard output would show."""
    text = io.StringIO()
    draw(_console(text))
    return text.getvalue()


def appearance() -> tuple[object, ...]:
    """What `printed` makes of standard output: its width, and whether and how it shows colours."""
    console = _console(io.StringIO())
    return console.width, console.is_terminal, console.color_system, console.no_color, console.legacy_windows


def _console(text: io.StringIO) -> Console:
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return Console(file=text, highlight=False, force_terminal=is_terminal or None, width=None if is_terminal else _WIDE)


def write(text: str) -> None:
    """Writes to standard output. A reader who has left has seen enough; a full disk is the user's to know of."""
    try:
        click.echo(text, nl=False)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        raise Misuse(f"standard output: {error.strerror}") from error


def run(command: click.Command, name: str) -> NoReturn:
    """Runs a command to its end: whatever happens ends in one of the documented exit statuses."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        status = command.main(prog_name=name, standalone_mode=False)
    except click.ClickException as error:
        _tell(error.show)
        status = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        status = INTERRUPTED
    except SystemExit as end:
        status = end.code
    except BrokenPipeError:
        sys.stderr.close()
        status = 0
    except Exception:
        traceback.print_exc()
        click.echo(f"{name}: this is a fault of the compiler, not of your scheme; please report it", err=True)
        status = OUR_FAULT
    sys.exit(status)


def _tell(show: Callable[[], None]) -> None:
    """Shows an error, to whoever still listens."""
    with suppress(BrokenPipeError):
        show()
