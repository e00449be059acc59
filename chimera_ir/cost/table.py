"""The report as a terminal table: the schedule beside the baseline, a verdict, the remarks."""

from collections.abc import Sequence
from fractions import Fraction

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from chimera_ir.cost.events import Launched
from chimera_ir.cost.numbers import decimal, percent
from chimera_ir.cost.report import Figures, Report

IN_FULL = 16
"""Up to how many workers a quantity is listed worker by worker; for more, it is told in runs."""


def show(report: Report) -> RenderableType:
    """The report, ready to be printed on a console of any width; colour adds nothing that the words do not say."""
    head = _heading(report.figures), _table(report), _verdict(report)
    return Group(*head, *_remarks(report), *_launches(report), _proof(report))


def _heading(own: Figures) -> Text:
    header = own.header
    parameters = " ".join(f"{name}={value}" for name, value in header.parameters)
    costs = own.costs.summary(header)
    sizes = ", ".join(
        _count(number, noun)
        for number, noun in (
            (header.workers, "worker"),
            (header.stages, "stage"),
            (header.whole_micro_batches, "micro-batch"),
            (len(header.pipes), "pipe"),
        )
    )
    steady = "\none update in the steady state; the baseline: with its flush" if header.asynchronous else ""
    return Text.assemble(
        (header.scheme, "bold"), f" {parameters}\n" if parameters else "\n", f"{sizes}; {costs}{steady}"
    )


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {noun if number == 1 else plural}"


def _table(report: Report) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column(report.figures.header.scheme, style="bold", overflow="fold")
    table.add_column(f"baseline: {report.baseline.header.scheme}", overflow="fold")
    recomputing = any(report.figures.stashed_inputs) or any(report.baseline.stashed_inputs)
    own_rows, base_rows = _rows(report.figures, recomputing), _rows(report.baseline, recomputing)
    for (name, own), (_, base) in zip(own_rows, base_rows, strict=True):
        table.add_row(name, own, base)
    return table


def _rows(figures: Figures, recomputing: bool) -> list[tuple[str, str]]:
    rows = [
        ("makespan", decimal(figures.makespan)),
        ("critical path", f"C_f = {decimal(figures.forwards)}, C_b = {decimal(figures.backwards)}"),
        ("bubble ratio", percent(figures.bubble_ratio)),
        ("clock span", decimal(figures.clock_span)),
        ("weights, M_theta", per_worker(figures.weights)),
        ("activations, M_a", per_worker(figures.activations)),
    ]
    if recomputing:
        rows.append(("stashed inputs", per_worker(figures.stashed_inputs)))
    return rows


def _verdict(report: Report) -> Text:
    own, base = report.figures.makespan, report.baseline.makespan
    if own < base:
        saved = percent(1 - own / base)
        return Text(f"faster than the baseline: {decimal(own)} against {decimal(base)}, {saved} less time", "green")
    if own == base:
        return Text("as fast as the baseline")
    return Text("slower than the baseline", "bold red")


def _launches(report: Report) -> list[Text]:
    """Where the sums of the gradients overlap compute: one line per launch with a bubble after it."""
    early = [launched for launched in report.launches if launched.free]
    rest = len(report.launches) - len(early)
    steady = report.figures.header.asynchronous
    lines = [f"stage {each.stage} on worker {each.worker}: {_launch(each, steady)}" for each in early[:IN_FULL]]
    if len(early) > IN_FULL:
        lines.append(f"and {len(early) - IN_FULL} more such launches (report.json lists all)")
    if early and rest:
        bubble = "with no bubble before the step" if steady else "after the worker's last bubble"
        lines.append(f"{rest} more {'sum' if rest == 1 else 'sums'} launched {bubble}")
    return [Text.assemble(("gradients: ", "cyan"), line) for line in lines]


def _launch(launched: Launched, steady: bool) -> str:
    if steady:
        return f"{decimal(launched.free)} free between launch and step"
    return (
        f"launched at {decimal(launched.at)}, {decimal(launched.free)} free before the worker's last operation, "
        f"{decimal(launched.flush)} after it"
    )


def _remarks(report: Report) -> list[Text]:
    return [Text.assemble(("remark: ", "yellow"), remark) for remark in report.remarks]


def _proof(report: Report) -> Text:
    return Text("verified: " + ", ".join(rule.replace("_", "-") for rule, holds in report.verified if holds))


def per_worker(values: Sequence[Fraction]) -> str:
    """A quantity of each worker, from P0 on; for many workers in runs of equal or evenly rising and falling values.

    Examples
    --------
    >>> per_worker([Fraction(n) for n in (3, 4, 4, 3)])
    '3 4 4 3'
    >>> per_worker([Fraction(2)] * 64)
    '2 on each worker'
    """
    if len(set(values)) == 1:
        return f"{decimal(values[0])} on each worker" if len(values) > 1 else decimal(values[0])
    if len(values) <= IN_FULL:
        return " ".join(map(decimal, values))
    return ", ".join(_run(first, last, values) for first, last in _runs(values))


def _runs(values: Sequence[Fraction]) -> list[tuple[int, int]]:
    """The first and last index of each maximal run with a constant step, from left to right."""
    runs = []
    first = 0
    while first < len(values):
        last = min(first + 1, len(values) - 1)
        while last + 1 < len(values) and values[last + 1] - values[last] == values[first + 1] - values[first]:
            last += 1
        runs.append((first, last))
        first = last + 1
    return runs


def _run(first: int, last: int, values: Sequence[Fraction]) -> str:
    if first == last:
        return f"P{first}: {decimal(values[first])}"
    joint = "," if last == first + 1 else ".."
    amounts = [decimal(values[first])] + ([] if values[first] == values[last] else [decimal(values[last])])
    return f"P{first}{joint}P{last}: {joint.join(amounts)}"
