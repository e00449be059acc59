"""CH505 and on: mistakes in the header of an IR text."""

from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.plural import counted
from chimera_ir.source import Span


class MissingHeader(Diagnostic, code="CH505"):
    """A line that every header has is missing."""

    title = "the header has no `{word}` line"
    label = "the header begins here"
    help = "add a line such as `{form}`"
    word: str
    form: str


class PlacementLength(Diagnostic, code="CH509"):
    """A pipe lists more or fewer workers after ``on`` than there are stages."""

    title = "pipe {pipe} places {placed} of {stages:stage}"
    label = "one worker per stage after `on`"
    help = "name {stages:worker}, in the order of the stages"
    pipe: str
    placed: int
    stages: int


class MicroTwice(Diagnostic, code="CH510"):
    """A micro-batch belongs to two pipes, or twice to one."""

    title = "micro-batch {micro} is given twice"
    label = "the second time"
    help = "every micro-batch 0 to {last} belongs to exactly one pipe"
    micro: int
    last: int


class MicroElsewhere(Diagnostic, code="CH532"):
    """A pipe that recomputes a micro-batch of another pipe."""

    title = "the pipe `{pipe}` has no micro-batch {micro} to recompute"
    label = "recomputes micro-batch {micro}"
    help = "behind `of` list micro-batches of this pipe"
    micro: int
    pipe: str


class MicroMissing(Diagnostic, code="CH511"):
    """A micro-batch belongs to no pipe."""

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
    """A fact that the header states twice."""

    title = "{what} is given twice"
    label = "the second time"
    help = "keep one of the two"
    what: str


BoundTwice = HeaderTwice.worded("BoundTwice", title="the bound on {what} is given twice")


class BoundLength(Diagnostic, code="CH529"):
    """A bound lists the limits of more or fewer workers than there are."""

    title = "the bound on {what} has {limits:limit} for {workers:worker}"
    label = "one limit for all workers, or one for each"
    help = "give one limit, or {workers}, in the order of the workers"
    what: str
    limits: int
    workers: int


SyncTwice = HeaderTwice.worded("SyncTwice", title="the synchronisation of stage {what} is given twice")


class EntryTwice(HeaderTwice):
    """A parameter, a pipe, a kind of operation or a stage that stands twice in the header, or in a line of it."""

    title = "{noun} {what} is given twice"
    noun: str


class HalvesLeftOver(Diagnostic, code="CH516"):
    """An odd number of half micro-batches, which do not make whole ones."""

    title = "{count:half micro-batch} cannot be whole ones"
    label = "an odd number"
    help = "count two for each micro-batch"
    count: int


class UnevenUpdates(Diagnostic, code="CH517"):
    """Micro-batches that the updates cannot share equally, or a period that is not a number of whole updates.

    ``count`` is the number of micro-batches and ``period`` that of a period; both count slices, ``slices`` to a
    micro-batch.
    """

    title = "{updates:update} that repeat every {repeated} cannot be made of {whole:micro-batch}{cut}"
    label = "the updates would not have equally many micro-batches"
    help = "`updates U period L`: U divides the micro-batches, and L is a multiple of what an update takes"
    count: int
    updates: int
    period: int
    slices: int = 1

    @property
    def whole(self) -> int:
        """The number of whole micro-batches in the text, whose own numbers count slices."""
        return self.count // self.slices

    @property
    def cut(self) -> str:
        """Words on the slices of each micro-batch."""
        return f" of {counted(self.slices, 'slice')}" if self.slices > 1 else ""

    @property
    def repeated(self) -> str:
        """The period, in slices if there are any."""
        return self.parts(self.period)

    def parts(self, count: int) -> str:
        """A number of parts in words."""
        return counted(count, "slice") if self.slices > 1 else str(count)


class PeriodTooShort(UnevenUpdates):
    """A period that is not a number of whole updates."""

    label = "an update takes {taken_by_update}"

    @property
    def taken_by_update(self) -> str:
        """The micro-batches of an update, or its slices."""
        return self.parts(self.count // self.updates)


UnevenPlan = UnevenUpdates.worded(
    "UnevenPlan", label="every update has as many micro-batches, and a period is made of whole updates"
)


class WrongUpdates(Diagnostic, code="CH519"):
    """The `updates` line of a plan in a schedule or a program, or the other way round."""

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
    """A turn whose updates cannot share its micro-batches equally."""

    title = "{updates:update} of a turn cannot be made of {micro_batches:micro-batch}"
    label = "the updates would not have equally many micro-batches"
    help = "`updates U per turn`: U divides the micro-batches of the turn"
    micro_batches: int
    updates: int


class KindLacking(Diagnostic, code="CH525"):
    """A ``kinds`` line without the kind of operation that makes what another kind of the line reads."""

    title = "`{line}`: no operation makes what a {reader} reads"
    label = "as {reason}"
    help = "name the kind that makes it as well; a header without this line has all kinds"
    line: str
    reader: str
    reason: str


class KindUnfinished(Diagnostic, code="CH528"):
    """A ``kinds`` line with operations that leave weight gradients, but without the kind that sums them."""

    title = "`{line}`: no operation sums the weight gradients that {nouns} leave"
    label = "micro-batches with {nouns} would be missing from the update"
    help = "name the kind that sums them as well; a header without this line has all kinds"
    line: str
    nouns: str


class NoUpdates(Diagnostic, code="CH526"):
    """A line about updates in a header whose kinds of operations make no update."""

    title = "`{word}` is about updates, and there are none"
    label = "nothing to say here"
    help = "leave it out; or remove `{line}`, and add the operations that make an update"
    related = ("kinds", "operations of these kinds add to no gradients")
    word: str
    line: str
    kinds: Span


class SlicesLeftOver(Diagnostic, code="CH531"):
    """A count of slices that ends within a micro-batch."""

    title = "after {count:slice} no micro-batch ends: each has {slices:slice}"
    label = "not a multiple of {slices}"
    help = "count {slices} for each micro-batch: `micro_batches COUNT slices K`, updates and pipes count slices"
    count: int
    slices: int


class LengthsOfOthers(Diagnostic, code="CH533"):
    """More or fewer lengths than a micro-batch has slices."""

    title = "{count:length} for {slices:slice} of a micro-batch"
    label = "{count:length}"
    help = "give each slice its length, as in `micro_batches 8 slices 4 lengths 3 2 2 1`; or none, if all are equal"
    count: int
    slices: int
