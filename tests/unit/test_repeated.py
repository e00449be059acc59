"""Schemes compiled by turns: all that is written equals what the whole gives, and what does not repeat is refused."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

import chimera_ir
from chimera_ir import library
from chimera_ir.compilation import Compilation
from chimera_ir.errors import TextError
from chimera_ir.ir.rolled import RolledProgram
from chimera_ir.ir.text.printer import show
from chimera_ir.options import Options
from chimera_ir.source import Source
from chimera_ir.verify.scripts import scripts, worker_scripts
from chimera_ir.verify.verify import verify_program
from tests.documents import document_in

NO_TURNS = {
    *("amdp", "breadth_first", "chimera_zb", "colocated", "gpipe", "pipedream", "pipedream_2bw", "terapipe"),
    "waves_tight",
}
"""Schemes whose lists have no turns: what is open grows, there is no flush, or the compiler orders operations."""

TWO_CHUNKS = {name for name in library.names() if "P" in library.parameters(name)}


def compiled(name: str, monkeypatch: pytest.MonkeyPatch, large: int, workers: int = 4, n: int = 144) -> Compilation:
    monkeypatch.setattr("chimera_ir.compilation.LARGE", large)
    size = {"P" if name in TWO_CHUNKS else "D": workers, "N": n}
    return chimera_ir.compile(name, **size)


def by_turns(compilation: Compilation) -> bool:
    return compilation._repeated is not None


def whole(compilation: Compilation, monkeypatch: pytest.MonkeyPatch) -> Compilation:
    monkeypatch.setattr("chimera_ir.compilation.LARGE", 1 << 40)
    again = Compilation(compilation.request)
    assert not by_turns(again)
    return again


def texts(files: Mapping[str, str]) -> Mapping[str, str]:
    """All files but the pictures, which show a window."""
    return {name: text for name, text in files.items() if not name.endswith((".svg", ".html"))}


@pytest.mark.parametrize("name", [name for name in library.names() if name not in {"pipedream", "pipedream_2bw"}])
def test_all_files_of_a_scheme_are_those_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiled(name, monkeypatch, large=0)
    assert by_turns(made) == (name not in NO_TURNS)
    files, printed = made.files, made.summary
    other = whole(made, monkeypatch)
    assert texts(files) == texts(other.files)
    assert printed == other.summary


@pytest.mark.full
@pytest.mark.parametrize(("workers", "n"), [(2, 70), (3, 100), (8, 200)])
@pytest.mark.parametrize("name", sorted({*library.names()} - NO_TURNS))
def test_so_are_those_of_other_sizes(name: str, workers: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        made = compiled(name, monkeypatch, large=0, workers=workers, n=n)
        files = made.files
    except TextError:
        pytest.skip("the scheme has no such size")
    assert texts(files) == texts(whole(made, monkeypatch).files)


def test_a_window_shorter_than_its_circle_of_slots_has_its_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiled("seq1f1b", monkeypatch, large=0, workers=16, n=64)
    assert made._repeated
    assert made._repeated.verified.program.header.micro_batches < made.header.micro_batches // 4
    assert texts(made.files) == texts(whole(made, monkeypatch).files)


@pytest.mark.parametrize("sizes", [{"N": 144}, {"a": 1, "b": 3, "D": 2, "N": 100}])
def test_so_are_those_of_a_graph(sizes: Mapping[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chimera_ir.compilation.LARGE", 0)
    made = chimera_ir.compile("two_encoders", **sizes)
    assert by_turns(made)
    assert texts(made.files) == texts(whole(made, monkeypatch).files)


COSTS = (
    {"costs": {"F": 3, "B": 5}},
    {"stage_costs": {"F": (1, 2, 1, 1)}},
    {"stage_costs": {"F": (4, 5, 4, 6), "B": (8, 9, 10, 7)}},
)


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("name", ["dapple", "chimera", "eager_1f1b", "gems", "dapple_recompute"])
def test_unequal_costs_give_the_figures_of_the_whole(
    name: str, costs: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chimera_ir.compilation.LARGE", 0)
    made = chimera_ir.compile(name, D=4, N=160, options=Options(**costs))
    report = made.report.as_json()
    assert by_turns(made)
    assert report == whole(made, monkeypatch).report.as_json()


EXCEPTION = """scheme odd(D = 4, N = 96)
pipe p {{
  stages s in 0..D on s
  micros m in 0..N
  F(m, s) @ 4*m + 2*s {forward}
  B(m, s) @ 4*m + 4*D - 1 - 2*s {backward}
}}
"""


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ("", ""),
        ("+ (if m == 48 then 1 else 0) - (if m == 48 then 1 else 0)", ""),
        ("", "+ (if m == 48 and s == 0 then 2 else 0)"),
        ("- (if m == N - 1 and s == 0 then 2 else 0)", ""),
        ("", "+ (if m >= N - 2 then 4*D else 0)"),
        ("", "+ (if m < 3 then 0 else 4)"),
    ],
    ids=["none", "of no effect", "in the middle", "late in the forwards", "late in the drain", "early"],
)
def test_an_exception_in_the_clocks_is_what_it_is_in_the_whole(
    forward: str, backward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = EXCEPTION.format(forward=forward, backward=backward)
    results: list[object] = []
    for large in (0, 1 << 40):
        monkeypatch.setattr("chimera_ir.compilation.LARGE", large)
        compilation = Compilation(Options().request(Source("odd.chim", text), {}))
        try:
            results.append(texts(compilation.files))
        except TextError as error:
            results.append(str(error))
    assert results[0] == results[1]


def test_mistakes_are_reported_with_the_numbers_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chimera_ir.compilation.LARGE", 0)
    text = EXCEPTION.format(forward="", backward="- (if m == N - 1 then 16 else 0)")
    compilation = Compilation(Options().request(Source("odd.chim", text), {}))
    with pytest.raises(TextError, match="m95"):
        _ = compilation.files


def test_a_rolled_program_is_proven_by_its_window_alone_and_prints_as_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = compiled("zb_h1", monkeypatch, large=0, n=200)
    assert made._repeated
    verified = made._repeated.verified
    assert isinstance(verified.level, RolledProgram)
    assert verified.program.header.micro_batches < 20
    assert verify_program(verified.level.unrolled).live == verified.live
    assert show(verified.level) == show(verified.level.unrolled)


def test_the_page_and_the_picture_say_what_they_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiled("dapple", monkeypatch, large=0, n=200)
    left_out = "turns of 1 micro-batch left out"
    assert left_out in made.files["timeline.svg"]
    assert left_out in " ".join(document_in(made.files["schedule.html"])["notes"])
    assert left_out not in " ".join(document_in(made.page)["notes"])


@pytest.mark.parametrize(
    ("pattern", "wrong"),
    [
        (r"into=\((m \+ \d)\) % (\d)\)", r"into=\1)"),
        (r"into=\((m \+ \d)\) % (\d)\)", r"into=(\1) % 9\2)"),
        (r"into=\(m \+ 1\) % (\d)\)", r"into=1 + m % \1)"),
        (r"into=\((m \+ \d)\) % (\d)\)", r"into=(\1 + m * 0 * m) % \2 % \2)"),
        (r"range\((\d+), (\d+)\d\d\)", r"range(\1, \g<2>90)"),
        (r"isend\(m, stage1.outputs\(m\)\)", r"isend(m, stage1.outputs(m % 1))"),
    ],
    ids=["no remainder", "of another number", "from another slot", "not even", "other rounds", "another micro-batch"],
)
def test_a_loop_that_is_right_in_some_rounds_alone_is_refused(
    pattern: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = compiled("dapple", monkeypatch, large=0, n=200)
    assert made._repeated
    verified, evaluation = made._repeated.verified, made._repeated.verified_evaluation
    text = made.files["rank_1.py"]
    changed = re.sub(pattern, wrong, text)
    assert changed != text
    files = made.files | {"rank_1.py": changed}
    found = [*scripts(verified.scripted, evaluation.scripted, worker_scripts(verified.header, files))]
    assert (found == []) == ("m * 0 * m" in wrong)
