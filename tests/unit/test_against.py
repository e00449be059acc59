"""``--against``: what a report compares with, at the size of the schedule."""

import json
from pathlib import Path

import pytest

import chimera_ir
from chimera_ir.commands.common import WRONG_COMMAND, WRONG_TEXT
from tests.unit.command import Run

FIXED = """\
scheme fixed(D = 2)
workers D
pipe p {
  stages s in 0..D on s
  micros m in 0..3
  F(m, s) @ 2*m + s
  B(m, s) @ 2*m + 2*D-1 - s
}
"""


def baseline(run: Run, *arguments: object) -> dict[str, object]:
    ended = run(*arguments, "--emit", "report")
    assert ended.err == ""
    return json.loads(ended.out)["baseline"]


@pytest.mark.parametrize(
    ("arguments", "against", "makespan"),
    [
        (("zb_h2", "--set", "D=4", "--set", "N=8"), "zb_h1", 27),
        (("dapple", "--set", "D=4", "--set", "N=8"), "gpipe", 33),
        (("chimera", "--set", "N=5"), "dapple", 24),
        (("dapple", "--set", "D=4", "--set", "N=8"), "interleaved", 57 / 2),
        (("interleaved", "--set", "v=4"), "breadth_first", 105),
        (("dapple", "--set", "D=4", "--set", "N=4"), "pipedream_2bw", 12),
    ],
)
def test_another_scheme_gets_as_many_workers_and_micro_batches(
    run: Run, arguments: tuple[str, ...], against: str, makespan: float
) -> None:
    found = baseline(run, *arguments, "--against", against)
    assert (found["scheme"], found["makespan"]) == (against, makespan)


def test_a_schedule_file_is_compared_with_where_it_has_the_same_size(run: Run, tmp_path: Path) -> None:
    (tmp_path / "other.sir").write_text(run("gpipe", "--emit", "schedule").out)
    assert baseline(run, "dapple", "--against", "other.sir")["scheme"] == "gpipe"
    ended = run("dapple", "--set", "N=5", "--against", "other.sir")
    ended.assert_refused(WRONG_COMMAND, "--against other.sir", "on 4 workers with 8 micro-batches", "with 5")


@pytest.mark.parametrize(
    ("against", "words"),
    [
        ("chimera_halving", ["--against chimera_halving.chim", "on 4 workers with 6 micro-batches", "multiple of D"]),
        ("chimera_halvng", ["--against: no library scheme", "did you mean chimera_halving"]),
        ("nowhere.chim", ["--against: nowhere.chim: No such file"]),
        ("fixed.chim", ["--against fixed.chim", "with no values of its parameters"]),
    ],
)
def test_what_cannot_be_compared_is_one_message(run: Run, tmp_path: Path, against: str, words: list[str]) -> None:
    (tmp_path / "fixed.chim").write_text(FIXED)
    ended = run("dapple", "--set", "N=6", "--against", against)
    ended.assert_refused(WRONG_COMMAND, *words)
    assert ended.err.count("Error") == 1


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("broken.chim", "pipe p {", "pipe p", "error[CH1"),
        ("broken.chim", "2*m + s", "2*m + t", "error[CH201]: nothing is called `t`"),
        ("broken.chim", "2*D-1 - s", "2*D-2 - s", "error[CH301]"),
        ("broken.sir", "F m0 s0", "F m0 s7", "error[CH506]"),
        ("broken.sir", "  B m0 s0\n", "", "error[CH302]"),
    ],
)
def test_a_text_with_mistakes_gets_its_diagnostics(
    run: Run, tmp_path: Path, name: str, old: str, new: str, said: str
) -> None:
    text = FIXED if name.endswith(".chim") else run("gpipe", "--emit", "schedule").out
    text = text.replace("0..3", "0..8")
    assert old in text
    (tmp_path / name).write_text(text.replace(old, new, 1))
    ended = run("dapple", "--set", "D=4", "--set", "N=8", "--against", name, "--emit", "report")
    ended.assert_refused(WRONG_TEXT, said, f"--> {name}:")


def test_a_parameter_of_a_text_that_no_scheme_can_have_is_not_shared(run: Run, tmp_path: Path) -> None:
    text = run("dapple", "--emit", "schedule").out.replace(" N=8", f" N=8 f={2**63}")
    (tmp_path / "far.sir").write_text(text)
    assert baseline(run, "far.sir", "--against", "chimera")["scheme"] == "chimera"


@pytest.mark.parametrize(
    ("arguments", "makespan"),
    [
        (("zb_h1", "--against", "dapple", "--cost", "I=2", "--cost", "W=3"), 6 * 11),
        (("dapple", "--against", "zb_h1", "--cost", "B=4"), (1 + 4) * 8 + 3 * 2),
        (("dapple", "--against", "zb_h1", "--cost", "B=4", "--cost", "I=1", "--cost", "W=1"), 27),
    ],
)
def test_a_split_backward_is_compared_with_a_whole_one(run: Run, arguments: tuple[str, ...], makespan: int) -> None:
    """ZB-H1: N (f + i + w) + (D - 1) max(f, i, f + i - w)."""
    assert baseline(run, *arguments, "--set", "D=4", "--set", "N=8")["makespan"] == makespan


def test_from_python_it_is_an_option() -> None:
    options = chimera_ir.Options(against="gpipe")
    assert chimera_ir.compile("dapple", options=options).report.baseline.header.scheme == "gpipe"
    with pytest.raises(chimera_ir.CompileError, match=r"against chimera_halving.chim: it does not compile"):
        _ = chimera_ir.compile("dapple", N=6, options=chimera_ir.Options(against="chimera_halving")).report


def test_workers_without_stages_do_not_count(run: Run, tmp_path: Path) -> None:
    """A scheme on four of five workers is compared with schemes of four, in both directions."""
    lines = (
        "stages s in 0..D on if s < 2 then s else s + 1",
        "micros m in 0..N",
        "F(m, s) @ m + s",
        "B(m, s) @ N + m + 2*D - s",
    )
    (tmp_path / "spare.chim").write_text(
        "scheme spare(D = 4, N = 8)\nworkers D + 1 except 2\npipe down {\n  " + "\n  ".join(lines) + "\n}\n"
    )
    assert baseline(run, "spare.chim", "--against", "chimera")["scheme"] == "chimera"
    assert baseline(run, "chimera", "--set", "N=8", "--against", "spare.chim")["scheme"] == "spare"
