"""CH254 and on: mistakes in schemes whose micro-batches go on for ever, such as formulas that do not repeat."""

from chimera_ir.diagnostics.catalogue.values import InFormula, InInstance
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.source import Span


class UpdateMissing(Diagnostic, code="CH254"):
    """A pipe without an end in a scheme that does not say when weights are updated."""

    title = "the micro-batches of the pipe `{pipe}` go on for ever, and nothing says when weights are updated"
    label = "without an end"
    help = "add `update every K` above the pipes, or say where the range stops: `0..N`"
    pipe: str


class PipeEnds(Diagnostic, code="CH255"):
    """A pipe with an end in a scheme without a flush."""

    title = "the pipe `{pipe}` ends, while `update every` is for micro-batches that go on for ever"
    label = "stops here"
    help = "write `0..` in every pipe, or leave `update every` out: one update per iteration then"
    related = ("update", "the scheme is asynchronous by this line")
    pipe: str
    update: Span


class NeedlessReads(Diagnostic, code="CH256"):
    """A ``reads version`` line in a synchronous scheme, which has only one version of the weights."""

    title = "`reads version` chooses among weight versions, and without `update every` there is one"
    label = "nothing to choose from"
    help = "leave the line out, or make the scheme asynchronous: `update every K`, and `0..` for the micro-batches"


class NeverLazy(Diagnostic, code="CH257"):
    """``sync lazy`` in a scheme without a flush, in which a worker's compute has no end to wait for."""

    title = "`sync lazy` waits for the end of a worker's compute, and an asynchronous scheme has none"
    label = "would never come"
    help = "leave the line out: gradients are summed right after the last backward of an update"


class BadUpdate(InInstance, code="CH258"):
    """An ``update every`` line with a number of micro-batches below 1."""

    title = "weights are updated after every 1 or more micro-batches, and this is {count}"
    label = "{count:micro-batch}"
    help = "give the number of micro-batches, over all pipes, whose gradients make one update"
    count: int


class NumbersNeeded(InInstance, code="CH259"):
    """A pipe that does not number its micro-batches with ``as``, in a scheme with several pipes without an end."""

    title = "the pipe `{instance.pipe}` does not number its micro-batches, and there are {count:pipe} without an end"
    label = "no pipe comes after one that never ends"
    help = "say with `as` which numbers are whose, as in `micros m in 0.. as {count}*m`"
    count: int


class GrowingProduct(InFormula, code="CH260"):
    """A product of two values that both change with the micro-batch, one of which grows without end."""

    title = "this product is not quasi-affine: neither factor is constant, and one of them grows without end"
    label = "`{left}` and `{right}` change"
    help = "multiply what grows by a constant; two factors that change must both repeat, as `m % 4` does"
    left: str
    right: str


class ChangingDivisor(InFormula, code="CH261"):
    """A divisor that changes with the micro-batch, in a pipe without end."""

    title = "the divisor `{divisor}` changes with the micro-batch"
    label = "not constant"
    help = "where micro-batches go on for ever, divisors are constants: parameters, values, numbers, the stage"
    divisor: str


class GrowingCondition(InFormula, code="CH262"):
    """A condition that changes once and for all at some micro-batch, instead of repeating."""

    title = "this condition does not repeat: its sides grow apart without end"
    label = "changes once and for all"
    help = "compare what repeats, as in `m % 2 == 0`; warm-up and drain are derived, and need no cases of their own"


class GrowingArgument(InFormula, code="CH263"):
    """A function that is called with a value that grows without end."""

    title = "`{function}` takes a value that grows without end"
    label = "not quasi-affine"
    help = "use sums, multiples, `/c` and `%c` with constants c"
    function: str


GrowingExtreme = GrowingArgument.worded(
    "GrowingExtreme", help="`{function}` takes such values in `reads version` only; elsewhere use sums, `/c` and `%c`"
)


class GrowingPosition(InFormula, code="CH279"):
    """An entry of a table at a position that grows without end."""

    title = "the position in the table `{table}` grows without end"
    label = "not quasi-affine"
    help = "look up a position that repeats, as in `{table}[m % 4]`"
    table: str


class WeightDrifts(InFormula, code="CH292"):
    """Weights of micro-batches that grow without end."""

    title = "the weights of micro-batches grow by {rate} per micro-batch, and must repeat"
    label = "grows by {rate}"
    help = "write weights that repeat, as in `weigh 1 + m % 2`"
    rate: str


class BranchesDrift(InFormula, code="CH264"):
    """An ``if`` whose two values grow at different rates per micro-batch."""

    title = "the two values of this `if` grow apart without end"
    label = "by {then} per micro-batch if it holds, by {otherwise} if not"
    help = "let both grow alike, or choose by what does not depend on the micro-batch"
    then: str
    otherwise: str


class RepeatsTooLate(InFormula, code="CH265"):
    """A formula whose values repeat only after too many micro-batches."""

    title = "this repeats only after {count:micro-batch} or more, and the limit is {most:,}"
    label = "repeats too late"
    help = "use smaller constants, or ones with common divisors; `--max-operations` raises the limit"
    count: int
    most: int


