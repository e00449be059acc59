import re
from collections import Counter
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.text import Text

import chimera_ir
from chimera_ir.cost.durations import Costs
from chimera_ir.cost.host_plan import with_events
from chimera_ir.cost.simulate import Timeline, simulate, steady_window
from chimera_ir.ir.kinds import BACKWARD, FORWARD
from chimera_ir.ir.levels import Header, Pipe, Schedule
from chimera_ir.ir.ops import Compute, Micro, Stage, Worker
from chimera_ir.picture import sheet, svg, terminal
from chimera_ir.picture.looks import HUES, INK, PAPER, Looks, hue, label, step
from tests.lowered import lowered
from tests.unit.clocked import all_then_all, one_direction, one_version_each, two_directions, two_versions

GOLDEN = Path(__file__).parent.parent / "golden"
USUAL = Costs()
SVG = "{http://www.w3.org/2000/svg}"


def timeline(schedule: Schedule, costs: Costs = USUAL) -> Timeline:
    return simulate(schedule, costs)


def boxes(document: str) -> list[ElementTree.Element]:
    """The operations of a drawing: the rectangles that tell what they are."""
    return [
        rect for rect in ElementTree.fromstring(document).iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None
    ]


def lanes(drawn: Text) -> list[str]:
    """The workers' lines of a terminal picture, parts that continue one another joined."""
    joined: dict[str, str] = {}
    for line in drawn.plain.split("\n"):
        if match := re.match(r"(P\d+) +(.*)", line):
            joined[match[1]] = joined.get(match[1], "") + match[2]
    return list(joined.values())


@pytest.mark.parametrize(("name", "drawn"), [("svg", svg.draw), ("txt", lambda t: terminal.draw(t, 80).plain + "\n")])
def test_the_picture_of_four_stages_is_the_golden_one(name: str, drawn: object, update_goldens: bool) -> None:
    """The bottom right of the paper's schedule figure (section 3.1)."""
    path = GOLDEN / f"two_directions.{name}"
    text = drawn(timeline(two_directions(4)))  # type: ignore[operator]
    if update_goldens:
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("costs", [Costs(), Costs(B=Fraction(5, 3)), Costs(F=Fraction(1, 100), B=Fraction(30))])
def test_every_operation_has_its_box_at_its_time(costs: Costs) -> None:
    shown = timeline(two_directions(4, 2), costs)
    drawn = {
        (rect.get("y"), (rect.findtext(f"{SVG}title") or "").split(":")[0]): rect for rect in boxes(svg.draw(shown))
    }
    assert len(drawn) == sum(map(len, shown.lanes))
    chart = svg.picture(shown).chart
    pixel = (float(chart.right) - chart.scale.left) / shown.span
    for row, lane in zip(chart.rows, shown.lanes, strict=True):
        for timed in lane:
            kind = "forward" if timed.operation.kind is FORWARD else "backward"
            pipe = shown.header.pipe_of[timed.operation.micros[0]].name
            told = f"{kind} of micro-batch {timed.operation.micros[0]} on stage {timed.operation.stage}, pipe {pipe}"
            rect = drawn[str(row.y), told]
            assert float(rect.get("x", 0)) - chart.scale.left == pytest.approx(timed.start * pixel, abs=0.02)
            assert float(rect.get("width", 0)) == pytest.approx((timed.end - timed.start) * pixel, abs=0.02)


@pytest.mark.parametrize(("D", "K"), [(2, 1), (4, 1), (6, 2), (8, 4)])
def test_every_box_up_to_8_workers_and_32_micro_batches_has_its_number(D: int, K: int) -> None:
    families = svg.picture(timeline(two_directions(D, K))).chart.families
    labels = [label.text for family in families for label in family.labels]
    assert Counter(labels) == dict.fromkeys(map(str, range(K * D)), 2 * D)


