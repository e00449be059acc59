"""The command line as users and scripts meet it: what it accepts and prints, and how it ends."""

import json
from fractions import Fraction
from itertools import cycle, product
from pathlib import Path

import pytest

from chimera_ir import library
from chimera_ir.answer import Level
from chimera_ir.commands.common import OUR_FAULT, WRONG_COMMAND, WRONG_TEXT
from chimera_ir.lower import lower
from tests.repeatable import also, part
from tests.unit.command import TINY, Ended, Run, contents

ELSEWHERE = (Level.TORCH_CSV, Level.TORCH_CSV_COMMS, Level.HTML, Level.GRAPH)
"""Levels of test_for_torch, of test_page_tables and of test_order_graphs: a page has the text that was compiled."""

LEVELS = [level.value for level in Level if level not in ELSEWHERE]
READ = ("ast", "program", "report")
"""Levels that tests compare for every scheme."""

OTHERS = [level for level in LEVELS if level not in READ]
TEXTS = ("plan", "schedule", "program")
"""Levels that a text can have: a run reads of each scheme the text of one, a search of all."""

PRINTED: dict[tuple[str, str], Ended] = {}
"""Output of library schemes by name and level: each is compiled once for several tests."""

MIDDLE = Path(__file__).resolve().parent.parent / "errors" / "middle"


def printed(run: Run, scheme: str, level: str) -> Ended:
    if (scheme, level) not in PRINTED:
        PRINTED[scheme, level] = run(scheme, "--emit", level)
    return PRINTED[scheme, level]


# What is accepted, and what is printed.


@pytest.mark.parametrize(
    ("scheme", "level"), [*product(library.names(), READ), *part(product(library.names(), OTHERS), 5)]
)
def test_every_level_of_every_library_scheme_prints_and_writes_nothing(
    run: Run, tmp_path: Path, scheme: str, level: str
) -> None:
    ended = PRINTED[scheme, level] = run(scheme, "--emit", level)
    assert (ended.status, ended.err) == (0, "")
    assert scheme in ended.out
    assert ended.out.endswith("\n")
    assert contents(tmp_path) == {}


@pytest.mark.parametrize(
    ("scheme", "level"), also(zip(library.names(), cycle(TEXTS), strict=False), product(library.names(), TEXTS))
)
def test_a_level_read_back_from_its_text_gives_the_same_program_and_report(
    run: Run, tmp_path: Path, scheme: str, level: str
) -> None:
    (tmp_path / "level.sir").write_text(printed(run, scheme, level).out)
    for wanted in ("program", "report"):
        assert run("level.sir", "--emit", wanted) == printed(run, scheme, wanted)


@pytest.mark.parametrize("scheme", library.names())
def test_the_syntax_tree_read_back_from_its_text_gives_the_same_everything(
    run: Run, tmp_path: Path, scheme: str
) -> None:
    (tmp_path / "again.chim").write_text(printed(run, scheme, "ast").out)
    for wanted in also(READ, LEVELS):
        assert run("again.chim", "--emit", wanted) == printed(run, scheme, wanted)


def test_a_compilation_from_the_written_program_writes_the_same_directory(run: Run, tmp_path: Path) -> None:
    assert run("chimera", "--set", "N=6").status == 0
    assert run("chimera.out/schedule.sir", "--out", "again").status == 0
    again, first = contents(tmp_path / "again"), contents(tmp_path / "chimera.out")
    page = {"schedule.html": b""}
    assert {**again, **page} == {**first, **page}, "the page has the text that was compiled"


def test_the_report_that_is_emitted_is_the_one_that_is_written(run: Run, tmp_path: Path) -> None:
    emitted = run("chimera", "--set", "D=4", "--set", "N=4", "--emit", "report")
    assert all(json.loads(emitted.out)["verified"].values())
    assert run("chimera", "--out", "o").status == 0
    assert (tmp_path / "o" / "report.json").read_text() == emitted.out


@pytest.mark.parametrize(
    ("costs", "makespan"),
    [
        ({}, Fraction(16)),
        ({"F": "1", "B": "3"}, Fraction(4 + 6 * 3)),
        ({"F": "0.1", "B": "0.2"}, Fraction(16, 10)),
        ({"F": "1/3", "B": "2/3"}, Fraction(16, 3)),
        ({"B": "2.50"}, Fraction(19)),
        ({"I": "7", "W": ".5"}, Fraction(16)),
    ],
)
def test_costs_are_integers_decimals_or_fractions_and_exact(
    run: Run, costs: dict[str, str], makespan: Fraction
) -> None:
    options = [word for kind, value in costs.items() for word in ("--cost", f"{kind}={value}")]
    assert json.loads(run("chimera", "--emit", "report", *options).out)["makespan"] == float(makespan)


