"""Lanes that compute nothing: each call of a script takes the next line of the program, and must match it.

rank_0.py                                          the lane of worker 0
  in_s1_s0.wait(2)                                   wait recv m2 s1->s0
  stage0.backward(2, in_s1_s0.take(2))               B m2 s0

Where a rank has a tensor, there is a description of it: ``("input gradients", (2,), 1)`` are the gradients of
micro-batch 2 from stage 1. The classes have the methods that scripts call, and share no code with what writes the
scripts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial, partialmethod
from itertools import chain, product
from math import inf
from typing import Any, NamedTuple, Self

from chimera_ir.ir import ops
from chimera_ir.ir.kinds import BACKWARD, FORWARD, KINDS, Kind, values
from chimera_ir.ir.kinds import Value as HandedOn
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Micro, Slot, Stage, Version, WeightGroup, Worker
from chimera_ir.ir.text.printer import absolute
from chimera_ir.ir.text.printer import line as text_of

Group = tuple[Micro, ...]
"""The micro-batches of an operation or of a message."""

Micros = Micro | Group
"""Micro-batches as scripts write them: one as a number, several as a tuple."""

Route = tuple[int, int, int, str]
"""A link: the stage that sends, the stage that receives, the other worker; a value, empty if the stages imply it."""

Value = tuple[str, Group, int]
"""The description of a tensor: its role, such as "input gradients", its micro-batches, and the stage that made it."""

_INPUT, _TARGET = "input", "target"

_DATASET = -1
"""The number that inputs and targets have in place of the stage that made them."""


class Differs(Exception):
    """Error: a call of a script is not the next line of the program.

    ``expected`` is that line, None if no line is left; ``done`` says what the script does instead.
    """

    def __init__(self, expected: ops.Instruction | None, done: str) -> None:
        super().__init__(done)
        self.expected = expected
        self.done = done


def group_of(micros: Micros) -> Group:
    """Micro-batches as a tuple."""
    return micros if isinstance(micros, tuple) else (micros,)


class ScriptRun(NamedTuple):
    """The updates and micro-batches of one run of a script; calls about others expect no line of the program.

    Without a flush a run has the micro-batches ``start`` to ``micro_batches - 1``, and the updates that make the
    versions ``start + 1`` to ``updates``. The defaults are for a script with a flush: every call expects its line.
    """

    start: float = -inf
    updates: float = inf
    micro_batches: float = inf

    def makes(self, version: int) -> bool:
        """Whether the step that makes this version of the weights is in the run."""
        return self.start < version <= self.updates

    def keeps(self, version: int) -> bool:
        """Whether the step that makes this version is in the run, and so is a later one that replaces the version."""
        return self.start < version < self.updates


class Recording:
    """The lines of a ``lane`` that the calls of a script are compared with, one after the other.

    ``next_line`` takes the next line; it returns None after the last.
    """

    def __init__(self, lane: Iterable[ops.Instruction], header: Header, run: ScriptRun) -> None:
        self.header, self.run = header, run
        self.next_line: Callable[[], ops.Instruction | None] = partial(next, iter(lane), None)

    def in_run(self, micros: Micros) -> Group:
        """The micro-batches as a tuple; none if they are not in the run. Either all of them are, or none."""
        group = micros if isinstance(micros, tuple) else (micros,)
        return group if self.run.start <= group[0] < self.run.micro_batches else ()

    def expect(self, done: ops.Instruction) -> ops.Instruction:
        """Takes the next line and returns it; raises `Differs` if it is not ``done``."""
        line = self.next_line()
        if line is None or line != done:
            raise Differs(line, self.text(done))
        return line

    def text(self, done: ops.Instruction, *arguments: object) -> str:
        """A line of a script in words."""
        values = " and the ".join(map(self.value_text, arguments))
        return f"does `{text_of(done, self.header)}`" + (f" with the {values}" if values else "")

    def value_text(self, value: object) -> str:
        """The description of tensors in words, as in ``outputs of m2 s1``."""
        match value:
            case (str(kind), tuple(group), int(stage), *others):
                micros = ",".join(map(absolute(self.header.slices).micro, group))
                further = f" and the {self.value_text((*others,))}" if others else ""
                return f"{kind} of {micros}" + ("" if stage == _DATASET else f" s{stage}") + further
            case _:
                return str(value)


class _RecordedLink:
    _wait: type[ops.WaitSend | ops.WaitRecv]
    _preposition: str

    def __init__(self, recording: Recording, route: Route) -> None:
        self._recording = recording
        self._source, self._target, self._worker = Stage(route[0]), Stage(route[1]), Worker(route[2])
        self._sent = recording.header.value_between[self._source, self._target, route[3]]
        self._role = _role(self._sent)
        self._under_way: set[Group] = set()
        self._over: set[Group] = set()

    def skip(self, micros: int) -> None:
        """Counts what is under way for micro-batches that are so much later."""
        self._under_way = {_later(group, micros) for group in self._under_way}
        self._over = {_later(group, micros) for group in self._over}

    def wait(self, micros: Micros) -> None:
        """Expects the line ``wait send`` or ``wait recv`` of a message that is posted on this link."""
        if group := self._recording.in_run(micros):
            line, message = self._recording.next_line(), self._message(group)
            if type(line) is not self._wait or line.message != message or group not in self._under_way:
                done = self._recording.text(self._wait(message))
                raise Differs(line, f"{done} {self._preposition} w{self._worker}")
            self._under_way.remove(group)
            self._over.add(group)

    def _message(self, group: Group) -> ops.Message:
        return ops.Message(group, self._source, self._target, self._sent)


class RecordedOutgoing(_RecordedLink):
    """A link to a stage on another worker."""

    _wait, _preposition = ops.WaitSend, "to"

    def isend(self, micros: Micros, tensors: object) -> None:
        """Expects the line ``send``; ``tensors`` must be the value that the stage has made of these micro-batches."""
        if group := self._recording.in_run(micros):
            line, message = self._recording.next_line(), self._message(group)
            is_next = type(line) is ops.Send and line.message == message and line.to == self._worker
            if not is_next or tensors != (self._role, group, self._source):
                raise Differs(line, self._recording.text(ops.Send(message, self._worker), tensors))
            self._under_way.add(group)


class RecordedIncoming(_RecordedLink):
    """A link from a stage on another worker; slot k has room for ``rooms[k]`` micro-batches."""

    _wait, _preposition = ops.WaitRecv, "from"

    def __init__(self, recording: Recording, route: Route, rooms: Sequence[int]) -> None:
        super().__init__(recording, route)
        self._rooms = rooms
        self._taken: dict[Group, int] = {}  # by how many of several stages

    def skip(self, micros: int) -> None:
        """Counts what is under way for micro-batches that are so much later."""
        super().skip(micros)
        self._taken = {_later(group, micros): count for group, count in self._taken.items()}

    def irecv(self, micros: Micros, into: int) -> None:
        """Expects the line ``recv``, into the slot ``into``, which must have room."""
        if group := self._recording.in_run(micros):
            line, message = self._recording.next_line(), self._message(group)
            if (
                type(line) is not ops.Recv
                or line.message != message
                or line.source != self._worker
                or line.slot != into
            ):
                raise Differs(line, self._recording.text(ops.Recv(message, self._worker, Slot(into))))
            if into >= len(self._rooms) or len(group) > self._rooms[into]:
                raise Differs(line, f"has no room in slot {into}: program.json gives the slots {list(self._rooms)}")
            self._under_way.add(group)

    def take(self, micros: Micros) -> Value | None:
        """Returns the value that a message has brought; raises `Differs` if it has not come, or if every stage that
        reads it took it before.
        """
        group = self._recording.in_run(micros)
        if not group:
            return None
        value = self._role, group, self._source
        if group not in self._over:
            text = self._recording.value_text(value)
            raise Differs(self._recording.next_line(), f"takes the {text} from w{self._worker}, which have not come")
        header = self._recording.header
        sharing = header.sharing(self._sent, self._source, self._target, group[0])
        self._taken[group] = self._taken.get(group, 0) + 1
        if self._taken[group] == len(sharing):
            del self._taken[group]
            self._over.remove(group)
        return value


class RecordedWeights:
    """The weights of a stage or a tie.

    ``initial`` are two version numbers, both 0 or less, that stand for the initial weights in a stream: `stash` of the
    first one keeps these weights, and `drop` of the second one frees them.
    """

    def __init__(self, recording: Recording, group: WeightGroup, initial: tuple[int, int]) -> None:
        self._recording, self._group = recording, group
        self._stashed, self._dropped = initial

    def stash(self, version: int) -> None:
        """Expects the line ``stash``."""
        if version == self._stashed or self._recording.run.keeps(version):
            self._recording.expect(ops.Stash(self._group, Version(max(0, version))))

    def drop(self, version: int) -> None:
        """Expects the line ``drop``."""
        if version == self._dropped or self._recording.run.keeps(version):
            self._recording.expect(ops.Drop(self._group, Version(max(0, version))))

    def _expect_of_update(
        self, kind: type[ops.AllReduce | ops.WaitAllReduce | ops.Step], version: Version | None = None
    ) -> None:
        if version is None or self._recording.run.makes(version):
            self._recording.expect(kind(self._group, version=version))

    all_reduce = partialmethod(_expect_of_update, ops.AllReduce)
    wait_all_reduce = partialmethod(_expect_of_update, ops.WaitAllReduce)
    step = partialmethod(_expect_of_update, ops.Step)


class RecordedStage(RecordedWeights):
    """A stage whose methods expect lines of the program. If it feeds no other stage, its forward also takes targets."""

    def __init__(self, recording: Recording, stage: Stage, initial: tuple[int, int]) -> None:
        super().__init__(recording, (stage,), initial)
        self._stage = stage
        self._version: int | None = None
        self._values: set[tuple[Value, int | None]] = set()  # a value for each micro-batch
        makers = recording.header.makers
        # What each kind of operations reads of other stages: the roles of these values, and the stages that make them.
        self._received = {
            kind: [
                (_role(value), makers(value, stage)) for value in kind.reads if value.crosses and makers(value, stage)
            ]
            for kind in KINDS.values()
        }
        # Its methods, as the table of kinds names them, which run operations or return what operations have made.
        vars(self).update({kind.method: partial(self._expect_operation, kind) for kind in KINDS.values()})
        moves = [kind for kind in KINDS.values() if kind.moves]
        vars(self).update({f"wait_{kind.method}": partial(self._expect_wait, kind) for kind in moves})
        crossing = [value for value in values() if value.crosses]
        vars(self).update({value.made: partial(self._handed_on, _role(value)) for value in crossing})
        # The stages that read its values, each of which takes them once, as scripts name them: None if there is one.
        readers = {value: recording.header.readers(value, stage) for value in crossing}
        self._readers = {
            value: [(reader if len(stages) > 1 else None, reader) for reader in stages]
            for value, stages in readers.items()
        }

    def at(self, version: int) -> Self:
        """Sets the version of the weights that the next operation reads, and returns the stage; below 0 counts as 0."""
        self._version = max(0, version)
        return self

    def skip(self, micros: int) -> None:
        """Counts what the stage has made, and not handed on, for micro-batches that are so much later."""
        self._values = {((role, _later(group, micros), s), reader) for (role, group, s), reader in self._values}

    def pair(self, forward: Sequence[Any], other: "RecordedStage", backward: Sequence[Any]) -> None:
        """Expects the line of a pair: a forward of this stage and a backward of ``other``, each with its arguments."""
        line, forwards, backwards = self._recording.next_line(), group_of(forward[0]), group_of(backward[0])
        first, second = (line.forward, line.backward) if type(line) is ops.Pair else (None, None)
        matches = self._does(first, FORWARD, forwards, (*forward[1:],))
        if not (matches and other._does(second, BACKWARD, backwards, (*backward[1:],))):
            done = ops.Pair(self._operation(FORWARD, forwards), other._operation(BACKWARD, backwards))
            raise Differs(line, self._recording.text(done, *forward[1:], *backward[1:]))

    def _expect_operation(self, kind: Kind, micros: Micros, *arguments: object) -> None:
        if group := self._recording.in_run(micros):
            line = self._recording.next_line()
            if not self._does(line, kind, group, arguments):
                raise Differs(line, self._recording.text(self._operation(kind, group), *arguments))

    def _expect_wait(self, kind: Kind, micros: Micros) -> None:
        if group := self._recording.in_run(micros):
            self._recording.expect(ops.WaitMove(kind, group, self._stage))

    def _does(self, line: ops.Instruction | None, kind: Kind, group: Group, arguments: tuple[object, ...]) -> bool:
        if (
            type(line) is not ops.Compute
            or line.kind.letter != kind.letter
            or line.micros != group
            or line.stage != self._stage
            or line.version != self._read_by(kind)
            or arguments != self._reads(kind, group)
        ):
            return False
        has = self._recording.header.has
        for value in kind.hands_on:
            readers = [reader for reader, stage in self._readers[value] if has(group[0], stage)]
            made = ((_role(value), (micro,), self._stage) for micro in group)
            self._values.update(product(made, readers))
        return True

    def _reads(self, kind: Kind, group: Group) -> tuple[tuple[object, ...], ...]:
        # Tensors from several stages are in one tuple, and so are their descriptions.
        has = self._recording.header.has
        received = tuple(
            [
                tuple([part for maker in makers if has(group[0], maker) for part in (role, group, maker)])
                for role, makers in self._received[kind]
            ]
        )
        if not kind.opens:
            return received
        header = self._recording.header
        source, sink = (self._of_dataset(neighbours) for neighbours in (header.feeding, header.fed))
        targets = () if header.fed[self._stage] else ((_TARGET, group, sink),)
        return (*(received or ((_INPUT, group, source),)), *targets)

    def _of_dataset(self, neighbours: Sequence[Sequence[Stage]]) -> int:
        """The number in the description of an input or a target: of this stage, if several have no ``neighbours``."""
        return int(self._stage) if sum(not others for others in neighbours) > 1 else _DATASET

    def _handed_on(self, role: str, micros: Micros, *readers: int) -> Value | None:
        group = self._recording.in_run(micros)
        if not group:
            return None
        value = role, group, self._stage
        values = {((role, (micro,), self._stage), reader) for micro in group for reader in readers or (None,)}
        if not values <= self._values:
            text = self._recording.value_text(value)
            raise Differs(self._recording.next_line(), f"reads the {text}, which are not on this worker")
        self._values -= values
        return value

    def _operation(self, kind: Kind, group: Group) -> ops.Compute:
        return ops.Compute(kind, group, self._stage, version=self._read_by(kind))

    def _read_by(self, kind: Kind) -> Version | None:
        return None if kind.moves or self._version is None else Version(self._version)


class RecordedLane:
    """Stand-in for a rank's lane, given to a script's functions: every call must be the next line of ``recording``.

    The rest is what program.json lists for the rank. ``initial`` has the two version numbers of each weight group that
    the rank holds: see `RecordedWeights`. ``rooms`` has, for each incoming link, how many micro-batches each slot has
    room for; ``outgoing`` are the outgoing links.
    """

    def __init__(
        self,
        recording: Recording,
        initial: Mapping[WeightGroup, tuple[int, int]],
        rooms: Mapping[Route, Sequence[int]],
        outgoing: Sequence[Route],
    ) -> None:
        self._groups = {
            group: RecordedStage(recording, group[0], versions)
            if len(group) == 1
            else RecordedWeights(recording, group, versions)
            for group, versions in initial.items()
        }
        self._incoming = {route: RecordedIncoming(recording, route, slots) for route, slots in rooms.items()}
        self._outgoing = {route: RecordedOutgoing(recording, route) for route in outgoing}

    def skip(self, micros: int) -> None:
        """Goes on after turns that are not run, in which the script has got so many micro-batches further."""
        for group in self._groups.values():
            if isinstance(group, RecordedStage):
                group.skip(micros)
        for link in (*self._incoming.values(), *self._outgoing.values()):
            link.skip(micros)

    def stage(self, number: int) -> RecordedWeights:
        """A stage of the worker."""
        return self._groups[Stage(number),]

    def tie(self, *stages: int) -> RecordedWeights:
        """Returns the parameters that these stages share, with the methods that scripts call on them."""
        return self._groups[tuple(map(Stage, stages))]

    def incoming(self, source: int, target: int, worker: int, value: str = "") -> RecordedIncoming:
        """The link on which stage ``target`` receives a value from stage ``source`` of another worker."""
        return self._incoming[source, target, worker, value]

    def outgoing(self, source: int, target: int, worker: int, value: str = "") -> RecordedOutgoing:
        """The link on which stage ``source`` sends a value to stage ``target`` of another worker."""
        return self._outgoing[source, target, worker, value]

    def input(self, micros: Micros, stage: int = _DATASET) -> Value:
        """Returns the description that scripts get in place of the input of these micro-batches, for a stage."""
        return _INPUT, group_of(micros), stage

    def join(self, *parts: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the description of parts joined: of all their micro-batches, if nothing else differs."""
        roles, groups, stages = zip(*parts, strict=True)
        of_one_stage = len({*roles}) == len({*stages}) == 1
        return (roles[0], tuple(chain.from_iterable(groups)), stages[0]) if of_one_stage else parts

    def target(self, micros: Micros, stage: int = _DATASET) -> Value:
        """Returns the description that scripts get in place of the target of these micro-batches, for a stage."""
        return _TARGET, group_of(micros), stage


def _later(group: Group, by: int) -> Group:
    return tuple([Micro(micro + by) for micro in group])


@cache
def _role(value: HandedOn) -> str:
    return value.made.replace("_", " ")
