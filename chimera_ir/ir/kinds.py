"""The table of kinds of compute operations. All that the compiler knows about a kind follows from its row.

    kind              reads                            makes      frees     sums   opens   occupies
    F                 y of the stages that feed it, c  y, a, c    -         no     yes     lane
    F                 y of the stages that feed it, c  y, x, c    -         no     yes     lane       if it recomputes
    F                 y of the stages that feed it, c  y, c       c         no     yes     lane       unless it backs
    recompute         x, c                             a          x         no     no      lane
    B                 a, dx of the stages it feeds, dc dx, dc     a, c, dc  yes    no      lane
    I                 a, dx of the stages it feeds, dc dx, dc, g  a, c, dc  no     no      lane
    I                 a, dx of the stages it feeds, dc dx, dc     a, c, dc  no     no      lane       if it is frozen
    W                 g                                -          g         yes    no      lane
    offload           a                                h          a         no     no      host link
    reload            h                                a          h         no     no      host link
    offload_operands  g                                hg         g         no     no      host link
    reload_operands   hg                               g          hg        no     no      host link

    value   counted as
    y, dx   message
    a       activations
    x       input
    g       operands
    c       carries
    dc      carry gradients
    h       host
    hg      host operands

y is the output of a stage, a is what its forward keeps for the backward, x is its input, dx is the gradient of its
input, g is what the gradient of its weights still needs; h and hg are a and g in the memory of the host. c and dc exist
where micro-batches are cut into slices: the carry c is what a slice leaves for the next one on the same stage, such as
keys and values. The backward of the slice that read it makes its gradient dc, so backwards take the slices in reverse.

On each stage a micro-batch, or each slice of it, has one of the sets of kinds of `ir.alternatives`: F and B, or F, I
and W. If the stage recomputes, its forward keeps the input alone, and recompute, which is the forward again, makes a.
The weights of a frozen stage are not trained. Behind a trained stage it has F and I, and I leaves nothing for a W. With
nothing trained before it, it does not back: it has F alone, which keeps nothing, and gets no gradient of its output.
Offload and reload, both or neither, move a to the host and back while the worker computes (`flow.host_moves`), and so
do offload_operands and reload_operands with g. A value for another stage is gone after the operation that reads it
there, any other value after the operation that frees it. A kind that frees a value and reads it frees what it read, as
B does with the dc that the next slice made; else it frees what its own slice made. `Header.readers` says which stages
read a value, `Header.kinds_of` which rows a stage has. No other module asks whether an operation *is* a forward, or a
stage frozen: it asks what the operation's kind reads, makes, frees and sums. `flow.live` follows from what values are
counted as.

A pair is an F and a B of different micro-batches that a worker runs as one operation. It reads, makes, frees and sums
what both do, and has a cost of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property


class Counted(Enum):
    """The unit in which a value counts while it is kept.

    ``ACTIVATIONS`` are M_a, what a forward keeps of a micro-batch; ``INPUT`` is the input of a forward that will run
    again; ``OPERANDS`` are what the first half of a backward leaves for the second, with the rest of the activations;
    ``CARRIES`` are what slices leave to the next ones, ``CARRY_GRADIENTS`` the gradients of these; ``MESSAGE`` is a
    value for another stage; ``HOST`` are activations and ``HOST_OPERANDS`` operands in host memory, any other value is
    in the worker's memory.
    """

    ACTIVATIONS = "activations"
    INPUT = "input"
    OPERANDS = "operands"
    CARRIES = "carries"
    CARRY_GRADIENTS = "carry gradients"
    MESSAGE = "message"
    HOST = "host"
    HOST_OPERANDS = "host operands"

    __hash__ = object.__hash__  # faster than that of Enum, and walks along lanes look up units


ON_WORKER = (Counted.ACTIVATIONS, Counted.OPERANDS)
"""The units that add up to a worker's activations in M_a.

