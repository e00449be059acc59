"""The tables of benchmarks: all rows in data files, and their summaries on the pages."""

import re
from pathlib import Path

import pytest

from benchmarks import tables
from tests.pages import page_of

HEADS = ("", "N", "operations", "ours / torch", "faster")
ROWS = (
    ("dapple", "4", "4,096", "0.968 (0.965..0.971)", "yes"),
    ("dapple", "8", "8,192", "1.020 (0.990..1.040)", "no"),
    ("gpipe", "4", "4,096", "0.950 (0.940..0.960)", "yes"),
)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(tables.SUMMARIES, "steps", tables.Summary(("scheme",), ("ours / torch", "faster")))
    page = tmp_path / "page.md"
    page.write_text("before\n\n<!-- steps -->\nold\n<!-- /steps -->\n\nafter\n")
    tables.publish(page, "steps", HEADS, ROWS, "more")
    return tables.data_file(page, "steps")


def test_a_data_file_has_every_row_with_the_ends_of_its_intervals(file: Path) -> None:
    assert file.read_text().splitlines() == [
        "scheme,N,operations,ours / torch,ours / torch from,ours / torch to,faster",
        "dapple,4,4096,0.968,0.965,0.971,yes",
        "dapple,8,8192,1.020,0.990,1.040,no",
        "gpipe,4,4096,0.950,0.940,0.960,yes",
    ]


def test_a_page_sums_rows_up_and_counts_those_that_lose(file: Path) -> None:
    text = (file.parent.parent / "page.md").read_text()
    assert "old" not in text
    assert "All 3 rows: [steps.csv](data/steps.csv)." in text
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    assert lines[2:] == [["dapple", "0.968..1.020", "1/2"], ["gpipe", "0.950 (0.940..0.960)", "yes"]]
    assert text.index("gpipe") < text.index("more") < text.index("after")


@pytest.mark.parametrize("section", tables.SUMMARIES)
def test_the_summary_on_a_page_is_that_of_its_data_file(section: str, update_goldens: bool) -> None:
    page = page_of("agreement.md" if section == "agreement" else "benchmarks.md")
    rows = tables.read(tables.data_file(page, section))
    text = page.read_text(encoding="utf-8")
    part = re.search(rf"<!-- {section} -->\n(.*?)\n<!-- /{section} -->", text, re.DOTALL)
    assert f"All {len(rows)} rows:" in part[1]
    table = tables.summary(section, rows)
    if update_goldens:
        tables.put(page, section, re.sub(r"(?:^\|.*\n?)+", lambda _: f"{table}\n", part[1], flags=re.M).strip())
        return
    assert table in part[1], "pytest --update-goldens writes the summaries"
