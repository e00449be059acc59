"""CH501 and on: mistakes in the text form of the IR; `irheader` has those of the header."""

from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.source import Span


class NoTitle(Diagnostic, code="CH501"):
    """The text does not begin as any level of IR does."""

    title = "this is not the text of a plan, a schedule or a program"
    label = "the first line names the level"
    help = "begin with `plan NAME`, `schedule NAME` or `program NAME`"


class MalformedLine(Diagnostic, code="CH502"):
    """A line whose first word is known, but which does not have the form that this word asks for."""

    title = "this `{word}` line is malformed"
    label = "expected `{form}`"
    help = "write `{form}`, with your own names and numbers, and nothing after it but a comment"
    word: str
    form: str


class UnknownKind(Diagnostic, code="CH503"):
    """A line that begins with an unknown word."""

    title = "no line begins with `{word}`"
    label = "unknown"
    help = "operations are {words}"
    word: str
    words: str


class MisspeltKind(UnknownKind):
    """A line that begins with a word that resembles a known one."""

    help = "did you mean `{closest}`, as in `{form}`?"
    closest: str
    form: str


class OutOfOrder(Diagnostic, code="CH504"):
    """A line out of order."""

    title = "this line cannot stand here"
    help = "the order is: level and name, header lines, then the operations{under}"
    lanes: bool

    @property
    def under(self) -> str:
        """The words `` under their `worker` headings`` for a text with lanes; else nothing."""
        return " under their `worker` headings" if self.lanes else ""


LaneInPlan = OutOfOrder.worded("LaneInPlan", label="a plan has no lanes")
SecondTitle = OutOfOrder.worded("SecondTitle", label="the level is named once, in the first line")
HeaderTooLate = OutOfOrder.worded("HeaderTooLate", label="a header line after the first operation")
HeadingTooLate = OutOfOrder.worded("HeadingTooLate", label="a heading after operations that have none")
NoHeading = OutOfOrder.worded("NoHeading", label="an operation before the first heading")


class NumberOutOfRange(Diagnostic, code="CH506"):
    """A number beyond the limits of the header, or of the compiler."""

    title = "{what} {value} is out of range"
    label = "only {first} to {last}"
    help = "keep within {first} to {last}, or change the header if it is too small"
    what: str
    value: str
    first: int
    last: int


CountOutOfRange = NumberOutOfRange.worded("CountOutOfRange", title="number of {what} {value} is out of range")


class LaneTwice(Diagnostic, code="CH507"):
    """A worker has two headings."""

    title = "worker {worker} has two lanes"
    label = "the second"
    help = "write everything that worker {worker} does under one heading"
    related = ("first", "the first is here")
    worker: int
    first: Span


class LanesMissing(Diagnostic, code="CH508"):
    """A worker has no heading."""

    title = "worker {worker} has no lane{others:(and more)}"
    label = "the text has {lanes} of {workers:lane}"
    help = "add the heading `worker {worker}:`; a worker with nothing to do has an empty lane"
    worker: int
    lanes: int
    workers: int
    others: int


class WrongLevel(Diagnostic, code="CH513"):
    """An operation of another level of IR."""

    title = "a {level} has no such line"
    label = "this belongs to a {other}"
    help = "{level} lines look like `{form}`; or begin the text with `{other} NAME`"
    level: str
    other: str
    form: str


class MoreMistakes(Diagnostic, code="CH515"):
    """More errors in an IR text than are shown one by one."""

    title = "{count:more error} like these"
    label = "the next one is here"
    help = "mend the first errors and compile again"
    count: int


class VersionUnsaid(Diagnostic, code="CH518"):
    """An operation without a version where there is no flush, or one with a version where there is one."""

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
    """A plain number, as in ``m3``, where micro-batches and versions are counted from the turn, as in ``m+1``."""

    title = "`{number}` is not counted from the turn"
    label = "the header says `per turn`: this line comes again in every turn"
    help = (
        "write `m` for the first micro-batch of the turn, `m+1` or `m-1` for others; `v` for the weights that the "
        "updates before the turn have made"
    )
    number: str


class NoTurnToCountFrom(Diagnostic, code="CH522"):
    """A number that is counted from a turn, as in ``m+1``, in a level that has no turn."""

    title = "`{number}` is counted from a turn, and this {level} has none"
    label = "which one?"
    help = "write its number, as in `m3`; or add `updates U per turn` to the header, for a scheme without a flush"
    number: str
    level: str


NoTurnInPlan = NoTurnToCountFrom.worded(
    "NoTurnInPlan", help="write its number, as in `m3`; a plan shows some updates from the first one on"
)


class RingUnsaid(Diagnostic, code="CH523"):
    """A ``recv`` of a turn that does not say how many slots its messages use one after the other."""

    title = "this `recv` does not say how many slots there are"
    label = "the next turn takes another slot"
    help = "add the number of slots that these messages take in turn, as in `into {slot} of {count}`"
    slot: int
    count: int


class RingsDiffer(Diagnostic, code="CH524"):
    """Receives of a turn that give different numbers of slots for the same messages."""

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
    """A pair in a level without a flush."""

    title = "a pair has no place where micro-batches go on for ever"
    label = "a pair"
    help = "write the two operations on two lines, one after the other"


class LineWithoutSlice(Diagnostic, code="CH530"):
    """A line of IR text that names no slice though micro-batches have slices."""

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
