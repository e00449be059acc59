"""Schedules written for torch: what the installed torch makes of them is what was proven. On ranks: tests/e2e."""

import csv
import io
import logging
from collections.abc import Iterator
from unittest import mock

import pytest
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime
from torch.distributed.pipelining.stage import PipelineStage

import chimera_ir
from chimera_ir import library
from chimera_ir.compilation import Compilation
from chimera_ir.diagnostics.model import Rejected
from chimera_ir.errors import CompileError, NotInTorch
from chimera_ir.ir.ops import Recv, Send
from chimera_ir.options import Options
from chimera_ir.source import Source
from chimera_ir.torch_text.csv_reader import program_of
from chimera_ir.torch_text.csv_writer import cell_text
from chimera_ir.torch_text.torch_lowering import lowered
from chimera_ir.verify.verify import verify_program
from tests.graphs import Edge, plan
from tests.torch_rows import Reading
from tests.unit.command import Run

ACCEPTED = {
    *("breadth_first", "dapple", "dualpipe_v", "eager_1f1b", "gpipe", "interleaved", "interleaved_overlap"),
    *("v_half", "v_min", "waves", "waves_tight", "zb_h1", "zb_h2", "zb_v"),
}
SIZES: tuple[dict[str, int], ...] = ({"P": 2, "D": 2}, {}, {"P": 3, "D": 6, "N": 7}, {"P": 4, "D": 8, "v": 5, "N": 12})
"""Of these parameters a scheme is given those that it has; five stages on a rank are more than torch unshards ahead."""


def compilations(name: str) -> Iterator[Compilation]:
    parameters = {parameter.name.text for parameter in chimera_ir.compile(name).scheme.parameters}
    for size in SIZES:
        try:
            compilation = chimera_ir.compile(name, **{key: size[key] for key in size.keys() & parameters})
            _ = compilation.schedule
        except CompileError:
            continue
        yield compilation


def rows_in(text: str) -> list[list[str]]:
    return [*csv.reader(io.StringIO(text))]


def made_by_torch(text: str, workers: int, stages: int, micro_batches: int) -> list[list[str]]:
    """The actions that the installed torch makes of a compute order."""
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.ERROR)
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages = 0, workers, stages
    runtime = _PipelineScheduleRuntime([stage], micro_batches)
    actions = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(rows_in(text))}
    runtime._prepare_schedule_with_comms(actions)
    return [[*map(str, runtime.pipeline_order_with_comms[rank])] for rank in range(workers)]


@pytest.mark.full
@pytest.mark.skipif(hasattr(schedules, "WAIT_REDUCE_GRAD"), reason="torch 2.15 adds waits, and receives move by them")
@pytest.mark.parametrize("name", sorted(ACCEPTED))
def test_the_model_of_torchs_lowering_makes_what_the_installed_torch_makes(name: str) -> None:
    sizes = set()
    for compilation in compilations(name):
        schedule, text = compilation.schedule, compilation.torch_csv
        header = schedule.header
        mine = [[cell_text(cell) for cell in row] for row in lowered(schedule)]
        assert mine == made_by_torch(text, header.workers, header.stages, header.micro_batches)
        assert not Reading(mine).wrong
        sizes.add((header.workers, header.stages, header.micro_batches))
    assert len(sizes) >= 3


@pytest.mark.parametrize("name", sorted(ACCEPTED))
def test_what_is_written_reads_back_as_the_same_operations_and_messages(name: str) -> None:
    compilation = chimera_ir.compile(name)
    order, comms = (
        chimera_ir.compile(Source("x.csv", text)) for text in (compilation.torch_csv, compilation.torch_csv_comms)
    )
    assert order.schedule.lanes == comms.schedule.lanes == compilation.schedule.lanes
    posts = [
        [[(type(line), line.message) for line in lane if isinstance(line, Send | Recv)] for lane in program.lanes]
        for program in (comms.program, compilation.program)
    ]
    assert posts[0] == posts[1]
    assert not Reading(rows_in(compilation.torch_csv_comms)).wrong


