"""CH406 and on: mistakes in the communication, the synchronisation and the memory of a program."""

from fractions import Fraction
from math import ceil
from typing import NamedTuple

from chimera_ir.diagnostics.catalogue.schedule import InLane
from chimera_ir.diagnostics.model import Diagnostic, Note, Severity
from chimera_ir.source import Span


class SlotInUse(InLane, code="CH406"):
    meaning = "A receive into a buffer whose content is still needed."
    title = "`{line}` on worker {worker} overwrites slot {slot} while it is in use"
    label = "slot {slot} still holds {content}"
    help = "receive into another slot, or post the receive after `{last_use}`"
    slot: int
    content: str
    last_use: str
    last_use_span: Span
    first_use_span: Span

    def notes(self) -> tuple[Note, ...]:
        return (
            Note("the slot is taken here", self.first_use_span),
            Note(f"and free after `{self.last_use}`", self.last_use_span),
        )


class SlotTooHigh(InLane, code="CH407"):
    meaning = "A slot number that is higher than any program for the schedule needs."
    title = "`{line}` on worker {worker} names slot {slot}, beyond any need"
    label = "stage and direction have slots 0 to {last} at most, one per message"
    help = "use a slot from 0 to {last}"
    slot: int
    last: int


class ReceivesOutOfOrder(InLane, code="CH408"):
    meaning = "Receives from a peer that are not in the order of its sends."
    title = "worker {worker} posts `{line}` where worker {peer} sends `{sent}`"
    label = "number {place} of the receives from worker {peer}"
    help = "post the receives from worker {peer} in the order of its sends: an in-order queue matches them by place"
    related = ("sent_span", "number {place} of the sends of worker {peer} to worker {worker}")
    peer: int
    sent: str
    place: int
    sent_span: Span


class Blocked(NamedTuple):
    """A lane that stands at ``line``, waiting for what ``meaning`` describes, until worker ``peer`` runs ``needs``."""

    worker: int
    line: str
    meaning: str
    needs: str
    peer: int
    span: Span


class Deadlock(Diagnostic, code="CH409"):
    meaning = "Lanes that wait for each other."
    title = "{lanes}: the program cannot finish with {transports}"
    label = "worker {first.worker} waits for {first.meaning}"
    help = "on worker {last.peer}, run `{last.needs}` before `{first.line}`"
    transports: str
    blocked: tuple[Blocked, ...]

    @property
    def lanes(self) -> str:
        count = len(self.blocked)
        return f"{count:,} workers wait for each other" if count > 1 else f"worker {self.first.worker} waits for itself"

    @property
    def first(self) -> Blocked:
        return self.blocked[0]

    @property
    def last(self) -> Blocked:
        return self.blocked[-1]

    def notes(self) -> tuple[Note, ...]:
        return tuple(
            Note(
                f"worker {lane.worker} stands at `{lane.line}`, for {lane.meaning},"
                f" until worker {lane.peer} runs `{lane.needs}`",
                lane.span,
            )
            for lane in self.blocked
        )


class NotHeld(InLane, code="CH410"):
    meaning = "A line about a weight group on a worker that holds none of the group's stages."
    title = "`{line}` on worker {worker}, which does not hold {group}"
    label = "{group} is held by {holders}"
    help = "remove the line"
    group: str
    holders: str


class NotTied(InLane, code="CH421"):
    meaning = "A line about parameters that stages share, for stages that the header does not tie."
    title = "`{line}` on worker {worker}: the stages {stages} share no parameters"
    label = "no line of the header ties them"
    help = "remove the line, or add `{header_line}` to the header"
    stages: str
    header_line: str


class Launches(NamedTuple):
    """Two sums, in words, that a worker launches one after the other; ``span`` is the line of the later launch."""

    earlier: str
    later: str
    worker: int
    span: Span


class LaunchOrder(Diagnostic, code="CH411"):
    meaning = "Workers that launch their sums in orders that contradict each other."
    title = "workers launch the sums of their gradients in orders that contradict each other"
    label = "worker {first.worker} launches {first.earlier} before {first.later}"
    help = "launch them in one order on all workers, so that no two groups of workers wait for each other"
    first: Launches
    others: tuple[Launches, ...]

    def notes(self) -> tuple[Note, ...]:
        return tuple(
            Note(f"worker {order.worker} launches {order.earlier} before {order.later}", order.span)
            for order in self.others
        )


class AfterStep(InLane, code="CH412"):
    meaning = "An operation that reads weights which the update has already changed."
    title = "worker {worker} runs `{line}` after `{step}`"
    label = "reads weights of {group} that are one update too new"
    help = "on worker {worker}, move `{step}` below `{line}`"
    related = ("step_span", "the weights change here")
    group: str
    step: str
    step_span: Span


class NoSuchUpdate(InLane, code="CH416"):
    meaning = "A sum or a step that leads to a version which no update makes."
    title = "`{line}` on worker {worker} belongs to no update"
    label = "{updates:update} make the versions 1 to {updates}"
    help = "remove the line, or name the version that its update leads to"
    updates: int


VersionOfOneStep = NoSuchUpdate.worded("VersionOfOneStep", label="a synchronous program has one update and no versions")


class UpdateOfForwards(NoSuchUpdate):
    label = "the header says `{kinds}`: no operation adds to gradients"
    kinds: str


