"""Texts that chimera compile makes of the levels of a compilation."""

from collections.abc import Callable, Mapping
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


def produce(compilation: Compilation, wanted: Level | None, details: bool = False) -> str:
    """The text of a level; if ``wanted`` is None, a text for a terminal on the whole, whose files are made, too.

    ``details`` adds the tables of all figures. Raises `CompileError`, also if the program must fit and does not.
    """
    if compilation.request.require_fit:
        _ = compilation.verified
    if wanted is not None:
        return _TEXTS[wanted](compilation)
    text, _ = _screen(compilation, details), compilation.files
    return text


def _screen(compilation: Compilation, details: bool) -> str:
    """The text for a terminal: speed, memory and limits in words, with ``details`` tables, timeline, proven rules."""
    from chimera_ir.console import printed
    from chimera_ir.cost import report as table
    from chimera_ir.picture import terminal
    from chimera_ir.predict import screen

    report, timeline, prediction = compilation.whole_report, compilation.drawn, compilation.prediction
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
