"""CH3xx and CH6xx: mistakes in the operations of a plan or a schedule, and in the lanes of a stream."""

from typing import NamedTuple

from chimera_ir.diagnostics.catalogue.syntax import LIMITS
from chimera_ir.diagnostics.model import Diagnostic, Note, Severity
from chimera_ir.source import Span

# CH401 to CH405: lines of a program that are missing, redundant, too early, or about no message of their worker.

_STRAY = "`{line}` on worker {worker} is about no message of this worker: "


class InLane(Diagnostic):
    """A mistake at one line of a worker's lane."""

    worker: int
    line: str


class MissingLine(InLane, code="CH401"):
    meaning = "A line that a worker lacks."
    title = "worker {worker} has no `{line}`"
    help = "add `{line}` to the lane of worker {worker}"


class MissingSend(MissingLine):
    label = "worker {peer} needs {content} for `{user}`"
    help = MissingLine.help + ", after `{operation}`"
    peer: int
    content: str
    user: str
    operation: str


class MissingWaitSend(MissingLine):
    label = "nothing waits for this send, so its tensors are never known to be free"
    help = MissingLine.help + ", below `{send}`"
    send: str


class MissingWaitMove(MissingLine):
    label = "nothing waits for this {noun}, so it is never known to be over"
    help = MissingLine.help + ", below `{launch}`"
    noun: str
    launch: str


class MissingWaitRecv(MissingLine):
    label = "`{user}` needs {content} (worker {peer})"
    help = MissingLine.help + ", before `{user}`"
    peer: int
    content: str
    user: str


MissingRecv = MissingWaitRecv.worded("MissingRecv", help=MissingWaitRecv.help + ", into a slot that is free")


class MissingStep(MissingLine):
    label = "worker {worker} holds weights of {group}, which every update must change"
    help = MissingLine.help + ", at the end"
    group: str
    tied: bool


MissingStepOfMany = MissingStep.worded(
    "MissingStepOfMany", help=MissingLine.help + ", before the next update's backwards"
)


class MissingSum(MissingStep):
    label = "every worker that holds {part}{group} takes part in the sum of its gradients"
    help = MissingLine.help + ", after its last backward of {whose}"

    @property
    def part(self) -> str:
        return "a stage of " if self.tied else ""

    @property
    def whose(self) -> str:
        return "those stages" if self.tied else "that stage"


MissingWaitSum = MissingStep.worded(
    "MissingWaitSum",
    label="the step needs the sum of the gradients of {group}",
    help=MissingLine.help + ", between the launch and the step",
)


class MissingStash(MissingLine):
    label = "`{operation}` reads {weights} after `{step}`"
    help = MissingLine.help + ", before `{step}`"
    operation: str
    weights: str
    step: str


class MissingDrop(MissingLine):
    label = "nothing lets {weights} go"
    help = MissingLine.help + ", after `{end}`"
    weights: str
    end: str


class RedundantLine(InLane, code="CH402"):
    meaning = "A line that repeats another, or changes nothing."
    title = "`{line}` on worker {worker} is redundant: a synchronous program has one version"
    label = "redundant"
    help = "remove the line"


class NeverReplaced(RedundantLine):
    title = "`{line}` on worker {worker} is redundant: no step follows {weights}"
    weights: str


class NeverStashed(RedundantLine):
    title = "`{line}` on worker {worker} is redundant: {weights} is not stashed"
    weights: str


class WaitForNoMove(RedundantLine):
    title = "`{line}` on worker {worker} is redundant: the worker has no `{launch}`"
    launch: str


class WaitRepeated(RedundantLine):
    title = "`{line}` on worker {worker} is redundant: the lane has waited for this {noun} already"
    related = ("first", "the wait is over here")
    noun: str
    first: Span


class RepeatedLine(RedundantLine):
    title = "`{line}` on worker {worker} is redundant: {content} is already {done}"
    related = ("first", "this line does the same")
    content: str
    done: str
    first: Span


