"""The survey as text, as Markdown and as JSON: a line for each figure of each scheme, reasons below."""

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple, assert_never

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from chimera_ir.cost.durations import decimal
from paper_tables.formula import Size
from paper_tables.paper import Amount, Claim, CountClaim, FactClaim, Interval, IntervalClaim, RatioClaim
from paper_tables.survey import (
    Absent,
    Compared,
    Differs,
    Equal,
    Explained,
    FigureComparison,
    Section,
    Survey,
    Surveyed,
    Verdict,
)

_HEAD = ("scheme", "figure", "the paper", "at this size", "compiled", "")
_SAY = {True: "yes", False: "no"}
_Notes = Mapping[str, int]


class _Line(NamedTuple):
    """The cells of one figure, without those of the scheme."""

    figure: str
    claim: str
    claimed: str
    compiled: str
    verdict: str


def text(survey: Survey) -> RenderableType:
    """The survey, ready to be printed on a console."""
    parts: list[RenderableType] = []
    for section in survey.sections:
        notes = _notes(section)
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for head in _HEAD:
            table.add_column(head, overflow="fold")
        for row in section.rows:
            columns = zip(*_lines(row, notes), strict=True)
            if table.rows:
                table.add_row()
            table.add_row("\n".join(_heads(row)), *("\n".join(cells) for cells in columns))
        footnotes = [Text(f"[{number}] {note}") for note, number in notes.items()]
        parts += [Text(_heading(section, survey.size), "bold"), table, *footnotes, *([Text("")] if footnotes else [])]
    return Group(*parts)


def markdown(survey: Survey) -> str:
    """The survey as tables of a Markdown page."""
    parts = []
    for section in survey.sections:
        notes = _notes(section)
        rows = [_HEAD, ("---",) * len(_HEAD), *(cells for row in section.rows for cells in _marked(row, notes))]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
        footnotes = "".join(f"\n\\[{number}\\] {note}\n" for note, number in notes.items())
        parts.append(f"**{_heading(section, survey.size)}**\n\n{table}\n{footnotes}")
    return "\n".join(parts)


def _marked(row: Surveyed, notes: _Notes) -> Iterator[tuple[str, ...]]:
    """The cells of a row line by line, formulas as code; only the first line has the scheme."""
    scheme = ", ".join(_heads(row))
    for line in _lines(row, notes):
        claim = f"`{line.claim}`" if line.claim else ""
        yield scheme, *line._replace(claim=claim)
        scheme = ""


def as_json(survey: Survey) -> dict[str, object]:
    """The survey as data; numbers as in ``report.json``, an interval as a list of two."""
    tables = [
        {"title": section.title, "rows": [_row_as_json(row) for row in section.rows]} for section in survey.sections
    ]
    return {"size": dict(survey.size), "tables": tables}


def _row_as_json(row: Surveyed) -> dict[str, object]:
    costs = {kind: _plain(cost) for kind, cost in row.costs.items() if kind in "FB"}
    data: dict[str, object] = {
        "name": row.name,
        "scheme": row.scheme,
        "parameters": dict(row.parameters),
        "costs": costs,
    }
    match row.outcome:
        case Absent(why):
            return {**data, "absent": why}
        case Compared(comparisons):
            return {
                **data,
                "figures": {comparison.figure.value: _comparison_as_json(comparison) for comparison in comparisons},
            }
        case _:
            assert_never(row.outcome)


def _comparison_as_json(comparison: FigureComparison) -> dict[str, object]:
    data: dict[str, object] = {
        "formula": _formula(comparison.claim),
        "paper": _plain(comparison.claimed),
        "compiled": _plain(comparison.compiled),
    }
    match comparison.verdict:
        case Equal():
            return {**data, "verdict": "equal"}
        case Explained(instead):
            return {**data, "verdict": "explained", "instead": _formula(instead.claim), "reason": instead.reason}
        case Differs():
            return {**data, "verdict": "differs"}
        case _:
            assert_never(comparison.verdict)


def _heading(section: Section, size: Size) -> str:
    named = ", ".join(f"{name} = {number}" for name, number in size.items() if name in ("D", "N"))
    return f"{section.title}; {named}"


def _notes(section: Section) -> _Notes:
    """The notes below a table, numbered from 1."""
    texts = [note for row in section.rows for note in _notes_of(row)]
    return {note: number for number, note in enumerate(dict.fromkeys(texts), 1)}


def _notes_of(row: Surveyed) -> Iterator[str]:
    match row.outcome:
        case Absent(why):
            yield why
        case Compared(comparisons):
            verdicts = (comparison.verdict for comparison in comparisons)
            yield from (_reason(verdict) for verdict in verdicts if isinstance(verdict, Explained))
        case _:
            assert_never(row.outcome)


def _reason(verdict: Explained) -> str:
    """Why a figure differs, with the formula that it has instead."""
    claim = verdict.instead.claim
    what = "makespan " if isinstance(claim, CountClaim) else ""
    return f"{verdict.instead.reason}: {what}`{_formula(claim)}`"


def _heads(row: Surveyed) -> tuple[str, str, str]:
    return (
        row.name,
        _named(row.parameters),
        _named({kind: cost for kind, cost in row.costs.items() if kind in "FB"}),
    )


def _lines(row: Surveyed, notes: _Notes) -> Sequence[_Line]:
    match row.outcome:
        case Absent(why):
            return [_Line("", "", "", "", f"[{notes[why]}]")]
        case Compared(comparisons):
            return [_line(comparison, notes) for comparison in comparisons]
        case _:
            assert_never(row.outcome)


def _line(comparison: FigureComparison, notes: _Notes) -> _Line:
    return _Line(
        figure=comparison.figure.value.replace("_", " "),
        claim=_formula(comparison.claim),
        claimed=_show(comparison.claimed),
        compiled=_show(comparison.compiled),
        verdict=_verdict(comparison.verdict, notes),
    )


def _verdict(verdict: Verdict, notes: _Notes) -> str:
    match verdict:
        case Equal():
            return "equal"
        case Explained():
            return f"[{notes[_reason(verdict)]}]"
        case Differs():
            return "differs"
        case _:
            assert_never(verdict)


def _formula(claim: Claim) -> str:
    match claim:
        case RatioClaim(of, over, about):
            ratio = of if over == "1" else f"({of}) / ({over})"
            return f"about {ratio}" if about else ratio
        case IntervalClaim(least, most):
            return least if least == most else f"[{least}, {most}]"
        case CountClaim(count):
            return count
        case FactClaim(holds):
            return _SAY[holds]
        case _:
            assert_never(claim)


def _show(amount: Amount) -> str:
    match amount:
        case bool():
            return _SAY[amount]
        case Interval(least, most):
            return decimal(least) if least == most else f"[{decimal(least)}, {decimal(most)}]"
        case Fraction():
            return str(amount)
        case _:
            assert_never(amount)


def _plain(amount: Amount) -> object:
    match amount:
        case bool():
            return amount
        case Interval(least, most):
            return [_plain(least), _plain(most)]
        case Fraction():
            return amount.numerator if amount.denominator == 1 else float(amount)
        case _:
            assert_never(amount)


def _named(values: Mapping[str, int] | Mapping[str, Fraction]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items())
