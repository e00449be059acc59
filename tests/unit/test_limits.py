"""What is too large is refused before anything of that size is made: work is counted, as calls, and memory."""

import sys
import tracemalloc
from pathlib import Path

import pytest

from chimera_ir import library
from chimera_ir.commands import compile_command
from chimera_ir.commands.common import WRONG_COMMAND
from chimera_ir.compilation import Compilation
from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.diagnostics.render import MAX_NOTES, MAX_SHOWN, render_all
from chimera_ir.elaborate.elaborate import outline
from chimera_ir.errors import CompileError, TooLarge
from chimera_ir.lower import lower
from chimera_ir.request import Request
from chimera_ir.source import Source
from chimera_ir.syntax.parser import parse
from tests.unit.command import TINY, Run

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from large_inputs import NUMBERS, TEXTS, Input, pipes, scheme, turn

CALLS = 150_000
"""Calls that an input of a few lines may cost; a scheme of one pipe costs a tenth of that."""

MEMORY = 4 * 2**20
"""Bytes that it may take for a while."""


def answer(given: Input) -> str:
    """What is said of an input; empty if nothing is wrong with it."""
    source, warnings = Source(f"a{given.suffix}", given.text), list[Diagnostic]()
    try:
        assert Compilation(Request(source), warn=warnings.append).schedule
    except CompileError as error:
        return str(error)
    return render_all(warnings, source)


def counted(given: Input) -> tuple[str, int]:
    """What is said of an input, and after how many calls of functions."""
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        said = answer(given)
    finally:
        sys.setprofile(None)
    return said, calls


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """What is made once in a process, such as the parsers, counts for nothing."""
    answer(scheme())
    answer(NUMBERS["workers of ir"](1))


@pytest.mark.parametrize("name", NUMBERS)
def test_a_huge_number_is_refused_with_work_that_does_not_depend_on_it(name: str) -> None:
    for number in (10**7, 10**17):
        said, calls = counted(NUMBERS[name](number))
        assert said.startswith("error["), said
        assert "limit" in said or "out of range" in said or "cannot be made" in said, said
        assert "help: " in said
        assert calls < CALLS


@pytest.mark.parametrize("line", ["B m-900000 s0 v-900000", "send m-900000 s0->s0 to w0", "drop s0 v-900000"])
def test_lines_that_are_many_turns_apart_are_refused_before_any_turn_is_made(line: str) -> None:
    said, calls = counted(turn(f"{line}\n  F m s0 v"))
    assert said.startswith("what shows the turns of the text, warm-up and drain included, has ")
    assert "the limit is 1,000,000" in said
    assert calls < CALLS


@pytest.mark.parametrize("name", NUMBERS)
def test_a_huge_number_is_refused_with_nothing_made_of_that_size(name: str) -> None:
    for number in (10**7, 10**17):
        given = NUMBERS[name](number)
        tracemalloc.start()
        try:
            answer(given)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < MEMORY


