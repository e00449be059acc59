"""A gallery: several texts at one size, each with its picture, its figures, and when to use it.

a(D, N), b(P, N)  D=8 N=32  ->  a D=8 N=32: report    b P=8 N=32: report
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from chimera_ir import library
from chimera_ir.compare.sweep import Refused, Settings, SizeRow, in_short, reasons, tabled, times_as_fast
from chimera_ir.comparison import fitting, require_same_size, workers_with_stages
from chimera_ir.compilation import Compilation
from chimera_ir.console import printed
from chimera_ir.cost.durations import decimal, number, percent, seconds, sharing
from chimera_ir.cost.report import Report
from chimera_ir.cost.simulate import Timeline, beginning, steady_window
from chimera_ir.diagnostics.model import Rejected
from chimera_ir.elaborate.settings import parameter_names
from chimera_ir.errors import CompileError, Incomparable, ParameterError, TextError
from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.ops import parts_of
from chimera_ir.ir.streams import ProgramStream
from chimera_ir.library import Further
from chimera_ir.picture import svg
from chimera_ir.picture.chart import Picture, filled
from chimera_ir.picture.svg import Inlined, policy_source
from chimera_ir.plural import counted, listed
from chimera_ir.predict.screen import size as in_bytes
from chimera_ir.request import Request
from chimera_ir.source import Source, templates
from chimera_ir.tables import Table


@dataclass(frozen=True, slots=True)
class ScheduleRow(SizeRow):
    """A text of a gallery: what a sweep tells of it, a line on it and one on when to use it (empty if there is none).

    If it compiles, ``costs`` are those of the gallery's model, cut into the stages of this schedule; ``messages`` are
    those of an update, and the ``timeline`` of a stream ends with a turn of the steady state. With a profile,
    ``needed`` are the bytes of the fullest worker.
    """

    summary: str = ""
    use: str = ""
    timeline: Timeline | None = None
    messages: Fraction = Fraction(0)
    needed: int | None = None


@dataclass(frozen=True, slots=True)
class Gallery:
    """Texts that are compared with as many workers and micro-batches as ``header``, in units of its stages."""

    header: Header
    rows: tuple[ScheduleRow, ...]

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """The timelines of all texts that compile."""
        return tuple(row.timeline for row in self.rows if row.timeline)

    def by_time(self) -> "Gallery":
        """The gallery with the fastest schedule first, and the texts that are refused at the end."""

        def order(row: ScheduleRow) -> tuple[bool, float]:
            if isinstance(row.outcome, Refused):
                return True, 0.0
            return False, float(row.outcome.makespan) if row.seconds is None else row.seconds

        return replace(self, rows=tuple(sorted(self.rows, key=order)))


Ask = Callable[[Source, Settings], Request]
"""Makes the request for a text and values of its parameters."""


def gallery(
    sources: Sequence[Source],
    settings: Settings,
    ask: Ask,
    further: Further = (),
    tell: Callable[[str], None] = lambda _: None,
) -> Gallery:
    """Compiles texts at one size; returns the gallery of them.

    The first text that has all parameters of ``settings``, and compiles, decides the size: the numbers of workers and
    micro-batches. Every other text takes the settings that it has, and values of its other parameters that give it the
    same numbers. Calls ``tell`` with a few words before each compilation. ``further`` are directories of the library.

    Raises `ParameterError` if no text has all parameters of ``settings``, and the error of the first that has them if
    none compiles.
    """
    parameters = [_parameters(source, ask) for source in sources]
    requests = [
        ask(source, settings) for source, names in zip(sources, parameters, strict=True) if settings.keys() <= {*names}
    ]
    if not requests:
        raise ParameterError(
            f"{listed([*settings])}: no scheme has {'all these parameters' if len(settings) > 1 else 'it'}"
        )
    header = _first_header(requests)
    rows = []
    for position, (source, names) in enumerate(zip(sources, parameters, strict=True), 1):
        name, summary, use = Path(source.name).stem, "", ""
        tell(f"compiling {position} of {len(sources)}: {name}")
        if name in library.names(further) and library.source(name, further) == source:
            summary, use = library.summary(name, further), library.use(name, further)
        fixed = {name: value for name, value in settings.items() if name in names}
        try:
            request = ask(source, _fitted(source, fixed, header, ask))
            row = _compiled(name, request, header)
        except CompileError as error:
            row = ScheduleRow(name, {}, Refused.by(error))
        rows.append(replace(row, summary=summary, use=use))
    return Gallery(header, tuple(rows))


def _parameters(source: Source, ask: Ask) -> Sequence[str]:
    """The names of a text's parameters; none of a text with a mistake, or that is not a scheme."""
    try:
        return parameter_names(Compilation(ask(source, {})).scheme)
    except CompileError:
        return ()


