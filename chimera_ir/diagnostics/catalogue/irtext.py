"""CH5xx: what can be wrong with the text form of the IR."""

from typing import ClassVar

from chimera_ir.diagnostics.model import Diagnostic, Note
from chimera_ir.source import Span


class NoTitle(Diagnostic):
    """The text does not begin as any level of IR does."""

    code: ClassVar[str] = "CH501"
    title: ClassVar[str] = "this is not the text of a plan, a schedule or a program"
    label: ClassVar[str] = "the first line names the level"
    help: ClassVar[str] = "begin with `plan NAME`, `schedule NAME` or `program NAME`"


class MalformedLine(Diagnostic):
    """A malformed line."""

    code: ClassVar[str] = "CH502"
    title: ClassVar[str] = "this `{word}` line is malformed"
    label: ClassVar[str] = "expected `{form}`"
    help: ClassVar[str] = "write `{form}`, with your own names and numbers, and nothing after it but a comment"

    word: str
    form: str


class UnknownKind(Diagnostic):
    """A line that begins with an unknown word."""

    code: ClassVar[str] = "CH503"
    title: ClassVar[str] = "no line begins with `{word}`"
    label: ClassVar[str] = "unknown"
    help: ClassVar[str] = "{advice}"

    word: str
    advice: str


class MisplacedLine(Diagnostic):
    """A line out of order."""

    code: ClassVar[str] = "CH504"
    title: ClassVar[str] = "this line cannot stand here"
    label: ClassVar[str] = "{reason}"
    help: ClassVar[str] = "the order is: level and name, header lines, then the operations{under}"

    reason: str
    under: str


class MissingHeader(Diagnostic):
    """The header lacks a line."""

    code: ClassVar[str] = "CH505"
    title: ClassVar[str] = "the header has no `{word}` line"
    label: ClassVar[str] = "the header begins here"
    help: ClassVar[str] = "add a line such as `{form}`"

    word: str
    form: str


class NumberOutOfRange(Diagnostic):
    """A number is outside of what the header, or the compiler, allows."""

    code: ClassVar[str] = "CH506"
    title: ClassVar[str] = "{what} {value} is out of range"
    label: ClassVar[str] = "only {first} to {last}"
    help: ClassVar[str] = "keep within {first} to {last}, or change the header if it is too small"

    what: str
    value: str
    first: int
    last: int


class LaneTwice(Diagnostic):
    """A worker has two headings."""

    code: ClassVar[str] = "CH507"
    title: ClassVar[str] = "worker {worker} has two lanes"
    label: ClassVar[str] = "the second"
    help: ClassVar[str] = "write everything that worker {worker} does under one heading"

    worker: int
    first: Span

    def notes(self) -> tuple[Note, ...]:
        """Where the first lane is."""
        return (Note("the first is here", self.first),)


class LanesMissing(Diagnostic):
    """A worker has no heading."""

    code: ClassVar[str] = "CH508"
    title: ClassVar[str] = "worker {worker} has no lane{others}"
    label: ClassVar[str] = "the text has {lanes} of {workers:lane}"
    help: ClassVar[str] = "add the heading `worker {worker}:`; a worker with nothing to do has an empty lane"

    worker: int
    lanes: int
    workers: int

    @property
    def others(self) -> str:
        """How many more there are."""
        more = self.workers - self.lanes - 1
        return f" (and {more} more)" if more else ""


class PlacementLength(Diagnostic):
    """A pipe places too few or too many stages."""

    code: ClassVar[str] = "CH509"
    title: ClassVar[str] = "pipe {pipe} places {placed} of {stages:stage}"
    label: ClassVar[str] = "one worker per stage after `on`"
    help: ClassVar[str] = "name {stages:worker}, in the order of the stages"

    pipe: str
    placed: int
    stages: int