RepeatedMessage = RepeatedLine.worded(
    "RepeatedMessage", title="`{line}` on worker {worker} is redundant: {content} are already {done}"
)


class LineTooEarly(InLane, code="CH403"):
    meaning = "A line above another line that it must follow."
    title = "worker {worker} runs `{line}` before `{other}`"
    help = "on worker {worker}, move `{line}` below `{other}`"
    related = ("other_span", "`{other}` comes only here")
    other: str
    other_span: Span


class LineAboutContent(LineTooEarly):
    content: str


SendBeforeOperation = LineAboutContent.worded("SendBeforeOperation", label="{content} are not there yet")
WaitBeforeSend = LineTooEarly.worded("WaitBeforeSend", label="waits for what is not sent yet")
WaitBeforeRecv = LineTooEarly.worded("WaitBeforeRecv", label="waits for a receive that is not posted yet")
UseBeforeOut = LineAboutContent.worded("UseBeforeOut", label="{content} may not be out yet")
UseBeforeBack = LineAboutContent.worded("UseBeforeBack", label="{content} may not be back yet")
UseBeforeWait = LineAboutContent.worded("UseBeforeWait", label="{content} may not be there yet")
SumBeforeBackward = LineTooEarly.worded("SumBeforeBackward", label="the sum would lack the gradients of this backward")
WaitBeforeLaunch = LineTooEarly.worded("WaitBeforeLaunch", label="waits for what is not launched yet")
StepBeforeWait = LineTooEarly.worded("StepBeforeWait", label="the sum of the gradients may not be there yet")
BackwardBeforeStep = LineTooEarly.worded(
    "BackwardBeforeStep", label="its gradients would mix with those of the update before"
)
SumBeforeStep = LineTooEarly.worded("SumBeforeStep", label="it sums in the memory that holds the sum before it")
StepBeforeStep = LineTooEarly.worded("StepBeforeStep", label="versions are made one after the other")
ReadBeforeStep = LineAboutContent.worded("ReadBeforeStep", label="{content} is not there yet")
StepBeforeStash = LineAboutContent.worded("StepBeforeStash", label="{content} would be gone")
DropBeforeStash = LineAboutContent.worded("DropBeforeStash", label="{content} is not stashed yet")
DropBeforeRead = LineAboutContent.worded("DropBeforeRead", label="{content} is still read")


class WrongPeer(InLane, code="CH404"):
    meaning = "A message to or from a worker that does not take part in it."
    title = (
        "`{line}` on worker {worker} names worker {peer}, but stage {stage} of this micro-batch is on worker {right}"
    )
    label = "the peer must be worker {right}"
    help = "write w{right} instead of w{peer}"
    peer: int
    right: int
    stage: str


class UnknownMessage(InLane, code="CH405"):
    meaning = "A line about a message that does not exist, or does not concern this worker."
    title = _STRAY + "there is no such micro-batch or stage"
    label = "no such message here"
    help = "remove the line, or correct its micro-batch and stages"


class NoStageOfMessage(UnknownMessage):
    title = _STRAY + "there is no stage {stage}"
    stage: int


class NotNeighbours(UnknownMessage):
    title = _STRAY + "stages {source} and {target} are not neighbours"
    source: str
    target: str


class WithinWorker(UnknownMessage):
    title = _STRAY + "both stages of this micro-batch are on worker {holder}, where no message is needed"
    holder: int


class PartOfMessage(UnknownMessage):
    title = _STRAY + "one message holds all that `{operation}` makes: `{whole}`"
    operation: str
    whole: str


class SentOnce(UnknownMessage):
    title = _STRAY + "stage {target} reads what `{first}` brings to stage {stage}, which is on worker {holder} as well"
    help = "remove the line: a value goes once to each worker"
    first: str
    stage: str
    target: str
    holder: int


class MessageElsewhere(UnknownMessage):
    title = _STRAY + "worker {peer} {verb} it"
    peer: int
    verb: str


