"""CH3xx: what can be wrong with the operations of a plan or a schedule, wherever it comes from."""

from dataclasses import dataclass
from typing import ClassVar

from chimera_ir.diagnostics.model import Diagnostic, Note, Severity
from chimera_ir.plural import and_more
from chimera_ir.source import Span


class Conflict(Diagnostic):
    """Two operations of one worker on one clock."""

    code: ClassVar[str] = "CH301"
    title: ClassVar[str] = "worker {worker} has two operations on clock {clock}{others}"
    label: ClassVar[str] = "`{second}` on clock {clock}"
    help: ClassVar[str] = "give one of the two another clock, or place its stage on another worker"

    worker: int
    clock: int
    first: str
    second: str
    first_span: Span
    count: int
    around: tuple[str, ...]

    @property
    def others(self) -> str:
        """How many more conflicts these two lines have."""
        return and_more(self.count)

    def notes(self) -> tuple[Note, ...]:
        """The other operation."""
        return (Note(f"`{self.first}` is on clock {self.clock} of worker {self.worker} as well", self.first_span),)

    def drawing(self) -> tuple[str, ...]:
        """The clocks around the conflict."""
        return self.around


class WrongWorker(Diagnostic):
    """An operation on a worker that does not hold its stage for its pipe."""

    code: ClassVar[str] = "CH304"
    title: ClassVar[str] = (
        "`{operation}` is on worker {worker}, but pipe {pipe} has stage {stage} on worker {right}{others}"
    )
    label: ClassVar[str] = "on worker {worker}"
    help: ClassVar[str] = "move it to worker {right}, or place stage {stage} of pipe {pipe} on worker {worker}"

    operation: str
    worker: int
    right: int
    pipe: str
    stage: int
    count: int

    @property
    def others(self) -> str:
        """How many more are on the wrong worker."""
        return and_more(self.count)


class PlacedOutside(Diagnostic):
    """A pipe places a stage on a worker that does not exist."""

    code: ClassVar[str] = "CH305"
    title: ClassVar[str] = "pipe {pipe} places stage {stage} on worker {worker}, but there are workers 0 to {last}"
    label: ClassVar[str] = "needs worker {worker}"
    help: ClassVar[str] = "place it on one of the workers 0 to {last}, or have more workers"

    pipe: str
    stage: int
    worker: int
    last: int


class StagesUnplaced(Diagnostic):
    """A pipe places too few or too many stages."""

    code: ClassVar[str] = "CH306"
    title: ClassVar[str] = "pipe {pipe} places {placed} of {stages:stage}"
    label: ClassVar[str] = "every pipe places every stage once"
    help: ClassVar[str] = "give pipe {pipe} a worker for each of the stages 0 to {last}"

    pipe: str
    placed: int
    stages: int

    @property
    def last(self) -> int:
        """The last stage."""
        return self.stages - 1


class MicrosNotNumbered(Diagnostic):
    """The micro-batches of all pipes together are not 0 .. N-1."""

    code: ClassVar[str] = "CH307"
    title: ClassVar[str] = "micro-batch {micro} belongs to {pipes:pipe}, not to one"
    label: ClassVar[str] = "in a pipe's range of micro-batches"
    help: ClassVar[str] = "number the micro-batches of all pipes 0 to {last}, each number once"

    micro: int
    pipes: int
    last: int


class UnknownOperation(Diagnostic):
    """An operation on a micro-batch or stage that does not exist."""

    code: ClassVar[str] = "CH308"
    title: ClassVar[str] = "`{operation}` is on worker {worker}, but {reason}{others}"
    label: ClassVar[str] = "there is no such operation"
    help: ClassVar[str] = (
        "stages are numbered 0 to {last_stage}, micro-batches 0 to {last_micro}, workers 0 to {last_worker}"
    )

    operation: str
    worker: int
    reason: str
    last_stage: int
    last_micro: int
    last_worker: int
    count: int

    @property
    def others(self) -> str:
        """How many more there are."""
        return and_more(self.count)


class KindNotThere(Diagnostic):
    """An operation of a kind that the header leaves out."""

    code: ClassVar[str] = "CH316"
    title: ClassVar[str] = "`{operation}` is on worker {worker}, but the header says `{kinds}`{others}"
    label: ClassVar[str] = "of another kind"
    help: ClassVar[str] = "remove the operation, or the `kinds` line of the header"

    operation: str
    worker: int
    kinds: str
    count: int

    @property
    def others(self) -> str:
        """How many more there are."""
        return and_more(self.count)