def test_the_help_has_no_name_of_the_code(run: Run) -> None:
    assert "TableForm" not in run("--help").out


def test_a_file_of_another_editor_is_read_alike(run: Run, tmp_path: Path) -> None:
    text = library.source("chimera").text
    (tmp_path / "windows.chim").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert run("windows.chim", "--emit", "program") == run("chimera", "--emit", "program")


def test_results_go_to_standard_output_and_diagnostics_to_standard_error(run: Run) -> None:
    warned = run(MIDDLE / "falling_clock_without_a_cycle.chim", "--emit", "report")
    assert warned.status == 0
    assert warned.err.startswith("warning[")
    assert "warning" not in warned.out
    assert json.loads(warned.out)["verified"]["acyclic"]
    run(MIDDLE / "falling_clock_with_a_cycle.chim", "--emit", "report").assert_refused(WRONG_TEXT, "error[")


def test_a_compilation_says_what_it_wrote_and_how_to_run_it(run: Run) -> None:
    ended = run("gems", "--set", "D=2", "--out", "some/where")
    assert (ended.status, ended.err) == (0, "")
    assert "wrote some/where (page: chimera view some/where;" in ended.out
    assert not [line for line in ended.out.splitlines() if line.endswith(" ")]
    assert "torchrun --nproc-per-node=2 some/where/train.py" in ended.out
    assert "\x1b" not in ended.out


