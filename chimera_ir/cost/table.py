"""The details of a report for a terminal: the schedule next to the baseline, and the launches of sums."""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from chimera_ir import notebook
from chimera_ir.cost.durations import weighing
from chimera_ir.cost.number_text import Unit, decimal, exact, percent
from chimera_ir.cost.report import Figures, Report
from chimera_ir.cost.simulate import Launched
from chimera_ir.ir.text.printer import group_name
from chimera_ir.plural import counted

IN_FULL = 16
"""The most workers, stages or launches that are listed one by one; of more, runs or the extremes are listed."""

Show = Callable[[Fraction], str]


def show(report: Report) -> RenderableType:
    """All figures of a report, for a console of any width; colours add no information to the words."""
    return Group(_table(report), *_launches(report), *_communicator_lines(report))


def heading(report: Report) -> Text:
    """The scheme with its parameters, sizes and costs, and how the baseline differs."""
    header = report.header
    parameters = " ".join(f"{name}={value}" for name, value in header.parameters)
    costs = _costs(report)
    sizes = ", ".join(
        counted(number, noun)
        for number, noun in (
            (header.workers, "worker"),
            (header.stages, "stage"),
            (header.whole_micro_batches, "micro-batch"),
            (len(header.pipes), "pipe"),
        )
    )
    units = ["one update in the steady state"] if header.asynchronous else []
    if differences := ", ".join(_differences(report)):
        units.append(f"the baseline: {differences}")
    lines = f"{sizes}; {costs}{weighing(header)}", *(["; ".join(units)] if units else [])
    return Text.assemble((header.scheme, "bold"), f" {parameters}: " if parameters else ": ", "\n".join(lines))


def _differences(report: Report) -> Iterator[str]:
    """The differences of the baseline from the schedule: its flush, its stages, its costs."""
    header, base = report.header, report.baseline.header
    if header.asynchronous != base.asynchronous:
        yield "with its flush" if header.asynchronous else "one update in the steady state, without a flush"
    if header.stages != base.stages:
        larger = exact(Fraction(header.stages, base.stages))
        yield f"{counted(base.stages, 'stage')}, each as large as {larger} of these"
    costs = _costs(report.baseline)
    if costs != _costs(report):
        yield costs


def _costs(figures: Figures) -> str:
    return figures.durations.summary(figures.header, figures.counts)


def html(report: Report) -> str:
    """The figures of a report beside those of its baseline, as an HTML table."""
    rows, parent = [], ""
    for name, value, base in _both(report):
        parent = parent if name.startswith(" ") else name
        rows.append((name if name == parent else f"{parent}: {name.strip()}", value, base))
    heads = ("figure", report.scheme, f"baseline: {report.baseline.scheme}")
    return notebook.table(str(heading(report)), heads, rows)


def _table(report: Report) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column(report.scheme, style="bold", overflow="fold")
    table.add_column(f"baseline: {report.baseline.scheme}", overflow="fold")
    for row in _both(report):
        table.add_row(*row)
    return table


def _both(report: Report) -> list[tuple[str, str, str]]:
    """Rows with the name of a figure, its value, and the value of the baseline."""
    both = report, report.baseline
    splits = any(any(figures.between_halves) for figures in both)
    recomputing = any(any(figures.stashed_inputs) for figures in both)
    slicing = any(any(figures.carries) for figures in both)
    moving = any(any(figures.host) for figures in both)
    own_rows, base_rows = (_rows(figures, splits, recomputing, slicing, moving) for figures in both)
    return [(name, value, base) for (name, value), (_, base) in zip(own_rows, base_rows, strict=True)]