class RecomputesInPart(Diagnostic, code="CH331"):
    meaning = "An operation over several micro-batches of which a stage recomputes only some."
    title = "`{operation}` is over micro-batches of which stage {stage} recomputes only some{count:and more}"
    label = "on worker {worker}; micro-batch {micro} is recomputed"
    help = "let all micro-batches of an operation recompute, or none of them"
    operation: str
    worker: int
    stage: str
    micro: int
    count: int


class OperandsOfWhole(Diagnostic, code="CH332"):
    meaning = "A move of what a weight gradient needs, of a micro-batch whose backward is not split."
    title = "`{move}` moves operands of a backward that is not split{count:and more}"
    label = "on worker {worker}"
    help = "split the backward into `I` and `W`, which have operands between them, or remove both moves"
    related = ("backward_span", "`{backward}` is the whole backward")
    move: str
    worker: int
    backward: str
    backward_span: Span
    count: int


class Conflict(Diagnostic, code="CH301"):
    meaning = "Two operations of one worker on one clock."
    title = "worker {worker} has two operations on clock {clock}{count:and more}"
    label = "`{second}` on clock {clock}"
    help = "give one of the two another clock, or place its stage on another worker"
    related = ("first_span", "`{first}` is on clock {clock} of worker {worker} as well")
    worker: int
    clock: int
    first: str
    second: str
    first_span: Span
    count: int
    around: tuple[str, ...]

    def drawing(self) -> tuple[str, ...]:
        return self.around


class WrongWorker(Diagnostic, code="CH304"):
    meaning = "An operation on a worker that does not hold its stage for its pipe."
    title = "`{operation}` is on worker {worker}, but pipe {pipe} has stage {stage} on worker {right}{count:and more}"
    label = "on worker {worker}"
    help = "move it to worker {right}, or place stage {stage} of pipe {pipe} on worker {worker}"
    operation: str
    worker: int
    right: int
    pipe: str
    stage: str
    count: int


class PlacedOutside(Diagnostic, code="CH305"):
    meaning = "A pipe places a stage on a worker that does not exist."
    title = "pipe {pipe} places stage {stage} on worker {worker}, but there are workers 0 to {last}"
    label = "needs worker {worker}"
    help = "place it on one of the workers 0 to {last}, or have more workers"
    pipe: str
    stage: str
    worker: int
    last: int


class StagesUnplaced(Diagnostic, code="CH306"):
    meaning = "A pipe places too few or too many stages."
    title = "pipe {pipe} places {placed} of {stages:stage}"
    label = "every pipe places every stage once"
    help = "give pipe {pipe} a worker for each of the stages 0 to {last}"
    pipe: str
    placed: int
    stages: int
    last: int


class MicrosNotNumbered(Diagnostic, code="CH307"):
    meaning = "A micro-batch among 0 to N - 1 that belongs to no pipe, or to several."
    title = "micro-batch {micro} belongs to {pipes:pipe}, not to one"
    label = "in a pipe's range of micro-batches"
    help = "number the micro-batches of all pipes 0 to {last}, each number once"
    micro: int
    pipes: int
    last: int


class NoSuchOperation(Diagnostic, code="CH308"):
    meaning = "An operation on a micro-batch or stage that does not exist."
    title = "`{operation}` is on worker {worker}, but it is about no micro-batch{count:and more}"
    label = "there is no such operation"
    help = "stages are numbered 0 to {last_stage}, micro-batches 0 to {last_micro}, workers 0 to {last_worker}"
    operation: str
    worker: int
    last_stage: int
    last_micro: int
    last_worker: int
    count: int


class NumberNotThere(NoSuchOperation):
    title = "`{operation}` is on worker {worker}, but there is no {noun} {number}{count:and more}"
    noun: str
    number: int


MicroNamedTwice = NoSuchOperation.worded(
    "MicroNamedTwice", title="`{operation}` is on worker {worker}, but it names a micro-batch twice{count:and more}"
)
VersionOfOneUpdate = NoSuchOperation.worded(
    "VersionOfOneUpdate",
    title="`{operation}` is on worker {worker}, but there are no versions in a synchronous schedule{count:and more}",
)
NoVersionNamed = NoSuchOperation.worded(
    "NoVersionNamed",
    title="`{operation}` is on worker {worker}, but it names no version of the weights{count:and more}",
)


