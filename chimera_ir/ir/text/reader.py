"""Reads the text form of every level of IR. The grammar is `grammar/ir.lark`.

The text may come from anywhere: whatever its content, the result is a level of IR or diagnostics. Each line is checked
here against the header; `verify` checks that the operations together make sense.
"""

import re
from collections.abc import Iterable, Iterator

from lark import Token, Tree

from chimera_ir.diagnostics.catalogue import irtext as say
from chimera_ir.diagnostics.catalogue.endless import VersionsTooOld
from chimera_ir.diagnostics.catalogue.values import Instance
from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.ir import ops
from chimera_ir.ir.ids import Clock, Micro, Slot, Stage, Version, Worker
from chimera_ir.ir.kinds import KINDS, NOTHING, Value
from chimera_ir.ir.levels import MAX_AGE, MAX_MICRO_BATCHES, Header, Plan, Planned, Program, Schedule
from chimera_ir.ir.recomputation import in_full
from chimera_ir.ir.streams import Level, ProgramStream, ScheduleStream
from chimera_ir.ir.text.header import integers, read_header, span
from chimera_ir.ir.text.malformed import FORMS, FORMS_OF_TURN
from chimera_ir.ir.text.structure import MOST_MISTAKES, tree_of
from chimera_ir.ir.turns import Shelf, Turn, shelf
from chimera_ir.source import Source, Span


def parse(source: Source) -> Level:
    """The level of IR that a text describes; the origin of every operation is its line.

    Raises `Rejected` with all malformed lines; if there are none, with all mistakes of the header; if there are none
    either, with all mistakes of the operations.
    """
    tree = tree_of(source)
    title, header_lines, body = tree.children[0], tree.children[1], tree.children[2:]
    assert isinstance(title, Tree)
    assert isinstance(header_lines, Tree)
    name = title.children[0]
    assert isinstance(name, Token)
    header = read_header(name, [token for token in header_lines.children if isinstance(token, Token)])
    reader = _BodyReader(header, name.split()[0])
    level = reader.read(body, span(name))
    if reader.mistakes:
        raise Rejected(_some(reader.mistakes))
    return level


def _some(mistakes: list[Diagnostic]) -> list[Diagnostic]:
    """The first mistakes, and the number of further ones."""
    rest = mistakes[MOST_MISTAKES:]
    return [*mistakes[:MOST_MISTAKES], *([say.MoreMistakes(rest[0].span, len(rest))] if rest else [])]


