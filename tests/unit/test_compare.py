"""`chimera compare`: schemes at one size as a table, as JSON and as a page."""

import json
import re
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import chimera_ir
from chimera_ir import library
from chimera_ir.commands import common
from chimera_ir.commands.compare_command import compare_command
from chimera_ir.commands.compile_command import compile_command
from chimera_ir.compare.gallery import messages
from chimera_ir.ir.ops import Send
from chimera_ir.ir.text.printer import show
from tests.pages import SMALL, page_text
from tests.unit.command import TINY
from tests.unit.conftest import calling


def compared(*arguments: object) -> Result:
    return CliRunner().invoke(compare_command, [*map(str, arguments)])


def entries(*arguments: object) -> dict[str, dict[str, Any]]:
    """Entries of the JSON, one for each scheme."""
    return {entry["name"]: entry for entry in json.loads(compared(*arguments, "--json").stdout)}


def test_the_whole_library_has_the_figures_of_the_page_that_helps_to_choose() -> None:
    """Its table is of eight workers, in stages of which a worker has one, whatever the scheme's own stages are."""
    rows = re.findall(r"^\| (\w+) \| ([\d.]*) ?\| ([\d.]*) \| ([\d.]+) \| ([\d.]+) \|$", page_text("choose.md"), re.M)
    assert len(rows) == 15
    few = rows_of(compared("D=8", "N=8").stdout)
    assert few.keys() == {*library.names()}
    many = rows_of(compared(*(name for name, *_ in rows), "D=8", "N=32").stdout)
    for name, short, long, weights, activations in rows:
        assert few.get(name, {}).get("makespan", "") == short
        assert [many[name][head] for head in ("makespan", "M_theta", "M_a")] == [long, weights, activations]