They are what forwards keep, and operands, which take the place of activations between the halves of a backward.
"""

ON_HOST_UNITS = (Counted.HOST, Counted.HOST_OPERANDS)
"""The units of what has been offloaded to the memory of the host: activations, and operands."""

IN_M_A = frozenset({*ON_WORKER, *ON_HOST_UNITS})
"""The units that are counted in M_a, of which each stage keeps its share."""


class Resource(Enum):
    """The resource that an operation occupies while it runs: the worker's lane, or the worker's link to its host."""

    LANE = "lane"
    HOST_LINK = "host link"

    __hash__ = object.__hash__  # as that of `Counted`


class Readers(Enum):
    """Says which stages read a value; "it" is the stage that makes the value."""

    FED = "the stages that it feeds"
    FEEDING = "the stages that feed it, and that back"
    OWN = "the stage itself"


class Trained(Enum):
    """The trained part of a stage and of all stages before it; unless that is ``NOTHING``, the stage *backs*.

    A stage that backs gets the gradient of its output, and makes those of its inputs that any stage before reads.
    """

    ITSELF = "the stage itself"
    BEFORE = "a stage before it"
    NOTHING = "nothing"

    __hash__ = object.__hash__  # as that of `Counted`


BACKING = frozenset({Trained.ITSELF, Trained.BEFORE})
"""The stages that make the gradients of their inputs: those that are trained, and those behind a trained one."""


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """A value that an operation makes of a micro-batch on a stage.

    ``readers`` says which stages read it, ``counted`` the unit in which it counts while it is kept. ``reason`` is a
    text for messages: why an operation needs the value. ``slices_on`` is the distance from the slice that makes the
    value to the slice that reads it: 1 for the next slice, -1 for the slice before. Only values for other stages have
    ``made``, the method of a stage that returns the value, and ``slots``, the name of its receive buffers in
    program.json.
    """

    letter: str
    noun: str
    readers: Readers
    counted: Counted
    reason: str
    made: str = ""
    slots: str = ""
    slices_on: int = 0

    def __repr__(self) -> str:
        return self.letter

    def __reduce__(self) -> tuple[object, ...]:
        return _value, (self.letter,)

    @property
    def crosses(self) -> bool:
        """Whether the value is for other stages than the one that makes it."""
        return self.readers is not Readers.OWN

    def is_made(self, place: int, slices: int) -> bool:
        """Whether both slice ``place``, which would make the value, and the slice that would read it exist."""
        return 0 <= place < slices and 0 <= place + self.slices_on < slices


ACTIVATIONS = Value(
    "y", "activations", Readers.FED, Counted.MESSAGE, "it needs those activations", made="outputs", slots="inputs"
)
KEPT = Value("a", "activations", Readers.OWN, Counted.ACTIVATIONS, "a backward needs what its forward kept")
INPUT = Value("x", "input", Readers.OWN, Counted.INPUT, "a recomputation needs the input of its forward")
GRADIENTS = Value(
    "dx",
    "gradients",
    Readers.FEEDING,
    Counted.MESSAGE,
    "it needs those gradients",
    made="input_gradients",
    slots="gradients",
)
OPERANDS = Value(
    "g",
    "operands of the weight gradient",
    Readers.OWN,
    Counted.OPERANDS,
    "a weight gradient needs what its input gradient kept",
)
ON_HOST = Value("h", "activations on the host", Readers.OWN, Counted.HOST, "a reload needs what was offloaded")
OPERANDS_ON_HOST = Value(
    "hg", "operands on the host", Readers.OWN, Counted.HOST_OPERANDS, "a reload needs what was offloaded"
)

CARRY = Value("c", "carry", Readers.OWN, Counted.CARRIES, "a slice needs the carry of the slice before it", slices_on=1)
CARRY_GRADIENT = Value(
    "dc",
    "gradient of the carry",
    Readers.OWN,
    Counted.CARRY_GRADIENTS,
    "the backward of a slice needs the gradient of its carry, which that of the next slice makes",
    slices_on=-1,
)

NOTHING = Value("-", "nothing", Readers.OWN, Counted.MESSAGE, "")
"""Stands for the value of a message in IR text whose two stages exchange no value."""


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of compute operations: a row of the table.

    Attributes
    ----------
    letter
        Its name in texts, and the key of its cost.
    noun
        Its name in messages.
    reads, makes
        The values that an operation of this kind needs, and the values that exist when it is over.
    frees
        The values of its own stage that are gone when it is over; an operation may also read a value and leave it.
    sums
        Whether it adds to the gradients of the weights.
    opens
        Whether it is the first of a micro-batch on a stage.
    occupies
        The resource that an operation of this kind occupies.
    call
        The method of a stage that runs it in scripts, if that is not called like the noun.
    cost
        Its duration where neither the user nor a profile gives one, in units of a forward. The costs are the paper's: a
        backward takes twice as long as a forward (section 2).
    stages
        The stages that have operations of this kind, by what is trained of them.
    """

    letter: str
    noun: str
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]
    frees: tuple[Value, ...] = ()
    sums: bool = False
    opens: bool = False
    occupies: Resource = Resource.LANE
    call: str = ""
    cost: int = 1
    stages: frozenset[Trained] = frozenset({Trained.ITSELF})

    def __repr__(self) -> str:
        return self.letter

    def __reduce__(self) -> tuple[object, ...]:
        return _row, (all_kinds().index(self),)

    @cached_property
    def recomputes(self) -> bool:
        """Whether operations of this kind exist only on stages that recompute."""
        return INPUT in (*self.reads, *self.makes)

    @property
    def moves(self) -> bool:
        """Whether operations of this kind move a value between the worker and its host; they do not use weights."""
        return self.occupies is Resource.HOST_LINK

    @property
    def offloads(self) -> bool:
        """Whether operations of this kind move a value to the host."""
        return any(value.counted in ON_HOST_UNITS for value in self.makes)

    @property
    def moves_operands(self) -> bool:
        """Whether operations of this kind move operands between the worker and its host."""
        return self.moves and OPERANDS in (*self.reads, *self.makes)

    @property
    def method(self) -> str:
        """The method of a stage that runs an operation of this kind, in scripts."""
        return self.call or self.noun.replace(" ", "_")

    @property
    def splits(self) -> bool:
        """Whether an operation of this kind is the first half of a split backward, which leaves operands."""
        return OPERANDS in self.makes and not self.moves

    @property
    def kinds(self) -> "tuple[Kind]":
        """The kind alone, as a tuple of one; `Pairing.kinds` has two."""
        return (self,)

    @cached_property
    def hands_on(self) -> tuple[Value, ...]:
        """The values that an operation of this kind makes for other stages."""
        return tuple(value for value in self.makes if value.crosses)

    @cached_property
    def takes(self) -> tuple[Value, ...]:
        """The values that no longer exist after an operation of this kind: read from another stage, or freed."""
        return tuple(value for value in self.reads if value.crosses or value in self.frees)

    @cached_property
    def keeps(self) -> tuple[Value, ...]:
        """The values that an operation of this kind makes for a later operation of its own stage."""
        return tuple(value for value in self.makes if not value.crosses)

    @cached_property
    def keeps_in_slice(self) -> tuple[Value, ...]:
        """The values that an operation of this kind makes for a later operation of its own stage and slice."""
        return tuple(value for value in self.keeps if not value.slices_on)


