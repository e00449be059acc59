"""Reads the text form of every level of IR. The grammar is `grammar/ir.lark`.

The text may come from anywhere: whatever its content, the result is a level of IR or diagnostics. Each line is checked
here against the header; `verify` checks that the operations together make sense.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from lark import Lark, Token, Tree, UnexpectedToken

from chimera_ir.diagnostics.catalogue import irtext as say
from chimera_ir.diagnostics.catalogue.values import Instance, VersionsTooOld
from chimera_ir.diagnostics.model import Attempts, Diagnostic, Rejected
from chimera_ir.ir import ops
from chimera_ir.ir.kinds import KINDS, NOTHING, Value, all_kinds
from chimera_ir.ir.levels import MAX_AGE, MAX_MICRO_BATCHES, Header, Plan, Program, Schedule, in_full
from chimera_ir.ir.ops import Clock, Micro, Planned, Slot, Stage, Unclocked, Version, Worker
from chimera_ir.ir.streams import Level, ProgramStream, ScheduleStream, stream_with
from chimera_ir.ir.text.header import FORMS, FORMS_OF_TURN, HEADER_LINES, explain, integers, read_header, require, span
from chimera_ir.ir.turns import Shelf, Turn, shelf
from chimera_ir.source import Source, Span, parser_of

# Splits a text of IR into lines by the grammar (`grammar/ir.lark`), and finds lines that are malformed or misplaced.

MOST_MISTAKES = 50
"""The most mistakes of a text that are reported."""

_SHORT = 120

_ANY_LINE = re.compile(r"^[ \t]*[^\s#]", re.MULTILINE)
_HEADER_LINE = re.compile(rf"^[ \t]*(?:{'|'.join(HEADER_LINES)})\b", re.MULTILINE)


def count_lines(text: str) -> tuple[int, int]:
    """The number of lines of operations, and of other lines, by their first words: nothing is parsed."""
    lines, headers = (sum(1 for _ in form.finditer(text)) for form in (_ANY_LINE, _HEADER_LINE))
    return lines - headers, headers


@cache
def _parser() -> Lark:
    letters = " | ".join(f'"{letter}"' for letter in KINDS)
    return parser_of("ir.lark", f"\nLETTER: {letters}\n")


def tree_of(source: Source) -> Tree[Token]:
    """The lines of a text as a tree of the title, the header, and the operations or lanes.

    Raises `Rejected` with all lines that the grammar does not know or, without any, the first in a wrong place.
    """
    try:
        tree = _parser().parse(source.text)
    except UnexpectedToken as unexpected:
        raise Rejected(_structure(source, unexpected.token)) from None
    lines = list(tree.scan_values(lambda _: True))
    malformed = [token for token in lines if token.type == "OTHER"]
    if malformed:
        raise Rejected(_malformed(malformed, lines))
    return tree


def _malformed(malformed: list[Token], tokens: list[Token]) -> list[Diagnostic]:
    plan = tokens[0].startswith("plan")
    turn = not plan and any(token.type == "UPDATES" for token in tokens)
    shown = [explain(str(token), token.start_pos or 0, plan=plan, turn=turn) for token in malformed[:MOST_MISTAKES]]
    rest = malformed[MOST_MISTAKES:]
    return [*shown, *([say.MoreMistakes(span(rest[0]), len(rest))] if rest else [])]


def _structure(source: Source, unexpected: Token) -> list[Diagnostic]:
    """The malformed lines of a text or, if there are none, the mistake of the first ``unexpected`` line."""
    tokens = list(_parser().lex(source.text))
    if not tokens:
        return [say.NoTitle(Span(0, 0))]
    if tokens[0].type != "TITLE" and tokens[0].split()[:1] not in (["plan"], ["schedule"], ["program"]):
        return [say.NoTitle(Span(span(tokens[0]).start, min(span(tokens[0])[1], span(tokens[0]).start + _SHORT)))]
    malformed = [token for token in tokens if token.type == "OTHER"]
    if malformed:
        return _malformed(malformed, tokens)
    if unexpected.type == "HEADING" and not tokens[0].startswith("plan"):
        unexpected = next(token for token in tokens if token.type not in _MISPLACED)
    lanes = any(token.type == "HEADING" for token in tokens)
    return [_MISPLACED.get(unexpected.type, say.NoHeading)(span(unexpected), lanes)]


_MISPLACED: dict[str, type[say.OutOfOrder]] = {"TITLE": say.SecondTitle, "HEADING": say.HeadingTooLate} | dict.fromkeys(
    (
        "PARAMETERS",
        "WORKERS",
        "STAGES",
        "MICRO_BATCHES",
        "KINDS",
        "UPDATES",
        "MEMORY",
        "SYNC",
        "FROZEN",
        "NAMED",
        "FEEDS",
        "ABSENT",
        "KEEP",
        "TIED",
        "PIPE",
    ),
    say.HeaderTooLate,
)


def parse(source: Source) -> Level:
    """The level of IR that a text describes; the origin of every operation is its line.

    Raises `Rejected` with mistakes of one sort: all malformed lines; if there are none, all mistakes of the header; if
    the header has none either, all mistakes of the operations.
    """
    tree = tree_of(source)
    title, header_lines, body = tree.children[0], tree.children[1], tree.children[2:]
    assert isinstance(title, Tree)
    assert isinstance(header_lines, Tree)
    name = title.children[0]
    assert isinstance(name, Token)
    header = read_header(name, [token for token in header_lines.children if isinstance(token, Token)])
    header = replace(header, moves=_MOVE.search(source.text) is not None)
    reader = _BodyReader(header, name.split()[0])
    level = reader.read(body, span(name))
    if mistakes := reader.attempts.failed:
        rest = mistakes[MOST_MISTAKES:]
        raise Rejected([*mistakes[:MOST_MISTAKES], *([say.MoreMistakes(rest[0].span, len(rest))] if rest else [])])
    return level


class _BodyReader:
    """Reads operations, and checks them against a header; records a line with a mistake in ``attempts``."""

    def __init__(self, header: Header, level: str) -> None:
        self._header = header
        self._level = level
        self._stream = header.asynchronous and level != "plan"
        self._last = (header.micro_batches // header.slices - 1, header.stages - 1, header.workers - 1)
        self._rings: dict[Shelf, tuple[int, Token]] = {}
        self.attempts = Attempts()

    def read(self, body: list[Token | Tree[Token]], title: Span) -> Level:
        if self._level == "plan":
            return Plan(self._header, tuple(self._plan(body)))
        lanes = self._lanes(body, title)
        if self._stream:
            return self._turns(lanes)
        if self._level == "program":
            instructions = [tuple(self.attempts.each(lane, self._instruction)) for lane in lanes]
            return Program(self._header, in_full(self._header, instructions))
        return Schedule(self._header, in_full(self._header, [tuple(self._operations(lane)) for lane in lanes]))

    def _turns(self, lanes: Iterable[Iterable[Token]]) -> ScheduleStream | ProgramStream:
        if self._level == "schedule":
            turns_read = [ops.singles(self._operations(lane)) for lane in lanes]
            return stream_with(self._header, in_full(self._header, turns_read))
        turns: list[Turn] = []
        for lane in lanes:
            self._rings = {}
            (instructions,) = in_full(self._header, [tuple(self.attempts.each(lane, self._instruction))])
            turns.append(Turn(instructions, tuple((shelf, count) for shelf, (count, _) in self._rings.items())))
        return ProgramStream(self._header, tuple(turns))

    def _plan(self, body: list[Token | Tree[Token]]) -> list[Planned | Unclocked]:
        lines: list[Token] = []
        for item in body:
            if isinstance(item, Tree):
                self.attempts.failed.append(say.LaneInPlan(span(item.children[0]), lanes=False))  # type: ignore[arg-type]
                break
            lines.append(item)
        return self.attempts.each(lines, self._planned)

    def _planned(self, token: Token) -> Planned | Unclocked:
        if token.type not in ("PLANNED", "PLANNED_PAIR"):
            raise self._wrong_level(token)
        *numbers, worker = self._numbers(token)
        order = numbers.pop() if "@" in token or "prefer" in token else None
        operation = self._operation(token, numbers)
        require(token, "worker", worker, self._last[2])
        if order is None or "@" not in token:
            return Unclocked(order, Worker(worker), operation)
        return Planned(Clock(order), Worker(worker), operation)

    def _lanes(self, body: list[Token | Tree[Token]], title: Span) -> list[list[Token]]:
        workers, failed = self._header.workers, self.attempts.failed
        lanes: dict[int, list[Token]] = {}
        headings: dict[int, Token] = {}
        for item in body:
            if isinstance(item, Token):
                failed.append(say.NoHeading(span(item), lanes=True))
                break
            heading, *lines = [token for token in item.children if isinstance(token, Token)]
            with self.attempts.step():
                (worker,) = self._numbers(heading)
                if worker in headings:
                    raise Rejected([say.LaneTwice(span(heading), worker, span(headings[worker]))])
                require(heading, "worker", worker, workers - 1)
                headings[worker], lanes[worker] = heading, lines
        if len(lanes) < workers and not failed:
            first = next(worker for worker in range(workers) if worker not in lanes)
            failed.append(say.LanesMissing(title, first, len(lanes), workers, workers - len(lanes) - 1))
        return [lanes.get(worker, []) for worker in range(workers)] if not failed else list(lanes.values())

    def _operations(self, lane: Iterable[Token]) -> list[ops.Operation]:
        def operation(token: Token) -> ops.Operation:
            if token.type not in ("COMPUTE", "PAIR"):
                raise self._wrong_level(token)
            return self._operation(token, self._numbers(token))

        return self.attempts.each(lane, operation)

    def _instruction(self, token: Token) -> ops.Instruction:
        numbers, origin = self._numbers(token), self._origin(token)
        match token.type:
            case "COMPUTE" | "PAIR":
                return self._operation(token, numbers)
            case "SEND":
                return ops.Send(self._message(token, numbers[:-1], numbers[-1]), Worker(numbers[-1]), origin)
            case "RECV":
                count = numbers.pop() if _RING.search(token) else None
                message = self._message(token, numbers[:-2], numbers[-2])
                self._require_slot(token, message, numbers[-1], count)
                return ops.Recv(message, Worker(numbers[-2]), Slot(numbers[-1]), origin)
            case "WAIT_SEND":
                return ops.WaitSend(self._message(token, numbers), origin)
            case "WAIT_RECV":
                return ops.WaitRecv(self._message(token, numbers), origin)
            case "WAIT_MOVE":
                move = self._compute(token, numbers[:-1], numbers[-1], token.split()[1])
                return ops.WaitMove(move.kind, move.micros, move.stage, origin)
            case "ALL_REDUCE" | "WAIT_ALL_REDUCE" | "STEP" | "STASH" | "DROP":
                return self._synchronisation(token, numbers)
            case _:
                raise self._wrong_level(token)

    def _require_slot(self, token: Token, message: ops.Message, slot: int, count: int | None) -> None:
        """Lines of a turn must name the ``count`` of slots, other lines must not."""
        if not self._stream:
            if count is not None:
                raise Rejected([say.MalformedLine(span(token), "recv", FORMS["recv"])])
            require(token, "slot", slot, self._header.micro_batches - 1)
            return
        if count is None:
            raise Rejected([say.RingUnsaid(span(token), slot, slot + 1)])
        require(token, "number of slots", count, MAX_MICRO_BATCHES, 1)
        other, before = self._rings.setdefault(shelf(message), (count, token))
        if count != other:
            where = span(token), message.source, message.target
            raise Rejected([say.RingsDiffer(*where, count, other, span(before))])
        require(token, "slot", slot, count - 1)

    def _synchronisation(self, token: Token, stages: list[int]) -> ops.Instruction:
        require(token, "stage", max(stages), self._last[1])
        version, origin = self._version(token), self._origin(token)
        group = tuple(map(Stage, sorted(stages)))
        if token.type in _SYNCS:
            return _SYNCS[token.type](group, origin, version)
        assert version is not None, "the grammar demands one"
        return (ops.Stash if token.type == "STASH" else ops.Drop)(group, version, origin)

    def _version(self, token: Token, *, named: bool = True) -> Version | None:
        """The version that a line names: without a flush every line about weights must, no other may."""
        match, word = _VERSION.search(token), token.split()[0]
        if match is None:
            if named and self._header.steps_inside:
                unsaid = say.VersionUnsaidInTurn if self._stream else say.VersionUnsaid
                raise Rejected([unsaid(span(token), word)])
            return None
        if not (named and self._header.steps_inside):
            needless = say.NeedlessCopy if token.type in ("STASH", "DROP") else say.NeedlessVersion
            raise Rejected([needless(span(token), word)])
        (version,) = integers(token, match[1] or "0")
        self._require_of_turn(token, "version", version, self._header.updates)
        return Version(version)

    def _operation(self, token: Token, numbers: list[int]) -> ops.Operation:
        """The operation with these micro-batches and stage; a pair has them twice."""
        if "&" not in token:
            return self._compute(token, numbers[:-1], numbers[-1])
        if self._header.asynchronous:
            raise Rejected([say.PairInStream(span(token))])
        places = token[: token.index("&")].count(",") + 2
        forward, backward = (
            self._compute(token, [*micros], stage, letter)
            for letter, (*micros, stage) in (("F", numbers[:places]), ("B", numbers[places:]))
        )
        return ops.Pair(forward, backward, self._origin(token))

    def _compute(self, token: Token, micros: list[int], stage: int, letter: str = "") -> ops.Compute:
        self._require_range(token, micros, stage)
        kind, numbers = KINDS[letter or token.split()[0]], tuple(map(Micro, micros))
        version = self._version(token, named=not kind.moves)
        age = 0 if version is None else self._header.update_of(numbers) - version
        if age > MAX_AGE:
            raise Rejected([VersionsTooOld(span(token), (), Instance(), (), age, MAX_AGE)])
        return ops.Compute(kind, numbers, Stage(stage), self._origin(token), version)

    def _message(self, token: Token, numbers: list[int], peer: int = 0) -> ops.Message:
        """The message with these micro-batches, sending and receiving stage; ``peer`` must exist."""
        *micros, source, target = numbers
        self._require_range(token, micros, max(source, target))
        require(token, "worker", peer, self._last[2])
        stages = Stage(source), Stage(target)
        return ops.Message(tuple(map(Micro, micros)), *stages, self._value(token, stages))

    def _value(self, token: Token, stages: tuple[Stage, Stage]) -> Value:
        """The value that a line names or, without a name, the one that its stages imply."""
        match, between = _VALUE.match(token), self._header.value_between
        value = between.get((*stages, match[1] if match else ""))
        if value is None and (*stages, "") in between:
            word = " ".join(token.split()[: 1 + token.startswith("wait")])
            form = (FORMS_OF_TURN if self._stream else FORMS)[word]
            raise Rejected([say.MalformedLine(span(token), word, form)])
        return value or NOTHING

    def _origin(self, token: Token) -> Span:
        return span(token)._replace(turn=(0, 0) if self._stream else ())

    def _require_range(self, token: Token, micros: list[int], stage: int) -> None:
        for micro in {min(micros), max(micros)}:
            self._require_of_turn(token, "micro-batch", micro // self._header.slices, self._last[0])
        require(token, "stage", stage, self._last[1])

    def _require_of_turn(self, token: Token, what: str, value: int, last: int) -> None:
        """As `require`; in a turn, numbers count from its start, and may be negative."""
        if not self._stream:
            require(token, what, value, last)
        elif abs(value) > MAX_MICRO_BATCHES:
            limits = -MAX_MICRO_BATCHES, MAX_MICRO_BATCHES
            raise Rejected([say.NumberOutOfRange(span(token), what, f"{value:+}", *limits)])

    def _numbers(self, token: Token) -> list[int]:
        """The numbers of a line except its version; a micro-batch and its slice are one number."""
        wrong = (_NOT_OF_TURN if self._stream else _OF_TURN).search(token)
        if wrong and self._stream:
            raise Rejected([say.NotOfTurn(span(token), wrong[1])])
        if wrong:
            message = say.NoTurnInPlan if self._level == "plan" else say.NoTurnToCountFrom
            raise Rejected([message(span(token), wrong[1], self._level)])
        text = _VERSION.sub("", token)
        slices = self._header.slices
        if slices > 1 or ("q" in text and _SLICE.search(text)):
            return integers(token, self._counting_slices(token, text))
        return integers(token, _MICRO.sub(lambda micro: (micro[1] or "0").lstrip("+"), text))

    def _counting_slices(self, token: Token, text: str) -> str:
        """A line's text with one number for micro-batch and slice: with 4 slices ``14`` for ``m3 q2``."""
        slices = self._header.slices
        if slices == 1:
            raise Rejected([say.LineWithSlice(span(token), slices)])
        if "," in text:
            raise Rejected([say.GroupOfSlices(span(token), slices)])

        def number(micro: re.Match[str]) -> str:
            if micro[2] is None:
                raise Rejected([say.LineWithoutSlice(span(token), slices)])
            (whole, place) = integers(token, f"{(micro[1] or '0').lstrip('+')} {micro[2]}")
            require(token, "slice", place, slices - 1)
            return str(whole * slices + place)

        return _SLICED.sub(number, text)

    def _wrong_level(self, token: Token) -> Rejected:
        form = f"{FORMS['F']} @ 3 on w1" if self._level == "plan" else (FORMS_OF_TURN if self._stream else FORMS)["F"]
        other = "plan" if token.type == "PLANNED" else "program"
        return Rejected([say.WrongLevel(span(token), self._level, other, form)])


