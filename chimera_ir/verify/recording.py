"""A lane that computes nothing: each call of a script takes the next line of the program, and must say the same.

rank_0.py                                          the lane of worker 0
  in_s1_s0.wait(2)                                   wait recv m2 s1->s0
  stage0.backward(2, in_s1_s0.take(2))               B m2 s0

A value is what it stands for, such as the gradients of micro-batch 2 from stage 1. The classes have the methods that
scripts call, and share no code with what writes the scripts.
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
"""The same as scripts say it: one by itself."""

Route = tuple[int, int, int]
"""A link: the stage that sends, the stage that receives, and the other worker."""

Value = tuple[str, Group, int]
"""What a call hands on or is given: what it is, the micro-batches, and the stage that made it."""

_OUTPUTS, _GRADIENTS, INPUT, TARGET = "outputs", "input gradients", "input", "target"

DATASET = -1
"""In place of a stage, the maker of inputs and targets."""


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
        """The difference of something between two lines, before the next one."""
        return Differs(self.take(), done)


class WholeRun:
    """All that a script with a flush says, so that nothing is left out."""

    def has(self, micros: Micros) -> bool:
        """Whether micro-batches are in the run."""
        return True

    def makes(self, version: int) -> bool:
        """Whether an update of the run makes a version of the weights."""
        return True

    def keeps(self, version: int) -> bool:
        """Whether a version is made, and replaced later."""
        return True


class StreamRun(WholeRun):
    """A number of updates of a stream: calls about other micro-batches and versions do nothing."""

    def __init__(self, updates: int, micro_batches: int) -> None:
        self._updates = updates
        self._micro_batches = micro_batches

    def has(self, micros: Micros) -> bool:
        """Whether micro-batches are in the run; those of one operation are so together."""
        return 0 <= (micros[0] if isinstance(micros, tuple) else micros) < self._micro_batches

    def makes(self, version: int) -> bool:
        """Whether an update of the run makes a version of the weights."""
        return 0 < version <= self._updates

    def keeps(self, version: int) -> bool:
        """Whether an update of the run makes a version, and a later one replaces it."""
        return 0 < version < self._updates


class _RecordedLink:
    def __init__(self, lines: LaneLines, run: WholeRun, route: Route) -> None:
        self._lines, self._run = lines, run
        self._source, self._target, self._worker = route
        self._kind = _OUTPUTS if self._source < self._target else _GRADIENTS
        self._under_way: set[Group] = set()

    def _message(self, group: Group) -> Message:
        return Message(_micros(group), Stage(self._source), Stage(self._target))


class RecordedOutgoing(_RecordedLink):
    """A link to a stage on another worker."""

    def isend(self, micros: Micros, tensors: object) -> None:
        """The line ``send``, of what the stage has made of the same micro-batches."""
        if not self._run.has(micros):
            return
        group = micros if isinstance(micros, tuple) else (micros,)
        line = self._lines.take()
        if (
            type(line) is not Send
            or line.message != (group, self._source, self._target)
            or line.to != self._worker
            or tensors != (self._kind, group, self._source)
        ):
            raise Differs(line, _said(Send(self._message(group), Worker(self._worker)), tensors))
        self._under_way.add(group)

    def wait(self, micros: Micros) -> None:
        """The line ``wait send``, of a message that is sent on this link."""
        if not self._run.has(micros):
            return
        group = micros if isinstance(micros, tuple) else (micros,)
        line = self._lines.take()
        if (
            type(line) is not WaitSend
            or line.message != (group, self._source, self._target)
            or group not in self._under_way
        ):
            raise Differs(line, f"{_said(WaitSend(self._message(group)))} to w{self._worker}")
        self._under_way.remove(group)


class RecordedIncoming(_RecordedLink):
    """A link from a stage on another worker; ``rooms[k]`` is for how many micro-batches slot k has room."""

    def __init__(self, lines: LaneLines, run: WholeRun, route: Route, rooms: Sequence[int]) -> None:
        super().__init__(lines, run, route)
        self._rooms = rooms
        self._arrived: set[Group] = set()

    def irecv(self, micros: Micros, into: int) -> None:
        """The line ``recv``, into a slot that has room."""
        if not self._run.has(micros):
            return
        group = micros if isinstance(micros, tuple) else (micros,)
        line = self._lines.take()
        if (
            type(line) is not Recv
            or line.message != (group, self._source, self._target)
            or line.source != self._worker
            or line.slot != into
        ):
            raise Differs(line, _said(Recv(self._message(group), Worker(self._worker), Slot(into))))
        if into >= len(self._rooms) or len(group) > self._rooms[into]:
            raise Differs(line, f"has no room in slot {into}: program.json gives the slots {list(self._rooms)}")
        self._under_way.add(group)

    def wait(self, micros: Micros) -> None:
        """The line ``wait recv``, of a message that is received on this link."""
        if not self._run.has(micros):
            return
        group = micros if isinstance(micros, tuple) else (micros,)
        line = self._lines.take()
        if (
            type(line) is not WaitRecv
            or line.message != (group, self._source, self._target)
            or group not in self._under_way
        ):
            raise Differs(line, f"{_said(WaitRecv(self._message(group)))} from w{self._worker}")
        self._under_way.remove(group)
        self._arrived.add(group)

    def take(self, micros: Micros) -> Value | None:
        """What a message has brought, once."""
        if not self._run.has(micros):
            return None
        group = micros if isinstance(micros, tuple) else (micros,)
        value = self._kind, group, self._source
        if group not in self._arrived:
            raise self._lines.differs(f"takes the {_shown(value)} from w{self._worker}, which have not come")
        self._arrived.remove(group)
        return value


class RecordedWeights:
    """The weights of a stage or a tie.

    ``initial`` are the versions, 0 or less, at whose places the initial weights of a stream are stashed and dropped.
    """

    def __init__(self, lines: LaneLines, run: WholeRun, group: WeightGroup, initial: tuple[int, int]) -> None:
        self._lines, self._run, self._group = lines, run, group
        self._stashed, self._dropped = initial

    def all_reduce(self, version: Version | None = None) -> None:
        """The line ``all_reduce``."""
        self._made(AllReduce(self._group, version=version))

    def wait_all_reduce(self, version: Version | None = None) -> None:
        """The line ``wait all_reduce``."""
        self._made(WaitAllReduce(self._group, version=version))

    def step(self, version: Version | None = None) -> None:
        """The line ``step``."""
        self._made(Step(self._group, version=version))

    def stash(self, version: int) -> None:
        """The line ``stash``."""
        if version == self._stashed or self._run.keeps(version):
            self._next(Stash(self._group, Version(max(0, version))))

    def drop(self, version: int) -> None:
        """The line ``drop``."""
        if version == self._dropped or self._run.keeps(version):
            self._next(Drop(self._group, Version(max(0, version))))

    def _made(self, done: AllReduce | WaitAllReduce | Step) -> None:
        if done.version is None or self._run.makes(done.version):
            self._next(done)

    def _next(self, done: Instruction) -> None:
        line = self._lines.take()
        if line != done:
            raise Differs(line, _said(done))


class RecordedStage(RecordedWeights):
    """A stage; ``last`` is the number of the last one."""

    def __init__(self, lines: LaneLines, run: WholeRun, stage: int, last: int, initial: tuple[int, int]) -> None:
        super().__init__(lines, run, (Stage(stage),), initial)
        self._stage, self._last = stage, last
        self._version: int | None = None
        self._values: set[Value] = set()

    def at(self, version: int) -> Self:
        """The stage with a version of its weights; those below 0 are version 0."""
        self._version = max(0, version)
        return self

    def forward(self, micros: Micros, *given: object) -> None:
        """The line ``F``."""
        self._ran(FORWARD, micros, given)

    def backward(self, micros: Micros, *given: object) -> None:
        """The line ``B``."""
        self._ran(BACKWARD, micros, given)

    def backward_input(self, micros: Micros, *given: object) -> None:
        """The line ``I``."""
        self._ran(INPUT_GRADIENT, micros, given)

    def backward_weights(self, micros: Micros, *given: object) -> None:
        """The line ``W``."""
        self._ran(WEIGHT_GRADIENT, micros, given)

    def pair(self, forward: Sequence[Any], other: "RecordedStage", backward: Sequence[Any]) -> None:
        """The line of a pair, whose backward may be of another stage."""
        line = self._lines.take()
        first, second = (line.forward, line.backward) if type(line) is Pair else (None, None)
        known = self._does(first, FORWARD, forward[0], (*forward[1:],))
        if not (known and other._does(second, BACKWARD, backward[0], (*backward[1:],))):
            done = Pair(self._operation(FORWARD, forward[0]), other._operation(BACKWARD, backward[0]))
            raise Differs(line, _said(done, *forward[1:], *backward[1:]))

    def outputs(self, micros: Micros) -> Value | None:
        """What a forward has made for the next stage, once."""
        return self._handed_on(_OUTPUTS, micros)

    def input_gradients(self, micros: Micros) -> Value | None:
        """What a backward has made for the stage before, once."""
        return self._handed_on(_GRADIENTS, micros)

    def _ran(self, kind: Kind, micros: Micros, given: tuple[object, ...]) -> None:
        if not self._run.has(micros):
            return
        line = self._lines.take()
        if not self._does(line, kind, micros, given):
            raise Differs(line, _said(self._operation(kind, micros), *given))

    def _does(self, line: Instruction | None, kind: Kind, micros: Micros, given: tuple[object, ...]) -> bool:
        """Whether an operation is a line of the program and is given what that reads; then its value is there."""
        group = micros if isinstance(micros, tuple) else (micros,)
        if (
            type(line) is not Compute
            or line.kind is not kind
            or line.micros != group
            or line.stage != self._stage
            or line.version != self._version
            or given != self._reads(kind, group)
        ):
            return False
        if kind is FORWARD:
            self._values.add((_OUTPUTS, group, self._stage))
        elif kind is not WEIGHT_GRADIENT:
            self._values.add((_GRADIENTS, group, self._stage))
        return True

    def _reads(self, kind: Kind, group: Group) -> tuple[Value, ...]:
        """What an operation is given: of its neighbours, or of the dataset."""
        if kind is FORWARD:
            before = (_OUTPUTS, group, self._stage - 1) if self._stage else (INPUT, group, DATASET)
            return (before, (TARGET, group, DATASET)) if self._stage == self._last else (before,)
        if kind is WEIGHT_GRADIENT or self._stage == self._last:
            return ()
        return ((_GRADIENTS, group, self._stage + 1),)

    def _handed_on(self, kind: str, micros: Micros) -> Value | None:
        if not self._run.has(micros):
            return None
        value = kind, micros if isinstance(micros, tuple) else (micros,), self._stage
        if value not in self._values:
            raise self._lines.differs(f"reads the {_shown(value)}, which are not on this worker")
        self._values.remove(value)
        return value

    def _operation(self, kind: Kind, micros: Micros) -> Compute:
        version = None if self._version is None else Version(self._version)
        group = micros if isinstance(micros, tuple) else (micros,)
        return Compute(kind, _micros(group), Stage(self._stage), version=version)


def _micros(group: Group) -> tuple[Micro, ...]:
    return tuple(map(Micro, group))


def _said(done: Instruction, *given: object) -> str:
    """A line as the script says it, with what it is given."""
    values = [f"{_shown(value)}" for value in given]
    return f"does `{text_of(done)}`" + (f" with the {' and the '.join(values)}" if values else "")


def _shown(value: object) -> str:
    match value:
        case (str(kind), tuple(group), int(stage)):
            micros = ",".join(f"m{micro}" for micro in group)
            return f"{kind} of {micros}" + ("" if stage == DATASET else f" s{stage}")
        case _:
            return str(value)
