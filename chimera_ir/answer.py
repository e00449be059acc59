"""What a call of chimera-compile gives, wherever it then goes: produced from the levels, or read back from its text."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath

from chimera_ir.command import Misuse, printed
from chimera_ir.cost import table
from chimera_ir.cost.report import Report
from chimera_ir.cost.simulate import Timeline
from chimera_ir.driver import Level, Request, Result, Warn, compile_ir, compile_scheme, files
from chimera_ir.ir.levels import Plan, Program, Schedule
from chimera_ir.ir.text.printer import show
from chimera_ir.picture import replayed, terminal
from chimera_ir.predict import show as prediction_table
from chimera_ir.predict.prediction import Forecast, Prediction
from chimera_ir.syntax import printer as scheme_printer
from chimera_ir.syntax.ast import Scheme
from chimera_ir.verify.verify import Verified

Watch = Callable[[Iterator[Result]], Iterator[Result]]
"""Passes the levels on as they come, and sees them pass."""

_NEXT = {
    Level.AST: "placing and ordering the operations, verifying the schedule",
    Level.PLAN: "verifying the schedule",
    Level.SCHEDULE: "adding messages and gradient sums, verifying the program",
    Level.PROGRAM: "simulating",
    Level.TIMELINE: "comparing with the baseline",
    Level.REPORT: "writing the scripts",
}
"""What is done once a level is there."""


@dataclass(frozen=True, slots=True)
class Output:
    """What goes into the output directory, by relative path, and whom it is for."""

    scheme: str
    workers: int
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes to standard output, and to the output directory unless one level was asked for.

    ``warnings`` are those of the compilation, ready to be shown.
    """

    warnings: tuple[str, ...]
    printed: str
    output: Output | None

    def as_json(self) -> str:
        """The answer as a text that `read` understands."""
        return json.dumps(asdict(self))


def read(text: str | bytes) -> Answer | None:
    """The answer that a text stands for; None for a text that `Answer.as_json` cannot have written."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    match found:
        case {"warnings": list(warnings), "printed": str(shown), "output": None} if _strings(warnings):
            return Answer(tuple(warnings), shown, None)
        case {
            "warnings": list(warnings),
            "printed": str(shown),
            "output": {"scheme": str(scheme), "workers": int(workers), "files": dict(written)},
        } if _strings((*warnings, *written.values())) and all(map(_lies_below, (scheme, *written))):
            return Answer(tuple(warnings), shown, Output(scheme, workers, written))
    return None


def _strings(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def _lies_below(name: str) -> bool:
    """Whether a relative path stays within the directory that it is relative to."""
    path = PurePath(name)
    return not path.anchor and ".." not in path.parts and "\0" not in name


@dataclass(frozen=True, slots=True)
class _Told:
    """The report, and the prediction beside it."""

    report: Report
    prediction: Prediction | None


def watched(levels: Iterator[Result], tell: Callable[[str], None]) -> Iterator[Result]:
    """The levels; with each, what comes next is told."""
    for level, value in levels:
        tell(_NEXT[level])
        yield level, value


def produce(
    request: Request, wanted: Level | None, warn: Warn, watch: Watch, forecast: Forecast | None = None
) -> tuple[str, Output | None]:
    """What is printed, and what is written, of one level or, for None, of the whole compilation.

    With a forecast the report comes with a prediction.

    Raises
    ------
    Rejected, SettingError, TooLarge
        As `compile_scheme` does.
    Unfit
        If the files behind the forecast do not fit what is compiled.
    Misuse
        If the text enters below the level that is wanted.
    """
    asked = replace(request, until=wanted or Level.REPORT)
    levels = _told(watch((compile_ir if request.source.is_ir else compile_scheme)(asked, warn)), forecast)
    if wanted is None:
        return _whole(dict(levels))
    for level, value in levels:
        if level is wanted:
            return _text(value), None
    raise Misuse(f"--emit {wanted.value}: {request.source.name} enters below that level")


def _told(levels: Iterator[Result], forecast: Forecast | None) -> Iterator[Result]:
    """The levels, the report with what is predicted of the program before it."""
    program: Program | None = None
    for level, value in levels:
        if isinstance(value, Verified):
            program = value.program
        if isinstance(value, Report):
            prediction = forecast.of(program) if forecast and program else None
            yield level, _Told(value, prediction)
        else:
            yield level, value


def _whole(levels: Mapping[Level, object]) -> tuple[str, Output]:
    verified, timeline, told = levels[Level.PROGRAM], levels[Level.TIMELINE], levels[Level.REPORT]
    assert isinstance(verified, Verified)
    assert isinstance(timeline, Timeline)
    assert isinstance(told, _Told)
    header = verified.program.header
    predicted = [prediction_table.show(told.prediction)] if told.prediction else []
    shown = printed(
        lambda console: console.print(table.show(told.report), *predicted, terminal.draw(timeline, console.width))
    )
    drawn = {"replay.svg": replayed.draw_replay(told.prediction.replay)} if told.prediction else {}
    return shown, Output(header.scheme, header.workers, {**drawn, **files(verified, timeline, _json(told))})


def _text(value: object) -> str:
    match value:
        case Scheme():
            return scheme_printer.show(value)
        case Plan() | Schedule() | Program():
            return show(value)
        case Verified():
            return show(value.program)
        case Timeline():
            return printed(lambda console: console.print(terminal.draw(value, console.width)))
        case _Told():
            return _json(value)
        case _:
            raise TypeError(f"no level is a {type(value).__name__}")


def _json(told: _Told) -> str:
    prediction = {"prediction": told.prediction.as_json()} if told.prediction else {}
    return json.dumps({**told.report.as_json(), **prediction}, indent=2) + "\n"
