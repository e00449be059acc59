"""CH230 and on: mistakes in the numbers of a scheme, shown with the values for which a formula fails."""

from dataclasses import dataclass

from chimera_ir.diagnostics.catalogue.syntax import LIMITS
from chimera_ir.diagnostics.model import Diagnostic, Note
from chimera_ir.plural import counted
from chimera_ir.source import Span

Values = tuple[tuple[str, int], ...]
"""Names with their values, in the order in which they are read."""


@dataclass(frozen=True, slots=True)
class Called:
    """A call on the way to a failure: the function, its arguments or their formulas, and the place of the call."""

    function: str
    arguments: tuple[int | str, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Instance:
    """The pipe, micro-batch and stage for which a formula fails; empty for a formula outside of pipes."""

    pipe: str = ""
    values: Values = ()


def listed(values: Values) -> str:
    """Names and their values as text, as in ``m = 1, s = 2``."""
    return ", ".join(f"{name} = {_plain(value)}" for name, value in values)


def _plain(value: int | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class InInstance(Diagnostic):
    """A mistake that depends on numbers, with the values of the names in the formula, and the instance that fails."""

    values: Values
    instance: Instance

    def notes(self) -> tuple[Note, ...]:
        inner = tuple((name, value) for name, value in self.values if (name, value) not in self.instance.values)
        notes = [Note(f"with {listed(inner)}")] if inner else []
        if self.instance.pipe:
            which = f"for {listed(self.instance.values)} " if self.instance.values else ""
            notes.append(Note(f"{which}in the pipe `{self.instance.pipe}`"))
        return (*notes, *Diagnostic.notes(self))


class InFormula(InInstance):
    """A mistake in the value of a formula, with the calls of functions that lead to it."""

    calls: tuple[Called, ...]

    def notes(self) -> tuple[Note, ...]:
        steps = [
            Note(f"in `{call.function}({', '.join(map(_plain, call.arguments))})`, called here", call.span)
            for call in self.calls
        ]
        return (*InInstance.notes(self), *steps)


class BadDivisor(InFormula, code="CH230"):
    meaning = "A division by zero or by a negative number."
    title = "division by {kind}: `{divisor}` is {value}"
    label = "`{divisor}` is {value} here"
    help = "divisors are 1 or more: guard it with `if {guarded} > 0 then .. else ..`, or `require` that"
    divisor: str
    value: int

    @property
    def guarded(self) -> str:
        return f"({self.divisor})" if self.divisor.startswith("if ") else self.divisor

    @property
    def kind(self) -> str:
        return "zero" if self.value == 0 else "a negative number"


class Overflow(InFormula, code="CH231"):
    meaning = "A value beyond 64 bits."
    title = "this value is too large for 64 bits"
    label = "beyond 2**63 - 1 in size"
    help = "look for a parameter that is far too large, or a clock that grows faster than it needs to"


class BadShare(InFormula, code="CH232"):
    meaning = "A call of `share` with impossible arguments."
    title = "share({total}, {parts}, {part}) shares nothing out"
    label = "needs share(N, k, i) with N >= 0, k >= 1 and 0 <= i < k"
    help = "share(N, k, i) is how many of N things fall to part i of k, counted from 0"
    total: int
    parts: int
    part: int


class NoSuchEntry(InFormula, code="CH278"):
    meaning = "A position beyond the entries of a table."
    title = "the table `{table}` has no entry {position}: it has {entries:entry}, counted from 0"
    label = "entry {position}"
    help = "give `{table}` an entry for every position that is looked up, or `require` that the parameters fit it"
    table: str
    position: int
    entries: int


class BadWeight(InInstance, code="CH291"):
    meaning = "A micro-batch whose weight is below one."
    title = "micro-batch {micro} weighs {weight}: a weight is 1 or more"
    label = "gives {weight}"
    help = "a micro-batch of weight 2 takes twice the costs that are given; weigh the shortest 1, or give smaller costs"
    micro: int
    weight: int


class RequirementFails(Diagnostic, code="CH233"):
    meaning = "A condition of the scheme that its parameters do not meet."
    title = "{message}"
    label = "required by the scheme, and does not hold"
    help = "choose other parameters: {settings}"
    message: str
    values: Values
    parameters: tuple[str, ...]

    @property
    def settings(self) -> str:
        return " ".join(f"{name}=.." for name in self.parameters)

    def notes(self) -> tuple[Note, ...]:
        return (Note(f"with {listed(self.values)}"),) if self.values else ()


NeverMet = RequirementFails.worded("NeverMet", help="no parameter changes this; the scheme itself has to")


class BackwardRange(InInstance, code="CH234"):
    meaning = "A range that stops before it starts."
    title = "the range {start}..{stop} stops before it starts"
    label = "{start}..{stop}"
    help = "a range a..b counts from a to b - 1; it is empty if a = b, and b is never less than a"
    start: int
    stop: int


class NoWorkers(InInstance, code="CH235"):
    meaning = "A worker count below one."
    title = "a scheme needs at least one worker, and this is {count}"
    label = "{count:worker}"
    help = "give a number of 1 or more; without this line there are as many workers as stages"
    count: int


class NoStages(InInstance, code="CH236"):
    meaning = "An empty range of stages."
    title = "the pipe `{instance.pipe}` has no stages"
    label = "an empty range"
    help = "a model has at least one stage: `stages s in 0..D` with D >= 1"


class StagesNotFromZero(InInstance, code="CH237"):
    meaning = "Stages that are not numbered from 0."
    title = "stages are numbered from 0, and these start at {start}"
    label = "starts at {start}"
    help = (
        "count from 0, as in `stages s in 0..D`: `on` gives the order over the workers, and every pipe has all stages; "
        "see " + LIMITS
    )
    start: int


class StagesDiffer(InInstance, code="CH238"):
    meaning = "Pipes that cut the model into different numbers of stages."
    title = "the pipe `{pipe}` has {stages:stage} and the pipe `{other}` has {expected}"
    label = "{stages:stage}"
    help = "every pipe is a whole copy of one model: give all of them the same stages"
    related = ("first", "the pipe `{other}` has {expected}")
    pipe: str
    stages: int
    other: str
    expected: int
    first: Span


class GroupsDiffer(InInstance, code="CH339"):
    meaning = "Pipes with different groups of stages."
    title = "the pipe `{pipe}` has the stages {groups}, and the pipe `{other}` has {expected}"
    label = "the stages of `{pipe}`"
    help = "every pipe is a whole copy of one model: give all of them the same lines `stages`, but for the workers"
    related = ("first", "the pipe `{other}` has {expected}")
    pipe: str
    groups: str
    other: str
    expected: str
    first: Span


class NoSuchFeed(InInstance, code="CH340"):
    meaning = "A line `feeds` with a stage that does not exist."
    title = "there is no stage {stage} to feed or to be fed: stages are 0 to {last}"
    label = "stage {stage}"
    help = "name stages by their group, as in `feeds image[a-1] -> text[0]`, or by their numbers"
    stage: int
    last: int


class NoMicros(InInstance, code="CH239"):
    meaning = "A scheme whose pipes have no micro-batches at all."
    title = "there are no micro-batches"
    label = "an empty range, as in every pipe"
    help = "an iteration has at least one micro-batch: make one of the ranges longer"


class WorkerOutOfRange(InInstance, code="CH240"):
    meaning = "A stage on a worker that does not exist."
    title = "stage {stage} is placed on worker {worker}, and there is none"
    label = "worker {worker}"
    help = "{existing}; wrap around with `% {workers}`, or say how many there are with `workers`"
    stage: int
    worker: int
    workers: int

    @property
    def existing(self) -> str:
        return "the only worker is 0" if self.workers == 1 else f"the workers are 0 to {self.workers - 1}"


class NoSuchWorker(InInstance, code="CH293"):
    meaning = "A worker behind `except` that does not exist, or a range without any."
    title = "there is no worker {named} to leave out: workers are 0 to {last_worker}"
    label = "leaves out {named}"
    help = "behind `except` list numbers of workers, or ranges `a..b` from a to b - 1"
    start: int
    stop: int
    workers: int

    @property
    def named(self) -> str:
        return f"{self.start}" if self.stop == self.start + 1 else f"{self.start}..{self.stop}"

    @property
    def last_worker(self) -> int:
        return self.workers - 1


class NoSuchFrozenStage(InInstance, code="CH297"):
    meaning = "A stage behind `frozen` that does not exist."
    title = "there is no stage {named} to freeze: stages are 0 to {last_stage}"
    label = "freezes {named}"
    help = "behind `frozen` list numbers of stages, or ranges `a..b` from a to b - 1"
    start: int
    stop: int
    stages: int

    @property
    def named(self) -> str:
        return f"{self.start}" if self.stop == self.start + 1 else f"{self.start}..{self.stop}"

    @property
    def last_stage(self) -> int:
        return self.stages - 1


class AllFrozen(Diagnostic, code="CH298"):
    meaning = "A model of which no stage is trained."
    title = "all {stages:stage} are frozen, so there is nothing to train"
    label = "freezes every stage"
    help = "leave a stage out; for forwards alone every output directory has an evaluation (`pipe.evaluate`)"
    stages: int


class FeedsBack(Diagnostic, code="CH335"):
    meaning = "An edge of the graph of stages to the same stage, or to one before it."
    title = "stage {source} feeds stage {target}, which does not come after it"
    label = "feeds stage {target}"
    help = "stages have numbers in the order of the lines `stages`: write the group that feeds above the other"
    source: str
    target: str


class FedTwice(Diagnostic, code="CH336"):
    meaning = "An edge of the graph of stages that is given twice."
    title = "stage {source} feeds stage {target} twice"
    label = "the second time"
    help = "leave out one of the two: inside a group each stage feeds the next one without a line"
    source: str
    target: str


class NotConnected(Diagnostic, code="CH337"):
    meaning = "Stages that no edge of the graph connects with the others."
    title = "nothing connects stage {stage} with stage {other}"
    label = "the edges are these"
    help = "add a line `feeds {stage} -> ..` or `feeds .. -> {stage}`; without any `feeds` all stages are one chain"
    stage: str
    other: str


class FedByName(Diagnostic, code="CH338"):
    meaning = "A stage that gets two outputs under the same name."
    title = "stage {target} gets two outputs as `{keyword}`"
    label = "the second one"
    help = "give each a name of its own behind `as`, or none: then it is called with them in the order of the lines"
    target: str
    keyword: str


class WorkerLeftOut(InInstance, code="CH294"):
    meaning = "A stage on a worker that the line `workers` leaves out."
    title = "stage {stage} is placed on worker {worker}, which is left out"
    label = "worker {worker}"
    help = "place the stage on another worker, or take worker {worker} out of `except`"
    related = ("excepted", "left out here")
    stage: int
    worker: int
    excepted: Span


class IdleWorker(Diagnostic, code="CH241"):
    meaning = "A worker without a stage."
    title = "worker {worker} has no stage{others}"
    label = "{workers:worker}"
    help = "place a stage on it with `on`{ask}, or leave it out: `workers .. except {worker}`"
    worker: int
    workers: int
    idle: int
    fewer: int | None
    """The number of workers that have a stage, if these are the first ones."""

    @property
    def ask(self) -> str:
        return f", ask for {counted(self.fewer, 'worker')} (`workers {self.fewer}`)" if self.fewer else ""

    @property
    def others(self) -> str:
        others = self.idle - 1
        return f", nor {'has' if others == 1 else 'have'} {counted(others, 'other')}" if others else ""


class NumberOutside(InInstance, code="CH242"):
    meaning = "A micro-batch whose number, given with `as`, is not one of 0 to N - 1."
    title = (
        "micro-batch m = {micro} of the pipe `{instance.pipe}` gets the number {number}, and numbers are 0 to {last}"
    )
    label = "{number} here"
    help = "the numbers of all pipes together are 0 to {last}, each once; without `as` they are consecutive"
    micro: int
    number: int
    last: int


class NumberTaken(InInstance, code="CH243"):
    meaning = "Two micro-batches with the same number."
    title = "two micro-batches have the number {number}: {first}, and {second}"
    label = "{number} again"
    help = "give each micro-batch a number of its own with `as`; without `as` they are consecutive, pipe by pipe"
    related = ("first_span", "{first} gets its number here")
    number: int
    first: str
    second: str
    missing: int
    first_span: Span

    def notes(self) -> tuple[Note, ...]:
        *instance, first = InInstance.notes(self)
        return (*instance, Note(f"the number {self.missing} is given to none"), first)


class NoSuchMicro(InInstance, code="CH244"):
    meaning = "An operation on a micro-batch that its pipe does not have."
    title = "the pipe `{instance.pipe}` has no micro-batch {micro}"
    label = "micro-batch {micro}"
    help = "its micro-batches are {start} to {last}: guard the line with `when`, or mend the formula"
    micro: int
    start: int
    last: int


MicroElsewhere = NoSuchMicro.worded(
    "MicroElsewhere",
    title="`on` puts micro-batch {micro} on other workers than the rest of `{instance.pipe}`",
    help="name micro-batches in one operation that `on` puts on the same workers",
)


class NoSuchStage(InInstance, code="CH245"):
    meaning = "An operation on a stage that does not exist."
    title = "there is no stage {stage}"
    label = "stage {stage}"
    help = "the stages are 0 to {last}: guard the line with `when`, or mend the formula"
    stage: int
    last: int


class TooManyOperations(InInstance, code="CH246"):
    meaning = "A scheme with more operations than the limit allows."
    title = "the scheme has {count:operation}, and the limit is {limit:,}"
    label = "{micros:micro-batch} in all, {stages:stage}"
    help = "choose smaller parameters, or raise the limit with `--max-operations {count}`"
    count: int
    limit: int
    micros: int
    stages: int


class TooMany(InInstance, code="CH247"):
    meaning = "More workers, stages, micro-batches or pipes than any scheme may have."
    title = "this makes {count:{thing}}, and the limit is {limit:,}"
    label = "beyond the limit"
    help = "choose smaller parameters: no option raises this limit"
    thing: str
    count: int
    limit: int


TooManyEntries = TooMany.worded(
    "TooManyEntries",
    title="the tables of all pipes have {count:entry}, and the limit is {limit:,}",
    label="a pipe here",
)


class EmptyIndex(InInstance, code="CH248"):
    meaning = "A range of pipes without values: there is no pipe."
    title = "there are no pipes"
    label = "an empty range makes none"
    help = "a scheme has at least one pipe: make the range longer"


# CH254 and on: mistakes in schemes whose micro-batches go on for ever, such as formulas that do not repeat.


class UpdateMissing(Diagnostic, code="CH254"):
    meaning = "A pipe without an end in a scheme that does not say when weights are updated."
    title = "the micro-batches of the pipe `{pipe}` go on for ever, and nothing says when weights are updated"
    label = "without an end"
    help = "add `update every K` above the pipes, or say where the range stops: `0..N`"
    pipe: str


class PipeEnds(Diagnostic, code="CH255"):
    meaning = "A pipe with an end in a scheme without a flush."
    title = "the pipe `{pipe}` ends, while `update every` is for micro-batches that go on for ever"
    label = "stops here"
    help = "write `0..` in every pipe, or leave `update every` out: one update per iteration then"
    related = ("update", "the scheme is asynchronous by this line")
    pipe: str
    update: Span


class NeedlessReads(Diagnostic, code="CH256"):
    meaning = "A `reads version` line in a synchronous scheme, which has only one version of the weights."
    title = "`reads version` chooses among weight versions, and without `update every` there is one"
    label = "nothing to choose from"
    help = "leave the line out, or make the scheme asynchronous: `update every K`, and `0..` for the micro-batches"


class NeverLazy(Diagnostic, code="CH257"):
    meaning = "`sync lazy` in a scheme without a flush, in which a worker's compute has no end to wait for."
    title = "`sync lazy` waits for the end of a worker's compute, and an asynchronous scheme has none"
    label = "would never come"
    help = "leave the line out: gradients are summed right after the last backward of an update"


class BadUpdate(InInstance, code="CH258"):
    meaning = "An `update every` line with a number of micro-batches below 1."
    title = "weights are updated after every 1 or more micro-batches, and this is {count}"
    label = "{count:micro-batch}"
    help = "give the number of micro-batches, over all pipes, whose gradients make one update"
    count: int


class NumbersNeeded(InInstance, code="CH259"):
    meaning = "A pipe that does not number its micro-batches with `as`, in a scheme with several pipes without an end."
    title = "the pipe `{instance.pipe}` does not number its micro-batches, and there are {count:pipe} without an end"
    label = "no pipe comes after one that never ends"
    help = "say with `as` which numbers are whose, as in `micros m in 0.. as {count}*m`"
    count: int


class GrowingProduct(InFormula, code="CH260"):
    meaning = "A product of two values that both change with the micro-batch, one of which grows without end."
    title = "this product is not quasi-affine: neither factor is constant, and one of them grows without end"
    label = "`{left}` and `{right}` change"
    help = "multiply what grows by a constant; two factors that change must both repeat, as `m % 4` does"
    left: str
    right: str


class ChangingDivisor(InFormula, code="CH261"):
    meaning = "A divisor that changes with the micro-batch, in a pipe without end."
    title = "the divisor `{divisor}` changes with the micro-batch"
    label = "not constant"
    help = "where micro-batches go on for ever, divisors are constants: parameters, values, numbers, the stage"
    divisor: str


class GrowingCondition(InFormula, code="CH262"):
    meaning = "A condition that changes once and for all at some micro-batch, instead of repeating."
    title = "this condition does not repeat: its sides grow apart without end"
    label = "changes once and for all"
    help = "compare what repeats, as in `m % 2 == 0`; warm-up and drain are derived, and need no cases of their own"


class GrowingArgument(InFormula, code="CH263"):
    meaning = "A function that is called with a value that grows without end."
    title = "`{function}` takes a value that grows without end"
    label = "not quasi-affine"
    help = "use sums, multiples, `/c` and `%c` with constants c"
    function: str


GrowingExtreme = GrowingArgument.worded(
    "GrowingExtreme", help="`{function}` takes such values in `reads version` only; elsewhere use sums, `/c` and `%c`"
)


class GrowingPosition(InFormula, code="CH279"):
    meaning = "An entry of a table at a position that grows without end."
    title = "the position in the table `{table}` grows without end"
    label = "not quasi-affine"
    help = "look up a position that repeats, as in `{table}[m % 4]`"
    table: str


class WeightDrifts(InFormula, code="CH292"):
    meaning = "Weights of micro-batches that grow without end."
    title = "the weights of micro-batches grow by {rate} per micro-batch, and must repeat"
    label = "grows by {rate}"
    help = "write weights that repeat, as in `weigh 1 + m % 2`"
    rate: str


class BranchesDrift(InFormula, code="CH264"):
    meaning = "An `if` whose two values grow at different rates per micro-batch."
    title = "the two values of this `if` grow apart without end"
    label = "by {then} per micro-batch if it holds, by {otherwise} if not"
    help = "let both grow alike, or choose by what does not depend on the micro-batch"
    then: str
    otherwise: str


class RepeatsTooLate(InFormula, code="CH265"):
    meaning = "A formula whose values repeat only after too many micro-batches."
    title = "this repeats only after {count:micro-batch} or more, and the limit is {most:,}"
    label = "repeats too late"
    help = "use smaller constants, or ones with common divisors; `--max-operations` raises the limit"
    count: int
    most: int


class StageDrifts(InFormula, code="CH266"):
    meaning = "An operation whose stage grows without end from micro-batch to micro-batch."
    title = "the {noun} of this operation grows without end"
    label = "by {rate} per micro-batch"
    help = "let it depend on the stage, and on the micro-batch only by what repeats, as `m % 2` does"
    noun: str
    rate: str


class MicroStrays(InFormula, code="CH267"):
    meaning = "An operation on another micro-batch than the line's variable stands for, such as `F(m + 1, s)`."
    title = "`{micro}` is not within what `{variable}` stands for"
    label = "expected {expected}"
    help = "shift the clock instead of the micro-batch; for several micro-batches in an operation write `by`"
    micro: str
    variable: str
    step: int

    @property
    def expected(self) -> str:
        return f"`{self.variable}`" if self.step == 1 else f"`{self.variable}..{self.variable}+{self.step}`, or a part"


class ClockStands(InInstance, code="CH268"):
    meaning = "A clock that does not grow from micro-batch to micro-batch, in a pipe without end."
    title = "this clock does not advance from micro-batch to micro-batch"
    label = "grows by {rate} per micro-batch"
    help = "let it grow: a clock orders the operations of a worker, and micro-batches go on for ever"
    rate: str


class LanesDrift(InInstance, code="CH269"):
    meaning = "Two clocks of a pipe without end that grow at different rates per micro-batch."
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
    meaning = (
        "Numbers after `as` that grow too fast or too slowly to number the micro-batches of all pipes without gaps."
    )
    title = "the numbers of the pipe `{instance.pipe}` grow by {rate} per micro-batch, and should grow by {expected}"
    label = "grows by {rate}"
    help = "give every number to one micro-batch: while this pipe runs {mine} of them, all pipes together run {total}"
    rate: str
    expected: str
    mine: int
    total: int


class NumberOutsideTurn(InInstance, code="CH271"):
    meaning = "A number after `as` that is negative, or so large that a lower number is left out."
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
    meaning = "A version after `reads version` that grows faster or slower than updates make versions."
    title = "the version that is read grows by {rate} per micro-batch, and weights by {expected}"
    label = "grows by {rate} on stage {stage}"
    help = "let it follow the updates at a distance: `max(0, n/K - 1)` for the global number n and `update every K`"
    stage: int
    rate: str
    expected: str


class NegativeVersion(InInstance, code="CH273"):
    meaning = "A version after `reads version` that is below 0, the first version."
    title = "micro-batch {micro} reads version {version} on stage {stage}, and the first version is 0"
    label = "{version} here"
    help = "let the first micro-batches read version 0: `max(0, ..)`"
    micro: int
    stage: int
    version: int


class VersionUnsettled(InInstance, code="CH274"):
    meaning = "A micro-batch of the warm-up that reads another version than the rule of the later micro-batches gives."
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
    meaning = "An operation over micro-batches of two different updates, or with two different versions of the weights."
    title = "one operation takes the micro-batches {first} and {second}, of the {quantity}s {of_first} and {of_second}"
    label = "over both of them"
    help = "let the micro-batches of an operation share an update and a version, or take them one by one"
    first: int
    second: int
    quantity: str
    of_first: int
    of_second: int


class TooManyInTurns(InInstance, code="CH276"):
    meaning = "A scheme without a flush whose warm-up, steady state and drain have too many operations."
    title = "warm-up, steady state and drain take at least {count:operation}, and the limit is {limit:,}"
    label = "{stages:stage}; the schedule repeats after {period:micro-batch} or more"
    help = "choose smaller parameters, or raise the limit with `--max-operations {count}`"
    count: int
    limit: int
    stages: int
    period: int


class VersionsTooOld(InFormula, code="CH277"):
    meaning = "Weights that are read so many updates after they were made that no worker could keep all the copies."
    title = "the weights that are read here are {count:update} old, and the limit is {most:,}"
    label = "far behind"
    help = "read newer weights: a worker keeps a copy of every version that is still to be read"
    count: int
    most: int
