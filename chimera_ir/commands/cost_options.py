"""``--cost`` and ``--stage-cost``: how long operations of each kind take."""

from collections.abc import Callable, Sequence

import click

from chimera_ir.commands.common import WrongCommand
from chimera_ir.commands.sections import all_of
from chimera_ir.cost.durations import COST_LETTERS, SINGLE_LETTERS, Costs
from chimera_ir.plural import listed


def _by_kind(
    option: str, kinds: Sequence[str], example: str, check: Callable[[str, str], object]
) -> Callable[[click.Context, click.Parameter, tuple[str, ...]], dict[str, str]]:
    """Makes the callback of an option whose words are KIND=COST; ``check`` raises `ValueError` for a wrong cost.

    The callback checks the words, and returns the cost of each kind as the user wrote it.
    """

    def callback(_: click.Context, __: click.Parameter, words: tuple[str, ...]) -> dict[str, str]:
        by_kind: dict[str, str] = {}
        for text in words:
            kind, equals, value = text.partition("=")
            if not (equals and kind in kinds):
                one_of = f"with one of the kinds {', '.join(kinds)}, as in {option} {example}"
                raise WrongCommand(f"{option} {text}: write KIND=COST {one_of}")
            if kind in by_kind:
                raise WrongCommand(f"{option} {kind}: given twice")
            try:
                check(kind, value)
            except ValueError as error:
                raise WrongCommand(f"{option} {text}: {error}") from error
            by_kind[kind] = value
        return by_kind

    return callback


costing = all_of(
    click.option(
        "--cost",
        "costs",
        multiple=True,
        callback=_by_kind("--cost", COST_LETTERS, "B=2.5", Costs().using),
        metavar="KIND=VALUE",
        help=f"Cost of {listed(COST_LETTERS, 'or')} per micro-batch, or of each slice: F=2,3.",
    ),
    click.option(
        "--stage-cost",
        "stage_costs",
        multiple=True,
        callback=_by_kind("--stage-cost", SINGLE_LETTERS, "F=4,4,5,6", Costs().using_stages),
        metavar="KIND=V,V,..",
        help="Cost of a kind per micro-batch on each stage, where stages cost unequally: F=4,4,5,6.",
    ),
)
"""Decorator that adds ``--cost`` and ``--stage-cost`` to a command's function."""
