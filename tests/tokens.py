"""Tokens that the executor moves: pieces of memory, the ends of messages, and sums."""

from collections import Counter
from dataclasses import dataclass, field

SPOILT = ("spoilt",)


@dataclass(eq=False)
class Cell:
    """A piece of memory; what is made from it in place shares it."""

    value: object = SPOILT


@dataclass(eq=False)
class Transfer:
    """One end of a message: of a send the memory it reads, of a receive the memory it writes."""

    tag: object
    cell: Cell
    expected: object = None
    done: bool = False
    waited: bool = False


@dataclass(eq=False)
class Sum:
    """One sum over the holders of a stage or a tie, the n-th that each of them launched: what each of them put in."""

    parts: dict[int, Counter] = field(default_factory=dict)
    done: bool = False
