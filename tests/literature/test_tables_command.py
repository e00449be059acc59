"""``python docs/paper_tables`` as a user calls it."""

import json
import sys

import pytest

from chimera_ir.commands.common import OUR_FAULT, WRONG_COMMAND
from paper_tables import show, survey
from paper_tables.paper import Figure, Interval, IntervalClaim
from paper_tables.survey import Compared, Differs, FigureComparison, Section, Survey, Surveyed
from paper_tables.tables import main
from tests.unit.command import Ended


@pytest.fixture
def tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def call(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["paper_tables", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return Ended(int(end.value.code or 0), said.out, said.err)

    return call


def test_the_tables_are_for_four_stages_and_every_number_of_pipelines(tables) -> None:  # type: ignore[no-untyped-def]
    ended = tables()
    assert (ended.status, ended.err) == (0, "")
    for line in ("Table 2: pipeline schemes; D = 4, N = 4", "D = 4, N = 4, f = 1", "D = 4, N = 4, f = 2"):
        assert line in ended.out
    assert "differs" not in ended.out


def test_one_number_of_pipelines_can_be_chosen(tables) -> None:  # type: ignore[no-untyped-def]
    out = tables("--set", "D=8", "--set", "f=4").out
    assert "D = 8, N = 8, f = 4" in out
    assert "f = 1" not in out


def test_one_scheme_can_be_chosen(tables) -> None:  # type: ignore[no-untyped-def]
    told = json.loads(tables("--scheme", "chimera", "--format", "json").out)["tables"]
    assert {row["scheme"] for table in told for row in table["rows"]} == {"chimera"}
    assert len(told) == 3
    tables("--scheme", "zebra").assert_refused(WRONG_COMMAND, "--scheme zebra", "gpipe, gems, dapple")


def test_every_format_says_the_same(tables) -> None:  # type: ignore[no-untyped-def]
    told = json.loads(tables("--set", "N=6", "--format", "json").out)
    text, markdown = tables("--set", "N=6").out, tables("--set", "N=6", "--format", "markdown").out
    assert told["size"] == {"D": 4, "N": 6, "f": 1}
    for table in told["tables"]:
        assert table["title"] in text
        assert table["title"] in markdown
        for row in table["rows"]:
            for figure in row.get("figures", {}).values():
                assert figure["formula"] in text
                assert f"`{figure['formula']}`" in markdown
                assert (figure["paper"] == figure["compiled"]) == (figure["verdict"] == "equal")
                if figure["verdict"] == "explained":
                    assert f"{figure['reason']}: " in markdown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["D=5"], ["D is an even number of stages"]),
        (["D=0"], ["D is an even number of stages"]),
        (["D=8", "f=3"], ["f divides D/2"]),
        (["f=0"], ["f divides D/2"]),
        (["N=0"], ["N is a number of micro-batches"]),
        (["n=4"], ["no parameter n", "D, N, f"]),
        (["D=x"], ["write NAME=INTEGER"]),
        (["D=4", "D=4"], ["given twice"]),
    ],
)
def test_a_size_without_tables_is_status_two(tables, arguments: list[str], words: list[str]) -> None:  # type: ignore[no-untyped-def]
    options = [word for argument in arguments for word in ("--set", argument)]
    tables(*options).assert_refused(WRONG_COMMAND, arguments[-1].partition("=")[0], *words)


def test_an_unknown_format_is_status_two(tables) -> None:  # type: ignore[no-untyped-def]
    tables("--format", "pdf").assert_refused(WRONG_COMMAND, "pdf")


def test_a_fault_of_ours_is_status_seventy(tables, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(survey, "Compilation", lambda *_: 1 / 0)
    assert tables().status == OUR_FAULT


def test_a_scheme_too_large_to_compile_says_so(tables) -> None:  # type: ignore[no-untyped-def]
    ended = tables("--set", "D=2000", "--set", "f=1000")
    assert ended.status == 0
    assert "the limit is 1,000,000" in ended.out


def test_a_difference_without_a_reason_is_shown() -> None:
    claim, most = IntervalClaim("1", "D"), Interval(1, 4)  # type: ignore[arg-type]
    differing = FigureComparison(Figure.WEIGHTS, claim, most, Interval(1, 5), Differs())  # type: ignore[arg-type]
    row = Surveyed("Mine", "mine", {"D": 4}, survey.Costs(), Compared((differing,)))
    found = Survey({"D": 4}, (Section("Table", (row,)),))
    assert "| [1, 4] | [1, 5] | differs |" in show.markdown(found)
