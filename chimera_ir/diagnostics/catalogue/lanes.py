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


class MissingWaitRecv(MissingLine):
    """A receive that its worker never waits for."""

    label = "`{user}` needs {content} (worker {peer})"
    help = MissingLine.help + ", before `{user}`"
    peer: int
    content: str
    user: str


class MissingRecv(MissingWaitRecv):
    """A value that an operation needs and no line receives."""

    help = MissingWaitRecv.help + ", into a slot that is free"


class MissingStep(MissingLine):
    """A missing step, without which an update leaves weights as they are."""

    label = "worker {worker} holds weights of {group}, which every update must change"
    help = MissingLine.help + ", at the end"
    group: str
    tied: bool


class MissingStepOfMany(MissingStep):
    """A missing step of an update that other updates follow."""

    help = MissingLine.help + ", before the next update's backwards"


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


class MissingWaitSum(MissingStep):
    """A sum that its worker never waits for."""

    label = "the step needs the sum of the gradients of {group}"
    help = MissingLine.help + ", between the launch and the step"


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


class RepeatedLine(RedundantLine):
    """A line that repeats what an earlier line has done with weights or a sum."""

    title = "`{line}` on worker {worker} is redundant: {content} is already {done}"
    related = ("first", "this line does the same")
    content: str
    done: str
    first: Span


class RepeatedMessage(RepeatedLine):
    """A line that repeats what an earlier line has done with a message."""

    title = "`{line}` on worker {worker} is redundant: {content} are already {done}"


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


class SendBeforeOperation(LineAboutContent):
    """A send above the operation that makes its content."""

    label = "{content} are not there yet"


class WaitBeforeSend(LineTooEarly):
    """A wait above its send."""

    label = "waits for what is not sent yet"


class WaitBeforeRecv(LineTooEarly):
    """A wait above its receive."""

    label = "waits for a receive that is not posted yet"


class UseBeforeWait(LineAboutContent):
    """An operation above the wait for a message that it needs."""

    label = "{content} may not be there yet"


class SumBeforeBackward(LineTooEarly):
    """A sum above a backward that adds to its gradients."""

    label = "the sum would lack the gradients of this backward"


class WaitBeforeLaunch(LineTooEarly):
    """A wait above the launch of its sum."""

    label = "waits for what is not launched yet"


class StepBeforeWait(LineTooEarly):
    """A step above the wait for its sum."""

    label = "the sum of the gradients may not be there yet"


class BackwardBeforeStep(LineTooEarly):
    """A backward of the next update above the step of this one."""

    label = "its gradients would mix with those of the update before"


class SumBeforeStep(LineTooEarly):
    """A sum of the next update above the step of this one."""

    label = "it sums in the memory that holds the sum before it"


class StepBeforeStep(LineTooEarly):
    """A step of the next update above the step of this one."""

    label = "versions are made one after the other"


class ReadBeforeStep(LineAboutContent):
    """A line that uses a version above the step that makes it."""

    label = "{content} is not there yet"


class StepBeforeStash(LineAboutContent):
    """A step above the stash of the version that the step replaces."""

    label = "{content} would be gone"


class DropBeforeStash(LineAboutContent):
    """A drop above the stash of its version."""

    label = "{content} is not stashed yet"


class DropBeforeRead(LineAboutContent):
    """A drop above an operation that still reads the dropped version."""

    label = "{content} is still read"


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
