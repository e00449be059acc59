"""A gallery: several texts at one size, each with its picture, its figures, and when to use it.

a(D, N), b(P, N)  D=8 N=32  ->  a D=8 N=32: report    b P=8 N=32: report
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from chimera_ir import library
from chimera_ir.compare.sweep import Refused, Settings, in_short, reasons, tabled, times_as_fast
from chimera_ir.comparison import fitting, require_same_size, workers_with_stages
from chimera_ir.compilation import Compilation
from chimera_ir.console import printed
from chimera_ir.cost.durations import decimal, number, percent, seconds
from chimera_ir.cost.report import Report
from chimera_ir.cost.simulate import Timeline, beginning, steady_window
from chimera_ir.diagnostics.model import Rejected
from chimera_ir.elaborate.settings import parameter_names
from chimera_ir.errors import CompileError, Incomparable, ParameterError
from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.ops import parts_of
from chimera_ir.ir.streams import ProgramStream
from chimera_ir.library import Further
from chimera_ir.picture import svg
from chimera_ir.picture.chart import filled
from chimera_ir.picture.svg import Inlined, policy_source
from chimera_ir.plural import counted, listed
from chimera_ir.predict.screen import size as in_bytes
from chimera_ir.request import Request
from chimera_ir.source import Source, templates
from chimera_ir.tables import Table


@dataclass(frozen=True, slots=True)
class Shown:
    """Figures and timeline of a schedule for the gallery's model, cut into the stages of this schedule.

    ``weights``, ``activations`` and ``stashed_inputs`` are those of the fullest worker, in stages of the gallery;
    ``messages`` are those of an update. With a profile, ``seconds`` is the replayed time of an update, and ``needed``
    the bytes of the fullest worker. The ``timeline`` of a stream ends with a turn of the steady state.
    """

    report: Report
    timeline: Timeline
    weights: Fraction
    activations: Fraction
    stashed_inputs: Fraction
    messages: Fraction
    seconds: float | None
    needed: int | None

    def as_json(self) -> dict[str, object]:
        """The figures with the content of report.json."""
        predicted = {} if self.seconds is None else {"T_replay": self.seconds}
        return {"messages": number(self.messages), **predicted, "report": self.report.as_json()}


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A text of a gallery with its settings, its figures and picture, or why it is refused.

    ``summary`` is a line on the text, ``use`` one on when to use it; they are empty if the library has none.
    """

    name: str
    summary: str
    use: str
    settings: Settings
    outcome: Shown | Refused


@dataclass(frozen=True, slots=True)
class Gallery:
    """Texts that are compared with as many workers and micro-batches as ``header``, in units of its stages."""

    header: Header
    exhibits: tuple[Exhibit, ...]

    @property
    def shown(self) -> tuple[Shown, ...]:
        """Figures and timelines of all exhibits that compile."""
        return tuple(exhibit.outcome for exhibit in self.exhibits if isinstance(exhibit.outcome, Shown))

    def by_time(self) -> "Gallery":
        """The gallery with the fastest exhibit first, and those that are refused at the end."""

        def order(exhibit: Exhibit) -> tuple[bool, float]:
            match exhibit.outcome:
                case Shown(report=report, seconds=seconds):
                    return False, float(report.makespan) if seconds is None else seconds
                case Refused():
                    return True, 0.0

        return replace(self, exhibits=tuple(sorted(self.exhibits, key=order)))


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
    exhibits = []
    for position, (source, names) in enumerate(zip(sources, parameters, strict=True), 1):
        tell(f"compiling {position} of {len(sources)}: {Path(source.name).stem}")
        fixed = {name: value for name, value in settings.items() if name in names}
        exhibits.append(_exhibit(source, fixed, header, ask, further))
    return Gallery(header, tuple(exhibits))


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


def _exhibit(source: Source, fixed: Settings, like: Header, ask: Ask, further: Further) -> Exhibit:
    name, summary, use = Path(source.name).stem, "", ""
    if name in library.names(further) and library.source(name, further) == source:
        summary, use = library.summary(name, further), library.use(name, further)
    try:
        settings = _fitted(source, fixed, like, ask)
        if isinstance(settings, Refused):
            return Exhibit(name, summary, use, {}, settings)
        return Exhibit(name, summary, use, settings, _shown(ask(source, settings), like))
    except CompileError as error:
        return Exhibit(name, summary, use, {}, Refused.by(error))


def _fitted(source: Source, fixed: Settings, like: Header, ask: Ask) -> Settings | Refused:
    """Finds settings that give a text as many workers and micro-batches as the header ``like``; else says why not.

    A text that is not a scheme gets no settings.
    """
    if not source.is_scheme:
        return {}
    request = ask(source, {})
    chosen = fitting(Compilation(request).scheme, like, request.max_operations, fixed)
    if isinstance(chosen, Rejected):
        return Refused.of(chosen.diagnostics)
    if chosen is None:
        workers, micros = counted(workers_with_stages(like), "worker"), counted(like.whole_micro_batches, "micro-batch")
        return Refused(Incomparable.__name__, f"with no values of its parameters it has {workers} and {micros}")
    return chosen