_MOVE = re.compile(rf"^[ \t]*(?:wait[ \t]+)?(?:{'|'.join(kind.letter for kind in all_kinds() if kind.moves)})\b", re.M)
_VERSION = re.compile(r"[ \t]v([+-]?[0-9]+)?(?![^ \t\r])")
_MICRO = re.compile(r"(?<![^ \t,])m([+-]?[0-9]+)?(?![^ \t\r,])")
_SLICE = re.compile(r"[ \t]q[0-9]")
_SLICED = re.compile(_MICRO.pattern + r"(?:[ \t]+q([0-9]+))?")
_OF_TURN = re.compile(r"(?<![^ \t,])([mv](?:[+-][0-9]+)?)(?![^ \t\r,])")
_NOT_OF_TURN = re.compile(r"(?<![^ \t,])([mv][0-9]+)")
_VALUE = re.compile(r"(?:wait[ \t]+)?(?:send|recv)[ \t]+([a-z]+)[ \t]+m")
_RING = re.compile(r"[ \t]of[ \t]")
_SYNCS: dict[str, type[ops.AllReduce | ops.WaitAllReduce | ops.Step]] = {
    "ALL_REDUCE": ops.AllReduce,
    "WAIT_ALL_REDUCE": ops.WaitAllReduce,
    "STEP": ops.Step,
}
