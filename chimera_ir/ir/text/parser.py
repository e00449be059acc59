"""Reads the text form of every level of IR. The grammar is `grammar/ir.lark`.

The text may come from anywhere: whatever it holds, the result is a level of IR or diagnostics. Each line is checked
here against the header; `verify` checks that the operations together make sense.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache

from lark import Lark, Token, Tree, UnexpectedToken

from chimera_ir.diagnostics.catalogue.irtext import (
    LanesMissing,
    LaneTwice,
    MisplacedLine,
    MoreMistakes,
    NotCompiledYet,
    NoTitle,
    NumberOutOfRange,
    VersionUnsaid,
    WrongLevel,
)
from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.ir.ids import Clock, Micro, Slot, Stage, Version, Worker
from chimera_ir.ir.kinds import KINDS
from chimera_ir.ir.levels import Header, Plan, Planned, Program, Schedule
from chimera_ir.ir.ops import (
    AllReduce,
    Compute,
    Drop,
    Instruction,
    Message,
    Recv,
    Send,
    Stash,
    Step,
    WaitAllReduce,
    WaitRecv,
    WaitSend,
)
from chimera_ir.ir.text.header import integers, read_header, span
from chimera_ir.ir.text.mistakes import FORMS, explain
from chimera_ir.resources import grammar
from chimera_ir.source import Source, Span

_MOST_MISTAKES = 50
_SHORT = 120


def parse(source: Source) -> Plan | Schedule | Program:
    """The level of IR that a text describes; the origin of every operation is its line.

    Raises
    ------
    Rejected
        With all malformed lines; if there are none, with all mistakes of the header; if there are none either, with all
        mistakes of the operations.
    """
    tree = _tree(source)
    title, header_lines, body = tree.children[0], tree.children[1], tree.children[2:]
    assert isinstance(title, Tree)
    assert isinstance(header_lines, Tree)
    name = title.children[0]
    assert isinstance(name, Token)
    header = read_header(name, [token for token in header_lines.children if isinstance(token, Token)])
    reader = _Reader(header, name.split()[0])
    level = reader.read(body, span(name))
    if reader.mistakes:
        raise Rejected(_some(reader.mistakes))
    return level


_HEADER = "plan|schedule|program|parameters|workers?|stages|micro_batches|updates|memory|sync|pipe"
_ANY_LINE = re.compile(r"^[ \t]*[^\s#]", re.MULTILINE)
_HEADER_LINE = re.compile(rf"^[ \t]*(?:{_HEADER})\b", re.MULTILINE)


def count_lines(text: str) -> tuple[int, int]:
    """The number of lines of operations and of headers and headings in a text, by their first words alone."""
    lines, headers = (sum(1 for _ in form.finditer(text)) for form in (_ANY_LINE, _HEADER_LINE))
    return lines - headers, headers


@cache
def _parser() -> Lark:
    return Lark(grammar("ir.lark"), parser="lalr", lexer="basic")


def _tree(source: Source) -> Tree[Token]:
    try:
        tree = _parser().parse(source.text)
    except UnexpectedToken as unexpected:
        raise Rejected(_structure(source, unexpected.token)) from None
    lines = _lines(tree)
    malformed = [token for token in lines if token.type == "OTHER"]
    if malformed:
        raise Rejected(_malformed(malformed, lines[0]))
    return tree


def _lines(tree: Tree[Token]) -> list[Token]:
    lines: list[Token] = []
    for child in tree.children:
        if isinstance(child, Token):
            lines.append(child)
        else:
            lines.extend(token for token in child.children if isinstance(token, Token))
    return lines


def _malformed(tokens: list[Token], title: Token) -> list[Diagnostic]:
    plan = title.startswith("plan")
    shown = [explain(str(token), token.start_pos or 0, plan=plan) for token in tokens[:_MOST_MISTAKES]]
    rest = tokens[_MOST_MISTAKES:]
    return [*shown, *([MoreMistakes(span(rest[0]), len(rest))] if rest else [])]


def _structure(source: Source, unexpected: Token) -> list[Diagnostic]:
    """The diagnostics of a text whose lines are not in the order of the grammar; malformed lines come first."""
    tokens = list(_parser().lex(source.text))
    if not tokens:
        return [NoTitle(Span(0, 0))]
    if tokens[0].type != "TITLE" and tokens[0].split()[:1] not in (["plan"], ["schedule"], ["program"]):
        return [NoTitle(Span(span(tokens[0]).start, min(span(tokens[0])[1], span(tokens[0]).start + _SHORT)))]
    malformed = [token for token in tokens if token.type == "OTHER"]
    if malformed:
        return _malformed(malformed, tokens[0])
    lanes = any(token.type == "HEADING" for token in tokens)
    if unexpected.type == "HEADING" and not tokens[0].startswith("plan"):
        unexpected = next(token for token in tokens if token.type not in _MISPLACED)
    under = " under their `worker` headings" if lanes else ""
    return [
        MisplacedLine(span(unexpected), _MISPLACED.get(unexpected.type, "an operation before the first heading"), under)
    ]


_MISPLACED = {
    "TITLE": "the level is named once, in the first line",
    "HEADING": "a heading after operations that have none",
} | dict.fromkeys(
    ("PARAMETERS", "WORKERS", "STAGES", "MICRO_BATCHES", "UPDATES", "MEMORY", "SYNC", "PIPE"),
    "a header line after the first operation",
)


def _some(mistakes: list[Diagnostic]) -> list[Diagnostic]:
    """The first mistakes, and the number of further ones."""
    rest = mistakes[_MOST_MISTAKES:]
    return [*mistakes[:_MOST_MISTAKES], *([MoreMistakes(rest[0].span, len(rest))] if rest else [])]


class _Reader:
    """Reads operations and checks them against a header; records mistakes and leaves out their lines."""

    def __init__(self, header: Header, level: str) -> None:
        self._header = header
        self._level = level
        self._last = (header.micro_batches - 1, header.stages - 1, header.workers - 1)
        self.mistakes: list[Diagnostic] = []

    def read(self, body: list[Token | Tree[Token]], title: Span) -> Plan | Schedule | Program:
        """The level that operations or lanes make."""
        if self._level == "plan":
            return Plan(self._header, tuple(self._planned(body)))
        lanes = self._lanes(body, title)
        if self._level == "program":
            return Program(self._header, tuple(tuple(self._instructions(lane)) for lane in lanes))
        return Schedule(self._header, tuple(tuple(self._computes(lane)) for lane in lanes))

    def _planned(self, body: list[Token | Tree[Token]]) -> Iterator[Planned]:
        for item in body:
            if isinstance(item, Tree):
                self._reject(MisplacedLine(span(item.children[0]), "a plan has no lanes", ""))  # type: ignore[arg-type]
                return
            if item.type != "PLANNED":
                self._wrong_level(item)
                continue
            numbers = self._numbers(item)
            if not numbers:
                continue
            *micros, stage, clock, worker = numbers
            operation = self._compute(item, micros, stage)
            if operation is not None and self._within(item, "worker", worker, self._last[2]):
                yield Planned(Clock(clock), Worker(worker), operation)

    def _lanes(self, body: list[Token | Tree[Token]], title: Span) -> list[list[Token]]:
        """The lines of every worker, by its number."""
        workers = self._header.workers
        lanes: dict[int, list[Token]] = {}
        headings: dict[int, Token] = {}
        for item in body:
            if isinstance(item, Token):
                self._reject(MisplacedLine(span(item), "an operation before the first heading", _UNDER))
                break
            heading, *lines = [token for token in item.children if isinstance(token, Token)]
            worker = next(iter(self._numbers(heading)), workers)
            if worker in headings:
                self._reject(LaneTwice(span(heading), worker, span(headings[worker])))
            elif self._within(heading, "worker", worker, workers - 1):
                headings[worker] = heading
                lanes[worker] = lines
        if len(lanes) < workers and not self.mistakes:
            first = next(worker for worker in range(workers) if worker not in lanes)
            self._reject(LanesMissing(title, first, len(lanes), workers))
        return [lanes.get(worker, []) for worker in range(workers)] if not self.mistakes else list(lanes.values())

    def _computes(self, lane: Iterable[Token]) -> Iterator[Compute]:
        for token in lane:
            if token.type not in ("FORWARD", "BACKWARD", "SPLIT"):
                self._wrong_level(token)
                continue
            numbers = self._numbers(token)
            operation = self._compute(token, numbers[:-1], numbers[-1]) if numbers else None
            if operation is not None:
                yield operation

    def _instructions(self, lane: Iterable[Token]) -> Iterator[Instruction]:
        for token in lane:
            numbers = self._numbers(token)
            instruction = self._instruction(token, numbers) if numbers else None
            if instruction is not None:
                yield instruction

    def _instruction(self, token: Token, numbers: list[int]) -> Instruction | None:
        origin = span(token)
        match token.type:
            case "FORWARD" | "BACKWARD" | "SPLIT":
                return self._compute(token, numbers[:-1], numbers[-1])
            case "SEND":
                message = self._message(token, numbers[:-1])
                if message is None or not self._within(token, "worker", numbers[-1], self._last[2]):
                    return None
                return Send(message, Worker(numbers[-1]), origin)
            case "RECV":
                message = self._message(token, numbers[:-2])
                if message is None or not self._within(token, "worker", numbers[-2], self._last[2]):
                    return None
                if not self._within(token, "slot", numbers[-1], self._last[0]):
                    return None
                return Recv(message, Worker(numbers[-2]), Slot(numbers[-1]), origin)
            case "WAIT_SEND":
                message = self._message(token, numbers)
                return None if message is None else WaitSend(message, origin)
            case "WAIT_RECV":
                message = self._message(token, numbers)
                return None if message is None else WaitRecv(message, origin)
            case "ALL_REDUCE" | "WAIT_ALL_REDUCE" | "STEP" | "STASH" | "DROP":
                return self._synchronisation(token, numbers[0])
            case _:
                self._wrong_level(token)
                return None

    def _synchronisation(self, token: Token, stage: int) -> Instruction | None:
        if not self._within(token, "stage", stage, self._last[1]):
            return None
        version, origin = self._version(token), span(token)
        if version is not None and token.type in ("STASH", "DROP"):
            return (Stash if token.type == "STASH" else Drop)(Stage(stage), version, origin)
        return _SYNCS[token.type](Stage(stage), origin, version) if token.type in _SYNCS else None

    def _version(self, token: Token) -> Version | None:
        """The version that an operation names; a mistake if it lacks one or may not have one."""
        match = _VERSION.search(token)
        if (match is not None) is not self._header.asynchronous:
            self._reject(_unsaid(token, asynchronous=self._header.asynchronous))
        version = integers(token, match[1])[0] if match else 0
        within = self._within(token, "version", version, self._header.updates)
        return Version(version) if match and within else None

    def _compute(self, token: Token, micros: list[int], stage: int) -> Compute | None:
        row = KINDS.get(token[0])
        if row is None:
            advice = "write `B` for a backward that does both parts"
            self._reject(NotCompiledYet(span(token), "a split backward (`I` and `W`)", advice))
            return None
        if not self._within(token, "micro-batch", max(micros), self._last[0]):
            return None
        if not self._within(token, "stage", stage, self._last[1]):
            return None
        return Compute(row, tuple(map(Micro, micros)), Stage(stage), span(token), self._version(token))

    def _message(self, token: Token, numbers: list[int]) -> Message | None:
        *micros, source, target = numbers
        if not self._within(token, "micro-batch", max(micros), self._last[0]):
            return None
        if not self._within(token, "stage", max(source, target), self._last[1]):
            return None
        return Message(tuple(map(Micro, micros)), Stage(source), Stage(target))

    def _within(self, token: Token, what: str, value: int, last: int) -> bool:
        if value <= last:
            return True
        self._reject(NumberOutOfRange(span(token), what, str(value), 0, last))
        return False

    def _numbers(self, token: Token) -> list[int]:
        """The numbers of a line without its version; no numbers, and a mistake, if one is out of all bounds."""
        try:
            return integers(token, _VERSION.sub("", token))
        except Rejected as rejected:
            self.mistakes.extend(rejected.diagnostics)
            return []

    def _wrong_level(self, token: Token) -> None:
        form = f"{FORMS['F']} @ 3 on w1" if self._level == "plan" else FORMS["F"]
        other = "plan" if token.type == "PLANNED" else "program"
        self._reject(WrongLevel(span(token), self._level, other, form))

    def _reject(self, mistake: Diagnostic) -> None:
        self.mistakes.append(mistake)


def _unsaid(token: Token, *, asynchronous: bool) -> Diagnostic:
    word = f"`{token.split()[0]}`"
    if asynchronous:
        what, advice = (
            f"this {word} names no version of the weights",
            "add the version, as in `F m3 s0 v1`, `step s0 v2`",
        )
        return VersionUnsaid(span(token), what, "the header says `updates`: weights have versions", advice)
    change = "remove the line" if token.type in ("STASH", "DROP") else "leave the version out"
    advice = f"{change}; or add `updates U period L` to the header of an asynchronous program"
    return VersionUnsaid(span(token), f"this {word} names a version", "a synchronous program has one", advice)


_VERSION = re.compile(r"[ \t]v([0-9]+)")
_UNDER = " under their `worker` headings"
_SYNCS: dict[str, type[AllReduce | WaitAllReduce | Step]] = {
    "ALL_REDUCE": AllReduce,
    "WAIT_ALL_REDUCE": WaitAllReduce,
    "STEP": Step,
}
