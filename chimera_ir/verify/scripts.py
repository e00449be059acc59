"""Rule "scripts": each rank's script does what its program says, call by call and line by line.

The text of the script runs as it will be written, on a lane that computes nothing (`recording`): one update, or of a
stream the updates that are proven, from warm-up to drain; then the forwards alone. So whatever the code generator makes
of a lane, loops included, is compared with the lane itself.

A script whose text names anything but the calls of a lane is refused before any of it runs.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import currentframe
from operator import attrgetter
from traceback import walk_tb
from types import CodeType, FrameType, SimpleNamespace, TracebackType
from typing import Any, NamedTuple, TypeVar

from chimera_ir.diagnostics.catalogue.program import ScriptDiffers
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.ir.ids import Stage, WeightGroup
from chimera_ir.ir.kinds import KINDS, values
from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.ops import NOWHERE, Instruction
from chimera_ir.ir.text.printer import line
from chimera_ir.verify.recording import Differs, Held, RecordedLane, Route, ScriptRun

_Note = TypeVar("_Note")

FACTS = "program.json"

_LANE = "chimera_runtime.lane"

_OF_MODULES = {_LANE, "Lane", "INTERFACE", "PROGRAM", "update", "turn", "evaluate", "int", "__doc__"}
"""The names that a script may use outside its functions."""

_OF_FUNCTIONS = {
    *("range", "stage", "tie", "incoming", "outgoing", "input", "target"),
    *("isend", "irecv", "wait", "take", "all_reduce", "wait_all_reduce", "step", "stash", "drop"),
    *("at", "pair"),
}
"""The names that a script's functions may use, apart from their own variables and the methods of the table of kinds."""

_ANNOTATIONS = "__annotate__"
"""The name of the function that newer interpreters make of annotations."""


def scripts(program: Program, evaluation: Program, files: Mapping[str, str]) -> Iterator[Diagnostic]:
    """Yields, for each function of each script, its first difference from the program.

    The program has no errors by any other rule; of a stream, it has as many updates as are proven. ``evaluation`` is
    the program of the forwards alone, ``files`` has the scripts ``rank_<worker>.py`` and program.json.
    """
    for worker, of_rank in enumerate(json.loads(files[FACTS])["ranks"]):
        script = _Script(script_name(worker), files[script_name(worker)], program.header)
        yield from _trained(script, program.lanes[worker], program.header, of_rank)
        recorded = RecordedLane(evaluation.lanes[worker], _held_in_evaluations(program.header, of_rank), ScriptRun())
        yield from script.compared("evaluate", [()], recorded)


def call_lines(program: Program, files: Mapping[str, str]) -> Iterator[list[int]]:
    """Yields for each worker the line of its script that does each instruction of its lane; the scripts are proven."""
    return _noted(program, files, attrgetter("f_lineno"))


class CallPlace(NamedTuple):
    """A ``line`` of a script, with the values of the ``counters`` of its loops when the line runs."""

    line: int
    counters: Mapping[str, int]


def call_places(program: Program, files: Mapping[str, str]) -> Iterator[list[CallPlace]]:
    """Yields for each worker the place of its script that does each instruction of its lane; the scripts are proven."""
    return _noted(program, files, _place)


def _place(frame: FrameType) -> CallPlace:
    variables = {**frame.f_locals}
    return CallPlace(frame.f_lineno, {name: value for name, value in variables.items() if type(value) is int})


def _noted(program: Program, files: Mapping[str, str], note: Callable[[FrameType], _Note]) -> Iterator[list[_Note]]:
    """Runs each worker's training function; yields what ``note`` returns for its frame at each instruction."""
    for worker, of_rank in enumerate(json.loads(files[FACTS])["ranks"]):
        script, notes = _Script(script_name(worker), files[script_name(worker)], program.header), list[_Note]()
        lane = _with_callers(program.lanes[worker], script_name(worker), note, notes)
        assert not [*_trained(script, lane, program.header, of_rank)]
        yield notes


def script_name(worker: int) -> str:
    """The name of the script that a rank of a worker runs."""
    return f"rank_{worker}.py"


def _trained(
    script: "_Script", lane: Iterable[Instruction], header: Header, of_rank: Mapping[str, Any]
) -> Iterator[Diagnostic]:
    """Runs the training function of a script; yields its first difference from ``lane``."""
    held, turns = _held(header, of_rank), of_rank["turns"]
    if turns is None:
        return script.compared("update", [()], RecordedLane(lane, held, ScriptRun()))
    calls = [(number,) for number in range(turns["first"], header.updates + turns["behind"], turns["step"])]
    return script.compared("turn", calls, RecordedLane(lane, held, ScriptRun(0, header.updates, header.micro_batches)))