# What is refused: the command line (2), the text (1), ourselves (70).


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing argument"),
        (["chimera", "--foo"], "No such option"),
        (["chimera", "--clustr", "x"], "--cluster"),
        (["chimera", "dapple"], "unexpected word 'dapple'; parameters are written NAME=VALUE, as in D=8"),
        (["D=3", "chimera"], "D=3: the scheme comes first"),
        (["chimera", "D=x"], "D=x: write NAME=INTEGER"),
        (["chimera", "D=4", "--set", "D=4"], "D is given twice"),
        (["nosuch"], "no library scheme is called 'nosuch'"),
        ([""], "no library scheme"),
        (["-"], "/dev/stdin: "),
        (["nosuch.chim"], "No such file"),
        (["nosuch.sir"], "No such file"),
        (["some/where"], "ends in .chim"),
        (["."], "no library scheme"),
        (["/"], "no library scheme"),
        (["/dev/null/x.chim"], "Not a directory"),
        (["x" * 300 + ".chim"], "File name too long"),
        (["chimera", "--emit", "nonsense"], "--emit"),
        (["chimera", "--set", "D"], "--set D: write NAME=INTEGER"),
        (["chimera", "--set", "D=abc"], "NAME=INTEGER"),
        (["chimera", "--set", "D="], "NAME=INTEGER"),
        (["chimera", "--set", "=4"], "NAME=INTEGER"),
        (["chimera", "--set", "D=4.0"], "NAME=INTEGER"),
        (["chimera", "--set", "D=0x4"], "NAME=INTEGER"),
        (["chimera", "--set", "D=--4"], "NAME=INTEGER"),
        (["chimera", "--set", "D=\u0664"], "NAME=INTEGER"),
        (["chimera", "--set", "D=" + "9" * 5000], "at most 18 digits"),
        (["chimera", "--set", "D=4", "--set", "D=4"], "given twice"),
        (["chimera", "--set", "X=1"], "no parameter X"),
        (["chimera", "--set", "d=4"], "did you mean D?"),
        (["chimera", "--cost", "F"], "KIND=COST"),
        (["chimera", "--cost", "Q=1"], "KIND=COST"),
        (["chimera", "--cost", "F=" + "9" * 5000], "not '999"),
        (["chimera", "--cost", "B=2", "--cost", "B=3"], "given twice"),
        (["chimera", "--stage-cost", "pair=1,2"], "--stage-cost pair=1,2: write KIND=COST"),
        (["chimera", "--stage-cost", "F=1,2,3"], "--stage-cost F: it has costs for 3 stages, and chimera"),
        (["chimera", "--stage-cost", "F=1,2", "--cost", "F=1"], "both say what F costs"),
        (["chimera", "--max-operations", "0"], "--max-operations"),
        (["chimera", "--max-operations", "many"], "--max-operations"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_wrong_command_line_is_status_two_and_says_what_is_wrong(
    run: Run, tmp_path: Path, arguments: list[str], words: str
) -> None:
    run(*arguments).assert_refused(WRONG_COMMAND, words)
    assert contents(tmp_path) == {}


def test_a_file_that_cannot_be_read_is_status_two(run: Run, tmp_path: Path) -> None:
    (tmp_path / "folder.chim").mkdir()
    run("folder.chim").assert_refused(WRONG_COMMAND, "folder.chim: Is a directory")
    (tmp_path / "loop.chim").symlink_to("loop.chim")
    run("loop.chim").assert_refused(WRONG_COMMAND, "loop.chim: Too many levels")
    (tmp_path / "note.txt").write_text(TINY)
    run("./note.txt").assert_refused(WRONG_COMMAND)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["D=0"], "does not hold"),
        (["D=-4"], "does not hold"),
        (["N=-1"], "does not hold"),
        (["N=0"], "does not hold"),
        (["D=3"], "must split evenly"),
        (["f=3"], "must split evenly"),
        (["N=1000000"], "8,000,000 operations, and the limit is 1,000,000"),
        (["N=" + "9" * 18], "the limit is"),
        (["D=100000000000000000"], "the limit is"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_values_that_the_scheme_does_not_allow_are_explained_at_its_lines(
    run: Run, tmp_path: Path, settings: list[str], words: str
) -> None:
    options = [word for setting in settings for word in ("--set", setting)]
    run("chimera", *options).assert_refused(WRONG_TEXT, words, "--> library: chimera.chim:", "help:")
    assert contents(tmp_path) == {}


def test_the_limit_on_operations_can_be_raised_as_the_message_says(run: Run) -> None:
    size = ("chimera", "--set", "N=100", "--emit", "report")
    run(*size, "--max-operations", "799").assert_refused(WRONG_TEXT, "`--max-operations 800`")
    assert run(*size, "--max-operations", "800").status == 0


BAD_TEXTS = {
    "empty": b"",
    "blank": b" \n\t\n",
    "a comment": b"# nothing\n",
    "binary": bytes(range(256)) * 64,
    "not UTF-8": TINY.replace("tiny", "t\xefny").encode("latin-1"),
    "nul": b"\0" * 1000,
    "a megabyte of (": b"(" * 1_000_000,
    "a megabyte of [": b"[" * 1_000_000,
    "a megabyte of {}": b"{}" * 500_000,
    "a megabyte on one line": b"scheme a(D = " + b"1+" * 500_000 + b"1)\n",
    "a megabyte of quotes": b'"' * 1_000_000,
    "deep brackets": b"scheme a(D = " + b"(" * 5_000 + b"1" + b")" * 5_000 + b")\nworkers D\n",
    "deep minus": b"scheme a(D = " + b"-" * 20_000 + b"1)\n",
    "deep if": b"scheme a(D = " + b"if 1 == 1 then " * 5_000 + b"1" + b" else 2" * 5_000 + b")\n",
    "deep not": b"scheme a(D = 1)\nrequire " + b"not " * 20_000 + b'D > 0, "x"\n',
    "deep call": b"scheme a(D = 1)\nlet x = " + b"min(1, " * 5_000 + b"1" + b")" * 5_000 + b"\n",
}


@pytest.mark.parametrize("ending", ["chim", "sir"])
@pytest.mark.parametrize("text", BAD_TEXTS.values(), ids=BAD_TEXTS.keys())
def test_what_is_no_scheme_ends_in_a_short_diagnostic(run: Run, tmp_path: Path, text: bytes, ending: str) -> None:
    (tmp_path / f"bad.{ending}").write_bytes(text)
    ended = run(f"bad.{ending}")
    ended.assert_refused(WRONG_TEXT, "error[CH", f"--> bad.{ending}:", "help:")
    assert len(ended.err) < 10_000
    assert list(contents(tmp_path)) == [f"bad.{ending}"]


def test_a_text_beyond_the_limit_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "chimera.sir").write_text(run("chimera", "--emit", "schedule").out)
    ended = run("chimera.sir", "--emit", "schedule", "--max-operations", "31")
    assert ended.status == WRONG_COMMAND
    assert "the text has 32 operations, and the limit is 31; --max-operations 32 raises it" in ended.err


def test_a_fault_of_ours_is_status_seventy_and_says_so(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> object:
        raise AssertionError("a pass is broken")

    monkeypatch.setattr(lower, "lower", fail)
    for arguments in (["--emit", "program"], []):
        ended = run("chimera", *arguments)
        assert ended.status == OUR_FAULT
        assert "a pass is broken" in ended.err
        assert "fault of the compiler, not of your scheme" in ended.err
    assert contents(tmp_path) == {}