SEARCHED = {"a cycle of ir"}
"""The search for the shortest cycle may take longer, up to a length; see `test_render` for what is shown of it."""


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in TEXTS if name not in SEARCHED])
def test_the_work_for_a_text_grows_like_the_text(name: str) -> None:
    size, make = TEXTS[name]
    size = min(size // 80, 500)
    said, calls = counted(make(size))
    again, more = counted(make(2 * size))
    assert more < 2.5 * calls + CALLS / 20
    for shown in (said, again):
        assert shown.count("\n") < MAX_SHOWN * 20 + 3 * MAX_NOTES


@pytest.mark.full
@pytest.mark.parametrize(("workers", "stages", "micros"), [(4, 4096, 65_536), (1, 1, 65_536)])
def test_a_huge_header_over_few_operations_takes_no_memory_of_that_size(workers: int, stages: int, micros: int) -> None:
    places = " ".join(str(stage % workers) for stage in range(stages))
    lanes = "\n".join(f"worker {worker}:" for worker in reversed(range(workers)))
    sizes = f"workers {workers}\nstages {stages}\nmicro_batches {micros}\npipe down on {places} micros 0..{micros}"
    tracemalloc.start()
    try:
        said = answer(Input(".sir", f"schedule huge\n{sizes}\n{lanes}\n  F m0 s0\n"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert said.startswith("error[CH302]: micro-batch "), said
    assert peak < 2**24


@pytest.mark.parametrize("line", ["F(0..m+1, s) @ m", "recompute(0..m+1, s) @ m", "F(0..m+1, s) prefer m"])
@pytest.mark.parametrize("by", [1, 3])
def test_ranges_of_a_line_that_overlap_are_refused_before_all_of_them_are_made(line: str, by: int) -> None:
    given = scheme(stages="0..1 on s", micros=f"0..3000 by {by}", more=line)
    tracemalloc.start()
    try:
        said = answer(given)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "error[CH296]: the ranges of this line name more than all of 3,000 micro-batches on 1 stage" in said
    assert peak < 3 * MEMORY


def test_an_operation_over_a_range_counts_for_each_micro_batch_in_it() -> None:
    micros = "0..60000 by 60000"
    said, calls = counted(scheme(stages="0..60000 on s", micros=micros, more="F(m..m+60000, s) @ m"))
    assert said.startswith("error[CH246]: the scheme has 3,600,")
    assert calls < CALLS


def test_tables_of_pipes_are_counted_before_they_are_evaluated() -> None:
    table = f"let t = [{', '.join('1' * 500)}]"
    text = pipes(4000).text.replace("stages", f"{table}\n stages", 1)
    said, calls = counted(Input(".chim", text))
    assert said.startswith("error[CH247]: the tables of all pipes have 2,000,000 entries")
    assert calls < 2 * CALLS  # 4,000 pipes are made, and 2,000,000 entries are not


def test_the_size_of_a_scheme_can_be_asked_for_by_itself() -> None:
    with pytest.raises(Rejected, match="CH247"):
        outline(parse(Source("a.chim", NUMBERS["stages"](10**9).text)), {}, 1000)
    size = outline(parse(Source("a.chim", scheme().text)), {}, 1000)
    assert [len(shape.micro_range) * len(shape.stage_range) for shape in size.shapes] == [4]


@pytest.mark.parametrize(
    ("name", "settings", "code"),
    [
        ("pipedream", {"D": 200_000}, "CH247"),
        ("pipedream", {"D": 50_000}, "CH277"),
        ("pipedream", {"D": 600}, "CH276"),
        ("chimera", {"D": 1_000_000, "f": 500_000}, "CH247"),
        ("chimera", {"D": 4096, "f": 2048}, "CH246"),
    ],
)
def test_a_library_scheme_that_is_far_too_large(name: str, settings: dict[str, int], code: str) -> None:
    with pytest.raises(Rejected) as rejected:
        outline(parse(library.source(name)), settings, 1_000_000)
    assert [each.code for each in rejected.value.diagnostics] == [code]


def test_a_baseline_that_is_too_large_is_told_before_anything_is_made_of_a_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where only a level before the report is asked for, it is no mistake."""
    monkeypatch.setattr(lower, "lower", lambda *_, **__: pytest.fail("lowered"))
    workers = range(32)
    lines = ["schedule a", "workers 32", "stages 1", "micro_batches 32"]
    lines += [f"pipe p{w} on {w} micros {w}..{w + 1}" for w in workers]
    lines += ["", *(f"worker {w}:\n  F m{w} s0\n  B m{w} s0" for w in workers)]
    source = Source("a.sir", "\n".join(lines))
    with pytest.raises(TooLarge, match="the baseline of the report, on 32 workers with 32 micro-batches, has 2,048"):
        assert Compilation(Request(source, max_operations=1999), warn=pytest.fail).report
    with pytest.raises(pytest.fail.Exception, match="lowered"):
        assert Compilation(Request(source, max_operations=1999), warn=pytest.fail).program


def test_more_than_fits_into_memory_is_no_fault_of_the_compiler(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def produce(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(compile_command, "produce", produce)
    run("chimera", "--max-operations", 10**9).assert_refused(WRONG_COMMAND, "there is not enough memory")


def test_of_very_many_warnings_the_first_are_shown_and_how_many_more_there_are(run: Run, tmp_path: Path) -> None:
    values = "".join(f"let v{number} = {number}\n" for number in range(2000))
    (tmp_path / "tiny.chim").write_text(TINY.replace("workers D\n", f"workers D\n{values}"))
    warned = run("tiny.chim", "--emit", "plan")
    assert (warned.status, warned.err.count("warning[CH217]")) == (0, MAX_SHOWN)
    assert warned.err.endswith(f"\nand {2000 - MAX_SHOWN:,} more\n")