def _shown(request: Request, like: Header) -> Shown:
    # The costs are those of a stage of the header ``like``.
    compilation = Compilation(replace(request, costs=request.costs.of_model_in(like.stages)))
    header = compilation.schedule.header
    require_same_size(header, like, request.source.name)
    report, prediction, size = compilation.report, compilation.prediction, Fraction(like.stages, header.stages)
    window = steady_window(compilation.timeline)
    return Shown(
        report=report,
        timeline=compilation.timeline if window is None else beginning(compilation.timeline, window),
        weights=max(report.weights) * size,
        activations=max(report.activations) * size,
        stashed_inputs=max(report.stashed_inputs) * size,
        messages=messages(compilation.program),
        seconds=prediction.replay.seconds if prediction else None,
        needed=max(need.total for need in prediction.memory) if prediction else None,
    )


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
    for exhibit in gallery.exhibits:
        if exhibit.use:
            uses.add_row(exhibit.name, exhibit.use)
    refusals = reasons(exhibit.outcome for exhibit in gallery.exhibits)
    parts: list[RenderableType] = [Text(heading(gallery)), _table(gallery).for_terminal(), *map(Text, refusals)]
    parts += [Text("When to use which"), uses] if uses.row_count else []
    return printed(lambda console: console.print(Group(*parts)))


def heading(gallery: Gallery) -> str:
    """The size of a gallery, the costs of operations, and the unit of memory."""
    header = gallery.header
    sizes = (header.workers, "worker"), (header.stages, "stage"), (header.whole_micro_batches, "micro-batch")
    kinds = dict.fromkeys(kind for shown in gallery.shown for kind in shown.report.counts)
    reports = [shown.report for shown in gallery.shown if shown.report.stages == header.stages]
    costs = "".join(f"; {report.durations.summary(report.header, kinds)}" for report in reports[:1])
    return f"{', '.join(counted(*size) for size in sizes)}{costs}; M_theta and M_a are those of one of these stages"


def _table(gallery: Gallery) -> Table:
    return tabled(("scheme", "size"), [_cells(exhibit) for exhibit in gallery.exhibits], words=2)


def _cells(exhibit: Exhibit) -> tuple[Sequence[str], Mapping[str, str]]:
    shown = exhibit.outcome
    parameters = exhibit.settings if isinstance(shown, Refused) else shown.report.parameters
    names = exhibit.name, " ".join(f"{name}={value}" for name, value in parameters.items())
    if isinstance(shown, Refused):
        return names, {"makespan": in_short(shown)}
    report = shown.report
    return names, {
        "makespan": report.durations.unit.show(report.makespan),
        "times as fast": decimal(times_as_fast(report)),
        "bubble ratio": percent(report.bubble_ratio),
        "of own spans": percent(report.span_bubble_ratio) if report.spans else "",
        "M_theta": decimal(shown.weights),
        "M_a": decimal(shown.activations),
        **({"stashed": decimal(shown.stashed_inputs)} if any(report.stashed_inputs) else {}),
        "messages": decimal(shown.messages),
        **({} if shown.seconds is None else {"T by replay": seconds(shown.seconds)}),
        **({} if shown.needed is None else {"memory": in_bytes(shown.needed)}),
    }


def as_json(gallery: Gallery) -> list[dict[str, object]]:
    """The gallery as a JSON list: for each exhibit its name, settings, words and report, or why it is refused."""
    return [
        {
            "name": exhibit.name,
            "summary": exhibit.summary,
            "use": exhibit.use,
            "set": dict(exhibit.settings),
            **exhibit.outcome.as_json(),
        }
        for exhibit in gallery.exhibits
    ]


# A gallery as a page that needs no other file: a table, and for each exhibit its picture, all on one scale.

WIDTH = 2400
"""The largest width in pixels of half of the pictures; what is longer, such as a scheme that mostly idles, is wider."""

_STYLES = re.compile(r"<style>.*?</style>\n", re.DOTALL)


@dataclass(frozen=True, slots=True)
class GallerySection:
    """An exhibit on a page: the cells of its row, and a picture among ``drawings``, or the ``reason`` of a refusal."""

    anchor: str
    name: str
    cells: Sequence[str]
    size: str
    summary: str
    use: str
    reason: str
    drawings: Sequence[Inlined]


def page(gallery: Gallery) -> str:
    """The gallery as a page, of which the content security policy admits the style sheet alone."""
    table, unit = _table(gallery), _unit(gallery.shown)
    panels = []
    for position, (exhibit, (name, *cells)) in enumerate(zip(gallery.exhibits, table.rows, strict=True)):
        outcome = exhibit.outcome
        panels.append(
            GallerySection(
                anchor=f"scheme-{position}",
                name=name,
                cells=cells,
                size=cells[0],
                summary=exhibit.summary,
                use=exhibit.use,
                reason=f"{outcome.code}: {outcome.reason}" if isinstance(outcome, Refused) else "",
                drawings=[] if isinstance(outcome, Refused) else [_drawing(outcome.timeline, unit, position)],
            )
        )
    style = (templates() / "gallery.css").read_text(encoding="utf-8")
    return filled(
        "gallery.html.j2",
        style=Inlined(style),
        source=policy_source(style),
        heading=heading(gallery),
        heads=[column.head for column in table.columns],
        panels=panels,
    )


def _drawing(timeline: Timeline, unit: Fraction, number: int) -> Inlined:
    """The picture of an exhibit, without the style sheet of a document of its own."""
    return Inlined(_STYLES.sub("", svg.filled(svg.picture(timeline, unit, f"bubble-{number}"))))


def _unit(shown: Sequence[Shown]) -> Fraction:
    """Pixels for a unit of time: enough for the labels of most pictures, unless most are then too wide."""
    fair = _middle(svg.fair_unit(schedule.timeline) for schedule in shown)
    time = _middle(schedule.timeline.shown for schedule in shown)
    return min(fair, WIDTH / time) if time else Fraction(1)


def _middle(values: Iterable[Fraction]) -> Fraction:
    """The median, of an even number of values the upper one of the two in the middle; 0 if there are none."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else Fraction(0)