class KindNotThere(Diagnostic, code="CH316"):
    meaning = "An operation of a kind that the header leaves out."
    title = "`{operation}` is on worker {worker}, but the header says `{kinds}`{count:and more}"
    label = "of another kind"
    help = "remove the operation, or the `kinds` line of the header"
    operation: str
    worker: int
    kinds: str
    count: int


class AbsentMicro(Diagnostic, code="CH341"):
    meaning = "An operation of a micro-batch that its group of stages does not have."
    title = "`{operation}` is on worker {worker}, but stage {stage} does not have {micro_batch}{count:and more}"
    label = "absent there"
    help = "remove the operation, or take the micro-batch out of the line `absent`"
    operation: str
    worker: int
    micro_batch: str
    stage: str
    count: int


class ReadNowhere(Diagnostic, code="CH342"):
    meaning = "A micro-batch on a stage, of which no stage that it feeds has it."
    title = "stage {stage} has {micro_batch}, and no stage that it feeds ({fed}) has it"
    label = "read by no stage"
    help = "what a stage makes must be read: leave the micro-batch out of its group too, or give it to the group behind"
    micro_batch: str
    stage: str
    fed: str


class PartlyAbsent(Diagnostic, code="CH343"):
    meaning = "An operation over several micro-batches of which a neighbouring stage lacks only some."
    title = "`{operation}` is over micro-batches of which stage {stage} lacks some, as {micro_batch}"
    label = "over several micro-batches"
    help = "take micro-batches together that stage {stage} has, or those that it lacks"
    operation: str
    stage: str
    micro_batch: str


class FrozenStage(Diagnostic, code="CH333"):
    meaning = "An operation that a frozen stage does not have."
    title = (
        "`{operation}` is on worker {worker}, but stage {stage} is frozen, and nothing before it is trained"
        "{count:and more}"
    )
    label = "stage {stage} has forwards alone"
    help = "remove the operation{guard}; or take the stage out of `frozen`"
    operation: str
    worker: int
    stage: str
    trained: int | None
    """The first trained stage of a chain without names."""
    count: int

    @property
    def guard(self) -> str:
        return "" if self.trained is None else f": in a scheme, `when s >= {self.trained}` leaves it out"


FrozenBehind = FrozenStage.worded(
    "FrozenBehind",
    title="`{operation}` is on worker {worker}, but the weights of stage {stage} are frozen{count:and more}",
    label="stage {stage} has F and I alone",
    help="for a frozen stage behind a trained one write `I` in place of `B`, and no `W`; or take it out of `frozen`",
)


class TieFrozen(Diagnostic, code="CH334"):
    meaning = "Parameters that a frozen stage shares with another stage."
    title = "stages {stages} share parameters, and stage {stage} is frozen"
    label = "has a tie with a frozen stage"
    help = "leave out the tie, or take stage {stage} out of `frozen`: what stages share is trained on all of them"
    stages: str
    stage: str


class RecomputesNothing(Diagnostic, code="CH330"):
    meaning = "An operation `recompute` on a stage that keeps all that its forward computes."
    title = (
        "`{operation}` is on worker {worker}, but stage {stage} of the pipe `{pipe}` keeps everything{count:and more}"
    )
    label = "there is nothing to compute again"
    help = "remove the operation, or let the line of the pipe list stage {stage} after `recompute`"
    operation: str
    worker: int
    stage: str
    pipe: str
    count: int


class ClockNotIncreasing(Diagnostic, code="CH309"):
    meaning = (
        "An operation whose clock is not above that of an operation which it needs: legal, but it may have to wait."
    )
    severity = Severity.WARNING
    title = "the clock does not increase from `{before}` to `{after}`{count:and more}"
    label = "`{after}` has clock {after_clock} on worker {after_worker}"
    help = "give `{after}` a clock above {before_clock}, so that nobody waits for it longer than planned"
    related = ("before_span", "it needs `{before}`, which has clock {before_clock} on worker {before_worker}")
    before: str
    before_clock: int
    before_worker: int
    before_span: Span
    after: str
    after_clock: int
    after_worker: int
    count: int