FORWARD = Kind("F", "forward", reads=(ACTIVATIONS, CARRY), makes=(ACTIVATIONS, KEPT, CARRY), opens=True, stages=BACKING)
FORWARD_OF_INPUT = Kind(
    "F", "forward", reads=FORWARD.reads, makes=(ACTIVATIONS, INPUT, CARRY), opens=True, stages=BACKING
)
FORWARD_ALONE = Kind(
    "F",
    "forward",
    reads=FORWARD.reads,
    makes=(ACTIVATIONS, CARRY),
    frees=(CARRY,),
    opens=True,
    stages=frozenset({Trained.NOTHING}),
)
BACKWARD = Kind(
    "B",
    "backward",
    reads=(KEPT, GRADIENTS, CARRY_GRADIENT),
    makes=(GRADIENTS, CARRY_GRADIENT),
    frees=(KEPT, CARRY, CARRY_GRADIENT),
    sums=True,
    cost=2,
)
INPUT_GRADIENT = Kind(
    "I",
    "input gradient",
    reads=BACKWARD.reads,
    makes=(GRADIENTS, CARRY_GRADIENT, OPERANDS),
    frees=BACKWARD.frees,
    call="backward_input",
)
INPUT_GRADIENT_ALONE = Kind(
    "I",
    "input gradient",
    reads=BACKWARD.reads,
    makes=BACKWARD.makes,
    frees=BACKWARD.frees,
    call="backward_input",
    stages=frozenset({Trained.BEFORE}),
)
WEIGHT_GRADIENT = Kind("W", "weight gradient", (OPERANDS,), (), frees=(OPERANDS,), sums=True, call="backward_weights")
RECOMPUTATION = Kind(
    "recompute", "recomputation", (INPUT, CARRY), makes=(KEPT,), frees=(INPUT,), call="recompute", stages=BACKING
)