def _with_callers(
    lane: Iterable[Instruction], name: str, note: Callable[[FrameType], _Note], notes: list[_Note]
) -> Iterator[Instruction]:
    """Yields a lane's instructions, and notes which code in file ``name`` asks for each.

    What ``note`` returns for the frame of that code is added to ``notes``.
    """
    for instruction in lane:
        frame = currentframe()
        while frame is not None and frame.f_code.co_filename != name:
            frame = frame.f_back
        assert frame is not None, "a script asks for each instruction"
        notes.append(note(frame))
        yield instruction


class _Script:
    def __init__(self, name: str, text: str, header: Header) -> None:
        self._name, self._text, self._header = name, text, header
        self._defined: Mapping[str, Callable[..., None]] | None = None

    def compared(self, function: str, calls: Sequence[tuple[int, ...]], lane: RecordedLane) -> Iterator[Diagnostic]:
        """Calls a function with each tuple of arguments in ``calls``; yields its first difference from ``lane``."""
        try:
            if self._defined is None:
                self._defined = _functions(self._name, self._text)
            run = self._defined[function]
            for arguments in calls:
                run(lane, *arguments)
            left_out = lane.next_line()
            if left_out is not None:
                raise Differs(left_out, "ends")
        except Differs as differs:
            yield self._difference(function, differs.expected, differs.done, differs.__traceback__)
        except Exception as error:  # a wrong text may do anything
            done = f"ends with {type(error).__name__}: {error}"
            yield self._difference(function, lane.next_line(), done, error.__traceback__)

    def _difference(
        self, function: str, expected: Instruction | None, done: str, trace: TracebackType | None
    ) -> ScriptDiffers:
        number, lines = _line_of(self._name, trace), self._text.splitlines()
        return ScriptDiffers(
            span=NOWHERE if expected is None else expected.origin,
            script=self._name,
            function=function,
            number=number,
            text=lines[number - 1].split("  # ")[0].strip() if 0 < number <= len(lines) else "",
            expected="" if expected is None else line(expected, self._header),
            done=done,
        )


def _functions(name: str, text: str) -> dict[str, Callable[..., None]]:
    """The functions of a script by name; raises `Differs`, and runs nothing, for names that scripts do not need."""
    code = compile(text, name, "exec", dont_inherit=True)
    foreign = next(_foreign(code), None)
    if foreign is not None:
        raise Differs(None, f"names {foreign}, which is not a part of a script")
    builtins = {"range": range, "int": int, "__import__": lambda *_: SimpleNamespace(Lane=RecordedLane)}
    defined: dict[str, Any] = {"__name__": name, "__builtins__": builtins}
    exec(code, defined)
    return defined


def _foreign(module: CodeType) -> Iterator[str]:
    """Yields the names in a script that a correct script does not use."""
    functions = [constant for constant in module.co_consts if isinstance(constant, CodeType)]
    of_functions = _OF_FUNCTIONS | {kind.method for kind in KINDS.values()} | {value.made for value in values()}
    of_functions |= {f"wait_{kind.method}" for kind in KINDS.values() if kind.moves}
    yield from ({*module.co_names, *(function.co_name for function in functions)} - _OF_MODULES - {_ANNOTATIONS})
    for function in functions:
        allowed = _OF_MODULES if function.co_name == _ANNOTATIONS else of_functions
        yield from ({*function.co_names} - allowed)
        yield from (constant.co_name for constant in function.co_consts if isinstance(constant, CodeType))


def _line_of(name: str, trace: TracebackType | None) -> int:
    """The line of the script ``name`` at which an error with this traceback was raised; 0 if it was raised outside."""
    numbers = [number for frame, number in walk_tb(trace) if frame.f_code.co_filename == name]
    return numbers[-1] if numbers else 0


def _held(header: Header, of_rank: Mapping[str, Any]) -> Held:
    stages = of_rank["stages"]
    initial = {_stages([stage]): (*of_stage["initial"],) for stage, of_stage in stages.items()}
    ties = {_stages(tie["stages"]): (*tie["initial"],) for tie in of_rank["ties"]}
    rooms = {
        (source, target, worker, value): stages[str(target)][
            header.value_between[Stage(source), Stage(target), value].slots
        ]
        for source, target, worker, value in _routes(of_rank["incoming"])
    }
    return Held(header, initial | ties, rooms, _routes(of_rank["outgoing"]))


def _held_in_evaluations(header: Header, of_rank: Mapping[str, Any]) -> Held:
    of_evaluation = of_rank["evaluation"]
    rooms = {route: of_evaluation["slots"][str(route[1])] for route in _routes(of_evaluation["incoming"])}
    initial = {_stages([stage]): (0, 0) for stage in of_rank["stages"]}
    return Held(header, initial, rooms, _routes(of_evaluation["outgoing"]))


def _routes(routes: Iterable[Sequence[Any]]) -> list[Route]:
    """The routes in program.json, each with its value or, if it has none, with an empty one."""
    return [(*route[:3], *(route[3:] or [""])) for route in routes]


def _stages(numbers: Iterable[Any]) -> WeightGroup:
    return tuple(Stage(int(number)) for number in numbers)