def rows_of(printed: str) -> dict[str, dict[str, str]]:
    """The table of a text by name and head; cells are cut at the columns in which the heads end."""
    lines = printed.splitlines()
    (rule,) = (number for number, line in enumerate(lines) if "──" in line)
    heads = [(found.group().strip(), found.end()) for found in re.finditer(r"\S+(?: \S+)*", lines[rule - 1])]
    names = [line.split()[0] for line in lines[rule + 1 :] if line.startswith(" ")]
    tables = {}
    for name, line in zip(names, lines[rule + 1 :], strict=False):
        cells = {head: line[:end].rsplit("  ", 1)[-1].strip() for head, end in heads[2:]}
        tables[name] = cells if "refused" not in line else {}
    return tables


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_no_word_of_a_table_is_broken_and_each_part_of_it_names_its_rows(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["chimera", "dapple_recompute", "seq1f1b_interleaved", "colocated"]
    monkeypatch.setenv("COLUMNS", str(width))
    lines = compared("D=4", "N=8", *names).stdout.partition("When to use which")[0].splitlines()
    assert max(map(len, lines)) <= width
    words = {word for line in lines for word in line.split()}
    heads = "makespan times as fast bubble ratio of own spans M_theta M_a messages stashed"
    assert {*names, *heads.split(), "refused", "Incomparable", "25.125", "448"} <= words
    parts = sum("──" in line for line in lines)
    assert [sum(f"{line} ".startswith(f" {name} ") for line in lines) for name in names] == [parts] * len(names)
    assert (parts > 1) == (width < 140)


def test_the_first_scheme_that_has_all_parameters_decides_the_size() -> None:
    found = entries("zb_v", "dapple", "chimera", "D=6", "N=12", "f=3")
    assert {name: entry["set"] for name, entry in found.items()} == {
        "zb_v": {"P": 6, "N": 12},
        "dapple": {"D": 6, "N": 12},
        "chimera": {"D": 6, "N": 12, "f": 3},
    }
    assert {entry["report"]["workers"] for entry in found.values()} == {6}
    alone = chimera_ir.compile("chimera", D=6, N=12, f=3).report.as_json()
    assert found["chimera"]["report"] == alone


def test_costs_are_those_of_a_stage_of_the_scheme_that_decides() -> None:
    """zb_v has twice as many stages: half of the cost each."""
    halves = chimera_ir.Options(costs=dict.fromkeys("FIW", "1/2"))
    report = entries("dapple", "zb_v", "D=4", "N=8")["zb_v"]["report"]
    assert report["makespan"] == chimera_ir.compile("zb_v", options=halves, P=4, N=8).report.makespan
    whole = entries("zb_v", "dapple", "P=4", "N=8")
    assert whole["zb_v"]["report"]["makespan"] == 2 * report["makespan"]
    assert whole["dapple"]["report"]["makespan"] == 2 * 3 * (8 + 3)
    by_stage = entries("dapple", "interleaved", "D=4", "N=1", "--stage-cost", "F=1,2,3,4", "--stage-cost", "B=2,4,6,8")
    assert [entry["report"]["makespan"] for entry in by_stage.values()] == [30, 30]


def test_a_scheme_that_is_refused_has_a_word_a_code_and_its_reason_below() -> None:
    ended = compared("dapple", "dualpipe", "pipedream", "D=8", "N=8")
    assert ended.exit_code == 0
    lines = [line.strip() for line in ended.stdout.splitlines()]
    assert [line.split()[0] for line in lines if "refused" in line] == ["dualpipe", "pipedream"]
    assert "CH233: each direction has at least D micro-batches, and both as many" in lines
    assert [line for line in lines if line.startswith("Incomparable: ")] != []
    assert [entry["name"] for entry in entries("dualpipe", "dapple", "D=8", "N=8").values() if "code" in entry] == [
        "dualpipe"
    ]
    found = entries("dualpipe", "D=8", "N=16", "pipedream")
    assert (found["pipedream"]["code"], "report" in found["pipedream"]) == ("Incomparable", False)


def test_a_scheme_for_several_parts_is_refused_beside_one_for_other_parts_or_a_chain() -> None:
    assert entries("dapple", "colocated", "D=4", "N=8")["colocated"]["refused"] == (
        "it is for a model with image and text, and dapple for one with one chain of layers"
    )
    beside = entries("colocated", "colocated_nested", "dapple", "P=4", "N=8")
    assert [entry["report"]["makespan"] for entry in beside.values()] == [39, 43, 41.25]


@pytest.mark.parametrize("name", ["interleaved", "amdp", "chimera_halving"])
def test_messages_are_the_sends_of_an_update(name: str) -> None:
    compilation = chimera_ir.compile(name)
    level = compilation.program
    shown = compilation.verified.program
    sends = sum(isinstance(line, Send) for lane in shown.lanes for line in lane)
    assert messages(level) == Fraction(sends, shown.header.updates)


def test_each_library_scheme_says_when_to_use_it() -> None:
    """A line in `[use]` of library.toml, next to the scheme."""
    silent = [name for name in library.names() if not 20 < len(library.use(name)) < 120]
    assert silent == []


def test_a_scheme_of_ones_own_is_compared_and_says_when_to_use_it(tmp_path: Path) -> None:
    (tmp_path / "tiny.chim").write_text(TINY)
    (tmp_path / "library.toml").write_text('[use]\ntiny = "a first try"\n')
    ended = compared("tiny", "gpipe", "--library", tmp_path)
    assert "tiny   a first try" in ended.stdout
    assert " ".join(rows_of(ended.stdout)) == "tiny gpipe"
    (tmp_path / "a=b.chim").write_text(TINY)
    assert list(rows_of(compared(tmp_path / "a=b.chim", "gpipe").stdout)) == ["a=b", "gpipe"]


def test_a_prediction_is_of_each_scheme(tmp_path: Path) -> None:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    found = entries("dapple", "chimera", *options)
    alone = chimera_ir.compile("chimera", options=chimera_ir.Options(**SMALL), N=8)
    assert alone.prediction
    assert found["chimera"]["T_replay"] == pytest.approx(alone.prediction.replay.seconds)
    assert found["chimera"]["report"]["cost_unit"] == "s"


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["dapple", "P=4"], 2, "P: no scheme has it"),
        (["dapple", "zb_v", "D=4", "P=4"], 2, "D and P: no scheme has all these parameters"),
        (["nothing"], 2, "no library scheme is called 'nothing'"),
        (["dapple", "D=x"], 2, "D=x: write NAME=INTEGER"),
        (["chimera", "D=3"], 1, "error[CH233]"),
        (["dapple", "--html", "."], 2, "--html .: is a directory"),
        (["dapple", "--html", "mine.html"], 2, "exists and was not written by this command"),
    ],
)
def test_what_is_wrong_is_one_message(
    arguments: list[str],
    status: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.html").write_text("mine")
    run = calling(partial(common.run, compare_command, "chimera compare"), "chimera", capsys, monkeypatch)
    run(*arguments).assert_refused(status, words)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.html"]
    assert (tmp_path / "mine.html").read_text() == "mine"


def test_if_no_text_has_a_report_the_status_says_so(tmp_path: Path) -> None:
    (tmp_path / "forwards.sir").write_text(show(chimera_ir.compile("dapple", D=4, N=8).evaluation))
    ended = compared(tmp_path / "forwards.sir")
    assert (ended.exit_code, ended.stdout.count("refused CH420")) == (1, 1)
    both = compared(tmp_path / "forwards.sir", "gpipe")
    assert (both.exit_code, list(rows_of(both.stdout)["gpipe"].values())[:1]) == (0, ["33"])


def test_options_mean_the_same_as_those_of_compile() -> None:
    shared = {option.name: option for option in compile_command.params if option in compare_command.params}
    assert {"costs", "recompute", "library", "profile"} <= shared.keys()
