"""Sweeps: a table of reports from ``--set`` with several values, and from Python."""

import csv
import io
import json
import re
from fractions import Fraction
from pathlib import Path

import pytest
from click.testing import CliRunner

import chimera_ir
from chimera_ir.commands.common import WRONG_COMMAND, WRONG_TEXT
from chimera_ir.commands.explain_command import explain_command
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
    (_, row) = csv.DictReader(io.StringIO(run("dapple", "N=4,400", "--max-operations", "100", "--table", "csv").out))
    assert row["code"] == "CH246"
    assert row["refused"].endswith("has 3,200 operations, and the limit is 100")


def test_a_table_has_a_word_and_a_code_for_a_refusal_and_its_reason_once_below(run: Run) -> None:
    ended = run("chimera", "D=4,5,7", "N=4")
    rows = [line.split() for line in ended.out.splitlines()]
    assert [row for row in rows if row[:2] in (["5", "4"], ["7", "4"])] == [
        ["5", "4", "refused", "CH233"],
        ["7", "4", "refused", "CH233"],
    ]
    assert ended.out.splitlines()[-1] == "CH233: D stages must split evenly over the 2f pipelines"
    assert CliRunner().invoke(explain_command, ["CH233"]).exit_code == 0


def test_if_no_size_compiles_the_status_says_so(run: Run) -> None:
    ended = run("chimera", "--set", "D=5,7")
    assert (ended.status, ended.err) == (WRONG_TEXT, "")
    assert (ended.out.count("refused CH233"), ended.out.count("must split evenly")) == (2, 1)


def test_the_rows_compare_with_what_is_asked_for(run: Run) -> None:
    rows = json.loads(run("zb_h2", "--set", "D=3,4", "--set", "N=8", "--against", "zb_h1", "--table", "json").out)
    assert [row["baseline"]["scheme"] for row in rows] == ["zb_h1", "zb_h1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--set", "N=4,"), ["N=: write NAME=INTEGER, NAME=INTEGER,INTEGER or"]),
        (("--set", "N=4,x"), ["N=x: write NAME=INTEGER, NAME=INTEGER,INTEGER or"]),
        (("N=4,4",), ["N=4,4: 4 is in its list twice"]),
        (("--set", "N=4,8", "--emit", "report"), ["--emit", "printed alone"]),
        (("--set", "N=4,8", "--table", "csv", "--out", "there"), ["--out", "nothing is written"]),
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
    assert [row.settings["D"] for row in sizes.results] == [2, 3, 4]
    assert [row.outcome.makespan for row in sizes.compiled] == [Fraction(3 * (4 + D - 1)) for D in (2, 3, 4)]  # type: ignore[union-attr]


def test_zipped_values_go_together_and_combine_with_the_others() -> None:
    sizes = chimera_ir.sweep("chimera", zipped={"D": (4, 8), "N": [8, 16]}, f=[1, 2])
    assert [tuple(row.settings.values()) for row in sizes.results] == [(4, 8, 1), (4, 8, 2), (8, 16, 1), (8, 16, 2)]
    assert sizes.names == ("D", "N", "f")
    alone = chimera_ir.compile("chimera", D=8, N=16, f=2).report
    assert sizes.results[-1].outcome == alone


def test_each_of_several_schemes_takes_the_parameters_that_it_has() -> None:
    sizes = chimera_ir.sweep(["dapple", "zb_v"], D=[2, 4], P=4, N=8)
    assert sizes.schemes == ("dapple", "zb_v")
    found = [(row.scheme, dict(row.settings)) for row in sizes.results]
    assert found == [("dapple", {"D": D, "N": 8}) for D in (2, 4)] + [("zb_v", {"P": 4, "N": 8})]
    assert [row["P"] for row in sizes.rows] == [None, None, 4]
    assert repr(sizes) == "<Sweep of dapple, zb_v over D, P, N: 3 sizes>"
    with pytest.raises(chimera_ir.CompileError, match="no parameter Q"):
        chimera_ir.sweep(["dapple", "zb_v"], Q=4)


def test_each_column_of_the_rows_has_one_type_which_a_table_of_pandas_or_polars_needs() -> None:
    """Half a micro-batch at one size, a whole one at the next; a refused size between them."""
    options = chimera_ir.Options(costs={"F": "3/2"}, max_operations=300)
    rows = chimera_ir.sweep(["chimera_halving", "gpipe"], N=[4, 5, 64], options=options).rows
    assert len({tuple(row) for row in rows}) == 1, "the same columns in the same order"
    types = {name: {type(row[name]) for row in rows} - {type(None)} for name in rows[0]}
    assert {len(found) for found in types.values()} == {1}
    assert types["activations"] == types["makespan"] == {float}
    assert {row["code"] for row in rows} == {"", "CH233", "CH246"}
    assert list(rows[0])[-2:] == ["code", "refused"]


def test_a_notebook_shows_a_sweep_as_its_table() -> None:
    shown = re.sub(r' style="[^"]*"', "", chimera_ir.sweep("chimera", D=[4, 5])._repr_html_())
    assert '<tr><th scope="row">4</th><td>16</td><td>25.0%</td>' in shown
    assert '<tr><th scope="row">5</th><td>refused CH233</td><td></td>' in shown
    assert shown.endswith("<pre>CH233: D stages must split evenly over the 2f pipelines</pre>")


@pytest.mark.parametrize(
    ("zipped", "parameters", "words"),
    [
        ({"D": [4, 8], "N": [8]}, {}, r"zipped: D and N need as many values as one another, not \[1, 2\]"),
        ({"N": [4, 8]}, {"N": 4}, "N: its values are given twice"),
        ({"M": [4, 8]}, {}, "no parameter M"),
    ],
)
def test_zipped_values_that_do_not_go_together_are_an_error(
    zipped: dict[str, list[int]], parameters: dict[str, int], words: str
) -> None:
    with pytest.raises(chimera_ir.CompileError, match=words):
        chimera_ir.sweep("dapple", zipped=zipped, **parameters)


def test_a_sweep_of_no_texts_is_an_error() -> None:
    with pytest.raises(chimera_ir.CompileError, match="there are no texts"):
        chimera_ir.sweep([])


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
