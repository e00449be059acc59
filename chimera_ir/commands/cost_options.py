"""``--cost`` and ``--stage-cost``: how long operations of each kind take."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from chimera_ir import output
from chimera_ir.commands.common import FiniteRange, GivenPath, WrongCommand, all_of, as_misuse, report
from chimera_ir.cost.durations import COST_LETTERS, SINGLE_LETTERS, Costs
from chimera_ir.escapes import visible
from chimera_ir.options import MOST, SEARCHED
from chimera_ir.plural import listed
from chimera_ir.request import EqualTimes
from chimera_runtime.errors import Misuse

# Checks and writes the file of a page, which the option ``--html`` names.

_OPTION = "--html"
_REMEDY = "choose another file, or remove it"


class PagePath(GivenPath):
    """The file of a page; ``-`` is not one, as what a command prints goes to standard output."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; a usage error if it is empty or ``-``."""
        if value == "-":
            self.fail("a page is written to a file; name one, such as page.html.", param, ctx)
        return super().convert(value, param, ctx)


PAGE = PagePath(path_type=Path)
"""The type of an option that names the file of a page, whether it exists or not."""


def refuse_page(file: Path, mark: str) -> None:
    """Raises `OutputRefused` if `write_page` could not write to ``file``; called before the page is made.

    A page of this command begins with the text ``mark``. A file that begins otherwise is never overwritten.
    """
    output.refuse_file(file, mark, force=False, option=_OPTION, remedy=_REMEDY)


def write_page(file: Path, page: str, mark: str) -> None:
    """Writes a page, whose first lines are ``mark``, to a file, and prints where; may raise `OutputRefused`."""
    output.write_file(file, page.removeprefix(mark), mark, force=False, option=_OPTION, remedy=_REMEDY)
    report(f"wrote {visible(str(file))}: open it in a browser\n")


# The options of a search, which chimera compile and chimera search share.

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


# Options about the model: ``--tied`` and ``--split`` of its stages, ``--slice-lengths`` of its sequences.


def parse_ties(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> list[list[int | str]]:
    """The groups of stages of a repeatable option ``--tied STAGE,STAGE``."""
    ties: list[list[int | str]] = []
    for text in given:
        stages = text.split(",")
        are_stages = all(stage in ("first", "last") or (stage.isascii() and stage.isdecimal()) for stage in stages)
        if len(stages) < 2 or not are_stages:
            raise WrongCommand(f"--tied {text}: write two stages or more, as in --tied first,last or --tied 0,3")
        if any(len(stage) > 18 for stage in stages):
            raise WrongCommand(f"--tied {text[:40]}: a stage has at most 18 digits")
        ties.append([int(stage) if stage.isdecimal() else stage for stage in stages])
    return ties


def parse_split(_: click.Context, __: click.Parameter, given: str | None) -> tuple[int, ...] | None:
    """The first layer of each stage, of an option ``--split``."""
    words = [] if given is None else given.split(",")
    if not all(word.isascii() and word.isdecimal() and len(word) < 10 for word in words):
        raise WrongCommand(f"--split {given}: list the first layer of each stage, as in --split 0,9,17,25")
    return None if given is None else tuple(map(int, words))


def parse_lengths(_: click.Context, __: click.Parameter, text: str | None) -> tuple[int, ...] | str:
    """The lengths of slices, of an option ``--slice-lengths``; none if it is not given."""
    if text == EqualTimes.EQUAL_TIMES.value:
        return text
    words = [] if text is None else text.split(",")
    if not all(word.isascii() and word.isdecimal() and len(word) < 10 and int(word) for word in words):
        raise WrongCommand(
            f"--slice-lengths {'' if text is None else text[:80]}: list the length of each slice, as in "
            f"--slice-lengths 640,512,448,448, or write {EqualTimes.EQUAL_TIMES.value}"
        )
    return tuple(map(int, words))


def tied_by_transformer(source: Path) -> list[list[int | str]]:
    """The groups of stages that share parameters in a model of the transformers library; needs torch.

    Raises `WrongCommand` if the model cannot be read, or cut into layers.
    """
    from chimera_runtime.huggingface.layers import layers

    with as_misuse(Misuse):
        return [["first", "last"]] if layers(source).tied(2) else []


SLICE_LENGTHS = click.option(
    "--slice-lengths",
    callback=parse_lengths,
    metavar="L,L,..",
    help="Relative lengths of the slices, or equal-times by the profile [default: equal].",
)

TIED = click.option(
    "--tied",
    multiple=True,
    callback=parse_ties,
    metavar="STAGE,STAGE",
    help="Stages that share parameters, as the model's tied() says: by number, first or last.",
)

OFFLOAD = click.option(
    "--offload",
    type=click.Choice(["auto"]),
    metavar="auto",
    help="Move activations to the host and back so that workers keep the least and wait for no transfer.",
)

COMMUNICATORS = click.option(
    "--communicators",
    type=click.Choice(["directed", "pair"]),
    help="Of messages on NCCL: one for each direction between two workers, or for both [default: directed].",
)


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