class _BodyReader:
    """Reads operations, checks them against a header, and records mistakes; a line with a mistake is left out."""

    def __init__(self, header: Header, level: str) -> None:
        self._header = header
        self._level = level
        self._stream = header.asynchronous and level != "plan"
        self._last = (header.micro_batches - 1, header.stages - 1, header.workers - 1)
        self._rings: dict[Shelf, tuple[int, Token]] = {}
        self.mistakes: list[Diagnostic] = []

    def read(self, body: list[Token | Tree[Token]], title: Span) -> Level:
        """Returns the level with the operations or lanes below the header."""
        if self._level == "plan":
            return Plan(self._header, tuple(self._planned(body)))
        lanes = self._lanes(body, title)
        if self._stream:
            return self._turns(lanes)
        if self._level == "program":
            return Program(self._header, in_full(self._header, [tuple(self._instructions(lane)) for lane in lanes]))
        return Schedule(self._header, in_full(self._header, [tuple(self._computes(lane)) for lane in lanes]))

    def _turns(self, lanes: Iterable[Iterable[Token]]) -> ScheduleStream | ProgramStream:
        if self._level == "schedule":
            turns_read = [ops.singles(self._computes(lane)) for lane in lanes]
            return ScheduleStream(self._header, tuple(map(Turn, in_full(self._header, turns_read))))
        turns: list[Turn] = []
        for lane in lanes:
            self._rings = {}
            (instructions,) = in_full(self._header, [tuple(self._instructions(lane))])
            turns.append(Turn(instructions, tuple((shelf, count) for shelf, (count, _) in self._rings.items())))
        return ProgramStream(self._header, tuple(turns))

    def _planned(self, body: list[Token | Tree[Token]]) -> Iterator[Planned]:
        for item in body:
            if isinstance(item, Tree):
                self._reject(say.LaneInPlan(span(item.children[0]), lanes=False))  # type: ignore[arg-type]
                return
            if item.type not in ("PLANNED", "PLANNED_PAIR"):
                self._wrong_level(item)
                continue
            numbers = self._numbers(item)
            if not numbers:
                continue
            *_, clock, worker = numbers
            operation = self._operation(item, numbers[:-2])
            if operation is not None and self._within(item, "worker", worker, self._last[2]):
                yield Planned(Clock(clock), Worker(worker), operation)

    def _lanes(self, body: list[Token | Tree[Token]], title: Span) -> list[list[Token]]:
        """The lines of every worker, by its number; missing workers are reported at ``title``."""
        workers = self._header.workers
        lanes: dict[int, list[Token]] = {}
        headings: dict[int, Token] = {}
        for item in body:
            if isinstance(item, Token):
                self._reject(say.NoHeading(span(item), lanes=True))
                break
            heading, *lines = [token for token in item.children if isinstance(token, Token)]
            worker = next(iter(self._numbers(heading)), workers)
            if worker in headings:
                self._reject(say.LaneTwice(span(heading), worker, span(headings[worker])))
            elif self._within(heading, "worker", worker, workers - 1):
                headings[worker] = heading
                lanes[worker] = lines
        if len(lanes) < workers and not self.mistakes:
            first = next(worker for worker in range(workers) if worker not in lanes)
            self._reject(say.LanesMissing(title, first, len(lanes), workers, workers - len(lanes) - 1))
        return [lanes.get(worker, []) for worker in range(workers)] if not self.mistakes else list(lanes.values())

    def _computes(self, lane: Iterable[Token]) -> Iterator[ops.Operation]:
        for token in lane:
            if token.type not in ("COMPUTE", "PAIR"):
                self._wrong_level(token)
                continue
            numbers = self._numbers(token)
            operation = self._operation(token, numbers) if numbers else None
            if operation is not None:
                yield operation

    def _instructions(self, lane: Iterable[Token]) -> Iterator[ops.Instruction]:
        for token in lane:
            numbers = self._numbers(token)
            instruction = self._instruction(token, numbers) if numbers else None
            if instruction is not None:
                yield instruction

    def _instruction(self, token: Token, numbers: list[int]) -> ops.Instruction | None:
        origin = self._origin(token)
        match token.type:
            case "COMPUTE" | "PAIR":
                return self._operation(token, numbers)
            case "SEND":
                message = self._message(token, numbers[:-1], numbers[-1])
                return None if message is None else ops.Send(message, Worker(numbers[-1]), origin)
            case "RECV":
                count = numbers.pop() if _RING.search(token) else None
                message = self._message(token, numbers[:-2], numbers[-2])
                if message is None or not self._slot(token, message, numbers[-1], count):
                    return None
                return ops.Recv(message, Worker(numbers[-2]), Slot(numbers[-1]), origin)
            case "WAIT_SEND":
                message = self._message(token, numbers)
                return None if message is None else ops.WaitSend(message, origin)
            case "WAIT_RECV":
                message = self._message(token, numbers)
                return None if message is None else ops.WaitRecv(message, origin)
            case "ALL_REDUCE" | "WAIT_ALL_REDUCE" | "STEP" | "STASH" | "DROP":
                return self._synchronisation(token, numbers)
            case _:
                self._wrong_level(token)
                return None

    def _slot(self, token: Token, message: ops.Message, slot: int, count: int | None) -> bool:
        """Returns whether a receive has a slot in range, or records a mistake.

        ``count`` is the number of slots that the line names, as lines of a turn must, and no others may.
        """
        if not self._stream:
            if count is not None:
                self._reject(say.MalformedLine(span(token), "recv", FORMS["recv"]))
            return count is None and self._within(token, "slot", slot, self._last[0])
        if count is None:
            self._reject(say.RingUnsaid(span(token), slot, slot + 1))
            return False
        if not 1 <= count <= MAX_MICRO_BATCHES:
            self._reject(say.CountOutOfRange(span(token), "slots", str(count), 1, MAX_MICRO_BATCHES))
            return False
        other, before = self._rings.setdefault(shelf(message), (count, token))
        if count != other:
            self._reject(say.RingsDiffer(span(token), message.source, message.target, count, other, span(before)))
        return count == other and self._within(token, "slot", slot, count - 1)

    def _synchronisation(self, token: Token, stages: list[int]) -> ops.Instruction | None:
        if not self._within(token, "stage", max(stages), self._last[1]):
            return None
        version, origin = self._version(token), self._origin(token)
        group = tuple(map(Stage, sorted(stages)))
        if version is not None and token.type in ("STASH", "DROP"):
            return (ops.Stash if token.type == "STASH" else ops.Drop)(group, version, origin)
        return _SYNCS[token.type](group, origin, version) if token.type in _SYNCS else None

    def _version(self, token: Token) -> Version | None:
        """The version that a line names; None, with a mistake recorded if the level demands or forbids one."""
        match = _VERSION.search(token)
        if match is None and self._header.steps_inside:
            self._reject(
                (say.VersionUnsaidInTurn if self._stream else say.VersionUnsaid)(span(token), token.split()[0])
            )
        if match is not None and not self._header.steps_inside:
            needless = say.NeedlessCopy if token.type in ("STASH", "DROP") else say.NeedlessVersion
            self._reject(needless(span(token), token.split()[0]))
        version = integers(token, match[1] or "0")[0] if match else 0
        within = self._of_turn(token, "version", version, self._header.updates)
        return Version(version) if match and within else None

    def _operation(self, token: Token, numbers: list[int]) -> ops.Operation | None:
        """The operation of a line, from the numbers before its clock: micro-batches and a stage, twice for a pair."""
        if "&" not in token:
            return self._compute(token, numbers[:-1], numbers[-1])
        if self._header.asynchronous:
            self._reject(say.PairInStream(span(token)))
            return None
        places = token[: token.index("&")].count(",") + 2
        parts = [
            self._compute(token, [*micros], stage, letter)
            for letter, (*micros, stage) in (("F", numbers[:places]), ("B", numbers[places:]))
        ]
        forward, backward = parts
        return None if forward is None or backward is None else ops.Pair(forward, backward, self._origin(token))

    def _compute(self, token: Token, micros: list[int], stage: int, letter: str = "") -> ops.Compute | None:
        if not self._in_range(token, micros, stage):
            return None
        version = self._version(token)
        numbers = tuple(map(Micro, micros))
        age = 0 if version is None else self._header.update_of(numbers) - version
        if age > MAX_AGE:
            self._reject(VersionsTooOld(span(token), (), Instance(), (), age, MAX_AGE))
        return ops.Compute(KINDS[letter or token.split()[0]], numbers, Stage(stage), self._origin(token), version)

    def _message(self, token: Token, numbers: list[int], peer: int = 0) -> ops.Message | None:
        """The message of a line, from its micro-batches and its two stages; ``peer`` is the worker that it names."""
        *micros, source, target = numbers
        if not self._in_range(token, micros, max(source, target)):
            return None
        if not self._within(token, "worker", peer, self._last[2]):
            return None
        stages = Stage(source), Stage(target)
        value = self._value(token, stages)
        return None if value is None else ops.Message(tuple(map(Micro, micros)), *stages, value)

    def _value(self, token: Token, stages: tuple[Stage, Stage]) -> Value | None:
        """The value in the message of a line: the one that it names, or the one that its two stages imply."""
        match, between = _VALUE.match(token), self._header.value_between
        value = between.get((*stages, match[1] if match else ""))
        if value is None and (*stages, "") in between:
            word = " ".join(token.split()[: 1 + token.startswith("wait")])
            self._reject(say.MalformedLine(span(token), word, (FORMS_OF_TURN if self._stream else FORMS)[word]))
            return None
        return value or NOTHING

    def _in_range(self, token: Token, micros: list[int], stage: int) -> bool:
        ends = {min(micros), max(micros)}
        within = all(self._of_turn(token, "micro-batch", micro, self._last[0]) for micro in ends)
        return within and self._within(token, "stage", stage, self._last[1])

    def _origin(self, token: Token) -> Span:
        return span(token)._replace(turn=(0, 0) if self._stream else ())

    def _of_turn(self, token: Token, what: str, value: int, last: int) -> bool:
        """Whether ``value``, called ``what``, is in range: in a turn not too far from it, else at most ``last``."""
        if not self._stream:
            return self._within(token, what, value, last)
        if abs(value) <= MAX_MICRO_BATCHES:
            return True
        self._reject(say.NumberOutOfRange(span(token), what, f"{value:+}", -MAX_MICRO_BATCHES, MAX_MICRO_BATCHES))
        return False

    def _within(self, token: Token, what: str, value: int, last: int) -> bool:
        if value <= last:
            return True
        self._reject(say.NumberOutOfRange(span(token), what, str(value), 0, last))
        return False

    def _numbers(self, token: Token) -> list[int]:
        """The numbers of a line, without its version; empty, with a mistake recorded, if they do not suit the level."""
        wrong = (_NOT_OF_TURN if self._stream else _OF_TURN).search(token)
        if wrong and self._stream:
            self._reject(say.NotOfTurn(span(token), wrong[1]))
            return []
        if wrong:
            message = say.NoTurnInPlan if self._level == "plan" else say.NoTurnToCountFrom
            self._reject(message(span(token), wrong[1], self._level))
            return []
        try:
            return integers(token, _MICRO.sub(lambda micro: (micro[1] or "0").lstrip("+"), _VERSION.sub("", token)))
        except Rejected as rejected:
            self.mistakes.extend(rejected.diagnostics)
            return []

    def _wrong_level(self, token: Token) -> None:
        form = f"{FORMS['F']} @ 3 on w1" if self._level == "plan" else (FORMS_OF_TURN if self._stream else FORMS)["F"]
        other = "plan" if token.type == "PLANNED" else "program"
        self._reject(say.WrongLevel(span(token), self._level, other, form))

    def _reject(self, mistake: Diagnostic) -> None:
        self.mistakes.append(mistake)


_VERSION = re.compile(r"[ \t]v([+-]?[0-9]+)?(?![^ \t\r])")
_MICRO = re.compile(r"(?<![^ \t,])m([+-]?[0-9]+)?(?![^ \t\r,])")
_OF_TURN = re.compile(r"(?<![^ \t,])([mv](?:[+-][0-9]+)?)(?![^ \t\r,])")
_NOT_OF_TURN = re.compile(r"(?<![^ \t,])([mv][0-9]+)")
_VALUE = re.compile(r"(?:wait[ \t]+)?(?:send|recv)[ \t]+([a-z]+)[ \t]+m")
_RING = re.compile(r"[ \t]of[ \t]")
_SYNCS: dict[str, type[ops.AllReduce | ops.WaitAllReduce | ops.Step]] = {
    "ALL_REDUCE": ops.AllReduce,
    "WAIT_ALL_REDUCE": ops.WaitAllReduce,
    "STEP": ops.Step,
}
