"""Options that several commands share, made from the fields of `Options`, and the file of a page."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from chimera_ir import library, output
from chimera_ir.commands import completion
from chimera_ir.commands.common import (
    FILE,
    FiniteRange,
    Function,
    GivenPath,
    WrongCommand,
    all_of,
    as_misuse,
    remark,
    report,
)
from chimera_ir.cost.durations import COST_LETTERS, SINGLE_LETTERS, Costs
from chimera_ir.escapes import visible
from chimera_ir.options import FLAG, MOST, SEARCHED, STAGE, Declared, Options, keeping
from chimera_ir.plural import listed
from chimera_ir.request import MAX_OPERATIONS, EqualTimes, OfProfile
from chimera_ir.source import Source
from chimera_runtime.errors import Misuse


def scheme_named(scheme: str, directories: Iterable[Path]) -> Source:
    """The text that SCHEME names; prints a remark if the library calls it by another name."""
    return library.scheme_or_ir(scheme, directories, "--library", lambda text: remark(f"remark: {text}"))


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
    """Raises `OutputRefused` if `write_page` could not write to ``file``: no file without ``mark`` is overwritten."""
    output.refuse_file(file, mark, force=False, option=_OPTION, remedy=_REMEDY)


def write_page(file: Path, page: str, mark: str) -> None:
    """Writes a page, whose first lines are ``mark``, to a file, and prints where; may raise `OutputRefused`."""
    output.write_file(file, page.removeprefix(mark), mark, force=False, option=_OPTION, remedy=_REMEDY)
    report(f"wrote {visible(str(file))}: open it in a browser\n")


# Options whose values are several words: KIND=COST, QUANTITY=LIMIT, STAGE,STAGE, and lists of numbers.


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


def parse_ties(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> list[list[int | str]]:
    """The groups of stages of a repeatable option ``--tied STAGE,STAGE``."""
    ties: list[list[int | str]] = []
    for text in given:
        stages = text.split(",")
        if len(stages) < 2 or not all(map(STAGE.fullmatch, stages)):
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


def parse_shares(_: click.Context, option: click.Parameter, text: str | None) -> dict[int, str]:
    """The share of each number, of an option whose value is NUMBER:SHARE,..; none if it is not given."""
    shares: dict[int, str] = {}
    for word in [] if text is None else text.split(","):
        (number, colon, share), name = word.partition(":"), option.opts[0]
        if not (colon and number.isascii() and number.isdecimal() and len(number) < 10):
            raise WrongCommand(f"{name} {word[:40]}: write NUMBER:SHARE, as in {name} 8:0.5,12:0.5")
        if int(number) in shares:
            raise WrongCommand(f"{name} {word[:40]}: the share of {number} is given twice")
        shares[int(number)] = share
    return shares


def parse_items(context: click.Context, option: click.Parameter, text: str) -> int | dict[int, str]:
    """A number of items, or the share of each of several numbers."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else parse_shares(context, option, text)


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
    """The groups of stages that share parameters in a model of the transformers library; needs torch."""
    from chimera_runtime.huggingface.layers import layers

    with as_misuse(Misuse):
        return [["first", "last"]] if layers(source).tied(2) else []


def _by_kind(
    option: str, kinds: Sequence[str], example: str, check: Callable[[str, str], object], *, groups: bool = False
) -> Callable[[click.Context, click.Parameter, tuple[str, ...]], dict[str, str]]:
    """Makes the callback of an option whose words are KIND=COST, or with ``groups`` also GROUP.KIND=COST.

    ``check`` raises `ValueError` for a wrong cost.
    """

    def callback(_: click.Context, __: click.Parameter, words: tuple[str, ...]) -> dict[str, str]:
        by_kind: dict[str, str] = {}
        for text in words:
            word, equals, value = text.partition("=")
            group, dot, kind = word.rpartition(".")
            if not (equals and kind in kinds) or (dot and not (groups and group)):
                one_of = f"with one of the kinds {', '.join(kinds)}, as in {option} {example}"
                raise WrongCommand(f"{option} {text}: write KIND=COST {one_of}")
            if word in by_kind:
                raise WrongCommand(f"{option} {word}: given twice")
            try:
                Costs().using_group(group, kind, value) if dot else check(kind, value)
            except ValueError as error:
                raise WrongCommand(f"{option} {text}: {error}") from error
            by_kind[word] = value
        return by_kind

    return callback


def parse_keep(_: click.Context, __: click.Parameter, words: tuple[str, ...]) -> dict[str, str] | str:
    """The shares of M_a that stages keep, of a repeatable option ``--keep STAGE=SHARE``, or ``profile``."""
    by_stages: dict[str, str] = {}
    if words == (OfProfile.PROFILE.value,):
        return OfProfile.PROFILE.value
    for text in words:
        stages, equals, share = text.partition("=")
        if not equals:
            raise WrongCommand(f"--keep {text}: write STAGE=SHARE, as in --keep 0=1/4, or --keep profile alone")
        if stages in by_stages:
            raise WrongCommand(f"--keep {stages}: given twice")
        try:
            keeping(stages, share)
        except ValueError as error:
            raise WrongCommand(f"--keep {text}: {error}") from error
        by_stages[stages] = share
    return by_stages


# Options of the command line, made from the fields of `Options`.

_PARSE: Mapping[str, Callable[[click.Context, click.Parameter, Any], object]] = {
    "costs": _by_kind("--cost", COST_LETTERS, "B=2.5", Costs().using, groups=True),
    "stage_costs": _by_kind("--stage-cost", SINGLE_LETTERS, "F=4,4,5,6", Costs().using_stages),
    "keep": parse_keep,
    "slice_lengths": parse_lengths,
    "tied": parse_ties,
    "split": parse_split,
    "memory": _limits,
}

SECONDS = FiniteRange(0, MOST, min_open=True)
"""The type of an option that says how many seconds to search."""

_DECLARED: Mapping[str, Declared] = {option.name: option.metadata["declared"] for option in fields(Options)}
_SHOWN: Mapping[str, dict[str, Any]] = {
    "max_operations": {"default": MAX_OPERATIONS, "show_default": True},
    "seed": {"default": 0},
}
_TYPES: "Mapping[str, click.ParamType[Any]]" = {"FILE": FILE, "DIR": FILE, "SECONDS": SECONDS}
_COMPLETED = {"against": completion.schemes}


def option(name: str, **changed: Any) -> Callable[[Function], Function]:
    """The option of the command line for a field of `Options`; ``changed`` replaces arguments of `click.option`."""
    declared = _DECLARED[name]
    word = declared.word or name.replace("_", "-")
    arguments: dict[str, Any] = {
        "is_flag": declared.form is FLAG or None,  # click lets an option with False go without its value
        "type": _type(declared),
        "multiple": declared.repeated,
        "callback": _PARSE.get(name),
        "shell_complete": _COMPLETED.get(name),
        "metavar": declared.metavar,
        "help": declared.help,
    }
    return click.option(f"--{word}", name, **(arguments | _SHOWN.get(name, {}) | changed))


def _type(declared: Declared) -> "click.ParamType[Any] | None":
    form = declared.form
    if form is not None and form.choices:
        return click.Choice(form.choices)
    if form is not None and form.bounds:
        return click.IntRange(*form.bounds)
    return _TYPES.get(declared.metavar or "")


def options_named(*names: str) -> Callable[[Function], Function]:
    """Decorator that adds options of these names to a command's function, in this order."""
    return all_of(*map(option, names))
