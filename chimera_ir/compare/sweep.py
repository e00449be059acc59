"""A sweep: the reports of texts for combinations of values of their parameters.

chimera D=4..8  ->  D=4: report    D=5: refused, "D stages must split evenly over the 2f pipelines"    ..    D=8: report
"""

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from math import prod
from operator import mul
from os import PathLike
from pathlib import Path
from typing import assert_never

from rich import text as rich_text
from rich.console import Group, RenderableType

from chimera_ir import library, notebook
from chimera_ir.compare import MOST, TableForm
from chimera_ir.compilation import Compilation
from chimera_ir.console import printed
from chimera_ir.cost.durations import Unit, decimal, number, percent, positive, rounded, seconds
from chimera_ir.cost.report import Report
from chimera_ir.diagnostics.model import Diagnostic, titles
from chimera_ir.errors import AboveMaxOperations, CompileError, OptionError, TextError, WrongOption
from chimera_ir.options import Cost, Options, integer, require_parameters
from chimera_ir.plural import counted, listed
from chimera_ir.request import Request
from chimera_ir.source import Source
from chimera_ir.tables import Table

Settings = Mapping[str, int]

Text = str | PathLike[str] | Source
"""A text as a caller names it."""

_FIGURES = ("workers", "stages", "micro_batches", "makespan", "bubble_ratio", "steady_period", "clock_span")
_PEAKS = ("weights", "activations", "stashed_inputs")
_OF_BASELINE = ("scheme", "makespan", "bubble_ratio")
_REFUSAL = ("code", "refused")
"""The columns of what is refused, which a table has at its end."""

Cell = int | float | str | None
"""A value of a table of plain values."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The reason why there is no report, and the code by which ``chimera explain`` knows the message."""

    code: str
    reason: str

    @staticmethod
    def of(diagnostics: Sequence[Diagnostic]) -> "Refused":
        """The refusal by the errors of a text."""
        return Refused(diagnostics[0].code, titles(diagnostics))

    @staticmethod
    def by(error: CompileError) -> "Refused":
        """The refusal for an error of a compilation."""
        match error:
            case TextError():
                return Refused.of(error.diagnostics)
            case AboveMaxOperations():
                return Refused(type(error).__name__, error.excess)
            case _:
                return Refused(type(error).__name__, str(error))


