"""Stages that share parameters: asked for by an option, in every level's header, and one sum in every program."""

from pathlib import Path
from typing import Any

import pytest

import chimera_ir
from chimera_ir.commands.common import WRONG_COMMAND, WRONG_TEXT
from chimera_ir.compilation import Compilation
from chimera_ir.errors import NoSuchTie, OptionError, TextError
from chimera_ir.ir.levels import Program, Strategy
from chimera_ir.ir.ops import AllReduce, Compute, Step, WaitAllReduce
from chimera_ir.ir.text.printer import group_name, group_text, show
from chimera_ir.options import Options
from chimera_ir.predict.events import Role
from tests.executor import verdicts
from tests.pages import SMALL
from tests.sizes import on_workers, with_a_flush
from tests.unit.command import Run

ENDS = [("first", "last")]


def tied(scheme: str, *ties: Any, **settings: int) -> Compilation:
    return chimera_ir.compile(scheme, options=Options(tied=ties or ENDS), **settings)


def with_costs(copies: int, ties: Any) -> Options:
    return Options(tied=ties, copies=copies, **SMALL)


# What is asked for.


def test_stages_are_tied_by_number_and_by_name_once() -> None:
    header = tied("dapple", ("last", 0), (3, 0, 0), (2, 1), (0, 3, 1), D=4).schedule.header
    assert header.ties == ((0, 1, 3), (0, 3), (1, 2))
    assert header.groups_with[1] == ((1,), (0, 1, 3), (1, 2))
    assert header.groups_of[2] == ((2,), (1, 2))
    assert [group_text(tie) for tie in header.ties] == ["s0+s1+s3", "s0+s3", "s1+s2"]
    assert group_name(header.ties[0], header) == "the tie of stages 0, 1 and 3"


def test_the_ends_of_a_single_stage_are_one_parameter_of_it_and_no_tie() -> None:
    assert tied("gpipe", ("first", "last"), ("last", "first", 0), D=1).program.header.ties == ()
    for wrong in ((0, "last"), (0, 0), ("first", "first")):
        with pytest.raises(NoSuchTie, match="a tie is of two stages or more"):
            _ = tied("gpipe", wrong, D=1).schedule
    with pytest.raises(NoSuchTie, match="the scheme has the stages 0 to 0"):
        _ = tied("gpipe", (0, 3), D=1).schedule


@pytest.mark.parametrize("wrong", ["first,last", [0, 1], [(0,)], [(0, -1)], [(0, True)], [(0, 1.5)], 3])
def test_what_is_no_group_of_stages_is_refused(wrong: Any) -> None:
    with pytest.raises(OptionError, match=r"tied is .*: write groups of stages"):
        Options(tied=wrong)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0", "--tied 0: write two stages or more, as in --tied first,last or --tied 0,3"),
        ("0,middle", "--tied 0,middle: the scheme has the stages 0 to 3"),
        ("0,", "--tied 0,: write two stages or more"),
        ("0," + "9" * 30, "write two stages or more, as in --tied first,last"),
        ("0,4", "--tied 0,4: the scheme has the stages 0 to 3"),
        ("0,first", "--tied 0,first: a tie is of two stages or more"),
    ],
)
def test_a_wrong_option_is_one_message(run: Run, text: str, words: str) -> None:
    run("chimera", "--tied", text, "--emit", "program").assert_refused(WRONG_COMMAND, words)


