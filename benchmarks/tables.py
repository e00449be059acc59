"""Tables of results: on the terminal, and on the page of the documentation."""

import importlib.metadata
import os
import platform
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path


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