def _move(letter: str, noun: str, source: Value, target: Value, stages: frozenset[Trained]) -> Kind:
    frees, link = (source,), Resource.HOST_LINK
    return Kind(letter, noun, (source,), (target,), frees=frees, occupies=link, call=letter, stages=stages)


_SPLIT = WEIGHT_GRADIENT.stages
OFFLOAD = _move("offload", "offload", KEPT, ON_HOST, BACKING)
RELOAD = _move("reload", "reload", ON_HOST, KEPT, BACKING)
OFFLOAD_OPERANDS = _move("offload_operands", "offload of operands", OPERANDS, OPERANDS_ON_HOST, _SPLIT)
RELOAD_OPERANDS = _move("reload_operands", "reload of operands", OPERANDS_ON_HOST, OPERANDS, _SPLIT)

_IN_LANES = FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, RECOMPUTATION
KINDS = {row.letter: row for row in (*_IN_LANES, OFFLOAD, RELOAD, OFFLOAD_OPERANDS, RELOAD_OPERANDS)}
"""The rows of the table by their letters, in the order of reports.

Three rows have the letter F, and two I: those that some stages have in place of the plain ones are in `all_kinds`.
"""


def all_kinds() -> tuple[Kind, ...]:
    """All rows of the table: the forward of a stage that recomputes, the rows of `KINDS`, those of frozen stages."""
    return FORWARD_OF_INPUT, *KINDS.values(), FORWARD_ALONE, INPUT_GRADIENT_ALONE


@dataclass(frozen=True, eq=False)
class Pairing:
    """Two kinds whose operations may run as one; ``letter`` is the key of a pair's cost, ``noun`` its name."""

    letter: str
    noun: str
    kinds: tuple[Kind, Kind]

    @cached_property
    def occupies(self) -> Resource:
        """The resource that both operations occupy."""
        return self.kinds[0].occupies

    @property
    def moves(self) -> bool:
        """Whether the operations move values between the worker and its host, as `Kind.moves` says of one."""
        return any(kind.moves for kind in self.kinds)

    def __repr__(self) -> str:
        return self.letter

    def __reduce__(self) -> tuple[object, ...]:
        return costed, (self.letter,)


PAIR = Pairing("pair", "pair", (FORWARD, BACKWARD))

COSTED: dict[str, Kind | Pairing] = {**KINDS, PAIR.letter: PAIR}
"""The rows and pairings that have a cost, by the key of the cost."""


def costed(letter: str) -> Kind | Pairing:
    """The kind or the pairing with a letter."""
    return COSTED[letter]


def _row(number: int) -> Kind:
    return all_kinds()[number]


def _value(letter: str) -> Value:
    return next(value for value in (NOTHING, *values()) if value.letter == letter)


def values() -> Iterator[Value]:
    """All values of the table, each once."""
    yield from dict.fromkeys(value for row in all_kinds() for value in row.makes)


@cache
def implied(value: Value) -> bool:
    """Whether texts and scripts leave out the name of this value in a message: sender and receiver are enough.

    In each direction, from fed to feeding stages and back, the first value of the table is implied.
    """
    return value is NOTHING or value is next(first for first in values() if first.readers is value.readers)
