"""CH501 and on: mistakes in the text form of the IR."""

from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.plural import counted
from chimera_ir.source import Span

# CH505 and on: its header.


class MissingHeader(Diagnostic, code="CH505"):
    meaning = "A line that every header has is missing."
    title = "the header has no `{word}` line"
    label = "the header begins here"
    help = "add a line such as `{form}`"
    word: str
    form: str


class PlacementLength(Diagnostic, code="CH509"):
    meaning = "A pipe lists more or fewer workers after `on` than there are stages."
    title = "pipe {pipe} places {placed} of {stages:stage}"
    label = "one worker per stage after `on`"
    help = "name {stages:worker}, in the order of the stages"
    pipe: str
    placed: int
    stages: int


class MicroTwice(Diagnostic, code="CH510"):
    meaning = "A micro-batch belongs to two pipes, or twice to one."
    title = "micro-batch {micro} is given twice"
    label = "the second time"
    help = "every micro-batch 0 to {last} belongs to exactly one pipe"
    micro: int
    last: int


class MicroElsewhere(Diagnostic, code="CH532"):
    meaning = "A pipe that recomputes a micro-batch of another pipe."
    title = "the pipe `{pipe}` has no micro-batch {micro} to recompute"
    label = "recomputes micro-batch {micro}"
    help = "behind `of` list micro-batches of this pipe"
    micro: int
    pipe: str


class MicroMissing(Diagnostic, code="CH511"):
    meaning = "A micro-batch belongs to no pipe."
    title = "micro-batch {micro} belongs to no pipe{others:(and more)}"
    label = "given to a pipe: {placed} of {micro_batches:micro-batch}"
    help = "add {start} to the runs after `micros` of one pipe, as in `{start}..{after}`"
    micro: int
    placed: int
    micro_batches: int
    start: int
    after: int
    others: int


class HeaderTwice(Diagnostic, code="CH514"):
    meaning = "A fact that the header states twice."
    title = "{what} is given twice"
    label = "the second time"
    help = "keep one of the two"
    what: str


BoundTwice = HeaderTwice.worded("BoundTwice", title="the bound on {what} is given twice")
SyncTwice = HeaderTwice.worded("SyncTwice", title="the synchronisation of stage {what} is given twice")
ShareTwice = HeaderTwice.worded("ShareTwice", title="what stage {what} keeps is given twice")


class NoSuchGroup(Diagnostic, code="CH535"):
    meaning = "A group of stages behind `absent` that the line `named` does not have."
    title = "no group of stages is called `{name}`"
    label = "not a group"
    help = "the line `named` has these groups: {known}"
    name: str
    known: str


class BoundLength(Diagnostic, code="CH529"):
    meaning = "A bound lists the limits of more or fewer workers than there are."
    title = "the bound on {what} has {limits:limit} for {workers:worker}"
    label = "one limit for all workers, or one for each"
    help = "give one limit, or {workers}, in the order of the workers"
    what: str
    limits: int
    workers: int


class HalvesLeftOver(Diagnostic, code="CH516"):
    meaning = "An odd number of half micro-batches, which do not make whole ones."
    title = "{count:half micro-batch} cannot be whole ones"
    label = "an odd number"
    help = "count two for each micro-batch"
    count: int


class UnevenUpdates(Diagnostic, code="CH517"):
    meaning = "Micro-batches that the updates cannot share equally, or a period that is not a number of whole updates."
    # ``count`` is the number of micro-batches and ``period`` that of a period; both count slices, ``slices`` to a
    # micro-batch.
    title = "{updates:update} that repeat every {repeated} cannot be made of {whole:micro-batch}{cut}"
    label = "the updates would not have equally many micro-batches"
    help = "`updates U period L`: U divides the micro-batches, and L is a multiple of what an update takes"
    count: int
    updates: int
    period: int
    slices: int = 1

    @property
    def whole(self) -> int:
        return self.count // self.slices

    @property
    def cut(self) -> str:
        return f" of {counted(self.slices, 'slice')}" if self.slices > 1 else ""

    @property
    def repeated(self) -> str:
        return self.parts(self.period)

    def parts(self, count: int) -> str:
        return counted(count, "slice") if self.slices > 1 else str(count)


