"""Commands whose help has its options in sections, and the options that every command has."""

import os
import sys
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, TextIO, TypeVar

import click

from chimera_ir import __version__

Function = TypeVar("Function", bound=Callable[..., Any])

GENERAL = "Other options"
"""The last section of a help: the options that no other section names."""

WIDEST = 120
"""The most columns of a help; fewer where the terminal, or ``COLUMNS``, has fewer."""

_QUIET = f"{__name__}.quiet"
SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": WIDEST}


class SectionedCommand(click.Command):
    """A command whose help shows its options in sections.

    ``sections`` has the options of each section by its heading, in the order of the help: first what most calls need.
    An option that no section names is in the last.
    """

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
    """Decorator that applies several others, such as the options of a command, the last one first.

    That is as if they stood one below the other above the function.
    """
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