@pytest.mark.full
def test_sixty_four_workers_are_drawn_in_a_picture_of_bearable_size() -> None:
    """16,384 operations, each at least five pixels wide."""
    shown = timeline(two_directions(64, 2))
    assert svg.picture(shown).chart.width < 3200
    outlines = re.findall(r"M([\d.]+) \d+H([\d.]+)v14H\1z", svg.draw(shown))
    assert len(outlines) == 2 * 64 * 128
    assert all(float(right) - float(left) >= 5 for left, right in outlines)


def test_no_text_leaves_the_picture() -> None:
    for D, N in [(1, 1), (2, 2), (3, 7)]:
        shown = svg.picture(timeline(one_direction(D, N), Costs(B=Fraction(100000, 7)))).chart
        entries = [*shown.legend, *shown.signs.values()]
        assert all(entry.x + 48 + 8 * len(entry.name) <= shown.width for entry in entries)
        assert all(float(tick.x) + 4 * len(tick.text) <= shown.width for tick in shown.ticks)


def test_a_name_cannot_break_out_of_the_document() -> None:
    name = "</svg><script>&\"'\x07"
    document = svg.draw(timeline(two_directions(2, name=name)))
    texts = [element.text for element in ElementTree.fromstring(document).iter(f"{SVG}text")]
    assert "</svg><script>&\"'\ufffd(D=2, N=2)" in texts


def test_an_operation_over_several_micro_batches_names_them() -> None:
    numbers = [(3,), (4, 5), (4, 5, 6), (0, 2)]
    assert [label(Compute(FORWARD, tuple(map(Micro, some)), Stage(0))) for some in numbers] == [
        "3",
        "4-5",
        "4-6",
        "0,2",
    ]


def test_a_worker_without_work_is_all_bubble() -> None:
    header = Header("x", (), 2, 1, 1, (Pipe("down", (Worker(0),), (Micro(0),)),))
    lane = (Compute(FORWARD, (Micro(0),), Stage(0)), Compute(BACKWARD, (Micro(0),), Stage(0)))
    shown = timeline(Schedule(header, (lane, ())))
    assert set(lanes(terminal.draw(shown, 80))[1]) == {"·"}
    assert len(boxes(svg.draw(shown))) == 2


@pytest.mark.full
@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize(
    "schedule", [one_direction(1, 1), two_directions(4), all_then_all(3, 12), two_directions(64, 2)]
)
def test_a_terminal_picture_is_no_wider_than_the_terminal(width: int, schedule: Schedule) -> None:
    lines = terminal.draw(timeline(schedule), max(width, 80)).plain.split("\n")
    assert max(map(len, lines)) <= max(width, 80)


@pytest.mark.parametrize("width", [50, 80, 300])
@pytest.mark.parametrize("costs", [Costs(), Costs(B=Fraction(1)), Costs(B=Fraction(3))])
def test_a_terminal_picture_without_colour_tells_the_whole_timeline(width: int, costs: Costs) -> None:
    shown = timeline(two_directions(4, 2), costs)
    drawn = lanes(terminal.draw(shown, width))
    columns = Fraction(len(drawn[0]), shown.span)
    for line, lane in zip(drawn, shown.lanes, strict=True):
        read = [(m.start(), m.end(), m[1], m[2][0]) for m in re.finditer(r"(\d+)(─+|═+)", line)]
        assert read == [
            (
                timed.start * columns,
                timed.end * columns,
                label(timed.operation),
                "─" if timed.operation.kind is FORWARD else "═",
            )
            for timed in lane
        ]
    busy = 1 - Fraction("".join(drawn).count("·"), sum(map(len, drawn)))
    assert busy == 1 - shown.bubble_ratio


