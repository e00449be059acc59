"""CH4xx: what can be wrong with the communication, the synchronisation and the memory of a program."""

from dataclasses import dataclass
from typing import ClassVar

from chimera_ir.diagnostics.model import Diagnostic, Note, Severity
from chimera_ir.source import Span


class MissingLine(Diagnostic):
    """A line that a worker lacks."""

    code: ClassVar[str] = "CH401"
    title: ClassVar[str] = "worker {worker} has no `{line}`"
    label: ClassVar[str] = "{reason}"
    help: ClassVar[str] = "add `{line}` to the lane of worker {worker}, {place}"

    worker: int
    line: str
    reason: str
    place: str


class RedundantLine(Diagnostic):
    """A line that repeats another, or changes nothing."""

    code: ClassVar[str] = "CH402"
    title: ClassVar[str] = "`{line}` on worker {worker} is redundant: {reason}"
    label: ClassVar[str] = "redundant"
    help: ClassVar[str] = "remove the line"

    worker: int
    line: str
    reason: str
    other: tuple[Span, ...]

    def notes(self) -> tuple[Note, ...]:
        """The line that does the same."""
        return tuple(Note("this line does the same", span) for span in self.other)


class MisplacedLine(Diagnostic):
    """A line before another that it must follow."""

    code: ClassVar[str] = "CH403"
    title: ClassVar[str] = "worker {worker} runs `{line}` before `{other}`"
    label: ClassVar[str] = "{reason}"
    help: ClassVar[str] = "on worker {worker}, move `{line}` below `{other}`"

    worker: int
    line: str
    other: str
    other_span: Span
    reason: str

    def notes(self) -> tuple[Note, ...]:
        """The line that must come first."""
        return (Note(f"`{self.other}` comes only here", self.other_span),)


class WrongPeer(Diagnostic):
    """A message to or from a worker that does not take part in it."""

    code: ClassVar[str] = "CH404"
    title: ClassVar[str] = (
        "`{line}` on worker {worker} names worker {peer}, but stage {stage} of this micro-batch is on worker {right}"
    )
    label: ClassVar[str] = "the peer must be worker {right}"
    help: ClassVar[str] = "write w{right} instead of w{peer}"

    worker: int
    line: str
    peer: int
    right: int
    stage: int


class UnknownMessage(Diagnostic):
    """A line about a message that does not exist, or does not concern this worker."""

    code: ClassVar[str] = "CH405"
    title: ClassVar[str] = "`{line}` on worker {worker} is about no message of this worker: {reason}"
    label: ClassVar[str] = "no such message here"
    help: ClassVar[str] = "remove the line, or correct its micro-batch and stages"

    worker: int
    line: str
    reason: str


class SlotInUse(Diagnostic):
    """A receive into a buffer whose content is still needed."""

    code: ClassVar[str] = "CH406"
    title: ClassVar[str] = "`{line}` on worker {worker} overwrites slot {slot} while it is in use"
    label: ClassVar[str] = "slot {slot} still holds {content}"
    help: ClassVar[str] = "receive into another slot, or post the receive after `{last_use}`"

    worker: int
    line: str
    slot: int
    content: str
    last_use: str
    last_use_span: Span
    taken: Span

    def notes(self) -> tuple[Note, ...]:
        """Since when and until when the slot is in use."""
        return (
            Note("the slot is taken here", self.taken),
            Note(f"and free after `{self.last_use}`", self.last_use_span),
        )


class SlotTooHigh(Diagnostic):
    """A slot number beyond all that are needed."""

    code: ClassVar[str] = "CH407"
    title: ClassVar[str] = "`{line}` on worker {worker} names slot {slot}, beyond any need"
    label: ClassVar[str] = "stage and direction have slots 0 to {last} at most, one per message"
    help: ClassVar[str] = "use a slot from 0 to {last}"

    worker: int
    line: str
    slot: int
    messages: int

    @property
    def last(self) -> int:
        """The highest slot that makes sense."""
        return self.messages - 1