class MicroTwice(Diagnostic):
    """A micro-batch belongs to two pipes, or twice to one."""

    code: ClassVar[str] = "CH510"
    title: ClassVar[str] = "micro-batch {micro} is given twice"
    label: ClassVar[str] = "the second time"
    help: ClassVar[str] = "every micro-batch 0 to {last} belongs to exactly one pipe"

    micro: int
    last: int


class MicroMissing(Diagnostic):
    """A micro-batch belongs to no pipe."""

    code: ClassVar[str] = "CH511"
    title: ClassVar[str] = "micro-batch {micro} belongs to no pipe{others}"
    label: ClassVar[str] = "given to a pipe: {given} of {micro_batches:micro-batch}"
    help: ClassVar[str] = "add {micro} to the runs after `micros` of one pipe, as in `{micro}..{after}`"

    micro: int
    given: int
    micro_batches: int

    @property
    def after(self) -> int:
        """The end of the run that would add it."""
        return self.micro + 1

    @property
    def others(self) -> str:
        """How many more there are."""
        more = self.micro_batches - self.given - 1
        return f" (and {more} more)" if more else ""


class WrongLevel(Diagnostic):
    """An operation of another level of IR."""

    code: ClassVar[str] = "CH513"
    title: ClassVar[str] = "a {level} has no such line"
    label: ClassVar[str] = "this belongs to a {other}"
    help: ClassVar[str] = "{level} lines look like `{form}`; or begin the text with `{other} NAME`"

    level: str
    other: str
    form: str


class HeaderTwice(Diagnostic):
    """Something in the header is said twice."""

    code: ClassVar[str] = "CH514"
    title: ClassVar[str] = "{what} is given twice"
    label: ClassVar[str] = "the second time"
    help: ClassVar[str] = "keep one of the two"

    what: str


class MoreMistakes(Diagnostic):
    """More errors than are shown."""

    code: ClassVar[str] = "CH515"
    title: ClassVar[str] = "{count:more error} like these"
    label: ClassVar[str] = "the next one is here"
    help: ClassVar[str] = "mend the first errors and compile again"

    count: int


class HalvesLeftOver(Diagnostic):
    """Halves that make no whole number of micro-batches."""

    code: ClassVar[str] = "CH516"
    title: ClassVar[str] = "{count:half micro-batch} cannot be whole ones"
    label: ClassVar[str] = "an odd number"
    help: ClassVar[str] = "count two for each micro-batch"

    count: int


class UnevenUpdates(Diagnostic):
    """Updates that do not share the micro-batches evenly, or lanes that repeat within an update."""

    code: ClassVar[str] = "CH517"
    title: ClassVar[str] = "{updates:update} that repeat every {period} cannot be made of {micro_batches:micro-batch}"
    label: ClassVar[str] = "{reason}"
    help: ClassVar[str] = (
        "`updates U period L`: U divides the micro-batches, and L is a multiple of what an update takes"
    )

    micro_batches: int
    updates: int
    period: int
    reason: str


class VersionUnsaid(Diagnostic):
    """An operation of an asynchronous level without a version, or one of a synchronous level with a version."""

    code: ClassVar[str] = "CH518"
    title: ClassVar[str] = "{what}"
    label: ClassVar[str] = "{label_text}"
    help: ClassVar[str] = "{advice}"

    what: str
    label_text: str
    advice: str


class WrongUpdates(Diagnostic):
    """The `updates` line of a plan in a schedule or a program, or the other way round."""

    code: ClassVar[str] = "CH519"
    title: ClassVar[str] = "a {level} without a flush has another `updates` line"
    label: ClassVar[str] = "{reason}"
    help: ClassVar[str] = "{advice}"

    level: str
    reason: str
    advice: str


class UnevenTurn(Diagnostic):
    """The micro-batches of a turn cannot be shared out to its updates."""

    code: ClassVar[str] = "CH520"
    title: ClassVar[str] = "{updates:update} of a turn cannot be made of {micro_batches:micro-batch}"
    label: ClassVar[str] = "the updates would not have equally many micro-batches"
    help: ClassVar[str] = "`updates U per turn`: U divides the micro-batches of the turn"

    micro_batches: int
    updates: int