class LaneCount(Diagnostic, code="CH311"):
    meaning = "A level with more or fewer lanes than workers."
    title = "the schedule has {lanes:lane} for {workers:worker}"
    label = "one lane per worker"
    help = "give every worker one lane; a worker with nothing to do has an empty one"
    lanes: int
    workers: int


class GroupsDiffer(Diagnostic, code="CH312"):
    meaning = "Neighbouring stages that take the micro-batches in different groups."
    title = "`{after}` does not fit `{before}`, whose {what} it needs{count:and more}"
    label = "`{after}` is over other micro-batches"
    help = "an operation hands on all its {what} at once: write both lines over the same micro-batches"
    related = ("before_span", "`{before}` is here")
    before: str
    before_span: Span
    after: str
    what: str
    count: int


BlocksDoNotNest = GroupsDiffer.worded(
    "BlocksDoNotNest", help="let the micro-batches of one of the two be a part of those of the other, in their order"
)


class PipesMixed(Diagnostic, code="CH313"):
    meaning = "An operation over micro-batches of several pipes."
    title = "`{operation}` is over micro-batches of two pipes, {first} and {second}"
    label = "micro-batches that take different ways"
    help = "write one operation for each pipe"
    operation: str
    first: str
    second: str


class UpdatesMixed(Diagnostic, code="CH314"):
    meaning = "A backward over micro-batches of two updates, whose gradients would count for both."
    title = "`{operation}` is over micro-batches of update {first} and of update {second}"
    label = "its gradients are one sum, which one step uses"
    help = "write one backward for each update"
    operation: str
    first: int
    second: int


class CycleStep(NamedTuple):
    """One operation of a cycle; ``reason`` says why it must end before the next one starts."""

    operation: str
    place: str
    span: Span
    reason: str


class Cycle(Diagnostic, code="CH310"):
    meaning = "Operations that wait for each other in a cycle."
    title = "{who} in a cycle"
    label = "`{worst}` can never start"
    help = "let it read an older version of the weights, one that does not need its own gradients"
    worst: str
    steps: tuple[CycleStep, ...]
    chained: tuple[str, ...]

    @property
    def who(self) -> str:
        length = len(self.steps)
        return f"{length:,} operations wait for each other" if length > 1 else f"`{self.worst}` waits for itself"

    def notes(self) -> tuple[Note, ...]:
        following = (*self.steps[1:], self.steps[0])
        steps = tuple(
            Note(
                f"`{step.operation}` ({step.place}) must end before `{after.operation}` starts: {step.reason}",
                step.span,
            )
            for step, after in zip(self.steps, following, strict=True)
        )
        chain = " -> ".join(self.chained)
        text = f"without a line `feeds` the groups are one chain, in the order of the text: {chain}"
        return (*steps, Note(text)) if chain else steps


class CycleOfClocks(Cycle):
    help = "give `{after}` a clock above {clock}, the clock of `{before}`, which it needs"
    after: str
    clock: int | None
    before: str


CycleOfVersions = CycleOfClocks.worded("CycleOfVersions", help=CycleOfClocks.help + ", or let it read an older version")


class CycleOfPair(Cycle):
    help = "run `{forward}` and `{backward}` one after the other: as a pair they wait for what either needs"
    forward: str
    backward: str


class CycleOfLane(Cycle):
    help = "on worker {worker}, run `{second}` before `{first}`"
    worker: int
    second: str
    first: str


class NotLowered(Diagnostic, code="CH315"):
    meaning = "A correct schedule for which the compiler finds no program."
    title = "this schedule is legal, but the compiler finds no program for it"
    label = "in the program that it tries, {problem}"
    help = "let the operations read newer weights, or change their clocks or places"
    problem: str
    reason: str

    def notes(self) -> tuple[Note, ...]:
        return (Note(f"there, {self.reason}"),) if self.reason else ()


