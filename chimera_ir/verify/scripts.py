"""Rule "scripts": each rank's script does what its program says, call by call and line by line.

The text of the script runs as it will be written, on a lane that computes nothing (`recording`): one update, or of a
stream the updates that are proven, from warm-up to drain; then the forwards alone. So whatever the code generator makes
of a lane, loops included, is compared with the lane itself.

A script whose text names anything but the calls of a lane is refused before any of it runs.
"""

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from inspect import currentframe
from itertools import zip_longest
from operator import attrgetter
from traceback import walk_tb
from types import CodeType, FrameType, SimpleNamespace, TracebackType
from typing import Any, NamedTuple, TypeVar

from chimera_ir.diagnostics.catalogue.program import ScriptDiffers
from chimera_ir.diagnostics.catalogue.schedule import BreaksTurn, NoTurn, StateDiffers
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.ir.kinds import ACTIVATIONS, KINDS, Value, values
from chimera_ir.ir.levels import Header, Program, Schedule
from chimera_ir.ir.ops import NOWHERE, Instruction, Recv, Stage, WeightGroup, Worker, singles
from chimera_ir.ir.rolled import Loop, RolledLane, RolledProgram
from chimera_ir.ir.streams import ProgramStream, turn_in
from chimera_ir.ir.text.printer import line
from chimera_ir.ir.turns import Ring, lines_before, unroll
from chimera_ir.verify.messages import replay
from chimera_ir.verify.recording import Differs, RecordedLane, Recording, Route, ScriptRun

# Rule "repeats": all workers repeat their turns in step, so proofs for the updates shown hold for any number.
#
# Every lane of a stream is one turn over and over; the lanes of a plan are first shown to be such turns. What the rules
# check in a single lane (open waits, stashes, slots) follows from its lines, so it repeats with the lines.
#
# A test shows that the state of all workers together repeats, too. It plays the lanes up to a cut after a turn of the
# steady state, and again up to a cut one turn later. The second run must come exactly one turn further on every worker.
# Posting never blocks and no event is undone, so the next turn does the same, and so on.
#
# A program with fewer updates than shown lacks whole micro-batches and whole updates. If their lines are left out of an
# order in which no wait blocks, still no wait blocks.


