"""A gallery as a table for a terminal, and as JSON."""

from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from chimera_ir.console import printed
from chimera_ir.cost.number_text import decimal, number, percent, seconds
from chimera_ir.cost.report import Report
from chimera_ir.plural import counted
from chimera_ir.predict.prediction_table import size as in_bytes
from chimera_ir.sweeps.figures import times_as_fast
from chimera_ir.sweeps.gallery import Exhibit, Gallery, Shown
from chimera_ir.sweeps.printing import grid, in_short, reasons
from chimera_ir.sweeps.sweep import Refused


def text(gallery: Gallery) -> str:
    """The gallery as a table; below it the reasons of refusals, and when to use which scheme."""
    rows = [words(exhibit) for exhibit in gallery.exhibits]
    heads = list(dict.fromkeys(head for row in rows for head in row))
    uses = Table.grid(padding=(0, 2))
    for exhibit in gallery.exhibits:
        if exhibit.use:
            uses.add_row(exhibit.name, exhibit.use)
    refusals = reasons(exhibit.outcome for exhibit in gallery.exhibits)
    table = grid(heads, ([row.get(head, "") for head in heads] for row in rows))
    table.columns[0].justify = table.columns[1].justify = "left"
    parts: list[RenderableType] = [Text(heading(gallery)), table, *map(Text, refusals)]
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


def words(exhibit: Exhibit) -> Mapping[str, str]:
    """The figures of an exhibit as words, by the heads of their columns."""
    match exhibit.outcome:
        case Refused() as refused:
            return {"scheme": exhibit.name, "size": _size(exhibit.settings), "makespan": in_short(refused)}
        case Shown() as shown:
            size = _size(shown.report.parameters)
            return {"scheme": exhibit.name, "size": size, **dict(_figures(shown, shown.report))}


def _size(settings: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())


def _figures(shown: Shown, report: Report) -> Iterator[tuple[str, str]]:
    yield "makespan", report.durations.unit.show(report.makespan)
    yield "times as fast", decimal(times_as_fast(report))
    yield "bubble ratio", percent(report.bubble_ratio)
    yield "of own spans", percent(report.span_bubble_ratio) if report.spans else ""
    yield "M_theta", decimal(shown.weights)
    yield "M_a", decimal(shown.activations)
    if any(report.stashed_inputs):
        yield "stashed", decimal(shown.stashed_inputs)
    yield "messages", decimal(shown.messages)
    if shown.seconds is not None:
        yield "T by replay", seconds(shown.seconds)
    if shown.needed is not None:
        yield "memory", in_bytes(shown.needed)


def as_json(gallery: Gallery) -> list[dict[str, object]]:
    """The gallery as a JSON list: for each exhibit its name, settings, words and report, or why it is refused."""
    return [_entry(exhibit) for exhibit in gallery.exhibits]


def _entry(exhibit: Exhibit) -> dict[str, object]:
    about = {"name": exhibit.name, "summary": exhibit.summary, "use": exhibit.use, "set": dict(exhibit.settings)}
    match exhibit.outcome:
        case Refused(code, reason):
            return {**about, "code": code, "refused": reason}
        case Shown(report=report, messages=messages, seconds=replayed):
            predicted = {} if replayed is None else {"T_replay": replayed}
            return {**about, "messages": number(messages), **predicted, "report": report.as_json()}
