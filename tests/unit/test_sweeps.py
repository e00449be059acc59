"""Sweeps: a table of reports from ``--set`` with several values, and from Python."""

import csv
import io
import json
from fractions import Fraction
from pathlib import Path

import pytest

import chimera_ir
from chimera_ir.commands.common import WRONG_COMMAND, WRONG_TEXT
from tests.unit.command import Run


def test_several_values_print_a_table_and_write_nothing(run: Run, tmp_path: Path) -> None:
    ended = run("dapple", "--set", "D=4", "--set", "N=4,8,16")
    assert (ended.status, ended.err) == (0, "")
    rows = [line.split() for line in ended.out.splitlines() if line.split()[:1] == ["4"]]
    assert [row[:3] for row in rows] == [["4", "4", "21"], ["4", "8", "33"], ["4", "16", "57"]]
    assert list(tmp_path.iterdir()) == []


def test_several_parameters_give_all_combinations_in_order(run: Run) -> None:
    ended = run("gpipe", "--set", "D=2,4", "--set", "N=2,3", "--table", "csv")
    rows = list(csv.DictReader(io.StringIO(ended.out)))
    found = [(int(row["D"]), int(row["N"]), int(row["makespan"])) for row in rows]
    assert found == [(D, N, 3 * (N + D - 1)) for D in (2, 4) for N in (2, 3)]
    assert [int(row["activations"]) for row in rows] == [2, 3, 2, 3]


def test_a_row_of_json_is_the_report_of_its_size(run: Run) -> None:
    (row,) = json.loads(run("chimera", "--set", "D=8", "--table", "json").out)
    assert row.pop("set") == {"D": 8}
    report = json.loads(run("chimera", "--set", "D=8", "--emit", "report").out)
    assert report["verified"].pop("scripts"), "which a table does without"
    assert report.pop("summary"), "as well"
    assert row == report


def test_a_size_that_is_refused_is_a_row_with_the_reason(run: Run) -> None:
    ended = run("chimera", "--set", "D=4,5", "--table", "csv")
    assert ended.status == 0
    found = [(row["D"], row["makespan"], row["refused"]) for row in csv.DictReader(io.StringIO(ended.out))]
    assert found == [("4", "16", ""), ("5", "", "D stages must split evenly over the 2f pipelines")]
    too_large = run("dapple", "--set", "N=4,400", "--max-operations", "100", "--table", "csv").out
    assert "the limit is 100" in too_large.splitlines()[2]


def test_if_no_size_compiles_the_status_says_so(run: Run) -> None:
    ended = run("chimera", "--set", "D=5,7")
    assert (ended.status, ended.err) == (WRONG_TEXT, "")
    assert ended.out.count("must split evenly") == 2


def test_the_rows_compare_with_what_is_asked_for(run: Run) -> None:
    rows = json.loads(run("zb_h2", "--set", "D=3,4", "--set", "N=8", "--against", "zb_h1", "--table", "json").out)
    assert [row["baseline"]["scheme"] for row in rows] == ["zb_h1", "zb_h1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--set", "N=4,"), ["N=: write NAME=INTEGER or NAME=INTEGER,INTEGER"]),
        (("--set", "N=4,x"), ["N=x: write NAME=INTEGER or NAME=INTEGER,INTEGER"]),
        (("N=4,4",), ["N=4,4: 4 is in its list twice"]),
        (("--set", "N=4,8", "--emit", "report"), ["--emit", "printed alone"]),
        (("--set", "N=4,8", "--out", "there"), ["--out", "nothing is written"]),
        (("--set", "M=4,8"), ["no parameter M"]),
        (("--set", "N=" + ",".join(map(str, range(1, 10_002)))), ["10,001 combinations", "10,000"]),
        (("--table", "html"), ["--table", "html"]),
    ],
)
def test_what_is_wrong_on_the_command_line_is_one_message(
    run: Run, arguments: tuple[str, ...], words: list[str]
) -> None:
    run("dapple", *arguments).assert_refused(WRONG_COMMAND, *words)


def test_an_ir_text_has_no_sizes(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.sir").write_text(run("dapple", "--emit", "schedule").out)
    run("a.sir", "--set", "N=4,8").assert_refused(WRONG_COMMAND, "no parameters to set")
    assert run("a.sir", "--table", "csv").status == 0


def test_a_text_with_a_mistake_is_refused_once(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.chim").write_text("scheme a(N = 4) pipe")
    ended = run("a.chim", "--set", "N=4,8")
    ended.assert_refused(WRONG_TEXT, "a.chim:1")
    assert ended.err.count("error[") == 1


def test_from_python_the_rows_have_reports() -> None:
    sizes = chimera_ir.sweep("dapple", D=range(2, 5), N=4)
    assert [row.settings["D"] for row in sizes.rows] == [2, 3, 4]
    assert [row.outcome.makespan for row in sizes.compiled] == [Fraction(3 * (4 + D - 1)) for D in (2, 3, 4)]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"d": [4]}, "no parameter d"),
        ({"N": []}, "there are no values"),
        ({"N": ["4"]}, "a parameter is an integer"),
        ({"N": "48"}, "a parameter is an integer"),
        ({"recompute": [True]}, "a parameter is an integer"),
        ({"copies": [2]}, "no parameter but an option"),
    ],
)
def test_from_python_a_mistake_is_an_error(parameters: dict[str, list[int]], words: str) -> None:
    with pytest.raises(chimera_ir.CompileError, match=words):
        chimera_ir.sweep("dapple", **parameters)
