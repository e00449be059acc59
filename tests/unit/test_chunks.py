"""Several stages of a pipe on a worker: every picture tells them apart, by a shade and by a letter."""

import re
from collections import defaultdict
from itertools import combinations
from xml.etree import ElementTree

import pytest

import chimera_ir
from chimera_ir.ir.kinds import BACKWARD
from chimera_ir.ir.levels import Schedule
from chimera_ir.picture import svg, terminal
from chimera_ir.picture.looks import HUES, INK, PAPER, SWATCHES, Hue, Looks
from tests.unit.clocked import in_turns, one_direction, one_version_each, schedule, two_directions, two_versions
from tests.unit.test_picture import SIGHT, contrast, lab, lanes, linear, timeline, times

SVG = "{http://www.w3.org/2000/svg}"
TITLE = re.compile(r"(forward|backward) of (?:micro-batch(?:es)? )?([\d,-]+) on stage (\d+)")


def both_ways(D: int, workers: int) -> Schedule:
    """Stages dealt in turn, down and up, a micro-batch each: two pipes, and of each several stages per worker."""
    return schedule(
        "ways",
        {"D": D},
        D,
        workers,
        [("down", lambda s: s % workers, [0]), ("up", lambda s: workers - 1 - s % workers, [1])],
        lambda _, s: s,
        lambda _, s: 3 * D - s,
    )


def fills(document: str) -> dict[tuple[str, str, int], set[str]]:
    """The colours of the boxes, by direction, micro-batches and stage."""
    seen = defaultdict(set)
    for group in ElementTree.fromstring(document).iter(f"{SVG}g"):
        for box in group.findall(f"{SVG}rect"):
            if match := TITLE.match(box.findtext(f"{SVG}title") or ""):
                seen[match[1], match[2], int(match[3])].add(group.get("fill") or "")
    return seen


@pytest.mark.parametrize("plan", [in_turns(4, 2, 2), in_turns(7, 2, 3), in_turns(8, 1, 1), both_ways(6, 2)])
def test_boxes_of_two_stages_of_a_worker_have_two_colours(plan: Schedule) -> None:
    seen = fills(svg.draw(timeline(plan)))
    assert len(seen) == sum(map(len, plan.lanes))
    for pipe in plan.header.pipes:
        for stage, later in combinations(range(plan.header.stages), 2):
            if pipe.workers[stage] == pipe.workers[later]:
                for kind in ("forward", "backward"):
                    assert seen[kind, str(pipe.micros[0]), stage] != seen[kind, str(pipe.micros[0]), later]


@pytest.mark.parametrize("width", [60, 200])
@pytest.mark.parametrize("plan", [in_turns(4, 2, 2), in_turns(7, 2, 3), in_turns(60, 1, 2), both_ways(6, 2)])
def test_a_terminal_picture_without_colour_tells_the_stages_of_a_worker_apart(plan: Schedule, width: int) -> None:
    looks = Looks(plan.header)
    drawn = terminal.draw(timeline(plan), width)
    if "drawn small" in drawn.plain:
        pytest.fail("a picture that leaves labels out shows nothing here")
    for line, lane in zip(lanes(drawn), plan.lanes, strict=True):
        assert re.findall(r"(\d+[a-z]+)[─═]", line) == [looks.label(operation) for operation in lane]
        assert len({(looks.label(operation), operation.kind is BACKWARD) for operation in lane}) == len(lane)
    styles = {str(span.style) for span in drawn.spans if " on " in str(span.style)}
    assert len(styles) == 2 * looks.chunks * len(plan.header.pipes)


@pytest.mark.parametrize(
    "plan", [one_direction(4, 4), two_directions(4), two_directions(8, 2), one_version_each(4), two_versions(4, 4)]
)
def test_one_stage_of_a_pipe_per_worker_has_neither_letters_nor_shades(plan: Schedule) -> None:
    """Two pipes on a worker have a stage each there: their hues tell them apart."""
    shown = svg.picture(timeline(plan)).chart
    assert all(label.text.isdigit() for family in shown.families for label in family.labels)
    assert {family.fill for family in shown.families} <= {fill for hue in HUES for fill in (hue.light, hue.dark)}
    assert {tuple(swatch.text for swatch in entry.swatches) for entry in shown.legend} == {("F", "B")}
    assert "in order" not in terminal.draw(timeline(plan), 80).plain


def test_the_letters_go_on_behind_z() -> None:
    looks = Looks(in_turns(60, 1, 1).header)
    letters = [looks.letter(chunk) for chunk in range(looks.chunks)]
    assert (letters[0], letters[25], letters[26], letters[59]) == ("a", "z", "aa", "bh")
    assert len(set(letters)) == 60


@pytest.mark.parametrize("D", [2, 3, 4, 5, 60])
def test_the_legend_says_what_the_shades_and_letters_are_and_stays_within_the_picture(D: int) -> None:
    plan = in_turns(D, 1, 1)
    letters = [Looks(plan.header).letter(chunk) for chunk in range(D)]
    shown = svg.picture(timeline(plan)).chart
    strand, sign = shown.legend
    chunks = letters if D <= SWATCHES else [*letters[: SWATCHES - 1], letters[-1]]
    assert [swatch.text for swatch in strand.swatches] == [kind + letter for letter in chunks for kind in "FB"]
    filled = {family.fill for family in shown.families}
    assert {swatch.fill for swatch in strand.swatches} <= filled
    assert sign.name == f"a{', ' if D == 2 else '-'}{letters[-1]}: the pipe's stages on a worker, in order"
    assert all(entry.text + 8 * len(entry.name) <= shown.width for entry in shown.legend)


def test_a_split_backward_has_a_swatch_for_each_half_and_words_for_the_letters() -> None:
    shown = svg.picture(chimera_ir.compile("zb_h1").timeline).chart
    strand, sign = shown.legend
    assert [swatch.text for swatch in strand.swatches] == ["F", "I", "W"]
    assert {swatch.fill for swatch in strand.swatches} == {family.fill for family in shown.families}
    assert sign.name == "F forward, I input gradient, W weight gradient"


def shades(pipes: int, chunks: int) -> list[Hue]:
    directions = [(str(pipe), lambda _: 0, [pipe]) for pipe in range(pipes)]
    looks = Looks(schedule("x", {}, chunks, 1, directions, lambda m, _: m, lambda m, _: m).header)
    return list(looks.hues.values())


def difference(colour: str, other: str, sight: str) -> float:
    """How unlike two colours are: from 2.3 on, people who see them side by side see that they differ."""
    a, b = (lab(times(SIGHT[sight], linear(seen))) for seen in (colour, other))
    return float(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize(("pipes", "chunks", "least"), [(1, 2, 12), (1, 3, 5), (1, 4, 3), (2, 2, 8), (2, 4, 3)])
def test_the_shades_of_the_first_pipes_are_told_apart_by_every_eye(
    pipes: int, chunks: int, least: float, sight: str
) -> None:
    """With more pipes or chunks the letters remain."""
    for several in zip(*((hue.light, hue.dark) for hue in shades(pipes, chunks)), strict=True):
        assert min(difference(*pair, sight) for pair in combinations(several, 2)) > least


@pytest.mark.parametrize("chunks", [2, 3, 8])
def test_labels_are_legible_on_every_shade(chunks: int) -> None:
    for hue in shades(len(HUES), chunks):
        assert contrast(hue.light, INK) > 4.5
        assert contrast(hue.dark, PAPER) > 4.5
        assert contrast(hue.light, hue.dark) > 3
