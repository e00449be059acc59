"""Tokens that the executor moves: pieces of memory, the ends of messages, copies, and sums."""

from collections import Counter
from dataclasses import dataclass, field

from chimera_ir.ir.ops import Compute, Instruction, WaitMove

SPOILT = ("spoilt",)

Group = tuple[int, ...]
"""A stage by itself, or stages that share parameters."""


@dataclass(eq=False)
class Cell:
    """A piece of memory; what is made from it in place shares it."""

    value: object = SPOILT


@dataclass(eq=False)
class Transfer:
    """One end of a message: of a send the memory it reads, of a receive the memory it writes.

    What arrives is a part of what is in the sender's memory, if the message is about a part of its micro-batches.
    """

    tag: object
    cell: Cell
    expected: object = None
    arriving: object = None
    done: bool = False
    waited: bool = False


@dataclass(eq=False)
class Sum:
    """One sum over the holders of a stage or a tie, the n-th that each of them launched: what each of them put in."""

    parts: dict[int, Counter] = field(default_factory=dict)
    done: bool = False


Copied = tuple[str, tuple[int, ...], int]
"""A copy by its letter, micro-batches and stage."""


@dataclass(eq=False)
class HostLink:
    """Copies between a worker and its host, one after the other.

    ``copies`` are those that are not over, ``done`` those that the lane has not waited for since. ``places`` has where
    it is that a micro-batch keeps on a stage, by what it is, ``activations`` or ``operands``: on the worker, on the
    host, or nowhere for sure, while it is copied.
    """

    places: dict[tuple[str, int, int], str] = field(default_factory=dict)
    copies: list[Copied] = field(default_factory=list)
    done: list[Copied] = field(default_factory=list)

    @property
    def left(self) -> list[object]:
        """Values that are on the host or under way to it or back."""
        return [*self.copies, *self.done, *(cell for cell, place in self.places.items() if place != "worker")]

    def launch(self, each: Compute) -> bool:
        """Whether all that is to be copied is where the copy begins."""
        start = "worker" if each.kind.letter.startswith("offload") else "host"
        there = all(self.places.get(cell) == start for cell in cells(each))
        self.places.update(dict.fromkeys(cells(each), "nowhere"))
        self.copies.append(copied(each))
        return there

    def copy(self) -> None:
        """The first copy ends."""
        self.done.append(self.copies.pop(0))

    def knows(self, wait: WaitMove) -> bool:
        return copied(wait) in (*self.copies, *self.done)

    def over(self, wait: WaitMove) -> bool:
        return copied(wait) in self.done

    def wait(self, wait: WaitMove) -> None:
        self.done.remove(copied(wait))
        end = "host" if wait.kind.letter.startswith("offload") else "worker"
        self.places.update(dict.fromkeys(cells(wait), end))


def cells(each: Compute | WaitMove) -> list[tuple[str, int, int]]:
    """The value that a copy moves, of each micro-batch."""
    what = "operands" if each.kind.letter.endswith("_operands") else "activations"
    return [(what, micro, each.stage) for micro in each.micros]


def copied(each: Compute | WaitMove) -> Copied:
    return each.kind.letter, each.micros, each.stage


class Worker:
    """A lane and the memory of its worker."""

    def __init__(self, number: int, lane: tuple[Instruction, ...]) -> None:
        self.number = number
        self.lane = lane
        self.place = 0
        self.slots: dict[object, Cell] = {}
        self.sends: dict[object, Transfer] = {}
        self.recvs: dict[object, Transfer] = {}
        self.outputs: dict[object, tuple[Cell, object]] = {}
        self.kept: dict[object, tuple[list[tuple[Cell, object]], tuple[int, ...]]] = {}
        self.inputs: set[object] = set()
        self.alone: set[object] = set()
        self.carried: set[tuple[str, int, int]] = set()
        self.halves: dict[object, list[tuple[Cell, object]]] = {}
        self.host = HostLink()
        self.gradients: dict[Group, Counter] = {}
        self.busy: set[Group] = set()
        self.launched: dict[tuple[Group, int], Sum] = {}
        self.summed: dict[tuple[Group, int], Sum] = {}
        self.stepped: Counter = Counter()
        self.stashed: dict[tuple[Group, int], int] = {}