class TiesDiffer(Diagnostic, code="CH317"):
    meaning = "Stages that share parameters, but read different versions of them."
    title = "stages {first} and {other} are tied, but read different versions of the weights"
    label = "`{other_line}` reads another version than `{first_line}`"
    help = (
        "let both stages read one version of each micro-batch, as with double-buffered weights, or tie no stages: a "
        "parameter that stages share has one version at a time"
    )
    related = ("first_span", "`{first_line}` is here")
    first: str
    other: str
    first_line: str
    other_line: str
    first_span: Span


class Missing(Diagnostic, code="CH302"):
    meaning = "A micro-batch lacks operations on a stage."
    title = "{micro_batch} has no {lacking} on stage {stage}{count:and more}"
    label = "pipe {pipe} runs stage {stage} on worker {worker}"
    help = "add `{operations}` on worker {worker}: every micro-batch meets every stage once{directions}"
    pipe: str
    worker: int
    micro_batch: str
    stage: str
    kinds: tuple[str, ...]
    operations: str
    directions: str
    count: int

    @property
    def lacking(self) -> str:
        return " and no ".join(self.kinds)


MissingMove = Missing.worded(
    "MissingMove", help="add `{operations}` on worker {worker}: what is offloaded is reloaded before it is read"
)


MissingOfFrozen = Missing.worded(
    "MissingOfFrozen",
    help="add `{operations}` on worker {worker}: frozen, and behind a trained stage, it hands on gradients",
)


class Skipped(Missing, code="CH329"):
    meaning = "A micro-batch has no operation at all on a stage."
    help = Missing.help + f"; no stage can be skipped; see {LIMITS}"


class Duplicate(Diagnostic, code="CH303"):
    meaning = "Two places of a schedule have the same operation."
    title = "`{operation}` is there twice{count:and more}"
    label = "the second, on worker {worker}"
    help = "keep one of the two: every micro-batch meets every stage once{directions}"
    related = ("first_span", "the first is on worker {first_worker}")
    operation: str
    worker: int
    first_worker: int
    first_span: Span
    directions: str
    count: int


class DoneTwice(Diagnostic, code="CH318"):
    meaning = (
        "Two operations of different kinds do the same for a micro-batch, such as a backward and an input gradient."
    )
    title = "`{operation}` does again what `{first}` does{count:and more}"
    label = "on worker {worker}"
    help = "on each stage a micro-batch has either one `B`, or one `I` and one `W`"
    related = ("first_span", "`{first}` is on worker {first_worker}")
    operation: str
    first: str
    worker: int
    first_worker: int
    first_span: Span
    count: int


class NoTurn(Diagnostic, code="CH601"):
    meaning = "A lane that shows no full turn of the steady state."
    title = "worker {worker} shows no turn of the steady state"
    label = "the lane is too short, or no operation comes again after {period:micro-batch}"
    help = "show more updates: enough to fill the pipeline, to go round three times, and to drain it"
    worker: int
    period: int


class BreaksTurn(Diagnostic, code="CH602"):
    meaning = "A lane whose operations do not repeat from turn to turn."
    title = "the lane of worker {worker} does not repeat every {period:micro-batch}"
    label = "`{line}` stands where the turn has `{wanted}`"
    help = (
        "a turn in the middle of the lane, moved in time, must give all of it; where a micro-batch is beyond "
        "the first or the last, its lines are left out and the others stay as they are"
    )
    worker: int
    period: int
    line: str
    wanted: str


class StateDiffers(Diagnostic, code="CH603"):
    meaning = "A worker that falls further behind the other workers with every turn."
    title = "the state does not repeat: worker {worker} does not go round once a turn"
    label = "here it waits for what comes a turn later every turn"
    help = "show more updates, or move `{line}` behind what it waits for"
    worker: int
    line: str