class StageDrifts(InFormula, code="CH266"):
    """An operation whose stage grows without end from micro-batch to micro-batch."""

    title = "the stage of this operation grows without end"
    label = "by {rate} per micro-batch"
    help = "let it depend on the stage, and on the micro-batch only by what repeats, as `m % 2` does"
    rate: str


SliceDrifts = StageDrifts.worded("SliceDrifts", title="the slice of this operation grows without end")


class MicroStrays(InFormula, code="CH267"):
    """An operation on another micro-batch than the line's variable stands for, such as ``F(m + 1, s)``."""

    title = "`{micro}` is not within what `{variable}` stands for"
    label = "expected {expected}"
    help = "shift the clock instead of the micro-batch; for several micro-batches in an operation write `by`"
    micro: str
    variable: str
    step: int

    @property
    def expected(self) -> str:
        """The micro-batches that the variable stands for, as in ``m..m+2``."""
        return f"`{self.variable}`" if self.step == 1 else f"`{self.variable}..{self.variable}+{self.step}`, or a part"


class ClockStands(InInstance, code="CH268"):
    """A clock that does not grow from micro-batch to micro-batch, in a pipe without end."""

    title = "this clock does not advance from micro-batch to micro-batch"
    label = "grows by {rate} per micro-batch"
    help = "let it grow: a clock orders the operations of a worker, and micro-batches go on for ever"
    rate: str


class LanesDrift(InInstance, code="CH269"):
    """Two clocks of a pipe without end that grow at different rates per micro-batch."""

    title = "two clocks of the pipe `{instance.pipe}` grow apart without end"
    label = "by {rate} per micro-batch on stage {stage}"
    help = "let all clocks of a pipe grow alike, or operations move away from what they depend on"
    related = ("other", "by {other_rate} on stage {other_stage}")
    stage: int
    rate: str
    other_stage: int
    other_rate: str
    other: Span


class NumbersDrift(InInstance, code="CH270"):
    """Numbers after ``as`` that grow too fast or too slowly to number the micro-batches of all pipes without gaps."""

    title = "the numbers of the pipe `{instance.pipe}` grow by {rate} per micro-batch, and should grow by {expected}"
    label = "grows by {rate}"
    help = "give every number to one micro-batch: while this pipe runs {mine} of them, all pipes together run {total}"
    rate: str
    expected: str
    mine: int
    total: int


class NumberOutsideTurn(InInstance, code="CH271"):
    """A number after ``as`` that is negative, or so large that a lower number is left out."""

    title = (
        "the pipe `{instance.pipe}` gives {variable} = {micro} the number {number}; the first {total} are 0 to {last}"
    )
    label = "{number} here"
    help = "begin at 0 and leave none out: the schedule repeats after {total:micro-batch}, {mine} of them in this pipe"
    variable: str
    micro: int
    number: int
    mine: int
    total: int
    last: int


class VersionsDrift(InInstance, code="CH272"):
    """A version after ``reads version`` that grows faster or slower than updates make versions."""

    title = "the version that is read grows by {rate} per micro-batch, and weights by {expected}"
    label = "grows by {rate} on stage {stage}"
    help = "let it follow the updates at a distance: `max(0, n/K - 1)` for the global number n and `update every K`"
    stage: int
    rate: str
    expected: str


class NegativeVersion(InInstance, code="CH273"):
    """A version after ``reads version`` that is below 0, the first version."""

    title = "micro-batch {micro} reads version {version} on stage {stage}, and the first version is 0"
    label = "{version} here"
    help = "let the first micro-batches read version 0: `max(0, ..)`"
    micro: int
    stage: int
    version: int


class VersionUnsettled(InInstance, code="CH274"):
    """A micro-batch of the warm-up that reads another version than the rule of the later micro-batches gives."""

    title = (
        "micro-batch {micro} reads version {version} on stage {stage}; by the rule of later ones it would be {expected}"
    )
    label = "{version} here"
    help = "the first micro-batches read `max(0, v)` where the later ones read v"
    micro: int
    stage: int
    version: int
    expected: int


class GroupTorn(InInstance, code="CH275"):
    """An operation over micro-batches of two different updates, or with two different versions of the weights."""

    title = "one operation takes the micro-batches {first} and {second}, of the {quantity}s {of_first} and {of_second}"
    label = "over both of them"
    help = "let the micro-batches of an operation share an update and a version, or take them one by one"
    first: int
    second: int
    quantity: str
    of_first: int
    of_second: int


class TooManyInTurns(InInstance, code="CH276"):
    """A scheme without a flush whose warm-up, steady state and drain have too many operations."""

    title = "warm-up, steady state and drain take at least {count:operation}, and the limit is {limit:,}"
    label = "{stages:stage}; the schedule repeats after {period:micro-batch} or more"
    help = "choose smaller parameters, or raise the limit with `--max-operations {count}`"
    count: int
    limit: int
    stages: int
    period: int


class VersionsTooOld(InFormula, code="CH277"):
    """Weights that are read so many updates after they were made that no worker could keep all the copies."""

    title = "the weights that are read here are {count:update} old, and the limit is {most:,}"
    label = "far behind"
    help = "read newer weights: a worker keeps a copy of every version that is still to be read"
    count: int
    most: int