class ReceivesOutOfOrder(Diagnostic):
    """Receives from a peer that are not in the order of its sends."""

    code: ClassVar[str] = "CH408"
    title: ClassVar[str] = "worker {worker} posts `{line}` where worker {peer} sends `{sent}`"
    label: ClassVar[str] = "number {place} of the receives from worker {peer}"
    help: ClassVar[str] = (
        "post the receives from worker {peer} in the order of its sends: an in-order queue matches them by place"
    )

    worker: int
    line: str
    peer: int
    sent: str
    place: int
    sent_span: Span

    def notes(self) -> tuple[Note, ...]:
        """The send that this receive meets."""
        return (
            Note(f"number {self.place} of the sends of worker {self.peer} to worker {self.worker}", self.sent_span),
        )


@dataclass(frozen=True, slots=True)
class Blocked:
    """A lane that goes no further: what it waits for, and whose turn it is."""

    worker: int
    line: str
    meaning: str
    needs: str
    peer: int
    span: Span


class Deadlock(Diagnostic):
    """Lanes that wait for each other."""

    code: ClassVar[str] = "CH409"
    title: ClassVar[str] = "{lanes}: the program cannot finish with {transports}"
    label: ClassVar[str] = "worker {worker} waits for {meaning}"
    help: ClassVar[str] = "{advice}"

    transports: str
    blocked: tuple[Blocked, ...]

    @property
    def lanes(self) -> str:
        """Who waits for whom, in words."""
        count = len(self.blocked)
        return f"{count:,} workers wait for each other" if count > 1 else f"worker {self.worker} waits for itself"

    @property
    def worker(self) -> int:
        """The first worker of the circle."""
        return self.blocked[0].worker

    @property
    def meaning(self) -> str:
        """What the first worker of the circle waits for."""
        return self.blocked[0].meaning

    @property
    def advice(self) -> str:
        """A way to break the circle."""
        first = self.blocked[0]
        last = self.blocked[-1]
        return f"on worker {last.peer}, run `{last.needs}` before `{first.line}`"

    def notes(self) -> tuple[Note, ...]:
        """The circle, worker by worker."""
        return tuple(
            Note(
                f"worker {each.worker} stands at `{each.line}`, for {each.meaning},"
                f" until worker {each.peer} runs `{each.needs}`",
                each.span,
            )
            for each in self.blocked
        )


class NotHeld(Diagnostic):
    """Gradient synchronisation of a stage, or of tied stages, on a worker that does not hold it, or any of them."""

    code: ClassVar[str] = "CH410"
    title: ClassVar[str] = "`{line}` on worker {worker}, which does not hold {group}"
    label: ClassVar[str] = "{group} is held by {holders}"
    help: ClassVar[str] = "remove the line"

    worker: int
    line: str
    group: str
    holders: str


class NotTied(Diagnostic):
    """Gradient synchronisation of what stages share that are not tied."""

    code: ClassVar[str] = "CH421"
    title: ClassVar[str] = "`{line}` on worker {worker}: the stages {stages} share no parameters"
    label: ClassVar[str] = "no line of the header ties them"
    help: ClassVar[str] = "remove the line, or add `{header_line}` to the header"

    worker: int
    line: str
    stages: str
    header_line: str


class LaunchOrder(Diagnostic):
    """Workers that launch their sums in orders that contradict each other."""

    code: ClassVar[str] = "CH411"
    title: ClassVar[str] = "workers launch the sums of their gradients in orders that contradict each other"
    label: ClassVar[str] = "{order}"
    help: ClassVar[str] = (
        "launch them in one order on all workers, so that no two groups of workers wait for each other"
    )

    order: str
    others: tuple[Note, ...]

    def notes(self) -> tuple[Note, ...]:
        """The orders that close the circle."""
        return self.others


class AfterStep(Diagnostic):
    """An operation that reads weights which the update has already changed."""

    code: ClassVar[str] = "CH412"
    title: ClassVar[str] = "worker {worker} runs `{line}` after `{step}`"
    label: ClassVar[str] = "reads weights of {group} that are one update too new"
    help: ClassVar[str] = "on worker {worker}, move `{step}` below `{line}`"

    worker: int
    line: str
    group: str
    step: str
    step_span: Span

    def notes(self) -> tuple[Note, ...]:
        """The step."""
        return (Note("the weights change here", self.step_span),)