class NotOfTurn(Diagnostic):
    """A number in a turn that is not counted from the turn."""

    code: ClassVar[str] = "CH521"
    title: ClassVar[str] = "`{number}` is not counted from the turn"
    label: ClassVar[str] = "the header says `per turn`: this line comes again in every turn"
    help: ClassVar[str] = (
        "write `m` for the first micro-batch of the turn, `m+1` or `m-1` for others; `v` for the weights that the "
        "updates before the turn have made"
    )

    number: str


class NoTurnToCountFrom(Diagnostic):
    """A number that is counted from a turn, in a level that has none."""

    code: ClassVar[str] = "CH522"
    title: ClassVar[str] = "`{number}` is counted from a turn, and this {level} has none"
    label: ClassVar[str] = "which one?"
    help: ClassVar[str] = "write its number, as in `m3`; {advice}"

    number: str
    level: str
    advice: str


class RingUnsaid(Diagnostic):
    """A receive of a turn without the number of slots."""

    code: ClassVar[str] = "CH523"
    title: ClassVar[str] = "this `recv` does not say how many slots there are"
    label: ClassVar[str] = "the next turn takes another slot"
    help: ClassVar[str] = "add the number of slots that these messages take in turn, as in `into {slot} of {count}`"

    slot: int
    count: int


class RingsDiffer(Diagnostic):
    """Receives of a turn that give different numbers of slots for the same messages."""

    code: ClassVar[str] = "CH524"
    title: ClassVar[str] = "the messages s{source}->s{target} have {count:slot} here and {other:slot} before"
    label: ClassVar[str] = "they go round the same slots"
    help: ClassVar[str] = "say the same number in all of these lines"

    source: int
    target: int
    count: int
    other: int
    before: Span

    def notes(self) -> tuple[Note, ...]:
        """Where the other number is."""
        return (Note(f"here they have {self.other}", self.before),)


class KindLacking(Diagnostic):
    """A header with a kind of operation and without the kind that makes what it reads."""

    code: ClassVar[str] = "CH525"
    title: ClassVar[str] = "`{line}`: no operation makes what a {reader} reads"
    label: ClassVar[str] = "{reason}"
    help: ClassVar[str] = "name the kind that makes it as well; a header without this line has all kinds"

    line: str
    reader: str
    reason: str


class KindUnfinished(Diagnostic):
    """A header with kinds that sum the gradients of weights, and with one whose share nothing sums."""

    code: ClassVar[str] = "CH528"
    title: ClassVar[str] = "`{line}`: no operation sums the weight gradients that {nouns} leave"
    label: ClassVar[str] = "micro-batches with {nouns} would be missing from the update"
    help: ClassVar[str] = "name the kind that sums them as well; a header without this line has all kinds"

    line: str
    nouns: str


class NoUpdates(Diagnostic):
    """A line of a header about updates, where the kinds of operations make none."""

    code: ClassVar[str] = "CH526"
    title: ClassVar[str] = "`{word}` is about updates, and there are none"
    label: ClassVar[str] = "nothing to say here"
    help: ClassVar[str] = "leave it out; or remove `{line}`, and add the operations that make an update"

    word: str
    line: str
    kinds: Span

    def notes(self) -> tuple[Note, ...]:
        """Where the kinds are."""
        return (Note("operations of these kinds add to no gradients", self.kinds),)


class PairInStream(Diagnostic):
    """A pair in a level without a flush."""

    code: ClassVar[str] = "CH527"
    title: ClassVar[str] = "a pair has no place where micro-batches go on for ever"
    label: ClassVar[str] = "a pair"
    help: ClassVar[str] = "write the two operations on two lines, one after the other"
