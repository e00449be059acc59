"""Schedules that another program has found, from their lanes: their header, how they compile, what is refused."""

from fractions import Fraction
from pathlib import Path

import pytest

import chimera_ir
from chimera_ir import Compilation, Options, Schedule, Source
from chimera_ir.errors import DoesNotFit, OptionError, TextError
from chimera_ir.ir.text.printer import line, show
from tests.unit.command import Run

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
FILES = {"profile": EXAMPLES / "small.profile.toml", "micro_batch_size": 8}


@pytest.mark.parametrize(
    ("scheme", "settings"),
    [
        ("dapple", {"D": 3, "N": 4}),
        ("chimera", {"D": 4, "N": 4}),
        ("chimera_halving", {}),
        ("dualpipe_v", {"P": 2, "N": 4}),
        ("seq1f1b", {"D": 2, "N": 2, "k": 2}),
        ("gpipe", {"D": 2, "N": 2}),
    ],
)
def test_lanes_as_texts_or_as_operations_are_the_schedule_again(scheme: str, settings: dict[str, int]) -> None:
    c = chimera_ir.compile(scheme, options=Options(recompute=scheme == "gpipe"), **settings)
    header, lanes = c.schedule.header, c.schedule.lanes
    texts = [[line(operation, header) for operation in lane] for lane in lanes]
    assert Schedule.from_lanes(texts, header) == Schedule.from_lanes(lanes, header) == c.schedule
    assert Compilation.of(c.schedule).program == c.program


def test_without_a_header_there_is_a_pipe_for_every_placement() -> None:
    lanes = [["F m0 s0", "F m1 s1", "B m1 s1", "B m0 s0"], ["F m1 s0", "F m0 s1", "B m0 s1", "B m1 s0"]]
    c = Compilation.of(Schedule.from_lanes(lanes, name="crossed"))
    assert [(pipe.name, pipe.workers, pipe.micros) for pipe in c.schedule.header.pipes] == [
        ("p0", (0, 1), (0,)),
        ("p1", (1, 0), (1,)),
    ]
    assert (c.schedule.header.title, c.timeline.makespan) == ("crossed(D=2, N=2)", Fraction(6))
    forwards = Schedule.from_lanes([["F m0 s0"], ["F m0 s1"]])
    assert not forwards.header.trains


def test_other_orders_are_proven_like_any_text() -> None:
    c = chimera_ir.compile("dapple", D=2, N=2)
    first, second = c.schedule.lanes
    reordered = Schedule.from_lanes([first, [second[0], second[2], second[1], second[3]]], c.schedule.header)
    assert Compilation.of(reordered, Options(costs={"F": 2})).report.makespan == Fraction(12)
    hopeless = Schedule.from_lanes([reversed(first), second], c.schedule.header)
    with pytest.raises(TextError, match=r"(?s)wait.*dapple\.sir:"):
        assert Compilation.of(hopeless).schedule
    assert Compilation.of(c.program).program == chimera_ir.compile(Source("p.sir", show(c.program))).program


@pytest.mark.parametrize(
    ("lanes", "message"),
    [
        ([["F m0 s0"], ["F m0 s0"]], "micro-batch 0 is on stage 0 of the workers 0 and 1"),
        ([["F m0 s0", "F m2 s0"]], "micro-batch 1 has no operation on stage 0"),
        ([["F m0 s99999"]], "100,000 stages, and the limit is 65,536"),
        ([[7]], "7 is not an operation"),
    ],
)
def test_lanes_without_a_header_are_refused_in_one_line(lanes: list[list[str]], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Schedule.from_lanes(lanes)


def test_a_text_that_is_no_operation_is_quoted() -> None:
    with pytest.raises(TextError, match=r"(?s)error\[CH.*by_hand\.sir.*G m1 s0"):
        Schedule.from_lanes([["F m0 s0", "F m1 s0", "G m1 s0\n worker 1:"]])


def test_a_program_that_must_fit_is_refused_where_a_worker_lacks_the_memory(run: Run, tmp_path: Path) -> None:
    text = (EXAMPLES / "small.cluster.toml").read_text()
    (small := tmp_path / "small.toml").write_text(text.replace('"16 GB"', '"1030 MB"'))
    words = ["--profile", str(FILES["profile"]), "--micro-batch-size", "8", "--require-fit"]
    for more in (["--out", "o"], ["--emit", "schedule"], ["--html", "page.html"]):
        ended = run("chimera", "--cluster", str(small), *words, *more)
        assert (ended.status, ended.out) == (3, "")
        assert "chimera.chim does not fit: worker" in ended.err
    assert not (tmp_path / "o").exists()
    assert not (tmp_path / "page.html").exists()
    assert run("chimera", "--cluster", str(EXAMPLES / "small.cluster.toml"), *words, "--emit", "schedule").status == 0
    run("chimera", "--require-fit", "--emit", "ast").assert_refused(2, "--require-fit: a prediction needs")
    c = chimera_ir.compile("chimera", options=Options(cluster=small, require_fit=True, **FILES))
    assert c.prediction is not None
    with pytest.raises(DoesNotFit, match="needs"):
        assert c.scripts