class ClockNotIncreasing(Diagnostic):
    """A clock that does not increase along a data dependency: legal, but the clock is then no proof, and slow."""

    severity: ClassVar[Severity] = Severity.WARNING
    code: ClassVar[str] = "CH309"
    title: ClassVar[str] = "the clock does not increase from `{before}` to `{after}`{others}"
    label: ClassVar[str] = "`{after}` has clock {after_clock} on worker {after_worker}"
    help: ClassVar[str] = "give `{after}` a clock above {before_clock}, so that nobody waits for it longer than planned"

    before: str
    before_clock: int
    before_worker: int
    before_span: Span
    after: str
    after_clock: int
    after_worker: int
    count: int

    @property
    def others(self) -> str:
        """How many more instances these two lines have."""
        return and_more(self.count)

    def notes(self) -> tuple[Note, ...]:
        """The operation that must come before."""
        text = f"it needs `{self.before}`, which has clock {self.before_clock} on worker {self.before_worker}"
        return (Note(text, self.before_span),)


class LaneCount(Diagnostic):
    """A level with more or fewer lanes than workers."""

    code: ClassVar[str] = "CH311"
    title: ClassVar[str] = "the schedule has {lanes:lane} for {workers:worker}"
    label: ClassVar[str] = "one lane per worker"
    help: ClassVar[str] = "give every worker one lane; a worker with nothing to do has an empty one"

    lanes: int
    workers: int


class GroupsDiffer(Diagnostic):
    """Neighbouring stages that take the micro-batches in different groups."""

    code: ClassVar[str] = "CH312"
    title: ClassVar[str] = "`{after}` does not fit `{before}`, whose {what} it needs{others}"
    label: ClassVar[str] = "`{after}` is over other micro-batches"
    help: ClassVar[str] = "an operation hands on all its {what} at once: write both lines over the same micro-batches"

    before: str
    before_span: Span
    after: str
    what: str
    count: int

    @property
    def others(self) -> str:
        """How many more instances these two lines have."""
        return and_more(self.count)

    def notes(self) -> tuple[Note, ...]:
        """The operation that hands over."""
        return (Note(f"`{self.before}` is here", self.before_span),)


class PipesMixed(Diagnostic):
    """An operation over micro-batches of several pipes."""

    code: ClassVar[str] = "CH313"
    title: ClassVar[str] = "`{operation}` is over micro-batches of two pipes, {first} and {second}"
    label: ClassVar[str] = "micro-batches that take different ways"
    help: ClassVar[str] = "write one operation for each pipe"

    operation: str
    first: str
    second: str


class UpdatesMixed(Diagnostic):
    """A backward whose gradients would count for several updates."""

    code: ClassVar[str] = "CH314"
    title: ClassVar[str] = "`{operation}` is over micro-batches of update {first} and of update {second}"
    label: ClassVar[str] = "its gradients are one sum, which one step uses"
    help: ClassVar[str] = "write one backward for each update"

    operation: str
    first: int
    second: int


@dataclass(frozen=True, slots=True)
class Link:
    """One operation of a cycle; ``reason`` says why it comes before the next."""

    operation: str
    place: str
    span: Span
    reason: str


class Cycle(Diagnostic):
    """Operations that wait for each other in a circle."""

    code: ClassVar[str] = "CH310"
    title: ClassVar[str] = "{who} in a cycle"
    label: ClassVar[str] = "`{worst}` can never start"
    help: ClassVar[str] = "{advice}"

    worst: str
    links: tuple[Link, ...]
    advice: str

    @property
    def who(self) -> str:
        """How many operations wait, and for whom."""
        length = len(self.links)
        return f"{length:,} operations wait for each other" if length > 1 else f"`{self.worst}` waits for itself"

    def notes(self) -> tuple[Note, ...]:
        """The cycle, operation by operation."""
        following = (*self.links[1:], self.links[0])
        return tuple(
            Note(
                f"`{link.operation}` ({link.place}) must end before `{after.operation}` starts: {link.reason}",
                link.span,
            )
            for link, after in zip(self.links, following, strict=True)
        )


class NotLowered(Diagnostic):
    """A correct schedule for which the compiler finds no program."""

    code: ClassVar[str] = "CH315"
    title: ClassVar[str] = "this schedule is legal, but the compiler finds no program for it"
    label: ClassVar[str] = "{problem}"
    help: ClassVar[str] = "let the operations read newer weights, or change their clocks or places"

    problem: str
    reason: str

    def notes(self) -> tuple[Note, ...]:
        """Why the program that lowering makes is wrong."""
        return (Note(f"in the program that it tries: {self.reason}"),) if self.reason else ()


class TiesDiffer(Diagnostic):
    """Stages that share parameters, but read different versions of them."""

    code: ClassVar[str] = "CH317"
    title: ClassVar[str] = "stages {first} and {other} are tied, but read different versions of the weights"
    label: ClassVar[str] = "`{other_line}` reads another version than `{first_line}`"
    help: ClassVar[str] = (
        "let both stages read one version of each micro-batch, as with double-buffered weights, or tie no stages: a "
        "parameter that stages share has one version at a time"
    )

    first: int
    other: int
    first_line: str
    other_line: str
    first_span: Span

    def notes(self) -> tuple[Note, ...]:
        """The forward on the other stage."""
        return (Note(f"`{self.first_line}` is here", self.first_span),)