@dataclass(frozen=True, slots=True)
class SizeRow:
    """Values for a scheme with the report or refusal; ``seconds`` is the replayed time, if a profile is given."""

    scheme: str
    settings: Settings
    outcome: Report | Refused
    seconds: float | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Sweep:
    """The results of a sweep, in the order of texts and values, and the names of the parameters that were set.

    ``rows`` are plain values, for a table of pandas or polars. A notebook shows a sweep as its table.

    Examples
    --------
    >>> import chimera_ir
    >>> sizes = chimera_ir.sweep("chimera", D=[4, 5, 8])
    >>> sizes
    <Sweep of chimera over D: 3 sizes, 1 refused>
    >>> [row.outcome.makespan for row in sizes.compiled]
    [Fraction(16, 1), Fraction(36, 1)]
    >>> sizes.results[1].outcome
    Refused(code='CH233', reason='D stages must split evenly over the 2f pipelines')
    >>> [(row["D"], row["makespan"], row["code"]) for row in sizes.rows]
    [(4, 16.0, ''), (5, None, 'CH233'), (8, 36.0, '')]
    """

    names: tuple[str, ...]
    results: tuple[SizeRow, ...]

    @property
    def compiled(self) -> tuple[SizeRow, ...]:
        """The results that have a report."""
        return tuple(row for row in self.results if isinstance(row.outcome, Report))

    @property
    def schemes(self) -> tuple[str, ...]:
        """The names of the schemes, each once."""
        return tuple(dict.fromkeys(row.scheme for row in self.results))

    @property
    def rows(self) -> list[dict[str, Cell]]:
        """The results by column: the scheme, its settings, the figures of report.json, the reason of a refusal.

        Every row has every column, and a column has values of one type or None. Memory is that of the fullest worker.
        """
        rows = [_cells(row) for row in self.results]
        figures = dict.fromkeys(column for row in rows for column in row if column not in _REFUSAL)
        columns = dict.fromkeys(("scheme", *self.names, *figures, *_REFUSAL))
        return [{column: row.get(column) for column in columns} for row in rows]

    def expected(self, shares: Mapping[int, Cost]) -> "Expected":
        """The means over updates of which a share has each number of micro-batches; the sum of all counts as 1.

        Raises `WrongOption` if a share is no positive number, or there is not one program with a flush for the number.

        Examples
        --------
        >>> import chimera_ir
        >>> means = chimera_ir.sweep("chimera", D=4, N=[8, 16]).expected({8: 3, 16: 1})
        >>> means.makespan, means.micro_batches, means.makespan / means.micro_batches
        (Fraction(37, 1), Fraction(10, 1), Fraction(37, 10))
        """
        weights, chosen = list[Fraction](), list[tuple[Report, float | None]]()
        for count, share in shares.items():
            try:
                weights.append(positive("a share", str(share), "leave out a number that does not occur"))
                chosen.append(self._program(count))
            except ValueError as error:
                raise WrongOption("numbers", f" {count}:{share}: {error}") from error
        if not chosen:
            raise WrongOption("numbers", ": there is no number with a share")
        reports, predicted = zip(*chosen, strict=True)

        def mean(values: Iterable[Fraction]) -> Fraction:
            return sum(map(mul, weights, values), Fraction(0)) / sum(weights)

        makespan = mean(report.makespan for report in reports)
        return Expected(
            {report.micro_batches: weight / sum(weights) for report, weight in zip(reports, weights, strict=True)},
            mean(Fraction(report.micro_batches) for report in reports),
            makespan,
            mean(report.makespan * report.bubble_ratio for report in reports) / makespan,
            None if None in predicted else float(mean(map(Fraction, predicted))),
            reports[0].durations.unit,
        )

    def _program(self, count: int) -> tuple[Report, float | None]:
        """The report and the replayed time of the one program with so many micro-batches; a `ValueError` in words."""
        programs = [(row.outcome, row.seconds) for row in self.results if isinstance(row.outcome, Report)]
        chosen = [program for program in programs if program[0].micro_batches == count]
        if len(chosen) > 1:
            raise ValueError(f"{len(chosen)} programs of the table have {counted(count, 'micro-batch')}")
        if not chosen:
            there = listed(sorted({report.micro_batches for report, _ in programs})) if programs else "none"
            raise ValueError(f"no program of the table has {counted(count, 'micro-batch')}: they have {there}")
        if chosen[0][0].header.asynchronous:
            raise ValueError(f"{chosen[0][0].header.title} has no flush: its updates overlap, and none has a time")
        return chosen[0]

    def __repr__(self) -> str:
        refused = len(self.results) - len(self.compiled)
        sizes = counted(len(self.results), "size") + (f", {refused} refused" if refused else "")
        over = f" over {', '.join(self.names)}" if self.names else ""
        return f"<Sweep of {', '.join(self.schemes)}{over}: {sizes}>"

    def _repr_html_(self) -> str:
        return html(self)


@dataclass(frozen=True, slots=True)
class Expected:
    """Means over updates of which the share ``shares[n]`` has n micro-batches, in each of the copies.

    ``makespan`` and, with a profile, ``seconds`` are the mean time of an update, ``micro_batches`` the mean number. The
    time of a micro-batch is that of all updates by the number of all their micro-batches: ``makespan / micro_batches``.
    ``bubble_ratio`` is the share of all that time in which workers idle.
    """

    shares: Mapping[int, Fraction]
    micro_batches: Fraction
    makespan: Fraction
    bubble_ratio: Fraction
    seconds: float | None
    unit: Unit

    def __str__(self) -> str:
        each, unit = self.micro_batches, self.unit
        updates = listed([f"{number} in {percent(share)}" for number, share in self.shares.items()])
        times = [
            f"makespan {unit.show(self.makespan)} ({unit.show(self.makespan / each)} for each micro-batch)",
            f"bubble ratio {percent(self.bubble_ratio)}",
        ]
        if self.seconds is not None:
            of_each = seconds(self.seconds / float(each))
            times.append(f"T by replay {seconds(self.seconds)} ({of_each} for each micro-batch)")
        return f"expected if N is {updates} of updates: {', '.join(times)}"

    def as_json(self) -> dict[str, object]:
        """The means as plain values."""
        each = self.micro_batches
        predicted = (
            {}
            if self.seconds is None
            else {
                "T_replay": rounded(self.seconds),
                "T_replay_per_micro_batch": rounded(self.seconds / float(each)),
            }
        )
        return {
            "shares": {str(count): number(share) for count, share in self.shares.items()},
            "micro_batches": number(each),
            "makespan": number(self.makespan),
            "makespan_per_micro_batch": number(self.makespan / each),
            "bubble_ratio": number(self.bubble_ratio),
            **predicted,
        }