def repeats(schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields a diagnostic for each lane that does not repeat one turn, at the first line that breaks the turn.

    The schedule is a complete and placed view of a stream.
    """
    header = schedule.header
    turns = header.period // header.parts
    for number, lane in enumerate(schedule.lanes):
        turn = turn_in(header, singles(lane))
        if turn is None:
            yield NoTurn(lane[0].origin if lane else NOWHERE, Worker(number), turns)
            continue
        for instruction, wanted in zip_longest(lane, unroll(header, turn, header.updates)):
            if instruction != wanted:
                texts = (line(entry, header) if entry else "nothing" for entry in (instruction, wanted))
                yield BreaksTurn((instruction or lane[-1]).origin, Worker(number), turns, *texts)
                break


def state_repeats(stream: ProgramStream, program: Program) -> Iterator[Diagnostic]:
    """Yields a diagnostic of the first worker that does not get exactly one turn further if the cut is one turn later.

    ``program`` is a view of the stream, which shows all that ever happens and has no errors by all other rules.
    """
    # The steady state is in the middle: before it the pipes fill, after it they run empty.
    middle = program.header.updates // stream.header.per_turn // 2
    starts = [lines_before(stream.header, turn, middle, program.header.updates) for turn in stream.turns]
    lengths = [len(turn.instructions) for turn in stream.turns]
    before = replay(program, starts).places
    after = replay(program, [start + length for start, length in zip(starts, lengths, strict=True)]).places
    for number, length in enumerate(lengths):
        if after[number] - before[number] != length:
            stopped = program.lanes[number][min(after[number], len(program.lanes[number]) - 1)]
            yield StateDiffers(stopped.origin, Worker(number), line(stopped, program.header))
            return


Lane = Sequence[Instruction] | RolledLane
"""A lane with all of its instructions, or as pieces."""

_Note = TypeVar("_Note")

FACTS = "program.json"

_LANE = "chimera_runtime.lane"

_OF_MODULES = {_LANE, "Lane", "INTERFACE", "PROGRAM", "update", "turn", "evaluate", "int", "__doc__"}
"""The names that a script may use outside its functions."""

_OF_FUNCTIONS = {
    *("range", "stage", "tie", "incoming", "outgoing", "input", "target", "join"),
    *("isend", "irecv", "wait", "take", "all_reduce", "wait_all_reduce", "step", "stash", "drop"),
    *("at", "pair"),
}
"""The names that a script's functions may use, apart from their own variables and the methods of the table of kinds."""

_ANNOTATIONS = "__annotate__"
"""The name of the function that newer interpreters make of annotations."""


def scripts(
    program: Program | RolledProgram,
    evaluation: Program | RolledProgram,
    by_worker: Iterable["WorkerScript"],
    lines: Iterable[list[int]] | None = None,
) -> Iterator[Diagnostic]:
    """Yields, for each function of each script, its first difference from the program.

    The program has no errors by any other rule; of a stream, it has as many updates as are proven. ``evaluation`` is
    the program of the forwards alone; ``by_worker`` has their scripts. Each of ``lines`` gets, for each instruction of
    a worker's lane, the number of the line of its script that runs it; of a rolled lane, for those of its window.
    """
    lanes: tuple[Sequence[Lane], Sequence[Lane]] = program.lanes, evaluation.lanes
    noted = ([] for _ in program.lanes) if lines is None else lines
    for script, lane, of_evaluation, notes in zip(by_worker, *lanes, noted, strict=True):
        yield from script.trained(lane, attrgetter("f_lineno"), notes)
        yield from script.evaluated(of_evaluation)


def worker_scripts(header: Header, files: Mapping[str, str]) -> tuple["WorkerScript", ...]:
    """The script of each worker of a program; ``files`` has the scripts ``rank_<worker>.py`` and program.json."""
    ranks = enumerate(json.loads(files[FACTS])["ranks"])
    return tuple(WorkerScript(header, of_rank, name := script_name(worker), files[name]) for worker, of_rank in ranks)


class CallPlace(NamedTuple):
    """A ``line`` of a script, with the values of the ``counters`` of its loops when the line runs."""

    line: int
    counters: Mapping[str, int]


def call_places(program: Program, by_worker: Iterable["WorkerScript"]) -> Iterator[list[CallPlace]]:
    """Yields, for each worker, the place in its script that runs each instruction of its lane.

    The scripts have passed the rule "scripts".
    """
    for script, lane in zip(by_worker, program.lanes, strict=True):
        places = list[CallPlace]()
        assert not [*script.trained(lane, _place, places)]
        yield places


def _place(frame: FrameType) -> CallPlace:
    variables = {**frame.f_locals}
    return CallPlace(frame.f_lineno, {name: value for name, value in variables.items() if type(value) is int})


def script_name(worker: int) -> str:
    """The name of the script that a rank of a worker runs."""
    return f"rank_{worker}.py"


def _with_callers(
    lane: Iterable[Instruction], name: str, note: Callable[[FrameType], _Note], notes: list[_Note]
) -> Iterator[Instruction]:
    """Yields the instructions of a lane; ``notes`` gets one on each frame of a script that asks for an instruction."""
    generator = currentframe()
    for instruction in lane:
        frame = generator
        while frame is not None and frame.f_code.co_filename != name:
            frame = frame.f_back
        if frame is not None:  # else the script has ended, and is not through with its lane
            notes.append(note(frame))
        yield instruction


class LeftOut(NamedTuple):
    """The rounds of a script's loop that are not run: of ``rounds``, by ``step``, those from ``first`` up to ``last``.

    They are whole turns, so what is under way after them is what was under way before them, ``micros`` later.
    """

    rounds: int
    step: int
    first: int
    last: int
    micros: int

    @staticmethod
    def of(lane: RolledLane, least: int = 0) -> "LeftOut":
        """The rounds that `RolledLane.shown` leaves out."""
        before, after = lane.rounds(least)
        left_out, loop = after.start - len(before), lane.loop
        return LeftOut(loop.rounds, loop.step, len(before), after.start, left_out * loop.step)


@dataclass(frozen=True)
class WorkerScript:
    """The script that the ranks of a worker run, as text and compiled once.

    ``of_rank`` is what program.json says about these ranks.
    """

    header: Header
    of_rank: Mapping[str, Any]
    name: str
    text: str

    @cached_property
    def code(self) -> CodeType:
        """The compiled text; raises any error of compiling it, and `Differs` if it uses foreign names."""
        code = compile(self.text, self.name, "exec", dont_inherit=True)
        foreign = next(_foreign(code), None)
        if foreign is not None:
            raise Differs(None, f"names {foreign}, which is not a part of a script")
        return code

    def trained(self, lane: Lane, note: Callable[[FrameType], _Note], notes: list[_Note]) -> Iterator[Diagnostic]:
        """Runs the training function; yields its first difference from ``lane``.

        Of a lane as pieces, the loop with the turns runs for as many rounds as show that all are right. ``notes`` gets
        one on the frame that runs each instruction of the lane or, of pieces, of its window.
        """
        header, turns = self.header, self.of_rank["turns"]
        instructions, left_out = self._enough(lane, "update")
        run = ScriptRun() if turns is None else ScriptRun(0, header.updates, header.micro_batches)
        recording = Recording(_with_callers(instructions, self.name, note, notes), header, run)
        held = _held(recording, self.of_rank)
        if turns is None:
            yield from self._compared("update", [()], recording, held, left_out)
        else:
            calls = [(number,) for number in range(turns["first"], header.updates + turns["behind"], turns["step"])]
            yield from self._compared("turn", calls, recording, held, left_out)
        if isinstance(lane, RolledLane):
            notes[:] = lane.of_window(notes)

    def evaluated(self, lane: Lane) -> Iterator[Diagnostic]:
        """Runs the evaluation function likewise."""
        instructions, left_out = self._enough(lane, "evaluate")
        recording = Recording(instructions, self.header, ScriptRun())
        held = _held_in_evaluations(recording, self.of_rank)
        return self._compared("evaluate", [()], recording, held, left_out)

    def _enough(self, lane: Lane, function: str) -> "tuple[Iterable[Instruction], LeftOut | None]":
        """The instructions with which a function is compared, and the rounds of its loop that they leave out."""
        if not isinstance(lane, RolledLane):
            return lane, None
        # If all numbers grow evenly, those that are right in two rounds are right in all; else all rounds are compared.
        _, _, lines = f"\n{self.text}".rpartition(f"\ndef {function}(")
        least = 2 if _grows_evenly(lines.partition("\ndef ")[0], lane.loop) else lane.loop.rounds
        return lane.shown(least), LeftOut.of(lane, least)

    def _compared(
        self,
        function: str,
        calls: Sequence[tuple[int, ...]],
        recording: Recording,
        lane: RecordedLane,
        left_out: LeftOut | None,
    ) -> Iterator[Diagnostic]:
        def rounds(start: int, stop: int, step: int = 1) -> Iterator[int]:
            every = range(start, stop, step)
            if left_out is None or (len(every), step) != left_out[:2]:
                yield from every
                return
            yield from every[: left_out.first]
            lane.skip(left_out.micros)
            yield from every[left_out.last :]

        try:
            run = _functions(self.name, self.code, rounds if left_out else range)[function]
            for arguments in calls:
                run(lane, *arguments)
            rest = recording.next_line()
            if rest is not None:
                raise Differs(rest, "ends")
        except Differs as differs:
            yield self._difference(function, differs.expected, differs.done, differs.__traceback__)
        except Exception as error:  # a wrong text may do anything
            done = f"ends with {type(error).__name__}: {error}"
            yield self._difference(function, recording.next_line(), done, error.__traceback__)

    def _difference(
        self, function: str, expected: Instruction | None, done: str, trace: TracebackType | None
    ) -> ScriptDiffers:
        number, lines = _line_of(self.name, trace), self.text.splitlines()
        return ScriptDiffers(
            span=NOWHERE if expected is None else expected.origin,
            script=self.name,
            function=function,
            number=number,
            text=lines[number - 1].split("  # ")[0].strip() if 0 < number <= len(lines) else "",
            expected="" if expected is None else line(expected, self.header),
            done=done,
        )


def _functions(name: str, code: CodeType, rounds: Callable[..., Iterable[int]]) -> dict[str, Callable[..., None]]:
    """Defines the functions of a script, whose loops run over what ``rounds`` returns; runs nothing."""
    builtins = {"range": rounds, "int": int, "__import__": lambda *_: SimpleNamespace(Lane=RecordedLane)}
    defined: dict[str, Any] = {"__name__": name, "__builtins__": builtins}
    exec(code, defined)
    return defined


_RECEIVE = ".irecv("

_LOOP = re.compile(r"( *)for \w+ in range\((\d+), (\d+)(?:, (\d+))?\):")
_NUMBER, _QUOTIENT = re.compile(r"\d+"), re.compile(r"// (\d+)")
_RING = re.compile(r"into=(?:(\d+) \+ )?(?:\([^()]+\)|[\w /*]+) % (\d+)\)$")

_IN_LOOPS = (
    *(ast.Module, ast.Expr, ast.Call, ast.keyword, ast.Attribute, ast.Name, ast.Tuple, ast.Constant, ast.expr_context),
    *(ast.Starred, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Mod, ast.FloorDiv),
)
"""The syntax of a line in a loop."""


def _grows_evenly(text: str, loop: Loop) -> bool:
    """Whether every number in the lines of such a loop grows by the same from round to round, in a script and the loop.

    A number of a script is the loop's variable with constants added to it, times constants, or divided by the step of
    the loop. The slot of a receive that moves on is the remainder of such a number by the slots of its ring, counted
    from the ring's first slot; so two rounds show where on the ring it begins, and how far it goes.
    """
    rings, body = [loop.rings[line.message] for line in loop.instructions if isinstance(line, Recv)], ""
    receives = iter(rings)
    for line_of_text in text.splitlines():
        if body and line_of_text.startswith(body):
            code = line_of_text.split("  # ")[0].strip()
            ring = next(receives, None) if _RECEIVE in code else None
            if not _is_on_ring(code, ring):
                return False
            whole = all(int(number) == loop.step for number in _QUOTIENT.findall(code))
            if not whole or not _is_even(_NUMBER.sub("2", code)):
                return False
        else:
            head = _LOOP.fullmatch(line_of_text)
            body = f"{head[1]}    " if head and _has_rounds_of(loop, *head.groups()[1:]) else ""
            receives = iter(rings)
    return True


def _is_on_ring(code: str, ring: Ring | None) -> bool:
    """Whether a line has the remainder that the slot of a receive is on this ring, and no other one."""
    if ring is None or not ring.step % ring.slots:
        return "%" not in code
    slot = _RING.search(code)
    return slot is not None and code.count("%") == 1 and (int(slot[1] or 0), int(slot[2])) == (ring.first, ring.slots)


def _has_rounds_of(loop: Loop, start: str, stop: str, step: str | None) -> bool:
    by = int(step or 1)
    return by == loop.step and len(range(int(start), int(stop), by)) == loop.rounds


@cache
def _is_even(code: str) -> bool:
    """Whether a line, with other numbers, has nothing but calls with numbers as `_grows_evenly` has them."""
    if code.startswith("#"):
        return True
    try:
        nodes = [*ast.walk(ast.parse(code))]
    except SyntaxError:
        return False
    operations = [node for node in nodes if isinstance(node, ast.BinOp)]
    constants = (isinstance(node.op, ast.Add | ast.Sub) or isinstance(node.right, ast.Constant) for node in operations)
    return all(isinstance(node, _IN_LOOPS) for node in nodes) and all(constants)


def _foreign(module: CodeType) -> Iterator[str]:
    functions = [constant for constant in module.co_consts if isinstance(constant, CodeType)]
    of_functions = _OF_FUNCTIONS | {kind.method for kind in KINDS.values()} | {value.made for value in values()}
    of_functions |= {f"wait_{kind.method}" for kind in KINDS.values() if kind.moves}
    of_module = {*module.co_names, *(function.co_name for function in functions)}
    yield from sorted(of_module - _OF_MODULES - {_ANNOTATIONS})
    for function in functions:
        allowed = _OF_MODULES if function.co_name == _ANNOTATIONS else of_functions
        yield from sorted({*function.co_names} - allowed)
        yield from (constant.co_name for constant in function.co_consts if isinstance(constant, CodeType))


def _line_of(name: str, trace: TracebackType | None) -> int:
    numbers = [number for frame, number in walk_tb(trace) if frame.f_code.co_filename == name]
    return numbers[-1] if numbers else 0


def _held(recording: Recording, of_rank: Mapping[str, Any]) -> RecordedLane:
    """The lane of a rank in training, with the stages, ties and links that program.json gives to the rank."""
    stages = of_rank["stages"]
    initial = {_stages([stage]): (*of_stage["initial"],) for stage, of_stage in stages.items()}
    ties = {_stages(tie["stages"]): (*tie["initial"],) for tie in of_rank["ties"]}
    header = recording.header
    routes = {
        route: header.value_between[Stage(route[0]), Stage(route[1]), route[3]]
        for route in _routes(of_rank["incoming"])
    }
    rooms = {route: _rooms(header, route, value, stages[str(route[1])][value.slots]) for route, value in routes.items()}
    return RecordedLane(recording, initial | ties, rooms, _routes(of_rank["outgoing"]))


def _held_in_evaluations(recording: Recording, of_rank: Mapping[str, Any]) -> RecordedLane:
    of_evaluation = of_rank["evaluation"]
    rooms = {
        route: _rooms(recording.header, route, ACTIVATIONS, of_evaluation["slots"][str(route[1])])
        for route in _routes(of_evaluation["incoming"])
    }
    initial = {_stages([stage]): (0, 0) for stage in of_rank["stages"]}
    return RecordedLane(recording, initial, rooms, _routes(of_evaluation["outgoing"]))


def _rooms(header: Header, route: Route, value: Value, slots: Sequence[Any]) -> Sequence[int]:
    """The slots of a link among those of a stage: a list for each stage that makes the value, if several do."""
    source, target, *_ = route
    makers = header.makers(value, Stage(target))
    return slots[makers.index(Stage(source))] if len(makers) > 1 else slots


def _routes(routes: Iterable[Sequence[Any]]) -> list[Route]:
    return [(*route[:3], *(route[3:] or [""])) for route in routes]


def _stages(numbers: Iterable[Any]) -> WeightGroup:
    return tuple(Stage(int(number)) for number in numbers)