def _rows(figures: Figures, splits: bool, recomputing: bool, slicing: bool, moving: bool) -> list[tuple[str, str]]:
    unit = figures.durations.unit
    rows = [
        ("makespan", unit.show(figures.makespan)),
        ("  bubble ratio", percent(figures.bubble_ratio)),
        ("critical path", ", ".join(f"C_{kind.lower()} = {decimal(count)}" for kind, count in figures.counts.items())),
        (
            "workers' own spans",
            per_worker(figures.spans, lambda span: unit.show(span).replace(" ", "")) if figures.spans else "no flush",
        ),
        ("  bubble ratio", percent(figures.span_bubble_ratio) if figures.spans else ""),
        ("steady period", unit.show(figures.steady_period)),
        ("  bubble ratio", percent(figures.steady_bubble_ratio)),
        ("clock span", decimal(figures.clock_span)),
        ("weights, M_theta", per_worker(figures.weights)),
        ("activations, M_a", per_worker(figures.activations)),
    ]
    if splits:
        rows.append(("  between halves", per_worker(figures.between_halves)))
    if recomputing:
        rows.append(("stashed inputs", per_worker(figures.stashed_inputs)))
    if slicing:
        rows.append(("carries, in slices", per_worker(figures.carries)))
    if moving:
        rows.append(("host memory, M_a", per_worker(figures.host)))
        rows.append(("transfers", per_worker(figures.transfers, unit.show)))
        rows.append(("  while computing", per_worker(figures.hidden_transfers, unit.show)))
    return rows


def _launches(report: Report) -> list[Text]:
    """Lines of text on the launches of gradient sums after which their worker still idles: a line for each launch.

    After `IN_FULL` of them a line says how many more there are, and another how many launches no bubble follows.
    """
    early = [launched for launched in report.synchronisation if launched.free]
    rest = len(report.synchronisation) - len(early)
    steady, unit = report.header.asynchronous, report.durations.unit
    lines = [
        f"{group_name(launched.group)} on worker {launched.worker}: {_launch_text(launched, steady, unit)}"
        for launched in early[:IN_FULL]
    ]
    if len(early) > IN_FULL:
        lines.append(f"and {counted(len(early) - IN_FULL, 'more such launch')} (report.json lists all)")
    if early and rest:
        bubble = "with no bubble before the step" if steady else "after the worker's last bubble"
        lines.append(f"{counted(rest, 'more sum')} launched {bubble}")
    return [Text.assemble(("gradients: ", "cyan"), line) for line in lines]


def _launch_text(launched: Launched, steady: bool, unit: Unit) -> str:
    if steady:
        return f"{unit.show(launched.free)} free between launch and step"
    return (
        f"launched at {unit.show(launched.at)}, {unit.show(launched.free)} free before the worker's last operation, "
        f"{unit.show(launched.flush)} after it"
    )


def proof(report: Report) -> Text:
    """A line with the names of the rules that are proven."""
    return Text("verified: " + ", ".join(report.verified))


def _communicator_lines(report: Report) -> list[Text]:
    """A line that names the ways to use fewer communicators with which the program is proven to finish; or no line."""
    fewer = [f"{choice.name} ({choice.number})" for choice in report.communicators[1:] if not choice.blocked]
    return [Text(f"finishes with fewer communicators, too: {', '.join(fewer)}")] if fewer else []


def per_worker(values: Sequence[Fraction], show: Show = decimal) -> str:
    """Text with the values of all workers, from P0 on; many workers are joined to runs with a constant step.

    ``show`` writes a value.

    Examples
    --------
    >>> per_worker([Fraction(n) for n in (3, 4, 4, 3)])
    '3 4 4 3'
    >>> per_worker([Fraction(2)] * 64)
    '2 on each worker'
    """
    if len(set(values)) == 1:
        return f"{show(values[0])} on each worker" if len(values) > 1 else show(values[0])
    if len(values) <= IN_FULL:
        return " ".join(map(show, values))
    return ", ".join(_run(first, last, values, show) for first, last in _runs(values))


def _runs(values: Sequence[Fraction]) -> list[tuple[int, int]]:
    """Divides values into runs with a constant step, from left to right; returns each one's first and last index."""
    runs = []
    first = 0
    while first < len(values):
        last = min(first + 1, len(values) - 1)
        while last + 1 < len(values) and values[last + 1] - values[last] == values[first + 1] - values[first]:
            last += 1
        runs.append((first, last))
        first = last + 1
    return runs


def _run(first: int, last: int, values: Sequence[Fraction], show: Show) -> str:
    if first == last:
        return f"P{first}: {show(values[first])}"
    joint = "," if last == first + 1 else ".."
    amounts = [show(values[first])] + ([] if values[first] == values[last] else [show(values[last])])
    return f"P{first}{joint}P{last}: {joint.join(amounts)}"
