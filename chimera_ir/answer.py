"""Makes the answer to a call of chimera compile from the levels of a compilation, or reads it back from the cache."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING, assert_never

from chimera_ir import library
from chimera_ir.compilation import Compilation

if TYPE_CHECKING:
    from rich.console import Console


class Level(Enum):
    """The levels of a compilation that have a text, in their order; the values are the names of ``--emit``."""

    AST = "ast"
    PLAN = "plan"
    SCHEDULE = "schedule"
    PROGRAM = "program"
    EVALUATION = "evaluation"
    TORCH_CSV = "torch-csv"
    TORCH_CSV_COMMS = "torch-csv-comms"
    GRAPH = "graph"
    TIMELINE = "timeline"
    TRACE = "trace"
    REPORT = "report"
    HTML = "html"


ENDINGS: Mapping[Level | None, str] = {
    Level.AST: ".chim",
    **dict.fromkeys((Level.PLAN, Level.SCHEDULE, Level.PROGRAM, Level.EVALUATION), ".sir"),
}
"""Maps each level whose text chimera compile can read back to the ending of a file with such a text."""


@dataclass(frozen=True, slots=True)
class Output:
    """The files of the output directory by relative path, with the scheme and the number of workers.

    ``split`` is the first layer of each stage, if a prediction was made from the costs of layers. ``fits`` is whether
    the workers have enough memory, as far as that is known.
    """

    scheme: str
    workers: int
    files: Mapping[str, str]
    split: tuple[int, ...] | None = None
    fits: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a call of chimera compile, ready to be shown: ``printed`` is the text for standard output.

    ``output`` has the files to write, None if a single level was asked for; ``warnings`` are their whole texts.
    """

    warnings: tuple[str, ...]
    printed: str
    output: Output | None

    def as_json(self) -> str:
        """The answer as a text that `read` understands."""
        return json.dumps(asdict(self))


def read(text: str | bytes) -> Answer | None:
    """Returns the answer that `Answer.as_json` has written as ``text``; None for any other text."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    match data:
        case {"warnings": list(warnings), "printed": str(shown), "output": None} if _strings(warnings):
            return Answer(tuple(warnings), shown, None)
        case {
            "warnings": list(warnings),
            "printed": str(shown),
            "output": {
                "scheme": str(scheme),
                "workers": int(workers),
                "files": dict(written),
                "split": split,
                "fits": bool(fits),
            },
        } if _strings((*warnings, *written.values())) and all(map(_lies_below, (scheme, *written))) and _layers(split):
            return Answer(tuple(warnings), shown, Output(scheme, workers, written, split and tuple(split), fits))
    return None


def _strings(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def _layers(split: object) -> bool:
    return split is None or (isinstance(split, list) and all(type(layer) is int for layer in split))


def _lies_below(name: str) -> bool:
    """Whether a path is relative and stays within its directory, without ``..``."""
    path = PurePath(name)
    return not path.anchor and ".." not in path.parts and "\0" not in name


def produce(compilation: Compilation, wanted: Level | None, details: bool = False) -> tuple[str, Output | None]:
    """Returns the text of a level, without files; if ``wanted`` is None, text and files of the whole compilation.

    ``details`` adds the tables of all figures to the text of a whole compilation.

    Raises `CompileError` if a level cannot be made, or if the program must fit and does not.
    """
    if compilation.request.require_fit:
        _ = compilation.verified
    if wanted is not None:
        return _text(compilation, wanted), None
    shown, header = _screen(compilation, details), compilation.schedule.header
    forecast = compilation.forecast
    split = None if forecast is None else forecast.split_of(header)
    return shown, Output(header.scheme, header.workers, compilation.files, split, compilation.summary.fits)


def starting_in_torch(compilation: Compilation, level: Level | None) -> tuple[str, ...]:
    """Returns remarks for the user on how torch.distributed.pipelining runs an exported schedule.

    There are none unless ``level`` is one of the two that torch loads.
    """
    if level not in (Level.TORCH_CSV, Level.TORCH_CSV_COMMS):
        return ()
    from chimera_ir.torch_text.csv_writer import remarks

    sentences = remarks(compilation.schedule.header, comms=level is Level.TORCH_CSV_COMMS)
    return tuple(f"remark: {sentence}" for sentence in sentences)


def _screen(compilation: Compilation, details: bool) -> str:
    """Returns the text for a terminal: speed, memory and limits in words, a picture of the timeline, the proven rules.

    With ``details`` it has tables of all figures as well.
    """
    from chimera_ir.console import printed
    from chimera_ir.cost import report as table
    from chimera_ir.picture import terminal
    from chimera_ir.predict import screen

    report, timeline, prediction = compilation.whole_report, compilation.timeline, compilation.prediction
    summary = compilation.summary
    baseline = library.called(summary.speed.baseline)
    searched = compilation.improvement.words if compilation.improvement else ""

    def draw(console: "Console") -> None:
        console.print(table.heading(report), *([screen.heading(prediction)] if prediction else []), sep="\n")
        console.print(*screen.show(report, summary, prediction, console.width, baseline, searched), sep="\n")
        if details:
            console.print(table.show(report), *([screen.table(prediction)] if prediction else []))
        console.print("", terminal.picture(timeline, console.width), table.proof(report), sep="\n")

    return printed(draw)


def _text(compilation: Compilation, level: Level) -> str:
    from chimera_ir.ir.text.printer import show
    from chimera_ir.syntax import formatter

    match level:
        case Level.AST:
            return formatter.show(compilation.scheme)
        case Level.PLAN:
            return show(compilation.plan)
        case Level.SCHEDULE:
            return f"{compilation.comments}{show(compilation.schedule)}"
        case Level.PROGRAM:
            return compilation.program_text
        case Level.EVALUATION:
            return show(compilation.evaluation)
        case Level.TORCH_CSV:
            return compilation.torch_csv
        case Level.TORCH_CSV_COMMS:
            return compilation.torch_csv_comms
        case Level.GRAPH:
            return compilation.graph.json
        case Level.TIMELINE:
            from chimera_ir.console import printed
            from chimera_ir.picture import terminal

            return printed(lambda console: console.print(terminal.draw(compilation.timeline, console.width)))
        case Level.TRACE:
            return compilation.trace
        case Level.REPORT:
            return compilation.report_json
        case Level.HTML:
            return compilation.page
        case _:
            assert_never(level)