def test_fourteen_schemes_of_the_library_are_accepted_and_the_others_refused_with_a_reason() -> None:
    reasons: dict[str, str] = {}
    for name in library.names():
        try:
            _ = chimera_ir.compile(name).torch_csv
        except NotInTorch as error:
            reasons[name] = str(error)
    assert {*library.names()} - reasons.keys() == ACCEPTED
    assert reasons["chimera"] == (
        "emit torch-csv: torch cannot run chimera(D=4, N=4, f=1): stage 0 is on the workers 0 and 3, and in torch a "
        "stage is on one rank"
    )
    assert "it has no flush" in reasons["pipedream"]
    assert "on the workers" in reasons["chimera_halving"]
    assert "it moves activations to the host" in reasons["dapple_offload"]


HEADER = "schedule s\nworkers 1\nstages 1\nmicro_batches 2{}\npipe p on 0 micros 0..2\nworker 0:\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (HEADER.format(" halves") + "F m0 s0\nF m1 s0\nB m0 s0\nB m1 s0\n", "half micro-batches"),
        (HEADER.format("") + "F m0,m1 s0\nB m0,m1 s0\n", r"of several micro-batches \(0 and 1\)"),
        (HEADER.format("") + "F m1 s0\nF m0 s0\nB m1 s0\nB m0 s0\n", "out of order"),
        (HEADER.format("\nkinds F") + "F m0 s0\nF m1 s0\n", "no backwards"),
        (
            HEADER.format("").replace("workers 1", "workers 2") + "F m0 s0\nF m1 s0\nB m0 s0\nB m1 s0\nworker 1:\n",
            "worker 1 has no",
        ),
    ],
)
def test_what_torch_lacks_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(NotInTorch, match=reason):
        _ = chimera_ir.compile(Source("s.sir", text)).torch_csv_comms


def test_a_graph_of_stages_is_refused() -> None:
    text = plan({"text": 1, "head": 1, "other": 1}, [Edge(0, 1), Edge(0, 2)], 2)
    with pytest.raises(NotInTorch, match="its stages are no chain, and in torch's schedules each stage feeds the next"):
        _ = chimera_ir.compile(Source("s.sir", text)).torch_csv


def test_options_that_torch_lacks_are_refused_with_the_reason() -> None:
    for options, reason in (
        (Options(recompute=True), "recomputations"),
        (Options(tied=[("first", "last")]), "share parameters"),
    ):
        with pytest.raises(NotInTorch, match=reason):
            _ = chimera_ir.compile("dapple", options=options).torch_csv


def test_rows_that_torch_would_not_finish_are_not_proven() -> None:
    schedule = chimera_ir.compile("dapple", D=2, N=2).schedule
    rows = lowered(schedule)
    verify_program(program_of(schedule, rows))
    receives = [place for place, cell in enumerate(rows[1]) if "RECV_F" in cell_text(cell)]
    first, second = receives
    rows[1][first], rows[1][second] = rows[1][second], rows[1][first]
    with pytest.raises(Rejected):
        verify_program(program_of(schedule, rows))


def test_a_remark_says_how_to_start_the_file(run: Run) -> None:
    said = run("zb_v", "--emit", "torch-csv").err
    assert (
        "remark: in torch: schedule = _PipelineScheduleRuntime(stages, n_microbatches=8, loss_fn=loss); "
        'schedule._load_csv("zb_v.csv"), with the stages of each rank in ascending order '
        "(rank 0: 0 7; rank 1: 1 6; rank 2: 2 5; rank 3: 3 4); torch 2.15 adds messages in another order"
    ) in said
    assert "--parallelism.pipeline_parallel_schedule ZBVZeroBubble --parallelism.pipeline_parallel_schedule_csv" in said
    assert "(layers + 2) / K, rounded up, must be 8, and a local batch 8 micro-batches" in said
    assert "pipeline_parallel_schedule 1F1B " in run("dapple", "--emit", "torch-csv").err
    assert "pipeline_parallel_schedule PipelineScheduleMulti " in run("interleaved", "--emit", "torch-csv").err
    assert "torchtitan cannot place" in run("waves", "--set", "w=2", "--emit", "torch-csv").err
    assert 'format="compute_comms")' in run("dapple", "--emit", "torch-csv-comms").err
    run("chimera", "--emit", "torch-csv").assert_refused(2, "--emit torch-csv: torch cannot run chimera")