class NoSuchUpdate(Diagnostic):
    """A sum or a step that leads to a version which no update makes."""

    code: ClassVar[str] = "CH416"
    title: ClassVar[str] = "`{line}` on worker {worker} belongs to no update"
    label: ClassVar[str] = "{reason}"
    help: ClassVar[str] = "remove the line, or name the version that its update leads to"

    worker: int
    line: str
    reason: str


class VersionsDiffer(Diagnostic):
    """A backward that reads other weights than its forward."""

    code: ClassVar[str] = "CH417"
    title: ClassVar[str] = "`{backward}` reads another version of the weights than `{forward}`"
    label: ClassVar[str] = "gradients of two versions at once are gradients of none"
    help: ClassVar[str] = "let both read the version of the forward, and keep it until the backward"

    backward: str
    forward: str
    forward_span: Span

    def notes(self) -> tuple[Note, ...]:
        """The forward."""
        return (Note(f"`{self.forward}` is here", self.forward_span),)


class TooManyCopies(Diagnostic):
    """More versions of a group's weights kept than operations read."""

    code: ClassVar[str] = "CH418"
    title: ClassVar[str] = "worker {worker} keeps {kept:copy} of the weights of {group}, {needed} {are} needed"
    label: ClassVar[str] = "one more copy from here on"
    help: ClassVar[str] = "{advice}"

    worker: int
    group: str
    kept: int
    needed: int
    advice: str

    @property
    def are(self) -> str:
        """The verb."""
        return "are" if self.needed > 1 else "is"


class BoundExceeded(Diagnostic):
    """A declared memory bound that does not hold."""

    code: ClassVar[str] = "CH413"
    title: ClassVar[str] = "worker {worker} holds {peak} {unit}, more than the declared {limit}"
    label: ClassVar[str] = "{place}"
    help: ClassVar[str] = "raise the bound to {highest}, or {remedy}"

    worker: int
    peak: int
    limit: int
    highest: int
    unit: str
    place: str
    remedy: str


class MoreErrors(Diagnostic):
    """More errors by a rule than are shown."""

    code: ClassVar[str] = "CH415"
    title: ClassVar[str] = '{count:more error} by the rule "{rule}"'
    label: ClassVar[str] = "the next one is here"
    help: ClassVar[str] = "mend the first ones and compile again"

    count: int
    rule: str


class MoreWarnings(MoreErrors):
    """More warnings by a rule than are shown."""

    severity: ClassVar[Severity] = Severity.WARNING
    code: ClassVar[str] = "CH419"
    title: ClassVar[str] = '{count} more warnings by the rule "{rule}"'
    help: ClassVar[str] = "look at the first ones; these are of their kind"


class NothingTrained(Diagnostic):
    """A report or scripts for a text whose operations make no update."""

    code: ClassVar[str] = "CH420"
    title: ClassVar[str] = "the header says `{kinds}`: there is no update to report on, and none to write scripts for"
    label: ClassVar[str] = "a part of what is compiled"
    help: ClassVar[str] = "--emit program, or timeline, shows it; scripts come from the scheme, with its backwards"

    kinds: str


class ScriptDiffers(Diagnostic):
    """A script that was generated for a program does something else than the program says."""

    code: ClassVar[str] = "CH422"
    title: ClassVar[str] = "`{function}` in {script} does not do what the program says"
    label: ClassVar[str] = "the program says {expected}"
    help: ClassVar[str] = (
        "no script is written: this is an error of chimera_ir, so please report it, with this text and the command"
    )

    script: str
    function: str
    number: int
    text: str
    expected: str
    done: str

    def notes(self) -> tuple[Note, ...]:
        """Line of the script, and what it does."""
        where = f"line {self.number} of {self.script}, `{self.text}`," if self.text else f"{self.script}"
        return (Note(f"{where} {self.done}"),)