def _cells(row: SizeRow) -> dict[str, Cell]:
    settings: dict[str, Cell] = {"scheme": row.scheme, **row.settings}
    report = row.outcome
    if isinstance(report, Refused):
        return {**settings, "code": report.code, "refused": report.reason}
    figures = {
        **{name: getattr(report, name) for name in _FIGURES},
        **report.critical_path,
        **{name: max(getattr(report, name)) for name in _PEAKS},
        **{f"baseline_{name}": getattr(report.baseline, name) for name in _OF_BASELINE},
    }
    plain = {name: float(value) if isinstance(value, Fraction) else value for name, value in figures.items()}
    predicted = {} if row.seconds is None else {"T_replay": row.seconds}
    return {**settings, **plain, **predicted, **dict.fromkeys(_REFUSAL, "")}


def sweep(
    text: Text | Sequence[Text],
    /,
    *,
    options: Options | None = None,
    zipped: Mapping[str, Iterable[int]] | None = None,
    **parameters: int | Iterable[int],
) -> Sweep:
    """The reports of one or several texts for combinations of values of their parameters; nothing is written.

    A parameter has a value, or several, of which all combinations are compiled. The values of parameters in ``zipped``
    go together: the first of each, then the second of each. Of several texts each takes the parameters that it has. A
    combination without a report, because the scheme or the profile refuses it or it is too large, is a row that says
    why. ``options`` and each text are as in `compile`.

    Raises `CompileError` if there is no such text, no such parameter or option, a text cannot be read, or there are too
    many combinations.

    Examples
    --------
    >>> import chimera_ir
    >>> sizes = chimera_ir.sweep("chimera", zipped={"D": [4, 8], "N": [8, 16]})
    >>> [(row.settings["D"], row.settings["N"], int(row.outcome.makespan)) for row in sizes.results]
    [(4, 8, 30), (8, 16, 66)]
    """
    options = Options() if options is None else options
    named = [text] if isinstance(text, str | PathLike | Source) else text
    sources = [library.named(name, options.library) for name in named]
    if not sources:
        raise OptionError("there are no texts")
    together = {name: _integers(name, numbers) for name, numbers in (zipped or {}).items()}
    values = {name: _integers(name, numbers) for name, numbers in parameters.items()}
    if both := together.keys() & values.keys():
        raise OptionError(f"{min(both)}: its values are given twice")
    if len(lengths := {len(numbers) for numbers in together.values()}) > 1:
        raise OptionError(f"zipped: {' and '.join(together)} need as many values as one another, not {sorted(lengths)}")
    parameter_sets = [_parameters(source) for source in sources] if len(sources) > 1 else [{*together, *values}]
    nowhere = {*together, *values}.difference(*parameter_sets)
    results: list[SizeRow] = []
    for source, names in zip(sources, parameter_sets, strict=True):
        zips, alone = (
            {name: numbers for name, numbers in several.items() if name in names | nowhere}
            for several in (together, values)
        )
        first = {name: numbers[0] for name, numbers in {**zips, **alone}.items()}
        results += swept(options.request(source, first), alone, together=zips).results
    return Sweep((*together, *values), tuple(results))


