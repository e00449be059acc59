"""The options of a search, which chimera compile and chimera search share."""

import click

from chimera_ir.commands.common import FiniteRange, WrongCommand
from chimera_ir.commands.sections import all_of
from chimera_ir.options import MOST, SEARCHED
from chimera_ir.plural import listed

SECONDS = FiniteRange(0, MOST, min_open=True)
"""The type of an option that says how many seconds to search."""

SEED = click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), default=0, metavar="S", help="Seed of all chance in a search."
)


def _limits(_: click.Context, __: click.Parameter, words: tuple[str, ...]) -> dict[str, int]:
    limits: dict[str, int] = {}
    for text in words:
        quantity, equals, limit = text.partition("=")
        if not (equals and quantity in SEARCHED and limit.isdecimal() and limit.isascii() and len(limit) <= 9):
            searched = listed(SEARCHED, "or")
            raise WrongCommand(f"--memory {text}: write {searched} with a limit in micro-batches, as in activations=4")
        if int(limit) < 1:
            raise WrongCommand(f"--memory {text}: a limit is a whole number from 1 on, as in activations=4")
        if quantity in limits:
            raise WrongCommand(f"--memory {quantity}: given twice")
        limits[quantity] = int(limit)
    return limits


searching = all_of(
    click.option(
        "--memory",
        multiple=True,
        callback=_limits,
        metavar="QUANTITY=LIMIT",
        help="Limit of each worker in a search, in micro-batches: activations=4.",
    ),
    SEED,
)
"""Adds to a command's function the options of a search, except how long it takes."""
