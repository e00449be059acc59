"""What a compute operation is: the table of kinds. All that the compiler knows about a kind follows from its row.

    kind  reads                       makes     frees   sums
    F     y of the stage before       y, a      -       no
    B     a, dx of the stage behind   dx        a       yes

y is what a stage hands on, a what its forward keeps for the backward, dx the gradient with respect to its input. A
value is made once of each micro-batch on each stage, and gone after the operation that frees it or, where it is handed
to a neighbour, that reads it there. Nothing else asks whether an operation *is* a forward: it asks what its kind reads,
makes, frees and sums.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """What an operation makes of a micro-batch on a stage.

    ``towards`` is how many stages further it is read: 1 and -1 are the neighbours, 0 is the stage itself. ``reason``
    says why an operation needs it.
    """

    letter: str
    noun: str
    towards: int
    reason: str

    def __repr__(self) -> str:
        return self.letter


ACTIVATIONS = Value("y", "activations", 1, "it needs those activations")
KEPT = Value("a", "activations", 0, "a backward needs what its forward kept")
GRADIENTS = Value("dx", "gradients", -1, "it needs those gradients")


@dataclass(frozen=True, eq=False)
class Kind:
    """A row of the table.

    Attributes
    ----------
    letter
        How texts call it; its cost has the same key.
    noun
        How messages call it.
    reads, makes
        Values: those that it needs, and those that are there when it is over.
    frees
        The value of its own stage that is gone when it is over; none for the kind that comes first.
    sums
        Whether it adds to the weights' gradients.
    """

    letter: str
    noun: str
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]
    frees: Value | None
    sums: bool

    def __repr__(self) -> str:
        return self.letter

    def __reduce__(self) -> tuple[object, ...]:
        """The row itself, in whatever process it is read."""
        return kind, (self.letter,)

    @property
    def opens(self) -> bool:
        """Whether it is the first operation of a micro-batch on a stage."""
        return self.frees is None

    @cached_property
    def hands_on(self) -> tuple[Value, ...]:
        """What it makes for a neighbour."""
        return tuple(value for value in self.makes if value.towards)

    @cached_property
    def keeps(self) -> tuple[Value, ...]:
        """What it makes for a later operation of its own stage."""
        return tuple(value for value in self.makes if not value.towards)

    @cached_property
    def growth(self) -> int:
        """How many values more are kept on its stage when it is over, of each micro-batch."""
        return len(self.keeps) - (not self.opens)


FORWARD = Kind("F", "forward", (ACTIVATIONS,), (ACTIVATIONS, KEPT), None, sums=False)
BACKWARD = Kind("B", "backward", (KEPT, GRADIENTS), (GRADIENTS,), KEPT, sums=True)

KINDS = {row.letter: row for row in (FORWARD, BACKWARD)}
"""The rows, by letter, in the order in which a micro-batch meets them."""


def kind(letter: str) -> Kind:
    """The row of a letter."""
    return KINDS[letter]


def values() -> Iterator[Value]:
    """All values of the table, each once."""
    yield from dict.fromkeys(value for row in KINDS.values() for value in row.makes)


def follows(value: Value) -> tuple[Value, ...]:
    """The values of a stage that may be the same memory as one that it reads: all that is kept from there on."""
    reached: dict[Value, None] = {}
    ahead = [value]
    while ahead:
        now = ahead.pop()
        made = [kept for row in KINDS.values() if now in row.reads for kept in row.keeps if kept not in reached]
        reached.update(dict.fromkeys(made))
        ahead += made
    return tuple(reached)