def test_updates_without_a_flush_take_turns_in_colour() -> None:
    shown = svg.picture(timeline(two_versions(4, 4))).chart
    assert [entry.name for entry in shown.legend] == ["down, even updates", "down, odd updates"]
    micros = [{label.text for label in family.labels} for family in shown.families]
    even = {str(m) for m in range(32) if m // 4 % 2 == 0}
    assert micros == [even, even, {str(m) for m in range(32)} - even, {str(m) for m in range(32)} - even]


def test_a_stretch_of_the_steady_state_is_bracketed() -> None:
    """The first turn after the versions are no longer all 0, from F8 on P0; 3 for each of 4 micro-batches."""
    shown = timeline(two_versions(4, 4))
    (found,) = svg.picture(shown).steady
    assert found.text == "one update in the steady state"
    drawn = terminal.draw(shown, 1000).plain.split("\n")
    (line,) = (line for line in drawn if line.lstrip().startswith("└") and "update" not in line)
    columns = Fraction(len(lanes(terminal.draw(shown, 1000))[0]), shown.span)
    assert (line.index("└") - 3, len(line) - 3) == (24 * columns, 36 * columns)
    assert "└─┘ one update in the steady state" in drawn[-1]


def test_what_is_shown_of_an_endless_schedule_is_no_makespan() -> None:
    drawn = terminal.draw(timeline(one_version_each(4, 10)), 160).plain.split("\n")
    said = "one update in the steady state: makespan 3, bubble ratio 0.0%; the first 10 updates"
    assert drawn[1] == f"F = 1, B = 2; {said}"
    assert svg.picture(timeline(one_version_each(4, 10))).chart.ticks[-1].text == "39"  # 10 * 3 and the ends, 3 * 3


@pytest.mark.parametrize("schedule", [two_versions(8, 12, 9), one_version_each(12, 120)])
def test_of_many_updates_as_much_is_drawn_legibly_as_shows_the_steady_state(schedule: Schedule) -> None:
    shown = timeline(schedule)
    window = steady_window(shown)
    drawn = terminal.draw(shown, 160).plain
    assert "drawn small" not in drawn
    assert f"bubble ratio 0.0%; the first {window.end} of time" in drawn
    picture = svg.picture(shown)
    assert picture.steady[0].anchor == "end"
    assert picture.chart.ticks[-1].text == str(window.end)
    begun = sum(each.start < window.end for lane in shown.lanes for each in lane)
    assert sum(len(family.boxes) for family in picture.chart.families) == begun
    assert sum(len(family.labels) for family in picture.chart.families) == begun


def test_a_schedule_with_a_flush_has_no_bracket() -> None:
    assert svg.picture(timeline(two_directions(4))).steady == ()
    assert "└" not in terminal.draw(timeline(two_directions(4)), 80).plain


@pytest.mark.parametrize("width", [80, 160, 300])
@pytest.mark.parametrize("F", [1, 2])
def test_every_event_is_marked_where_the_operation_before_it_ends(width: int, F: int) -> None:
    schedule = one_version_each(3, 9)
    shown = with_events(timeline(schedule, Costs(F=Fraction(F))), lowered(schedule))
    drawn = lanes(terminal.draw(shown, width))
    columns = Fraction(len(drawn[0]), shown.span)
    marks = {(worker, match.end()) for worker, line in enumerate(drawn) for match in re.finditer("▾", line)}
    assert marks == {(event.worker, event.at / shown.tick * columns) for event in shown.events}
    assert len(marks) == 27
    document = svg.draw(shown)
    assert document.count("the weights of stage") == 27
    assert "the weights of stage 1 become version 4 at " in document


def test_the_launches_of_a_schedule_with_a_flush_are_marked() -> None:
    schedule = two_directions(4)
    drawn = terminal.draw(with_events(timeline(schedule), lowered(schedule)), 80)
    assert [line.count("▾") for line in lanes(drawn)] == [2, 1, 1, 2]
    assert drawn.plain.split("\n")[-1].endswith("▾ gradient sum launched")


def test_a_letter_stands_for_the_same_group_of_stages_on_all_workers() -> None:
    shown = chimera_ir.compile("colocated", P=4, N=8).timeline
    looks = Looks(shown.header)
    parts = [part for lane in shown.lanes for timed in lane for part in timed.operation.parts]
    letters = {(part.stage > 0, looks.label(part)[-1]) for part in parts}
    assert letters == {(False, "a"), (True, "b")}
    assert "a image, b text" in terminal.draw(shown, 80).plain
    assert [looks.chunk_name(chunk) for chunk in range(looks.chunks)] == ["a image", "b text"]


def test_groups_on_workers_of_their_own_need_no_letters() -> None:
    assert Looks(chimera_ir.compile("two_encoders").schedule.header).sign == ""


@pytest.mark.parametrize("costs", [Costs(B=Fraction(10**18)), Costs(F=Fraction(10**18, 7), B=Fraction(1, 10**18))])
def test_costs_that_differ_beyond_reason_still_make_a_picture(costs: Costs) -> None:
    shown = timeline(two_directions(4), costs)
    assert max(map(len, terminal.draw(shown, 80).plain.split("\n"))) <= 80
    assert svg.picture(shown).chart.width < 2 * svg.WIDEST


@pytest.mark.full
def test_a_picture_drawn_small_says_what_it_leaves_out() -> None:
    assert "drawn small" in terminal.draw(timeline(two_directions(64, 2)), 200).plain
    assert "drawn small" not in terminal.draw(timeline(two_directions(8)), 100).plain


@pytest.mark.parametrize(
    ("least", "round_one"),
    [
        (Fraction(1), 1),
        (Fraction(3), 5),
        (Fraction(51), 100),
        (Fraction(1, 3), Fraction(1, 2)),
        (Fraction(1, 70), Fraction(1, 50)),
    ],
)
def test_the_axis_is_marked_at_round_times(least: Fraction, round_one: Fraction) -> None:
    assert step(least) == round_one


# Colours: seen through each kind of colour blindness (Machado, Oliveira and Fernandes, 2009), and against their ink.

SIGHT = {
    "full": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}
TO_XYZ = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0178, 0.1095, 0.8728))  # white is (1, 1, 1)