def test_an_ir_text_says_itself_which_stages_are_tied(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "tied.sir"
    path.write_text(show(tied("chimera", D=2, N=2).program))
    ended = run(str(path), "--emit", "program")
    assert (ended.status, ended.out) == (0, path.read_text())
    assert "\ntied s0 s1\n" in ended.out
    run(str(path), "--tied", "0,1").assert_refused(WRONG_COMMAND, "--tied: an IR text says itself")


def test_stages_that_read_different_versions_are_refused(run: Run) -> None:
    run("pipedream", "--tied", "first,last").assert_refused(WRONG_TEXT, "error[CH317]: stages 0 and 3 are tied")
    with pytest.raises(TextError, match="stages 1 and 2 are tied, but read different versions"):
        _ = tied("pipedream", (1, 2), D=4).program


# What comes of it.


def sums(program: Program, worker: int, group: tuple[int, ...]) -> list[type]:
    lines = (AllReduce, WaitAllReduce, Step)
    return [type(line) for line in program.lanes[worker] if isinstance(line, lines) and line.group == group]


@pytest.mark.parametrize("name", with_a_flush())
@pytest.mark.parametrize("sync", ["eager", "lazy", "eager_opt"])
def test_every_worker_that_holds_an_end_sums_and_steps_it_once_behind_its_backwards(name: str, sync: Any) -> None:
    options = Options(tied=ENDS, sync=sync)
    program = chimera_ir.compile(name, options=options, **on_workers(name, 4, 6)).verified.program
    (tie,) = program.header.ties
    for worker, lane in enumerate(program.lanes):
        member = worker in program.header.members(tie)
        assert sums(program, worker, tie) == ([AllReduce, WaitAllReduce, Step] if member else [])
        backwards = [n for n, x in enumerate(lane) if isinstance(x, Compute) and x.kind.sums and x.stage in tie]
        if member and sync == "eager":
            launch = next(n for n, x in enumerate(lane) if isinstance(x, AllReduce) and x.group == tie)
            assert not any(isinstance(x, Compute) for x in lane[backwards[-1] + 1 : launch]) or _behind(program, worker)
    assert verdicts(program, seeds=1) == {"finished"}


def _behind(program: Program, worker: int) -> bool:
    """Whether a sum that all workers launch before holds the launch of the tie back."""
    launches = [x.group for x in program.lanes[worker] if isinstance(x, AllReduce)]
    return launches.index(program.header.ties[0]) > 0


def test_stages_of_different_strategies_launch_what_they_share_by_the_default_one() -> None:
    header = tied("chimera", D=4).schedule.header
    mixed = header.__class__(**{**vars_of(header), "strategies": ((0, Strategy.LAZY), (3, Strategy.EAGER))})
    assert mixed.strategy((0,)) is Strategy.LAZY
    assert mixed.strategy((0, 3)) is Strategy.EAGER_OPT
    assert mixed.strategy((1, 2)) is Strategy.EAGER_OPT


def vars_of(header: Any) -> dict[str, Any]:
    return {name: getattr(header, name) for name in header.__dataclass_fields__}


@pytest.mark.parametrize("scheme", ["chimera", "gems"])
def test_both_ends_meet_on_the_first_and_on_the_last_worker(scheme: str) -> None:
    header = tied(scheme, D=4, N=4).schedule.header
    assert header.members((0, 3)) == header.holders[0] == header.holders[3] == (0, 3)


def test_both_ends_on_one_worker_are_summed_there_alone_unless_there_are_copies() -> None:
    alone, copied = (
        chimera_ir.compile("dapple", options=with_costs(copies, ENDS), D=4).prediction for copies in (1, 2)
    )
    header = tied("interleaved", P=1, v=4, N=4).schedule.header
    assert header.members((0, 3)) == (0,)
    assert len(alone.replay.sums) == 1, "the ends are on two workers, every stage on one"
    assert len(copied.replay.sums) == 5
    local = chimera_ir.compile("interleaved", options=with_costs(1, ENDS), P=1, v=4, N=4).prediction
    assert local.replay.sums == ()


def test_the_report_says_what_is_shared_and_a_prediction_charges_the_smaller_stage() -> None:
    compilation = chimera_ir.compile("dapple", options=with_costs(1, ENDS), D=4)
    assert any("stages 0 and 3 share parameters" in remark for remark in compilation.report.remarks)
    launched = compilation.report.as_json()["synchronisation"]
    assert [each["worker"] for each in launched if each.get("tied") == [0, 3]] == [0, 3]  # type: ignore[attr-defined]
    apart = chimera_ir.compile("dapple", options=with_costs(1, ()), D=4)
    stages = compilation.prediction.setting.stages
    smaller = min(stages[0].gradients, stages[3].gradients)
    *of_stages, of_tie = compilation.prediction.equation.all_reduce
    assert of_stages == list(apart.prediction.equation.all_reduce)
    assert of_tie == compilation.prediction.setting.cluster.sums.all_reduce(smaller, 2)
    assert compilation.prediction.replay.seconds > apart.prediction.replay.seconds
    (event,) = compilation.prediction.replay.sums
    assert (event.role, event.workers) == (Role.SUM, (0, 3))


def test_without_a_flush_the_next_update_waits_for_what_is_shared() -> None:
    """D = 4, F = 1, B = 2: the last stage waits until the first has ended its last backward, D + 1 later."""
    for N in (4, 8, 16):
        assert chimera_ir.compile("pipedream_2bw", D=4, N=N).report.makespan == 3 * N
        assert tied("pipedream_2bw", D=4, N=N).report.makespan == 3 * N + 5


def test_a_tie_changes_nothing_else_with_a_flush() -> None:
    for name in with_a_flush():
        settings = on_workers(name, 4, 6)
        plain, shared = chimera_ir.compile(name, **settings), tied(name, **settings)
        assert shared.report.makespan == plain.report.makespan
        assert shared.report.weights == plain.report.weights
        without = [
            [x for x in lane if not isinstance(x, AllReduce | WaitAllReduce | Step) or len(x.group) == 1]
            for lane in shared.verified.program.lanes
        ]
        assert [sorted(map(repr, lane)) for lane in without] == [
            sorted(map(repr, lane)) for lane in plain.verified.program.lanes
        ]