class VersionsDiffer(Diagnostic, code="CH417"):
    meaning = "A backward that reads other weights than its forward."
    title = "`{backward}` reads another version of the weights than `{forward}`"
    label = "gradients of two versions at once are gradients of none"
    help = "let both read the version of the forward, and keep it until the backward"
    related = ("forward_span", "`{forward}` is here")
    backward: str
    forward: str
    forward_span: Span


class TooManyCopies(Diagnostic, code="CH418"):
    meaning = "A worker that keeps more versions of a group's weights than its operations still read."
    title = "worker {worker} keeps {kept:copy} of the weights of {group}, {needed} {needed:is or are} needed"
    label = "one more copy from here on"
    help = "run `{first}` right before `{then}`"
    worker: int
    group: str
    kept: int
    needed: int
    first: str
    then: str


CopyKeptTooLong = TooManyCopies.worded(
    "CopyKeptTooLong", help="run `{first}` right after `{then}`, the last operation that reads it"
)


class CopyInVain(TooManyCopies):
    help = "remove `{stash}` and `{first}`: nothing reads that version after `{then}`"
    stash: str


class BoundExceeded(Diagnostic, code="CH413"):
    meaning = "A declared memory bound that does not hold."
    title = "worker {worker} holds the activations of {peak:micro-batch} (M_a), more than the declared {limit}"
    label = "the peak is reached by `{place}`"
    help = "raise the bound to {enough}, or run backwards earlier"
    worker: int
    peak: int | Fraction
    limit: int | Fraction
    place: str

    @property
    def enough(self) -> int:
        return ceil(self.peak)


WeightsExceed = BoundExceeded.worded(
    "WeightsExceed",
    title="worker {worker} holds the weights of {peak:stage} (M_theta), more than the declared {limit}",
    label="worker {worker} holds the stages {place}",
    help="raise the bound to {peak}, or place the pipes so that they share fewer workers",
)
VersionsExceed = WeightsExceed.worded(
    "VersionsExceed",
    label="worker {worker} holds the stages {place}, and older versions of them",
    help="raise the bound to {peak}, or let fewer versions be read side by side",
)
BytesExceed = WeightsExceed.worded(
    "BytesExceed",
    title="worker {worker} needs {peak:,} bytes, more than the declared {limit:,}",
    help="raise the bound to {peak:,}, or keep less: recompute, or take smaller micro-batches or more workers",
)
HostExceeds = BoundExceeded.worded(
    "HostExceeds",
    title="worker {worker} keeps {peak:micro-batch} (M_a) in host memory, more than the declared {limit}",
    help="raise the bound to {enough}, or offload less",
)
HostBytesExceed = BytesExceed.worded(
    "HostBytesExceed",
    title="worker {worker} needs {peak:,} bytes of host memory, more than the declared {limit:,}",
    help="raise the bound to {peak:,}, or offload less",
)


NoOrderFits = BoundExceeded.worded(
    "NoOrderFits",
    title="no order was found in which worker {worker} keeps the activations of {limit:micro-batch} (M_a)",
    label="where micro-batches run one after another, it keeps {peak:micro-batch}",
    help="raise the bound to {enough}, or place fewer stages on worker {worker}",
)
NoOrderFitsHost = NoOrderFits.worded(
    "NoOrderFitsHost",
    title="no order was found in which worker {worker} keeps {limit:micro-batch} (M_a) in host memory",
)


class BoundUnchecked(Diagnostic, code="CH423"):
    meaning = "A bound in bytes where the sizes of the stages are not known."
    severity = Severity.WARNING
    title = "this bound in bytes is not checked: without a profile no bytes are known"
    label = "not checked"
    help = "give `--profile` and `--cluster`; at run time, `--memory-limit` bounds bytes"


class MoreErrors(Diagnostic, code="CH415"):
    meaning = "More errors against one rule than are shown one by one."
    title = '{count:more error} by the rule "{rule}"'
    label = "the next one is here"
    help = "mend the first ones and compile again"
    count: int
    rule: str


class MoreWarnings(MoreErrors, code="CH419"):
    meaning = "More warnings about one rule than are shown one by one."
    severity = Severity.WARNING
    title = '{count} more warnings by the rule "{rule}"'
    help = "look at the first ones; these are of their kind"


class NothingTrained(Diagnostic, code="CH420"):
    meaning = "A report or scripts for a text whose operations make no update."
    title = "the header says `{kinds}`: there is no update to report on, and none to write scripts for"
    label = "a part of what is compiled"
    help = "--emit program, or timeline, shows it; scripts come from the scheme, with its backwards"
    kinds: str


class ScriptDiffers(Diagnostic, code="CH422"):
    meaning = "A script that was generated for a program does something else than the program says."
    # ``text`` is line ``number`` of the script, empty if no line is at fault; ``done`` says what the script does there.
    title = "`{function}` in {script} does not do what the program says"
    label = "the program says {expectation}"
    help = "no script is written: this is an error of chimera_ir, so please report it, with this text and the command"
    script: str
    function: str
    number: int
    text: str
    expected: str
    done: str

    @property
    def expectation(self) -> str:
        return f"`{self.expected}`" if self.expected else "nothing more"

    def notes(self) -> tuple[Note, ...]:
        where = f"line {self.number} of {self.script}, `{self.text}`," if self.text else f"{self.script}"
        return (Note(f"{where} {self.done}"),)


class NoTurnFound(Diagnostic, code="CH604"):
    meaning = "Operations without clocks in a pipe without end, whose list schedule never repeats."
    title = "no turn was found after which the operations without clocks repeat"
    label = "the compiler orders this operation"
    help = "give it a clock, or bound the activations: `memory activations <= ..`"