def _first_header(requests: Sequence[Request]) -> Header:
    """The header of the first request that compiles; raises the error of the first if none does."""
    errors = []
    for request in requests:
        try:
            return Compilation(request).schedule.header
        except CompileError as error:
            errors.append(error)
    raise errors[0]


def _fitted(source: Source, fixed: Settings, like: Header, ask: Ask) -> Settings:
    """Settings that give a text as many workers and micro-batches as ``like``; none for a text that is not a scheme."""
    if not source.is_scheme:
        return {}
    request = ask(source, {})
    chosen = fitting(Compilation(request).scheme, like, request.max_operations, fixed)
    if isinstance(chosen, Rejected):
        raise TextError([(source, chosen.diagnostics)])
    if chosen is None:
        workers, micros = counted(workers_with_stages(like), "worker"), counted(like.whole_micro_batches, "micro-batch")
        raise Incomparable("", f"with no values of its parameters it has {workers} and {micros}")
    return chosen


def _compiled(name: str, request: Request, like: Header) -> ScheduleRow:
    of_model = replace(like, weights=(), frozen=()) if like.shares else None
    compilation = Compilation(
        replace(request, costs=request.costs.on_stages(like).of_model_in(like.stages), keep=(), like=of_model)
    )
    header = compilation.schedule.header
    require_same_size(header, like, request.source.name)
    if header.named and _parts(header) != _parts(like):
        other = f"{like.scheme} for one with {_parts(like)}"
        raise Incomparable("", f"it is for a model with {_parts(header)}, and {other}")
    report, prediction, timeline = compilation.report, compilation.prediction, compilation.timeline
    window = steady_window(timeline)
    return ScheduleRow(
        name,
        request.settings,
        report,
        prediction.replay.seconds if prediction else None,
        timeline=timeline if window is None else beginning(timeline, window),
        messages=messages(compilation.program),
        needed=max(need.total for need in prediction.memory) if prediction else None,
    )


def _parts(header: Header) -> str:
    """The groups of stages that a model has, in words."""
    return listed([group.name for group in header.named]) if header.named else "one chain of layers"


def messages(program: Program | ProgramStream) -> Fraction:
    """The number of messages of an update, over all workers."""
    if isinstance(program, Program):
        return Fraction(sum(len(parts.sends.lines) for parts in program.parts), program.header.updates)
    sends = sum(len(parts_of(turn.instructions).sends.lines) for turn in program.turns)
    return Fraction(sends, program.header.per_turn)


# A gallery as a table for a terminal, and as JSON.


def text(gallery: Gallery) -> str:
    """The gallery as a table; below it the reasons of refusals, and when to use which scheme."""
    uses = Grid.grid(padding=(0, 2))
    for row in gallery.rows:
        if row.use:
            uses.add_row(row.scheme, row.use)
    refusals = reasons(row.outcome for row in gallery.rows)
    parts: list[RenderableType] = [Text(heading(gallery)), _table(gallery).for_terminal(), *map(Text, refusals)]
    parts += [Text("When to use which"), uses] if uses.row_count else []
    return printed(lambda console: console.print(Group(*parts)))


def heading(gallery: Gallery) -> str:
    """The size of a gallery, the costs of operations, and the unit of memory."""
    header = gallery.header
    sizes = (header.workers, "worker"), (header.stages, "stage"), (header.whole_micro_batches, "micro-batch")
    reports = [row.outcome for row in gallery.rows if isinstance(row.outcome, Report)]
    kinds = dict.fromkeys(kind for report in reports for kind in report.counts)
    of_these_stages = [report for report in reports if report.stages == header.stages]
    costs = "".join(f"; {report.durations.summary(report.header, kinds)}" for report in of_these_stages[:1])
    sized = f"{', '.join(counted(*size) for size in sizes)}{costs}{sharing(header)}"
    return f"{sized}; M_theta and M_a are those of one of these stages"


def _table(gallery: Gallery) -> Table:
    return tabled(("scheme", "size"), [_cells(row, gallery.header.stages) for row in gallery.rows], names=1, words=2)