def swept(
    request: Request,
    values: Mapping[str, Sequence[int]],
    warn: Callable[[Diagnostic], None] = lambda _: None,
    tell: Callable[[str], None] = lambda _: None,
    together: Mapping[str, Sequence[int]] | None = None,
) -> Sweep:
    """The sweep of a request over values of its parameters; raises the errors of `sweep`.

    The values of ``together`` are zipped. Calls ``tell`` with a few words before each compilation, and ``warn`` with
    each warning.
    """
    requests, rows = sizes(request, values, together), []
    for place, sized in enumerate(requests, 1):
        tell(f"compiling {place} of {len(requests)}")
        compilation = Compilation(sized, warn=warn)
        try:
            rows.append(row_of(compilation))
        except CompileError as error:
            rows.append(SizeRow(_name(compilation), sized.settings, Refused.by(error)))
    return Sweep((*(together or {}), *values), tuple(rows))


def row_of(compilation: Compilation) -> SizeRow:
    """The row of a sweep for what compiles; raises `CompileError` for what does not."""
    report, prediction = compilation.report, compilation.prediction
    predicted = prediction.replay.seconds if prediction else None
    return SizeRow(_name(compilation), compilation.request.settings, report, predicted)


def _name(compilation: Compilation) -> str:
    """The name of the scheme whose parameters are set, or of another text that of its file."""
    request = compilation.request
    return compilation.scheme.name.text if request.settings else Path(request.source.name).stem


def sizes(
    request: Request, values: Mapping[str, Sequence[int]], together: Mapping[str, Sequence[int]] | None = None
) -> list[Request]:
    """The request for each combination of values of its parameters; raises the errors of `sweep`."""
    zipped = together or {}
    joint = list(dict.fromkeys(zip(*zipped.values(), strict=True))) or [()]
    combinations = prod(map(len, values.values())) * len(joint)
    if combinations > MOST:
        raise OptionError(f"{counted(combinations, 'combination')} of values, and the limit is {MOST:,}")
    largest = {name: max(numbers, key=abs) for name, numbers in {**zipped, **values}.items()}
    if largest:
        from chimera_ir.elaborate.settings import require_settable

        scheme = Compilation(request).scheme
        require_parameters(largest, scheme)
        require_settable(scheme, largest)
    chosen = ((*first, *others) for first, others in product(joint, product(*values.values())))
    return [replace(request, settings=dict(zip((*zipped, *values), numbers, strict=True))) for numbers in chosen]


def _parameters(source: Source) -> set[str]:
    if not source.is_scheme:
        return set()
    from chimera_ir.elaborate.settings import parameter_names

    return {*parameter_names(Compilation(Request(source)).scheme)}


def _integers(name: str, value: int | Iterable[int]) -> tuple[int, ...]:
    several = value if isinstance(value, Iterable) and not isinstance(value, str | bytes) else (value,)
    numbers = tuple(integer(name, number) for number in several)
    if not numbers:
        raise OptionError(f"{name}: there are no values")
    return numbers


# A sweep as a table for a terminal or a notebook, as CSV and as JSON.


def shown(sweep: Sweep, form: TableForm, expected: Expected | None = None) -> str:
    """The sweep as a text of the given form, with the means that are ``expected``, which CSV has no place for."""
    match form:
        case TableForm.TEXT:
            means = [rich_text.Text(str(expected))] if expected else []
            return printed(lambda console: console.print(text(sweep), *means))
        case TableForm.CSV:
            return as_csv(sweep)
        case TableForm.JSON:
            rows = as_entries(sweep)
            return json.dumps({"reports": rows, "expected": expected.as_json()} if expected else rows, indent=2) + "\n"
        case _:
            assert_never(form)


def text(sweep: Sweep) -> RenderableType:
    """The sweep as a table for a console of any width; below it the reason for each code of a refusal."""
    refusals = reasons(row.outcome for row in sweep.results)
    return Group(rich_text.Text(_heading(sweep)), _table(sweep).for_terminal(), *map(rich_text.Text, refusals))


def html(sweep: Sweep) -> str:
    """The sweep as an HTML table; below it the reason for each code of a refusal."""
    refusals = "\n".join(reasons(row.outcome for row in sweep.results))
    return _table(sweep).html(_heading(sweep)) + (notebook.message(refusals) if refusals else "")