Triple = tuple[float, ...]


def times(matrix: tuple[Triple, ...], vector: Triple) -> Triple:
    return tuple(sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix)


def linear(colour: str) -> Triple:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return tuple(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)


def lab(light: Triple) -> Triple:
    x, y, z = (
        part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116
        for part in times(TO_XYZ, tuple(min(max(part, 0), 1) for part in light))
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def contrast(one: str, other: str) -> float:
    dark, light = sorted(times(TO_XYZ, linear(colour))[1] for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("sight", SIGHT)
def test_pipes_are_told_apart_by_every_eye(sight: str) -> None:
    for shades in ([colours.light for colours in HUES], [colours.dark for colours in HUES]):
        seen = [lab(times(SIGHT[sight], linear(shade))) for shade in shades]
        assert min(sum((a - b) ** 2 for a, b in zip(*pair, strict=True)) ** 0.5 for pair in combinations(seen, 2)) > 8


def test_no_two_pipes_share_a_colour() -> None:
    colours = [hue(strand) for strand in range(256)]
    assert len({colour.light for colour in colours}) == len({colour.dark for colour in colours}) == 256


def test_numbers_are_legible_on_their_boxes() -> None:
    """WCAG 2.1, success criterion 1.4.3: 4.5 for text; 1.4.11: 3 for forward against backward, of the listed hues."""
    for number in range(256):
        assert contrast(hue(number).light, INK) > 4.5
        assert contrast(hue(number).dark, PAPER) > 4.5
    for colours in HUES:
        assert contrast(colours.light, colours.dark) > 3


def test_a_sheet_draws_all_its_panels_on_one_scale() -> None:
    shown = [timeline(two_directions(4)), timeline(one_direction(4, 4)), timeline(one_direction(2, 8))]
    panels = [sheet.Panel(f"({number})", each) for number, each in enumerate(shown)]
    document = sheet.draw("three", [panels[:2], panels[2:]])
    forward, backward = sorted({float(rect.get("width", 0)) for rect in boxes(document)})
    assert backward == pytest.approx(2 * forward, abs=0.02)


def test_a_sheet_has_no_name_twice_and_no_panel_over_another() -> None:
    shown = timeline(two_directions(4))
    document = ElementTree.fromstring(sheet.draw("four", [[sheet.Panel("(a)", shown)] * 2] * 2))
    ids = [element.get("id") for element in document.iter() if element.get("id")]
    assert len(ids) == len(set(ids)) == 4
    corners = [
        tuple(map(int, group.get("transform", "")[10:-1].split()))
        for group in document.findall(f"{SVG}g")
        if group.get("transform")
    ]
    _, frame, *_ = document.iter(f"{SVG}svg")
    width, height = int(frame.get("width", 0)), int(frame.get("height", 0))
    (left, right), (upper, lower) = (sorted(set(axis)) for axis in zip(*corners, strict=True))
    assert (left, upper) == (0, 0)
    assert width < right == int(document.get("width", 0)) - width
    assert height < lower < int(document.get("height", 0)) - height


def test_an_operation_with_a_long_label_gets_a_wider_box_than_is_fair_to_others() -> None:
    """Section 3.5, backward halving: a forward over the halves 14 and 15 is as short as a backward over one."""
    equal = Costs(B=Fraction(1))
    assert svg.fair_unit(timeline(one_direction(4, 8), equal)) == svg.FAIR[1]
    assert svg.fair_unit(timeline(one_direction(1, 10**4), equal)) < svg.FAIR[1], "for want of width"
    assert svg.fair_unit(timeline(halved(8), equal)) > svg.FAIR[1]


def halved(micro_batches: int) -> Schedule:
    """One worker: each forward is over both halves of a micro-batch, each backward over one."""
    numbers = range(2 * micro_batches)
    header = Header("x", (), 1, 1, len(numbers), (Pipe("down", (Worker(0),), tuple(map(Micro, numbers))),), halves=True)
    lane = [
        each
        for m in numbers[::2]
        for each in (
            Compute(FORWARD, (Micro(m), Micro(m + 1)), Stage(0)),
            *(Compute(BACKWARD, (Micro(h),), Stage(0)) for h in (m, m + 1)),
        )
    ]
    return Schedule(header, (tuple(lane),))


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_terminal_picture_is_not_continued_below_for_a_few_columns(missing: int) -> None:
    """They are left out where nothing is lost by it: every lane reads as before, with shorter strokes and bubbles."""

    def signs(line: str) -> str:
        return re.sub(r"([─═·])\1*", r"\1", line)

    shown, width = timeline(two_directions(4, 2)), 60 + len("P0 ")
    whole, squeezed = (lanes(terminal.draw(shown, columns)) for columns in (width, width - missing))
    assert {*map(len, whole)} == {60}
    assert {*map(len, squeezed)} == {60 - missing}
    assert list(map(signs, squeezed)) == list(map(signs, whole))


def test_columns_are_left_out_whatever_a_tick_is() -> None:
    """Times that were measured have ticks of nanoseconds, as many as there are in an update."""
    measured = Costs(F=Fraction(1_000_000_003, 10**9), B=Fraction(2_000_000_006, 10**9))
    drawn = lanes(terminal.picture(timeline(two_directions(4), measured), 31 + len("P0 ")))
    assert [*map(len, drawn)] == [31] * 4


@pytest.mark.parametrize(("columns", "parts"), [(24, 2), (17, 2), (15, 3)])
def test_what_is_continued_below_has_parts_of_about_equal_length(columns: int, parts: int) -> None:
    drawn = terminal.picture(timeline(two_directions(4)), columns + len("P0 "))
    lengths = [len(line) - len("P0 ") for line in drawn.plain.split("\n") if line.startswith("P0")]
    assert (len(lengths), sum(lengths)) == (parts, 32)
    assert max(lengths) - min(lengths) <= 2


def test_a_terminal_picture_that_is_much_too_long_is_continued_below() -> None:
    assert terminal.draw(timeline(two_directions(4, 2)), 40).plain.count("\nP0 ") == 2


def test_a_terminal_picture_that_would_show_less_than_half_is_not_drawn() -> None:
    """Every operation of 1,000 micro-batches in 100 columns."""
    text = terminal.picture(timeline(all_then_all(2, 1000)), 100).plain
    assert text.startswith("not drawn: in 100 columns ")
    assert "of 4,000 operations would not be seen;\ntimeline.svg" in text
    assert len(lanes(terminal.picture(timeline(all_then_all(2, 40)), 100))) == 2
