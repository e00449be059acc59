"""CH280 and on: pairs, a forward and a backward that a worker runs as one operation."""

from chimera_ir.diagnostics.catalogue.values import InInstance
from chimera_ir.diagnostics.model import Diagnostic


class OtherKinds(Diagnostic, code="CH280"):
    """A pair of other kinds than a forward and a backward."""

    title = "a pair joins an `F` and a `B`, and this line joins `{first}` and `{second}`"
    label = "not a pair"
    help = "give each of the two a line and a clock of its own"
    first: str
    second: str


class NoSuchPipe(InInstance, code="CH281"):
    """A pair with an operation of a pipe that the scheme does not have."""

    title = "the scheme has no pipe `{name}`"
    label = "there is none"
    help = "name one of its pipes: {known}"
    name: str
    known: str


class PairApart(InInstance, code="CH282"):
    """A pair of operations that are on two different workers."""

    title = "a pair runs on one worker: `{first}` is on worker {worker}, `{second}` on worker {other}"
    label = "on workers {worker} and {other}"
    help = "join two operations of one worker, or give each of the two a line and a clock of its own"
    first: str
    second: str
    worker: int
    other: int


class PairOfOne(InInstance, code="CH283"):
    """A pair of a forward and a backward of the same micro-batch."""

    title = "`{first}` and `{second}` cannot run together: both are about micro-batch {micro}"
    label = "the same micro-batch"
    help = "join the forward with the backward of an earlier micro-batch, which needs nothing of it"
    first: str
    second: str
    micro: int


class PairUneven(InInstance, code="CH284"):
    """A pair whose forward and backward are over different numbers of micro-batches."""

    title = "a pair joins as many micro-batches on both sides: `{first}` has {size}, `{second}` has {other}"
    label = "{size} and {other}"
    help = "give both ranges the same length"
    first: str
    second: str
    size: int
    other: int