def _cells(row: ScheduleRow, stages: int) -> tuple[Sequence[str], Mapping[str, str]]:
    report = row.outcome
    parameters = row.settings if isinstance(report, Refused) else report.parameters
    names = row.scheme, " ".join(f"{name}={value}" for name, value in parameters.items())
    if isinstance(report, Refused):
        return names, {"makespan": in_short(report)}
    size = Fraction(stages, report.stages)
    return names, {
        "makespan": report.durations.unit.show(report.makespan),
        "times as fast": decimal(times_as_fast(report)),
        "bubble ratio": percent(report.bubble_ratio),
        "of own spans": percent(report.span_bubble_ratio) if report.spans else "",
        "M_theta": decimal(max(report.weights) * size),
        "M_a": decimal(max(report.activations) * size),
        **({"stashed": decimal(max(report.stashed_inputs) * size)} if any(report.stashed_inputs) else {}),
        "messages": decimal(row.messages),
        **({} if row.seconds is None else {"T by replay": seconds(row.seconds)}),
        **({} if row.needed is None else {"memory": in_bytes(row.needed)}),
    }


def as_json(gallery: Gallery) -> list[dict[str, object]]:
    """The gallery as a JSON list: for each text its name, settings, words and report, or why it is refused."""
    return [
        {"name": row.scheme, "summary": row.summary, "use": row.use, "set": dict(row.settings), **_entries(row)}
        for row in gallery.rows
    ]


def _entries(row: ScheduleRow) -> Mapping[str, object]:
    if isinstance(row.outcome, Refused):
        return {"code": row.outcome.code, "refused": row.outcome.reason}
    predicted = {} if row.seconds is None else {"T_replay": row.seconds}
    return {"messages": number(row.messages), **predicted, "report": row.outcome.as_json()}


# A gallery as a page that needs no other file: a table, and for each schedule its picture, all on one scale.

WIDTH = 2400
"""The largest width in pixels of half of the pictures; what is longer, such as a scheme that mostly idles, is wider."""

_STYLES = re.compile(r"<style>.*?</style>\n", re.DOTALL)


def page(gallery: Gallery) -> str:
    """The gallery as a page, of which the content security policy admits the style sheet alone."""
    table, unit = _table(gallery), _unit(gallery.timelines)
    pictures = {
        position: svg.picture(row.timeline, unit, f"bubble-{position}")
        for position, row in enumerate(gallery.rows)
        if row.timeline is not None
    }
    panels = []
    for position, (row, (name, *cells)) in enumerate(zip(gallery.rows, table.rows, strict=True)):
        panels.append(
            {
                "anchor": f"scheme-{position}",
                "name": name,
                "cells": cells,
                "size": cells[0],
                "summary": row.summary,
                "use": row.use,
                "reasons": reasons([row.outcome]),
                "drawings": [_drawing(pictures[position])] if position in pictures else [],
            }
        )
    widths = {position: picture.chart.width for position, picture in pictures.items()}
    style = (templates() / "gallery.css").read_text(encoding="utf-8") + "".join(_fitting(widths))
    return filled(
        "gallery.html.j2",
        style=Inlined(style),
        source=policy_source(style),
        heading=heading(gallery),
        heads=[column.head for column in table.columns],
        panels=panels,
    )


def _drawing(picture: Picture) -> Inlined:
    """The picture of a schedule, without the style sheet of a document of its own."""
    return Inlined(_STYLES.sub("", svg.filled(picture)))


def _fitting(widths: Mapping[int, int]) -> Iterator[str]:
    """Lines of the style sheet that make pictures of ``widths`` as wide as the page, all by one factor.

    The widest takes all of the page, unless it is by half wider than most, as that of a scheme that mostly idles.
    """
    limit = Fraction(3, 2) * _middle(map(Fraction, widths.values()))
    whole = max((width for width in widths.values() if width <= limit), default=1)
    for position, width in widths.items():
        fitting = f"min({width}px, {100 * width / whole:.4f}cqi)"
        yield f"main:has(#fit:checked) #scheme-{position} svg {{ width: {fitting}; }}\n"


def _unit(timelines: Sequence[Timeline]) -> Fraction:
    """Pixels for a unit of time: enough for the labels of most pictures, unless most are then too wide."""
    fair, time = _middle(map(svg.fair_unit, timelines)), _middle(timeline.shown for timeline in timelines)
    return min(fair, WIDTH / time) if time else Fraction(1)


def _middle(values: Iterable[Fraction]) -> Fraction:
    """The median, of an even number of values the upper one of the two in the middle; 0 if there are none."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else Fraction(0)
