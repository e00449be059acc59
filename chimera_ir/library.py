"""The library: schemes that come with the compiler, each a text file, and which of them reports compare with."""

import tomllib
from dataclasses import dataclass
from functools import cache

from chimera_ir import resources
from chimera_ir.source import Source

_ENDING = ".chim"


@dataclass(frozen=True, slots=True)
class Letters:
    """How the parameters are called that say how many stages and micro-batches there are: the paper's D and N."""

    stages: str
    micro_batches: str


def names() -> tuple[str, ...]:
    """The names of the library schemes, in alphabetical order."""
    return tuple(sorted(path.stem for path in resources.schemes().glob(f"*{_ENDING}")))


def source(name: str) -> Source:
    """The text of a library scheme.

    Raises
    ------
    KeyError
        If the library has no such scheme.
    """
    if name not in names():
        raise KeyError(name)
    return Source(f"{name}{_ENDING}", (resources.schemes() / f"{name}{_ENDING}").read_text(encoding="utf-8"))


def summary(name: str) -> str:
    """What a library scheme is, in one line: the first line of the comment it begins with."""
    return source(name).text.split("\n", 1)[0].removeprefix("#").strip()


def parameters(name: str) -> str:
    """The parameters of a library scheme with their defaults, as in ``D = 4, N = D``."""
    from chimera_ir.syntax.parser import parse  # with lark, which takes a while
    from chimera_ir.syntax.printer import show_expression

    return ", ".join(f"{p.name.text} = {show_expression(p.default)}" for p in parse(source(name)).parameters)


def baseline(workers: int, micro_batches: int) -> tuple[Source, dict[str, int]]:
    """The scheme that reports compare with, and the settings that give it a size."""
    table = tomllib.loads((resources.schemes() / "library.toml").read_text(encoding="utf-8"))["baseline"]
    return source(table["scheme"]), {table["workers"]: workers, table["micro_batches"]: micro_batches}


@cache
def letters() -> Letters:
    """The parameters by which a scheme is fitted to a model and a mini-batch."""
    table = tomllib.loads((resources.schemes() / "library.toml").read_text(encoding="utf-8"))["letters"]
    return Letters(table["stages"], table["micro_batches"])
