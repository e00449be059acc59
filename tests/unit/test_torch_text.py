"""Schedules in torch's text: what is read, and verdicts beside an independent reading. Messages: tests/errors/torch."""

import csv
import io
import logging
import random
import re
from functools import cache
from inspect import signature

import pytest

import chimera_ir
from chimera_ir.compilation import Compilation
from chimera_ir.errors import CompileError, TextError, TooLarge
from chimera_ir.ir.ops import AllReduce
from chimera_ir.ir.text.printer import show
from chimera_ir.options import Options
from chimera_ir.source import Source
from tests.executor import TRANSPORTS, Executor
from tests.torch_rows import Reading, Row

SIZES = ((2, 4), (4, 8), (8, 16))
SINGLE = ("GPipe", "1F1B")
MULTI = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
CROSSED = {  # torch defers receives past one another, so that two ranks post and send in different orders
    *(("DualPipeV", size) for size in SIZES[1:]),
    *(("ZBVZeroBubble", size) for size in SIZES),
    ("InterleavedZeroBubble", (2, 4)),
}


def compiled(text: str, name: str = "theirs.csv") -> Compilation:
    return chimera_ir.compile(Source(name, text))


def text_of(rows: list[Row]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


@cache
def rows_of(name: str, size: tuple[int, int], *, comms: bool = False, deferred: bool = False) -> list[Row]:
    """Rows that the installed torch generates; imported here, as most workers that collect this file never ask."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.ERROR)
    if deferred and "defer_pp_recv" not in signature(get_schedule_ops).parameters:
        pytest.skip("this torch does not defer receives")
    rows = get_schedule_ops(name, *size, with_comms=comms, **({"defer_pp_recv": True} if deferred else {}))
    return [["" if action is None else str(action) for action in row] for row in rows]


def rejected(rows: list[Row]) -> bool:
    try:
        _ = compiled(text_of(rows)).verified
    except CompileError:
        return True
    return False


CASES = [
    *((name, size, False, False) for name in (*SINGLE, *MULTI) for size in SIZES),
    *((name, size, True, deferred) for name in MULTI for size in SIZES for deferred in (False, True)),
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "size", "comms", "deferred"), CASES)
def test_the_verdict_on_what_torch_generates_is_that_of_an_independent_reading(
    name: str, size: tuple[int, int], comms: bool, deferred: bool
) -> None:
    rows = rows_of(name, size, comms=comms, deferred=deferred)
    wrong = name == "1F1B" or (deferred and (name, size) in CROSSED)  # its picture of 1F1B has no micro-batch 0
    assert (rejected(rows), bool(Reading(rows).wrong)) == (wrong, wrong)


def changed(rows: list[Row], rng: random.Random) -> list[Row]:
    """The rows with a cell a place or two away, on another rank, twice or gone."""
    copies = [[*row] for row in rows]
    row = rng.choice(copies)
    place = rng.randrange(len(row))
    cell = row.pop(place)
    how = rng.choice(["near", "near", "near", "far", "twice", "gone"])
    if how in ("near", "twice"):
        row.insert(max(0, place + rng.choice([-2, -1, 1, 2])), cell)
    if how == "twice":
        row.insert(place, cell)
    if how == "far":
        rng.choice(copies).insert(place, cell)
    return copies


@pytest.mark.full
@pytest.mark.parametrize("name", MULTI)
def test_the_verdict_on_a_changed_file_is_that_of_an_independent_reading(name: str) -> None:
    rng, verdicts = random.Random(3), set[tuple[bool, bool]]()
    for comms in (False, True):
        generated = rows_of(name, (2, 4), comms=comms)
        rows = [[cell for cell in row if cell and not re.search("SHARD|REDUCE", cell)] for row in generated]
        for _ in range(25):
            mutant = changed(rows, rng)
            wrong = Reading(mutant).wrong
            assert rejected(mutant) == bool(wrong), (mutant, wrong)
            verdicts.add((comms, bool(wrong)))
    assert len(verdicts) == 4


@pytest.mark.parametrize("comms", [False, True])
def test_a_program_of_torchs_finishes_in_the_independent_executor(comms: bool) -> None:
    program = compiled(text_of(rows_of("DualPipeV", (4, 8), comms=comms))).program
    for transport in TRANSPORTS:
        assert Executor(program, transport, seed=1).run()


def test_messages_are_posted_where_the_file_has_them_and_waited_for_where_they_are_read() -> None:
    text = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    assert show(compiled(text).program) == (
        "program theirs\nparameters D=2 N=1\nworkers 2\nstages 2\nmicro_batches 1\npipe down on 0 1 micros 0..1\n"
        "\nworker 0:\n  F m0 s0\n  send m0 s0->s1 to w1\n  recv m0 s1->s0 from w1 into 0\n  wait recv m0 s1->s0\n"
        "  wait send m0 s0->s1\n  B m0 s0\n  all_reduce s0\n  wait all_reduce s0\n  step s0\n"
        "\nworker 1:\n  recv m0 s0->s1 from w0 into 0\n  wait recv m0 s0->s1\n  F m0 s1\n  B m0 s1\n  all_reduce s1\n"
        "  send m0 s1->s0 to w0\n  wait send m0 s1->s0\n  wait all_reduce s1\n  step s1\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "0F0,0F1,0I0,0W0,0B1\n1F0,1I0,1W0,1F1,1B1\n",
        "0F0,0F1,0B0,0W0,0BW1\r\n1F0,1B0,1W0,1F1,1BW1\r\n\r\n",
        '\ufeff 0F0 ,None,"0F1",,0I0,0W0,0B1,,,\n,1F0,1I0,None,1W0,1F1,1B1',
    ],
    ids=["today", "before 2025, CRLF", "blanks, quotes, ragged rows"],
)
def test_notations_and_dialects_of_one_schedule_are_one_schedule(text: str) -> None:
    assert show(compiled(text.removeprefix("\ufeff")).schedule).endswith(
        "\nworker 0:\n  F m0 s0\n  F m1 s0\n  I m0 s0\n  W m0 s0\n  B m1 s0\n"
        "\nworker 1:\n  F m0 s1\n  I m0 s1\n  W m0 s1\n  F m1 s1\n  B m1 s1\n"
    )


@pytest.mark.parametrize("cell", ['"0F1', '0F1"', '""0F1', '"""0F1"""', '"0F1,0B1"', "'0F1'"])
def test_a_cell_whose_quotes_torch_reads_otherwise_is_malformed(cell: str) -> None:
    """A lone quote joins cells up to the next one, and torch drops what follows the first action of a cell."""
    with pytest.raises(TextError, match=r"is not an action of|goes on after"):
        assert compiled(f"0F0,{cell},0B0,0B1\n").schedule


def test_cells_in_quotes_are_those_without_them() -> None:
    text = '"0F0","","0F1 ", "0B0" ,"None",0B1\n'
    assert show(compiled(text).schedule) == show(compiled(text.replace('"', "")).schedule)


def test_a_pair_is_one_operation_in_either_order() -> None:
    first, second = (
        compiled(f"0F0,{pair},0B1\n").schedule for pair in ("(0F1;0B0)OVERLAP_F_B", "( 0B0; 0F1 )OVERLAP_F_B")
    )
    assert "F m1 s0 & B m0 s0" in show(first)
    assert first == second


def test_a_file_without_an_ending_is_known_by_its_cells_and_names_a_scheme_of_its_file() -> None:
    assert compiled(",0F0,0B0\n", "/dev/fd/63").schedule.header.scheme == "_63"
    assert compiled("(0F1;0B0)OVERLAP_F_B,0F0,0B1\n", "a b").request.source.is_csv


def test_a_row_of_ten_thousand_cells_is_shown_around_the_mistake() -> None:
    row = [f"0{kind}{micro}" for kind in "FB" for micro in range(5000)]
    row[7000] = "0b2000"
    with pytest.raises(TextError) as error:
        _ = compiled(",".join(row)).schedule
    assert "(row 1, cell 7001)" in str(error.value)
    assert max(map(len, str(error.value).splitlines())) < 150


def test_a_file_with_too_many_cells_is_refused_before_it_is_read() -> None:
    with pytest.raises(TooLarge, match="the text has 5 operations, and the limit is 4"):
        _ = chimera_ir.compile(Source("x.csv", "0F0,0F1,,2F9?\n0B0,0B1"), options=Options(max_operations=4)).schedule


def test_stages_that_share_parameters_are_an_option_and_are_summed_at_the_end() -> None:
    for comms in (False, True):
        text = text_of(rows_of("Interleaved1F1B", (2, 4), comms=comms))
        program = chimera_ir.compile(Source("t.csv", text), options=Options(tied=[("first", "last")])).program
        assert all(AllReduce((0, 3)) in lane for lane in program.lanes)
        assert Executor(program, "tagged", seed=1).run()


@pytest.mark.full
@pytest.mark.parametrize("messages", ["", "0SEND_F0"])
def test_sizes_that_a_file_names_and_does_not_fill_take_no_memory(messages: str) -> None:
    row = ",".join(f"{stage}F{131071 * (stage == 0)},{stage}B0" for stage in range(2000))
    with pytest.raises(TextError, match="has no"):
        _ = compiled(f"{row},{messages}\n").program
    with pytest.raises(TextError, match="no rank computes stage 0"):
        _ = compiled("65535F1048575,65535B1048575\n").schedule
