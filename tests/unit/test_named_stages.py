"""Groups of stages by their names: in options, in messages, in the report."""

import pytest

import chimera_ir
from chimera_ir.elaborate.elaborate import elaborate
from chimera_ir.errors import NoSuchTie, WrongOption
from chimera_ir.options import Options
from chimera_ir.source import Source
from chimera_ir.syntax.formatter import show
from chimera_ir.syntax.parser import parse


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