class PeriodTooShort(UnevenUpdates):
    label = "an update takes {taken_by_update}"

    @property
    def taken_by_update(self) -> str:
        return self.parts(self.count // self.updates)


UnevenPlan = UnevenUpdates.worded(
    "UnevenPlan", label="every update has as many micro-batches, and a period is made of whole updates"
)


class WrongUpdates(Diagnostic, code="CH519"):
    meaning = "The `updates` line of a plan in a schedule or a program, or the other way round."
    title = "a {level} without a flush has another `updates` line"
    label = "its lanes are one turn, over and over"
    help = "write `updates U per turn`, the micro-batches of a turn elsewhere, and one turn of every worker"
    level: str


TurnInPlan = WrongUpdates.worded(
    "TurnInPlan",
    label="clocks have no turn to count from",
    help="write `updates U period L`: the updates that the plan shows, and when its lanes repeat",
)


class UnevenTurn(Diagnostic, code="CH520"):
    meaning = "A turn whose updates cannot share its micro-batches equally."
    title = "{updates:update} of a turn cannot be made of {micro_batches:micro-batch}"
    label = "the updates would not have equally many micro-batches"
    help = "`updates U per turn`: U divides the micro-batches of the turn"
    micro_batches: int
    updates: int


class KindLacking(Diagnostic, code="CH525"):
    meaning = "A `kinds` line without the kind of operation that makes what another kind of the line reads."
    title = "`{line}`: no operation makes what a {reader} reads"
    label = "as {reason}"
    help = "name the kind that makes it as well; a header without this line has all kinds"
    line: str
    reader: str
    reason: str


class KindUnfinished(Diagnostic, code="CH528"):
    meaning = "A `kinds` line with operations that leave weight gradients, but without the kind that sums them."
    title = "`{line}`: no operation sums the weight gradients that {nouns} leave"
    label = "micro-batches with {nouns} would be missing from the update"
    help = "name the kind that sums them as well; a header without this line has all kinds"
    line: str
    nouns: str


class NoUpdates(Diagnostic, code="CH526"):
    meaning = "A line about updates in a header whose kinds of operations make no update."
    title = "`{word}` is about updates, and there are none"
    label = "nothing to say here"
    help = "leave it out; or remove `{line}`, and add the operations that make an update"
    related = ("kinds", "operations of these kinds add to no gradients")
    word: str
    line: str
    kinds: Span


class SlicesLeftOver(Diagnostic, code="CH531"):
    meaning = "A count of slices that ends within a micro-batch."
    title = "after {count:slice} no micro-batch ends: each has {slices:slice}"
    label = "not a multiple of {slices}"
    help = "count {slices} for each micro-batch: `micro_batches COUNT slices K`, updates and pipes count slices"
    count: int
    slices: int


class LengthsOfOthers(Diagnostic, code="CH533"):
    meaning = "More or fewer lengths than a micro-batch has slices."
    title = "{count:length} for {slices:slice} of a micro-batch"
    label = "{count:length}"
    help = "give each slice its length, as in `micro_batches 8 slices 4 lengths 3 2 2 1`; or none, if all are equal"
    count: int
    slices: int


class NoTitle(Diagnostic, code="CH501"):
    meaning = "The text does not begin as any level of IR does."
    title = "this is not the text of a plan, a schedule or a program"
    label = "the first line names the level"
    help = "begin with `plan NAME`, `schedule NAME` or `program NAME`"


class MalformedLine(Diagnostic, code="CH502"):
    meaning = "A line whose first word is known, but which does not have the form that this word asks for."
    title = "this `{word}` line is malformed"
    label = "expected `{form}`"
    help = "write `{form}`, with your own names and numbers, and nothing after it but a comment"
    word: str
    form: str


class UnknownKind(Diagnostic, code="CH503"):
    meaning = "A line that begins with an unknown word."
    title = "no line begins with `{word}`"
    label = "unknown"
    help = "operations are {words}"
    word: str
    words: str


class MisspeltKind(UnknownKind):
    help = "did you mean `{closest}`, as in `{form}`?"
    closest: str
    form: str


class OutOfOrder(Diagnostic, code="CH504"):
    meaning = "A line out of order."
    title = "this line cannot stand here"
    help = "the order is: level and name, header lines, then the operations{under}"
    lanes: bool

    @property
    def under(self) -> str:
        return " under their `worker` headings" if self.lanes else ""


LaneInPlan = OutOfOrder.worded("LaneInPlan", label="a plan has no lanes")
SecondTitle = OutOfOrder.worded("SecondTitle", label="the level is named once, in the first line")
HeaderTooLate = OutOfOrder.worded("HeaderTooLate", label="a header line after the first operation")
HeadingTooLate = OutOfOrder.worded("HeadingTooLate", label="a heading after operations that have none")
NoHeading = OutOfOrder.worded("NoHeading", label="an operation before the first heading")


class NumberOutOfRange(Diagnostic, code="CH506"):
    meaning = "A number beyond the limits of the header, or of the compiler."
    title = "{what} {value} is out of range"
    label = "only {first} to {last}"
    help = "keep within {first} to {last}, or change the header if it is too small"
    what: str
    value: str
    first: int
    last: int


class ShareOutOfRange(Diagnostic, code="CH534"):
    meaning = "A share of M_a that no stage can keep."
    title = "a stage cannot keep {value} M_a of a micro-batch"
    label = "greater than 0, and at most {last:,}"
    help = "write a number or a fraction, as in `keep 1/4 0..2`; a stage without a backward keeps nothing: `frozen`"
    value: str
    last: int


SharesTooFine = ShareOutOfRange.worded(
    "SharesTooFine",
    title="the shares that stages keep have the common denominator {value}",
    label="at most {last:,}",
    help="round the shares to fewer digits",
)


class LaneTwice(Diagnostic, code="CH507"):
    meaning = "A worker has two headings."
    title = "worker {worker} has two lanes"
    label = "the second"
    help = "write everything that worker {worker} does under one heading"
    related = ("first", "the first is here")
    worker: int
    first: Span


class LanesMissing(Diagnostic, code="CH508"):
    meaning = "A worker has no heading."
    title = "worker {worker} has no lane{others:(and more)}"
    label = "the text has {lanes} of {workers:lane}"
    help = "add the heading `worker {worker}:`; a worker with nothing to do has an empty lane"
    worker: int
    lanes: int
    workers: int
    others: int


class WrongLevel(Diagnostic, code="CH513"):
    meaning = "An operation of another level of IR."
    title = "a {level} has no such line"
    label = "this belongs to a {other}"
    help = "{level} lines look like `{form}`; or begin the text with `{other} NAME`"
    level: str
    other: str
    form: str


class MoreMistakes(Diagnostic, code="CH515"):
    meaning = "More errors in an IR text than are shown one by one."
    title = "{count:more error} like these"
    label = "the next one is here"
    help = "mend the first errors and compile again"
    count: int


class VersionUnsaid(Diagnostic, code="CH518"):
    meaning = "An operation without a version where there is no flush, or one with a version where there is one."
    title = "this `{word}` names no version of the weights"
    label = "the header says `updates`: weights have versions"
    help = "add the version, as in `F m3 s0 v1`"
    word: str


VersionUnsaidInTurn = VersionUnsaid.worded(
    "VersionUnsaidInTurn", help="add the version, as in `F m+1 s0 v-1`, `step s0 v+1`"
)
NeedlessVersion = VersionUnsaid.worded(
    "NeedlessVersion",
    title="this `{word}` names a version",
    label="a synchronous program has one",
    help="leave the version out; or add `updates U per turn` to the header of a program without a flush",
)
NeedlessCopy = NeedlessVersion.worded(
    "NeedlessCopy", help="remove the line; or add `updates U per turn` to the header of a program without a flush"
)


class NotOfTurn(Diagnostic, code="CH521"):
    meaning = "A plain number, as in `m3`, where micro-batches and versions are counted from the turn, as in `m+1`."
    title = "`{number}` is not counted from the turn"
    label = "the header says `per turn`: this line comes again in every turn"
    help = (
        "write `m` for the first micro-batch of the turn, `m+1` or `m-1` for others; `v` for the weights that the "
        "updates before the turn have made"
    )
    number: str


class NoTurnToCountFrom(Diagnostic, code="CH522"):
    meaning = "A number that is counted from a turn, as in `m+1`, in a level that has no turn."
    title = "`{number}` is counted from a turn, and this {level} has none"
    label = "which one?"
    help = "write its number, as in `m3`; or add `updates U per turn` to the header, for a scheme without a flush"
    number: str
    level: str


NoTurnInPlan = NoTurnToCountFrom.worded(
    "NoTurnInPlan", help="write its number, as in `m3`; a plan shows some updates from the first one on"
)


class RingUnsaid(Diagnostic, code="CH523"):
    meaning = "A `recv` of a turn that does not say how many slots its messages use one after the other."
    title = "this `recv` does not say how many slots there are"
    label = "the next turn takes another slot"
    help = "add the number of slots that these messages take in turn, as in `into {slot} of {count}`"
    slot: int
    count: int


class RingsDiffer(Diagnostic, code="CH524"):
    meaning = "Receives of a turn that give different numbers of slots for the same messages."
    title = "the messages s{source}->s{target} have {count:slot} here and {other:slot} before"
    label = "they go round the same slots"
    help = "say the same number in all of these lines"
    related = ("before", "here they have {other}")
    source: int
    target: int
    count: int
    other: int
    before: Span


class PairInStream(Diagnostic, code="CH527"):
    meaning = "A pair in a level without a flush."
    title = "a pair has no place where micro-batches go on for ever"
    label = "a pair"
    help = "write the two operations on two lines, one after the other"


class LineWithoutSlice(Diagnostic, code="CH530"):
    meaning = "A line of IR text that names no slice though micro-batches have slices."
    title = "this line does not say which slice it is about"
    label = "expected a slice"
    help = "write the slice after the micro-batch, as in `m0 q1`: the header cuts a micro-batch into {slices:slice}"
    slices: int


LineWithSlice = LineWithoutSlice.worded(
    "LineWithSlice",
    title="this line names a slice, and the micro-batches have none",
    label="a slice",
    help="write `m0` without a slice, or `micro_batches COUNT slices K` in the header, where COUNT counts slices",
)
"""A line that names a slice though micro-batches have none."""

GroupOfSlices = LineWithoutSlice.worded(
    "GroupOfSlices",
    title="a line about slices names one micro-batch, and this one names several",
    label="several micro-batches",
    help="give each micro-batch a line of its own",
)
"""A line over several micro-batches though these are cut into slices."""
