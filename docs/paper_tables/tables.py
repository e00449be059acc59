"""``python docs/paper_tables``: the paper's tables, each figure compiled beside the claim."""

import json
from typing import NoReturn

import click

from chimera_ir import __version__
from chimera_ir.commands.assignments import setting, single_values
from chimera_ir.commands.common import WrongCommand, run, write
from chimera_ir.console import printed
from paper_tables import show
from paper_tables.formula import NoSuchSize
from paper_tables.survey import schemes, survey

NAME = "python docs/paper_tables"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@setting(single_values, "Set D, N or f of the size.")
@click.option("--scheme", metavar="NAME", help="Only what the tables say of this library scheme.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "markdown", "json"]),
    default="text",
    show_default=True,
    help="What to print.",
)
@click.version_option(__version__, prog_name=NAME)
def tables_command(settings: dict[str, int], scheme: str | None, form: str) -> None:
    """Print the paper's Tables 2 and 3 for D stages and N micro-batches, every figure compiled.

    Beside each figure stands the paper's formula and its value at that size, and where the two differ the reason.
    D is 4 and N is D unless they are set; Table 3 has a row for every f that divides D/2, unless f is set.

    Exit status: 0, 2 something is wrong on the command line, 70 in the compiler; 130 interrupted.
    """
    known = schemes()
    if scheme is not None and scheme not in known:
        raise WrongCommand(f"--scheme {scheme}: the tables speak of {', '.join(known)}")
    try:
        surveyed = survey(settings, known if scheme is None else (scheme,))
    except NoSuchSize as error:
        raise WrongCommand(f"--set: {error}") from error
    match form:
        case "json":
            write(json.dumps(show.as_json(surveyed), indent=2) + "\n")
        case "markdown":
            write(show.markdown(surveyed))
        case _:
            write(printed(lambda console: console.print(show.text(surveyed))))


def main() -> NoReturn:
    """The entry point."""
    run(tables_command, NAME)
