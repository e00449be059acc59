"""CH401 to CH405: lines of a program that are missing, redundant, too early, or about no message of their worker."""

from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.source import Span

_STRAY = "`{line}` on worker {worker} is about no message of this worker: "


class InLane(Diagnostic):
    """A mistake at one line of a worker's lane."""

    worker: int
    line: str


class MissingLine(InLane, code="CH401"):
    """A line that a worker lacks."""

    title = "worker {worker} has no `{line}`"
    help = "add `{line}` to the lane of worker {worker}"


class MissingSend(MissingLine):
    """A missing send of a value that another worker needs."""

    label = "worker {peer} needs {content} for `{user}`"
    help = MissingLine.help + ", after `{operation}`"
    peer: int
    content: str
    user: str
    operation: str


class MissingWaitSend(MissingLine):
    """A send that its worker never waits for."""

    label = "nothing waits for this send, so its tensors are never known to be free"
    help = MissingLine.help + ", below `{send}`"
    send: str


class MissingWaitMove(MissingLine):
    """A move of memory that its worker never waits for."""

    label = "nothing waits for this {noun}, so it is never known to be over"
    help = MissingLine.help + ", below `{launch}`"
    noun: str
    launch: str


class MissingWaitRecv(MissingLine):
    """A receive that its worker never waits for."""

    label = "`{user}` needs {content} (worker {peer})"
    help = MissingLine.help + ", before `{user}`"
    peer: int
    content: str
    user: str


MissingRecv = MissingWaitRecv.worded("MissingRecv", help=MissingWaitRecv.help + ", into a slot that is free")


class MissingStep(MissingLine):
    """A missing step, without which an update leaves weights as they are."""

    label = "worker {worker} holds weights of {group}, which every update must change"
    help = MissingLine.help + ", at the end"
    group: str
    tied: bool


MissingStepOfMany = MissingStep.worded(
    "MissingStepOfMany", help=MissingLine.help + ", before the next update's backwards"
)


class MissingSum(MissingStep):
    """A missing launch of a sum in which the worker must take part."""

    label = "every worker that holds {part}{group} takes part in the sum of its gradients"
    help = MissingLine.help + ", after its last backward of {whose}"

    @property
    def part(self) -> str:
        """The words ``a stage of `` for a weight group of tied stages; else nothing."""
        return "a stage of " if self.tied else ""

    @property
    def whose(self) -> str:
        """The words for the stage of the weight group, or for its tied stages."""
        return "those stages" if self.tied else "that stage"


MissingWaitSum = MissingStep.worded(
    "MissingWaitSum",
    label="the step needs the sum of the gradients of {group}",
    help=MissingLine.help + ", between the launch and the step",
)


class MissingStash(MissingLine):
    """A missing stash of a version that is still read after the next version has been made."""

    label = "`{operation}` reads {weights} after `{step}`"
    help = MissingLine.help + ", before `{step}`"
    operation: str
    weights: str
    step: str


class MissingDrop(MissingLine):
    """A missing drop, without which a stashed version is kept for ever."""

    label = "nothing lets {weights} go"
    help = MissingLine.help + ", after `{end}`"
    weights: str
    end: str


class RedundantLine(InLane, code="CH402"):
    """A line that repeats another, or changes nothing."""

    title = "`{line}` on worker {worker} is redundant: a synchronous program has one version"
    label = "redundant"
    help = "remove the line"


class NeverReplaced(RedundantLine):
    """A stash of weights that no later step changes."""

    title = "`{line}` on worker {worker} is redundant: no step follows {weights}"
    weights: str


class NeverStashed(RedundantLine):
    """A drop of a version that is not stashed."""

    title = "`{line}` on worker {worker} is redundant: {weights} is not stashed"
    weights: str


class WaitForNoMove(RedundantLine):
    """A wait for a move of memory that the worker does not launch."""

    title = "`{line}` on worker {worker} is redundant: the worker has no `{launch}`"
    launch: str


class WaitRepeated(RedundantLine):
    """A second wait for a move of memory."""

    title = "`{line}` on worker {worker} is redundant: the lane has waited for this {noun} already"
    related = ("first", "the wait is over here")
    noun: str
    first: Span


class RepeatedLine(RedundantLine):
    """A line that repeats what an earlier line has done with weights or a sum."""

    title = "`{line}` on worker {worker} is redundant: {content} is already {done}"
    related = ("first", "this line does the same")
    content: str
    done: str
    first: Span


RepeatedMessage = RepeatedLine.worded(
    "RepeatedMessage", title="`{line}` on worker {worker} is redundant: {content} are already {done}"
)


class LineTooEarly(InLane, code="CH403"):
    """A line above another line that it must follow."""

    title = "worker {worker} runs `{line}` before `{other}`"
    help = "on worker {worker}, move `{line}` below `{other}`"
    related = ("other_span", "`{other}` comes only here")
    other: str
    other_span: Span


class LineAboutContent(LineTooEarly):
    """A line that is too early for ``content``, which is a message's content or a version of weights."""

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
    """A message to or from a worker that does not take part in it."""

    title = (
        "`{line}` on worker {worker} names worker {peer}, but stage {stage} of this micro-batch is on worker {right}"
    )
    label = "the peer must be worker {right}"
    help = "write w{right} instead of w{peer}"
    peer: int
    right: int
    stage: int


class UnknownMessage(InLane, code="CH405"):
    """A line about a message that does not exist, or does not concern this worker."""

    title = _STRAY + "there is no such micro-batch or stage"
    label = "no such message here"
    help = "remove the line, or correct its micro-batch and stages"


class NoStageOfMessage(UnknownMessage):
    """A message from or to a stage that does not exist."""

    title = _STRAY + "there is no stage {stage}"
    stage: int


class NotNeighbours(UnknownMessage):
    """A message between two stages that are not neighbours."""

    title = _STRAY + "stages {source} and {target} are not neighbours"
    source: int
    target: int


class WithinWorker(UnknownMessage):
    """A message between two stages of one worker."""

    title = _STRAY + "both stages of this micro-batch are on worker {holder}, where no message is needed"
    holder: int


class PartOfMessage(UnknownMessage):
    """A line about a message with only a part of what an operation makes; all of it goes in one message."""

    title = _STRAY + "one message holds all that `{operation}` makes: `{whole}`"
    operation: str
    whole: str


class MessageElsewhere(UnknownMessage):
    """A send or a receive on another worker than the one that sends or receives the message."""

    title = _STRAY + "worker {peer} {verb} it"
    peer: int
    verb: str


class RecomputesInPart(Diagnostic, code="CH331"):
    """An operation over several micro-batches of which a stage recomputes only some."""

    title = "`{operation}` is over micro-batches of which stage {stage} recomputes only some{count:and more}"
    label = "on worker {worker}; micro-batch {micro} is recomputed"
    help = "let all micro-batches of an operation recompute, or none of them"
    operation: str
    worker: int
    stage: int
    micro: int
    count: int


class OperandsOfWhole(Diagnostic, code="CH332"):
    """A move of what a weight gradient needs, of a micro-batch whose backward is not split."""

    title = "`{move}` moves operands of a backward that is not split{count:and more}"
    label = "on worker {worker}"
    help = "split the backward into `I` and `W`, which have operands between them, or remove both moves"
    related = ("backward_span", "`{backward}` is the whole backward")
    move: str
    worker: int
    backward: str
    backward_span: Span
    count: int
