"""Tables of results: on the terminal, in data files, and summarised on the page of the documentation."""

import csv
import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

INTERVAL = re.compile(r"(\S+) \((\S+)\.\.(\S+)\)")
"""A median with the ends of its interval or of its quartiles, as in ``0.968 (0.965..0.971)``."""

Row = Mapping[str, str]
"""The cells of a data file by the heads of their columns."""


@dataclass(frozen=True)
class Summary:
    """Columns of a data file that a page shows; rows that are equal in the columns ``by`` become one.

    A column of numbers becomes the smallest and the largest, or the largest alone where the others do not matter; one
    of "yes" and "no" becomes the number of "yes" over that of rows.
    """

    by: tuple[str, ...]
    columns: tuple[str, ...]
    largest: bool = False


SUMMARIES = {
    "steps": Summary(("F, ms",), ("ours / torch", "reached", "CPU ours / torch")),
    "sizes": Summary(("scheme", "message"), ("ours / torch", "reached", "CPU ours / torch", "at most theirs")),
    "speedup": Summary(("D", "F, ms"), ("dapple / chimera in theory", "measured", "torch 1F1B / chimera")),
    "zero_bubble": Summary(("scheme", "torch"), ("ours / predicted", "ours / torch")),
    "accuracy rehearsal": Summary(("F, ms",), ("replay off", "within")),
    "accuracy links": Summary(("scheme",), ("equation off", "replay off")),
    "accuracy compute": Summary(("scheme",), ("equation off", "replay off", "expected off")),
    "compile": Summary(("scheme", "parameters"), ("operations", "CPU, s", "us each", "beside", "ratio", "peak, MB")),
    "host_time": Summary(
        ("scheme", "messages"),
        ("ours / torch", "minus bare", "limit", "within", "calls", "torch's calls", "at most 10 calls"),
    ),
    "halves pipelines": Summary(("scheme", "ranks"), ("over dapple", "CPU of the busiest rank / dapple's")),
    "agreement": Summary(("workers", "W"), ("losses", "norms", "gradients", "weights"), largest=True),
}
"""How the page of each large table sums it up, by the marks of its section."""


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up; the first is flush left, the others flush right."""
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join(aligned)} |"

    rule = "|".join("-" * (width + 1) + (":" if i else "-") for i, width in enumerate(widths))
    return "\n".join([line(heads), f"|{rule}|", *map(line, rows)])


def circumstances() -> str:
    """What the figures were taken on, in one line."""
    day = datetime.now(tz=UTC).date().isoformat()
    system = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}"
    return (
        f"Measured on {day}: {system}, Python {platform.python_version()}, torch {importlib.metadata.version('torch')}."
    )


def data_file(page: Path, section: str) -> Path:
    """Where all rows of a section of the page are."""
    return page.parent / "data" / f"{section.replace(' ', '_')}.csv"


def publish(page: Path, section: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *more: str) -> None:
    """Writes all rows into the section's data file, and their summary between the page's marks, then ``more``."""
    file = data_file(page, section)
    write(file, heads, rows)
    where = f"{circumstances()}\nAll {len(rows)} rows: [{file.name}](data/{file.name})."
    put(page, section, "\n\n".join([where, summary(section, read(file)), *more]))


def write(file: Path, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Writes a table with a column for each end of an interval, and numbers without commas.

    A first column without a head has schemes.
    """
    columns: list[list[str]] = []
    for head, *cells in zip(heads, *rows, strict=True):
        intervals = [INTERVAL.fullmatch(cell) for cell in cells]
        if any(intervals):
            parts = [
                interval.groups() if interval else [cell, "", ""]
                for interval, cell in zip(intervals, cells, strict=True)
            ]
            columns += map(list, zip([head, f"{head} from", f"{head} to"], *parts, strict=True))
        else:
            columns.append([head or "scheme", *(re.sub(r"(?<=\d),(?=\d{3})", "", cell) for cell in cells)])
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream, lineterminator="\n").writerows(zip(*columns, strict=True))


def read(file: Path) -> list[Row]:
    """The rows of a data file."""
    with file.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def summary(section: str, rows: Sequence[Row]) -> str:
    """The table that a page shows of a data file."""
    chosen = SUMMARIES[section]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[head] for head in chosen.by), []).append(row)
    return table(
        [*chosen.by, *chosen.columns],
        [[*key, *(_together(group, head, chosen.largest) for head in chosen.columns)] for key, group in groups.items()],
    )


def _together(rows: Sequence[Row], head: str, largest: bool) -> str:
    """A column of some rows as one cell: how many say "yes", or from the smallest number to the largest.

    A single row keeps its interval.
    """
    cells = [row[head] for row in rows]
    if len(rows) == 1:
        low, high = (rows[0].get(f"{head} {end}") for end in ("from", "to"))
        return f"{cells[0]} ({low}..{high})" if low else cells[0]
    if {*cells} <= {"yes", "no"}:
        return f"{cells.count('yes')}/{len(cells)}"
    known = [cell for cell in cells if cell]
    if not known:
        return ""
    least, most = min(known, key=_number), max(known, key=_number)
    return most if largest or least == most else f"{least}..{most}"


def _number(cell: str) -> float:
    return float(cell.rstrip("%").strip())


def picture(page: Path, name: str) -> Path:
    """Where a picture of the page is."""
    return page.parent.parent / "images" / "benchmarks" / f"{name}.svg"


def shown(title: str, name: str) -> str:
    """The line with which the page shows a picture."""
    return f"![{title}](../images/benchmarks/{name}.svg)"


def put(page: Path, section: str, text: str) -> None:
    """Replaces what stands between the page's marks ``<!-- section -->`` and ``<!-- /section -->``."""
    old = page.read_text(encoding="utf-8")
    begin, end = f"<!-- {section} -->", f"<!-- /{section} -->"
    new, found = re.subn(
        f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n\n{text}\n\n{end}", old, flags=re.DOTALL
    )
    if found != 1:
        raise SystemExit(f"{page} has no section {begin} .. {end}")
    page.write_text(new, encoding="utf-8")
