"""``--set NAME=VALUE`` and its short form, the words ``NAME=VALUE`` behind the scheme."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any

import click

from chimera_ir.commands import completion
from chimera_ir.commands.common import Function, WrongCommand
from chimera_ir.compare import MOST

Parse = Callable[[Iterable[str]], Mapping[str, object]]

_ASSIGNMENT = re.compile(r"\w+=[\d,.-]*")

_DIGITS = 18
"""The most digits of a value: any number with more may be beyond 64 bits."""


def setting(parse: Parse, help: str, texts: bool = False) -> Callable[[Function], Function]:
    """Decorator that adds ``--set`` and words NAME=VALUE to a command, whose function gets them as ``settings``.

    With ``texts`` words may also be paths of IR texts and of schedules of torch, which it gets as ``others``.
    """

    def decorate(function: Function) -> Function:
        @wraps(function)
        def parsed(*, settings: tuple[str, ...], assignments: tuple[str, ...], **options: Any) -> None:
            if texts:
                options["others"] = tuple(
                    word for word in assignments if "=" not in word and Path(word).suffix in (".sir", ".csv")
                )
                assignments = tuple(word for word in assignments if word not in options["others"])
            _require_order(options.get("scheme"), assignments)
            function(settings=parse((*settings, *assignments)), **options)

        complete = completion.settings
        words = click.argument("assignments", nargs=-1, shell_complete=complete, metavar="[NAME=VALUE]...")
        option = click.option(
            "--set", "settings", multiple=True, shell_complete=complete, metavar="NAME=VALUE", help=help
        )
        return option(words(parsed))  # type: ignore[return-value]

    return decorate


def _require_order(scheme: str | None, words: Iterable[str]) -> None:
    if scheme and _ASSIGNMENT.fullmatch(scheme):
        raise WrongCommand(f"{scheme}: the scheme comes first, then its parameters")
    for word in words:
        if "=" not in word:
            raise WrongCommand(f"unexpected word '{word}'; parameters are written NAME=VALUE, as in D=8")


def single_values(given: Iterable[str]) -> dict[str, int]:
    """The value of each name, from words like ``N=8``."""
    return {name: _integer(name, value) for name, value in _texts(given).items()}


def listed_values(given: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """The values of each name, one or several, from words like ``N=8,16`` and ``N=1..16``, which has 16 of them."""
    values = {}
    for name, text in _texts(given).items():
        values[name] = tuple(chain.from_iterable(_range(name, part) for part in text.split(",")))
        repeated = next((value for value, count in Counter(values[name]).items() if count > 1), None)
        if repeated is not None:
            raise WrongCommand(f"{name}={text}: {repeated} is in its list twice")
    return values


def _range(name: str, text: str) -> Iterable[int]:
    """The values of a part of a list: a value, or all from the first to the last, like ``1..16``."""
    form = "NAME=INTEGER, NAME=INTEGER,INTEGER or NAME=FIRST..LAST"
    first, *last = (_integer(name, value, form) for value in text.split("..", 1))
    values = range(first, (last or [first])[0] + 1)
    if not values:
        raise WrongCommand(f"{name}={text}: there are no values from {first} to {last[0]}")
    if len(values) > MOST:
        raise WrongCommand(f"{name}={text}: {len(values):,} values, and the limit is {MOST:,}")
    return values


def _texts(given: Iterable[str]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise WrongCommand(f"--set {text}: write NAME=INTEGER, as in D=8")
        if name in texts:
            raise WrongCommand(f"{name}={value}: {name} is given twice")
        texts[name] = value
    return texts


def _integer(name: str, value: str, form: str = "NAME=INTEGER") -> int:
    digits = value.removeprefix("-")
    if not (name and digits.isascii() and digits.isdecimal()):
        raise WrongCommand(f"{name}={value}: write {form}, as in D=8")
    if len(digits) > _DIGITS:
        raise WrongCommand(f"{name}: a value has at most {_DIGITS} digits")
    return int(value)
