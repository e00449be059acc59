"""Texts and files that chimera compile makes from the levels of a compilation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from chimera_ir import library
from chimera_ir.compilation import Compilation
from chimera_ir.ir.text.printer import show
from chimera_ir.syntax import formatter

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
    DAG = "dag"
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

    ``split`` is the first layer of each stage, if known; ``fits`` whether the workers have the memory, as far as known.
    """

    scheme: str
    workers: int
    files: Mapping[str, str]
    split: tuple[int, ...] | None = None
    fits: bool = True


def produce(compilation: Compilation, wanted: Level | None, details: bool = False) -> tuple[str, Output | None]:
    """The text of a level, without files; if ``wanted`` is None, text and files of the whole compilation.

    ``details`` adds the tables of all figures. Raises `CompileError`, also if the program must fit and does not.
    """
    if compilation.request.require_fit:
        _ = compilation.verified
    if wanted is not None:
        return _TEXTS[wanted](compilation), None
    shown, header = _screen(compilation, details), compilation.schedule.header
    forecast = compilation.forecast
    split = None if forecast is None else forecast.split_of(header)
    return shown, Output(header.scheme, header.workers, compilation.files, split, compilation.summary.fits)


def starting_in_torch(compilation: Compilation, level: Level | None) -> tuple[str, ...]:
    """Remarks on how torch.distributed.pipelining runs an exported schedule; none for other levels."""
    if level not in (Level.TORCH_CSV, Level.TORCH_CSV_COMMS):
        return ()
    from chimera_ir.torch_text.csv_writer import remarks

    sentences = remarks(compilation.schedule.header, comms=level is Level.TORCH_CSV_COMMS)
    return tuple(f"remark: {sentence}" for sentence in sentences)


def _screen(compilation: Compilation, details: bool) -> str:
    """The text for a terminal: speed, memory and limits in words, with ``details`` tables, timeline, proven rules."""
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


def _timeline(compilation: Compilation) -> str:
    from chimera_ir.console import printed
    from chimera_ir.picture import terminal

    return printed(lambda console: console.print(terminal.draw(compilation.timeline, console.width)))


_TEXTS: Mapping[Level, Callable[[Compilation], str]] = {
    Level.AST: lambda compilation: formatter.show(compilation.scheme),
    Level.PLAN: lambda compilation: show(compilation.plan),
    Level.SCHEDULE: lambda compilation: f"{compilation.comments}{show(compilation.schedule)}",
    Level.PROGRAM: lambda compilation: compilation.program_text,
    Level.EVALUATION: lambda compilation: show(compilation.evaluation),
    Level.TORCH_CSV: lambda compilation: compilation.torch_csv,
    Level.TORCH_CSV_COMMS: lambda compilation: compilation.torch_csv_comms,
    Level.DAG: lambda compilation: compilation.dag_json,
    Level.GRAPH: lambda compilation: compilation.graph.json,
    Level.TIMELINE: _timeline,
    Level.TRACE: lambda compilation: compilation.trace,
    Level.REPORT: lambda compilation: compilation.report_json,
    Level.HTML: lambda compilation: compilation.page,
}
"""Maps each level to its text."""