def reasons(outcomes: Iterable[object]) -> list[str]:
    """A line for each code and reason among the outcomes that are refusals."""
    return list(
        dict.fromkeys(f"{outcome.code}: {outcome.reason}" for outcome in outcomes if isinstance(outcome, Refused))
    )


def in_short(refused: Refused) -> str:
    """The cell of a table for a refusal: a word, and the code that `chimera explain` takes."""
    return f"refused {refused.code}"


def times_as_fast(report: Report) -> Fraction:
    """The makespan of the baseline over that of the schedule, rounded to thousandths."""
    return Fraction(round(1000 * report.baseline.makespan / report.makespan), 1000)


def tabled(
    heads: Sequence[str], rows: Sequence[tuple[Sequence[str], Mapping[str, str]]], names: int, words: int = 0
) -> Table:
    """The table of a comparison: cells under ``heads``, of which ``words`` are no numbers, then figures by their heads.

    The first ``names`` tell the rows apart. A figure that a row does not have is an empty cell.
    """
    figures = list(dict.fromkeys(head for _, by_head in rows for head in by_head))
    cells = [[*first, *(by_head.get(head, "") for head in figures)] for first, by_head in rows]
    return Table.of_numbers([*heads, *figures], cells, names, words)


def _table(sweep: Sweep) -> Table:
    several = ["scheme"] if len(sweep.schemes) > 1 else []
    rows = [
        ([row.scheme for _ in several] + [str(row.settings.get(name, "")) for name in sweep.names], _figures(row))
        for row in sweep.results
    ]
    heads = [*several, *sweep.names]
    return tabled(heads, rows, len(heads))


def _heading(sweep: Sweep) -> str:
    memory = "memory of the fullest worker"
    reports = [row.outcome for row in sweep.compiled if isinstance(row.outcome, Report)]
    if len(sweep.schemes) > 1 or not reports:
        return f"{', '.join(sweep.schemes)}: {memory}"
    report = reports[0]
    return f"{report.scheme}: {report.durations.summary(report.header, report.counts)}; {memory}"


def _figures(row: SizeRow) -> Mapping[str, str]:
    report = row.outcome
    if isinstance(report, Refused):
        return {"makespan": in_short(report)}
    unit, baseline = report.durations.unit, report.baseline
    return {
        "makespan": unit.show(report.makespan),
        "bubble ratio": percent(report.bubble_ratio),
        "steady period": unit.show(report.steady_period),
        **{f"C_{kind.lower()}": decimal(count) for kind, count in report.counts.items()},
        "M_theta": decimal(max(report.weights)),
        "M_a": decimal(max(report.activations)),
        **({"stashed": decimal(max(report.stashed_inputs))} if any(report.stashed_inputs) else {}),
        f"baseline: {baseline.scheme}": unit.show(baseline.makespan),
        "times as fast": decimal(times_as_fast(report)),
        **({} if row.seconds is None else {"T by replay": seconds(row.seconds)}),
    }


def as_csv(sweep: Sweep) -> str:
    """The rows of a sweep as CSV with a line of heads; numbers as in ``report.json``."""
    out = io.StringIO()
    writer = csv.DictWriter(out, sweep.rows[0], lineterminator="\n")
    writer.writeheader()
    for row in sweep.rows:
        whole = {head: int(cell) for head, cell in row.items() if isinstance(cell, float) and cell.is_integer()}
        writer.writerow({**rounded(row), **whole})
    return out.getvalue()


def as_entries(sweep: Sweep) -> list[dict[str, object]]:
    """An entry of JSON for each row: what was set, and the content of report.json, or why there is none."""
    return [{"set": dict(row.settings), **_entries(row)} for row in sweep.results]


def _entries(row: SizeRow) -> Mapping[str, object]:
    if isinstance(row.outcome, Refused):
        return {"scheme": row.scheme, "refused": row.outcome.reason, "code": row.outcome.code}
    return {**row.outcome.as_json(), **({} if row.seconds is None else {"T_replay": rounded(row.seconds)})}
