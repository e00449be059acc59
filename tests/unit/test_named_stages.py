"""Groups of stages by their names: in options, in messages, in the report."""

import pytest

import chimera_ir
from chimera_ir.elaborate.elaborate import elaborate
from chimera_ir.errors import NoSuchTie, WrongOption
from chimera_ir.ir.text.printer import show as show_level
from chimera_ir.options import Options
from chimera_ir.source import Source
from chimera_ir.syntax.formatter import show
from chimera_ir.syntax.parser import parse
from tests.executor import verdicts


def compiled(**options: object) -> chimera_ir.Compilation:
    return chimera_ir.compile("two_encoders", options=Options(**options))


def test_a_cost_of_a_group_is_that_of_its_stages_and_others_keep_theirs() -> None:
    costs = {"F": 3, "image.F": "1/4", "text.B": 8}
    by_stage = {"F": ["1/4", "1/4", 3, 3, 3, 3], "B": [2, 2, 2, 8, 8, 8]}
    assert compiled(costs=costs).report.makespan == compiled(stage_costs=by_stage).report.makespan


def test_a_group_keeps_a_share_and_so_does_one_of_its_stages() -> None:
    by_number = compiled(keep={0: "1/4", 1: "1/4", 4: 2})
    assert compiled(keep={"image": "1/4", "text[1]": 2}).header == by_number.header


def test_stages_are_tied_by_name() -> None:
    assert compiled(tied=[("image[1]", "text[2]")]).header.ties == ((1, 5),)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"costs": {"images.F": 2}}, WrongOption, "images.F: .* has the groups image, sound and text"),
        ({"keep": {"image[2]": 2}}, WrongOption, r"image\[2\]=2: .* which are image\[0\] to image\[1\], sound"),
        ({"keep": {"image": 2, "image[1]": 2}}, WrongOption, r"the share of stage image\[1\] is given twice"),
        ({"tied": [("image", "text[0]")]}, NoSuchTie, r"image\[0\] to image\[1\]"),
    ],
)
def test_a_name_of_no_group_is_an_error(options: dict[str, object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        assert compiled(**options).report


def test_without_groups_a_cost_of_one_is_an_error() -> None:
    with pytest.raises(WrongOption, match=r"image\.F: .* has no groups of stages with names"):
        assert chimera_ir.compile("dapple", options=Options(costs={"image.F": 2})).report


def test_the_report_says_the_groups_and_a_message_names_a_stage() -> None:
    report = compiled().report.as_json()
    assert report["groups"] == {"image": [0, 1], "sound": [2], "text": [3, 4, 5]}
    assert report["feeds"] == [[1, 3], [2, 3]]


def test_a_part_of_a_group_is_frozen_by_its_numbers() -> None:
    text = chimera_ir.library.named("two_encoders").text
    text = text.replace("\nworkers", "\nfrozen image[0..a], sound[j in 0..b]\nworkers", 1)
    frozen = parse(Source("frozen.chim", text))
    assert show(parse(Source("shown.chim", show(frozen)))) == show(frozen)
    plan, _ = elaborate(frozen, {}, 1000)
    assert plan.header.frozen == (0, 1, 2)


# Stages that are placed by the micro-batch.

BY_MICRO = """
scheme colocated(P = 4, N = 2*P)
feeds image[0] -> text[0] as pixels
workers P
let K = N / P
let end = K + 2*(N + P - 1)
pipe via {
  stages image[e in 0..1] on w = m % P
  stages text[s in 0..P]  on s
  micros m in 0..N
  F(m, image[0]) @ (m - w) / P
  F(m, text[s])  @ K + 2*m + s
  B(m, text[s])  @ K + 2*m + 2*P-1 - s
  B(m, image[0]) @ end + m / P
}
"""

IN_BLOCKS = """
scheme in_blocks(P = 4, N = 16, k = 2)
feeds image[0] -> text[0]
workers P
pipe down {
  stages image[e in 0..1] on m/k % P
  stages text[s in 0..P]  on s
  micros m in 0..N weigh 1 + m % 3
  recompute when e == 0 and m % 2 == 0
  F(m..m+k, image[0]) prefer N + m when m % k == 0
  B(m..m+k, image[0]) prefer m when m % k == 0
  F(m, text[s]) prefer N + m
  B(m, text[s]) prefer m
}
"""


@pytest.mark.parametrize(("workers", "micro_batches"), [(4, 8), (2, 6), (3, 3), (1, 4), (5, 40)])
def test_workers_by_the_micro_batch_are_a_pipe_for_each_worker(workers: int, micro_batches: int) -> None:
    """As `colocated`, which writes the pipes itself: the same program to the last line."""
    here = chimera_ir.compile(Source("by_micro.chim", BY_MICRO), P=workers, N=micro_batches)
    pipes = chimera_ir.compile("colocated", P=workers, N=micro_batches)
    assert show_level(here.program) == show_level(pipes.program)
    assert here.report == pipes.report


@pytest.mark.parametrize("k", [1, 2, 4])
def test_blocks_of_micro_batches_are_on_the_worker_of_all_of_them(k: int) -> None:
    text = IN_BLOCKS.replace("  recompute when e == 0 and m % 2 == 0\n", "") if k > 1 else IN_BLOCKS
    made = chimera_ir.compile(Source("in_blocks.chim", text), k=k)
    header = made.header
    assert [pipe.name for pipe in header.pipes] == ["down[0]", "down[1]", "down[2]", "down[3]"]
    for worker, pipe in enumerate(header.pipes):
        assert pipe.workers == (worker, 0, 1, 2, 3)
        assert [*pipe.micros] == [m for m in range(16) if m // k % 4 == worker]
    assert list(header.weights) == [1 + m % 3 for m in range(16)]
    assert verdicts(made.program, 5) == {"finished"}


def test_micro_batches_behind_another_pipe_keep_their_places() -> None:
    """Those of a pipe before come first, and others count on, whatever pipes they are in."""
    down = "pipe up {\n  stages image[e in 0..1] on 0\n  stages text[s in 0..P] on s\n  micros m in 0..2\n"
    lines = "".join(f"  {line}\n" for line in IN_BLOCKS.splitlines() if line.strip()[:2] in ("F(", "B("))
    text = IN_BLOCKS.replace(" weigh 1 + m % 3", "").replace("  recompute when e == 0 and m % 2 == 0\n", "")
    text = text.replace("pipe down", f"{down}{lines}}}\npipe down").replace("m in 0..N", "m in 4..N")
    made = chimera_ir.compile(Source("two.chim", text), k=1, N=12)
    assert [[*pipe.micros] for pipe in made.header.pipes] == [[0, 1], [2, 6], [3, 7], [4, 8], [5, 9]]
    assert [pipe.workers[0] for pipe in made.header.pipes] == [0, 0, 1, 2, 3]
