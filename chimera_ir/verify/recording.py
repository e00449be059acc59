"""Lanes that compute nothing: each call of a script takes the next line of the program, and must match it.

rank_0.py                                          the lane of worker 0
  in_s1_s0.wait(2)                                   wait recv m2 s1->s0
  stage0.backward(2, in_s1_s0.take(2))               B m2 s0

Where a rank has a tensor, there is a description of it: ``("input gradients", (2,), 1)`` are the gradients of
micro-batch 2 from stage 1. The classes have the methods that scripts call, and share no code with what writes the
scripts.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

from chimera_ir.ir.ids import Micro, Slot, Stage, Version, WeightGroup, Worker
from chimera_ir.ir.kinds import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Kind
from chimera_ir.ir.ops import (
    AllReduce,
    Compute,
    Drop,
    Instruction,
    Message,
    Pair,
    Recv,
    Send,
    Stash,
    Step,
    WaitAllReduce,
    WaitRecv,
    WaitSend,
)
from chimera_ir.ir.text.printer import line as text_of

Group = tuple[int, ...]
"""The micro-batches of an operation or of a message."""

Micros = int | Group
"""Micro-batches as scripts write them: one as a number, several as a tuple."""


def group_of(micros: Micros) -> Group:
    """Micro-batches as a tuple."""
    return micros if isinstance(micros, tuple) else (micros,)


Route = tuple[int, int, int]
"""A link: the stage that sends, the stage that receives, and the other worker."""

Value = tuple[str, Group, int]
"""The description of a tensor: its role, its micro-batches, and the stage that made it."""

_OUTPUTS, _GRADIENTS, INPUT, TARGET = "outputs", "input gradients", "input", "target"

DATASET = -1
"""The number that inputs and targets have in place of the stage that made them."""


class Differs(Exception):
    """A call that is not the next line of the program.

    ``expected`` is that line, None if no line is left; ``done`` says what the script does.
    """

    def __init__(self, expected: Instruction | None, done: str) -> None:
        super().__init__(done)
        self.expected = expected
        self.done = done


class LaneLines:
    """The lines of a lane that are still to come; ``take`` gives the next one, None after the last."""

    def __init__(self, lane: Iterable[Instruction]) -> None:
        self._lines = iter(lane)
        self.take: Callable[[], Instruction | None] = partial(next, self._lines, None)

    def differs(self, done: str) -> Differs:
        """The exception for a call that does not match the next line, with that line."""
        return Differs(self.take(), done)


class WholeRun:
    """The run of a script with a flush, all of whose calls count."""

    def has(self, micros: Micros) -> bool:
        """Whether micro-batches are in the run."""
        return True

    def makes(self, version: int) -> bool:
        """Whether an update of the run makes a version of the weights."""
        return True

    def keeps(self, version: int) -> bool:
        """Whether an update of the run makes a version, and a later one replaces it."""
        return True


class StreamRun(WholeRun):
    """The run of some updates of a script without a flush: calls about other micro-batches and versions do nothing."""

    def __init__(self, updates: int, micro_batches: int) -> None:
        self._updates = updates
        self._micro_batches = micro_batches

    def has(self, micros: Micros) -> bool:
        """Whether micro-batches are in the run; those of one operation are all in it or all outside."""
        return 0 <= group_of(micros)[0] < self._micro_batches

    def makes(self, version: int) -> bool:
        """Whether an update of the run makes a version of the weights."""
        return 0 < version <= self._updates

    def keeps(self, version: int) -> bool:
        """Whether an update of the run makes a version, and a later one replaces it."""
        return 0 < version < self._updates


class _RecordedLink:
    """One direction of the messages between two stages.

    ``_under_way`` are the micro-batches of open messages, and ``_over`` those of messages that are waited for.
    """

    _wait: type[WaitSend | WaitRecv]
    _preposition: str

    def __init__(self, lines: LaneLines, run: WholeRun, route: Route) -> None:
        self._lines, self._run = lines, run
        self._source, self._target, self._worker = route
        self._kind = _OUTPUTS if self._source < self._target else _GRADIENTS
        self._under_way: set[Group] = set()
        self._over: set[Group] = set()

    def wait(self, micros: Micros) -> None:
        """Expects the line ``wait send`` or ``wait recv`` of a message that is posted on this link."""
        if not self._run.has(micros):
            return
        group = group_of(micros)
        line = self._lines.take()
        if (
            not isinstance(line, self._wait)
            or line.message != (group, self._source, self._target)
            or group not in self._under_way
        ):
            done = _call_text(self._wait(self._message(group)))
            raise Differs(line, f"{done} {self._preposition} w{self._worker}")
        self._under_way.remove(group)
        self._over.add(group)

    def _message(self, group: Group) -> Message:
        return Message(_micros(group), Stage(self._source), Stage(self._target))


class RecordedOutgoing(_RecordedLink):
    """A link to a stage on another worker."""

    _wait, _preposition = WaitSend, "to"

    def isend(self, micros: Micros, tensors: object) -> None:
        """Expects the line ``send``, with the value that the stage has made of the same micro-batches."""
        if not self._run.has(micros):
            return
        group = group_of(micros)
        line = self._lines.take()
        if (
            type(line) is not Send
            or line.message != (group, self._source, self._target)
            or line.to != self._worker
            or tensors != (self._kind, group, self._source)
        ):
            raise Differs(line, _call_text(Send(self._message(group), Worker(self._worker)), tensors))
        self._under_way.add(group)


class RecordedIncoming(_RecordedLink):
    """A link from a stage on another worker; slot k has room for ``rooms[k]`` micro-batches."""

    _wait, _preposition = WaitRecv, "from"

    def __init__(self, lines: LaneLines, run: WholeRun, route: Route, rooms: Sequence[int]) -> None:
        super().__init__(lines, run, route)
        self._rooms = rooms

    def irecv(self, micros: Micros, into: int) -> None:
        """Expects the line ``recv``, into a slot that has room."""
        if not self._run.has(micros):
            return
        group = group_of(micros)
        line = self._lines.take()
        if (
            type(line) is not Recv
            or line.message != (group, self._source, self._target)
            or line.source != self._worker
            or line.slot != into
        ):
            raise Differs(line, _call_text(Recv(self._message(group), Worker(self._worker), Slot(into))))
        if into >= len(self._rooms) or len(group) > self._rooms[into]:
            raise Differs(line, f"has no room in slot {into}: program.json gives the slots {list(self._rooms)}")
        self._under_way.add(group)

    def take(self, micros: Micros) -> Value | None:
        """Returns the value that a message has brought, which is possible once."""
        if not self._run.has(micros):
            return None
        group = group_of(micros)
        value = self._kind, group, self._source
        if group not in self._over:
            raise self._lines.differs(f"takes the {_value_text(value)} from w{self._worker}, which have not come")
        self._over.remove(group)
        return value


class RecordedWeights:
    """The weights of a stage or a tie.

    ``initial`` are the versions, 0 or less, at whose places the initial weights of a stream are stashed and dropped.
    """

    def __init__(self, lines: LaneLines, run: WholeRun, group: WeightGroup, initial: tuple[int, int]) -> None:
        self._lines, self._run, self._group = lines, run, group
        self._stashed, self._dropped = initial

    def all_reduce(self, version: Version | None = None) -> None:
        """Expects the line ``all_reduce``."""
        self._expect_of_update(AllReduce(self._group, version=version))

    def wait_all_reduce(self, version: Version | None = None) -> None:
        """Expects the line ``wait all_reduce``."""
        self._expect_of_update(WaitAllReduce(self._group, version=version))

    def step(self, version: Version | None = None) -> None:
        """Expects the line ``step``."""
        self._expect_of_update(Step(self._group, version=version))

    def stash(self, version: int) -> None:
        """Expects the line ``stash``."""
        if version == self._stashed or self._run.keeps(version):
            self._expect(Stash(self._group, Version(max(0, version))))

    def drop(self, version: int) -> None:
        """Expects the line ``drop``."""
        if version == self._dropped or self._run.keeps(version):
            self._expect(Drop(self._group, Version(max(0, version))))

    def _expect_of_update(self, done: AllReduce | WaitAllReduce | Step) -> None:
        if done.version is None or self._run.makes(done.version):
            self._expect(done)

    def _expect(self, done: Instruction) -> None:
        line = self._lines.take()
        if line != done:
            raise Differs(line, _call_text(done))


class RecordedStage(RecordedWeights):
    """A stage; ``last`` is the number of the last one."""

    def __init__(self, lines: LaneLines, run: WholeRun, stage: int, last: int, initial: tuple[int, int]) -> None:
        super().__init__(lines, run, (Stage(stage),), initial)
        self._stage, self._last = stage, last
        self._version: int | None = None
        self._values: set[Value] = set()

    def at(self, version: int) -> Self:
        """The stage, with the version of its weights that the next operation reads; versions below 0 count as 0."""
        self._version = max(0, version)
        return self

    def forward(self, micros: Micros, *arguments: object) -> None:
        """Expects the line ``F``."""
        self._expect_operation(FORWARD, micros, arguments)

    def backward(self, micros: Micros, *arguments: object) -> None:
        """Expects the line ``B``."""
        self._expect_operation(BACKWARD, micros, arguments)

    def backward_input(self, micros: Micros, *arguments: object) -> None:
        """Expects the line ``I``."""
        self._expect_operation(INPUT_GRADIENT, micros, arguments)

    def backward_weights(self, micros: Micros, *arguments: object) -> None:
        """Expects the line ``W``."""
        self._expect_operation(WEIGHT_GRADIENT, micros, arguments)

    def pair(self, forward: Sequence[Any], other: "RecordedStage", backward: Sequence[Any]) -> None:
        """Expects the line of a pair, whose backward may be of another stage."""
        line = self._lines.take()
        first, second = (line.forward, line.backward) if type(line) is Pair else (None, None)
        matches = self._does(first, FORWARD, forward[0], (*forward[1:],))
        if not (matches and other._does(second, BACKWARD, backward[0], (*backward[1:],))):
            done = Pair(self._operation(FORWARD, forward[0]), other._operation(BACKWARD, backward[0]))
            raise Differs(line, _call_text(done, *forward[1:], *backward[1:]))

    def outputs(self, micros: Micros) -> Value | None:
        """Returns the value that a forward has made for the next stage, which is possible once."""
        return self._handed_on(_OUTPUTS, micros)

    def input_gradients(self, micros: Micros) -> Value | None:
        """Returns the value that a backward has made for the stage before, which is possible once."""
        return self._handed_on(_GRADIENTS, micros)

    def _expect_operation(self, kind: Kind, micros: Micros, arguments: tuple[object, ...]) -> None:
        if not self._run.has(micros):
            return
        line = self._lines.take()
        if not self._does(line, kind, micros, arguments):
            raise Differs(line, _call_text(self._operation(kind, micros), *arguments))

    def _does(self, line: Instruction | None, kind: Kind, micros: Micros, arguments: tuple[object, ...]) -> bool:
        """Whether a call matches a line and gets the values that it reads; if so, the value that it makes is there."""
        group = group_of(micros)
        if (
            type(line) is not Compute
            or line.kind is not kind
            or line.micros != group
            or line.stage != self._stage
            or line.version != self._version
            or arguments != self._reads(kind, group)
        ):
            return False
        if kind is FORWARD:
            self._values.add((_OUTPUTS, group, self._stage))
        elif kind is not WEIGHT_GRADIENT:
            self._values.add((_GRADIENTS, group, self._stage))
        return True

    def _reads(self, kind: Kind, group: Group) -> tuple[Value, ...]:
        """The values that an operation needs: of neighbouring stages, or of the dataset."""
        if kind is FORWARD:
            before = (_OUTPUTS, group, self._stage - 1) if self._stage else (INPUT, group, DATASET)
            return (before, (TARGET, group, DATASET)) if self._stage == self._last else (before,)
        if kind is WEIGHT_GRADIENT or self._stage == self._last:
            return ()
        return ((_GRADIENTS, group, self._stage + 1),)

    def _handed_on(self, kind: str, micros: Micros) -> Value | None:
        if not self._run.has(micros):
            return None
        value = kind, group_of(micros), self._stage
        if value not in self._values:
            raise self._lines.differs(f"reads the {_value_text(value)}, which are not on this worker")
        self._values.remove(value)
        return value

    def _operation(self, kind: Kind, micros: Micros) -> Compute:
        version = None if self._version is None else Version(self._version)
        return Compute(kind, _micros(group_of(micros)), Stage(self._stage), version=version)


def _micros(group: Group) -> tuple[Micro, ...]:
    return tuple(map(Micro, group))


def _call_text(done: Instruction, *arguments: object) -> str:
    """The words for a call: its line, and the values that it gets."""
    values = [f"{_value_text(value)}" for value in arguments]
    return f"does `{text_of(done)}`" + (f" with the {' and the '.join(values)}" if values else "")


def _value_text(value: object) -> str:
    match value:
        case (str(kind), tuple(group), int(stage)):
            micros = ",".join(f"m{micro}" for micro in group)
            return f"{kind} of {micros}" + ("" if stage == DATASET else f" s{stage}")
        case _:
            return str(value)
