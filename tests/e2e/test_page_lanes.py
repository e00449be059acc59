"""The lanes of a page in a real browser: what a click, a key, fingers and a printer do with them."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import chimera_ir
from chimera_ir import Options
from chimera_ir.page.contents import document, page
from chimera_ir.page.tables import EventTable, MessageTable, PageDocument, ShownMistake, SourceText, SumTable
from tests.e2e.browser import Tab, needs_browser, tab
from tests.pages import DOCS, SMALL

pytestmark = [needs_browser]

CRITICAL, WAITS, DIFFERENCE, SUM = [0xD8, 0x00, 0x1F], [0x00, 0x72, 0xB2], [0xA3, 0x00, 0x6D], [0x8A, 0x7F, 0x72]
"""Colours of a light page: of mistakes and the critical path, of what an operation waits for, of differences, of sums
of gradients.
"""

EXAMPLES = DOCS / "examples"

AXIS = 30
"""Pixels of the axis above the lanes."""

READ = """([left, top, right, bottom]) => {
  const canvas = document.getElementById("canvas");
  const copy = new OffscreenCanvas((right || canvas.width) - left, (bottom || canvas.height) - top);
  const context = copy.getContext("2d", { willReadFrequently: true });
  context.drawImage(canvas, -left, -top);
  return context.getImageData(0, 0, copy.width, copy.height).data;
}"""

COUNT = f"""([red, green, blue]) => {{
  const data = ({READ})([0, 0, 0, 0]);
  let count = 0;
  for (let at = 0; at < data.length; at += 4) {{
    count += data[at] === red && data[at + 1] === green && data[at + 2] === blue;
  }}
  return count;
}}"""


def with_texts(shown: PageDocument) -> PageDocument:
    """The document with a text that has a line for each operation, and one with a line for each kind."""
    words = shown.schedules[0].operations.words
    kinds = [word[0] for word in words]
    scheme = SourceText("mine.chim", "chim", "F(m, s)\nB(m, s)", [1 + "FB".index(kind) for kind in kinds])
    return replace(shown, texts=[scheme, SourceText("lanes.sir", "sir", "\n".join(words), [*range(1, 1 + len(words))])])


def unproven(shown: PageDocument) -> PageDocument:
    """The document of a text whose proof has failed: lanes without times, and a cycle."""
    (schedule,) = shown.schedules
    operations = replace(schedule.operations, event=[-1] * len(schedule.operations.words))
    row = {words: row for row, words in enumerate(operations.words)}
    cycle = [row["B m0 s1"], row["B m0 s0"]]
    arrows = [
        {"from": cycle[0], "to": cycle[1], "words": "gradient of m0"},
        {"from": cycle[1], "to": cycle[0], "words": "the order of a lane"},
    ]
    mistake = ShownMistake("CH302", "these operations wait for one another", "error[CH302]", cycle, arrows, ["no way"])
    lanes = replace(
        schedule,
        operations=operations,
        events=EventTable(),
        messages=MessageTable(),
        sums=SumTable(),
        turn=None,
        memory=[],
        sliders=[],
    )
    return replace(shown, schedules=[lanes], mistake=mistake)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("lanes")
    shown = document(chimera_ir.compile("chimera", D=4, N=4))
    wide = document(chimera_ir.compile("dapple", D=32, N=4))
    refused = replace(unproven(shown), schedules=[])
    measured = Options(**SMALL, against="dapple")
    compared = document(chimera_ir.compile("chimera", options=measured, D=4, N=4))
    documents = {
        "texts": with_texts(shown),
        "mistake": unproven(shown),
        "wide": wide,
        "no lanes": refused,
        "compared": compared,
        "long": document(chimera_ir.compile("dapple", D=2, N=300)),
        "stream": document(chimera_ir.compile("pipedream_2bw", D=4, N=4)),
        "split": document(chimera_ir.compile("zb_h1", options=Options(against="dapple"), D=4, N=8)),
    }
    for name, contents in documents.items():
        (folder / f"{name}.html").write_text(page(contents), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in documents}


def part(opened: Tab, left: int = 0, top: int = 0, right: int = 0, bottom: int = 0) -> str:
    """The pixels of a part of the canvas; 0 on the right and below is its edge."""
    opened.frame()
    return str(opened.page.evaluate(f"part => ({READ})(part).join()", [left, top, right, bottom]))


def pixels_of(opened: Tab, colour: list[int]) -> int:
    opened.frame()
    return int(opened.page.evaluate(COUNT, colour))


def selected(opened: Tab) -> str:
    opened.frame()
    return str(opened.page.locator("#details h2").text_content())


def test_a_click_shows_the_lines_of_an_operation_and_a_click_on_a_line_its_operations(
    pages: Mapping[str, Path], browser: Any
) -> None:
    with tab(browser) as opened:
        opened.open(pages["texts"])
        opened.page.locator("#canvas").click(position={"x": 80, "y": AXIS + 20})
        assert selected(opened) == "F m0 s0 on P0"
        assert opened.page.locator("[role=option][aria-selected=true]").text_content() == "1F(m, s)"
        opened.page.get_by_role("button", name="lanes.sir:1").click()
        assert opened.page.locator("[role=option][aria-selected=true]").text_content() == "1F m0 s0"
        opened.page.locator("#line-4").click()
        assert selected(opened).startswith(str(opened.page.locator("#line-4").text_content())[1:])

        opened.page.locator("#texts select").select_option("mine.chim")
        plain = part(opened, 64, AXIS)
        opened.page.locator("#line-2").click()
        assert selected(opened) == "Line 2 of mine.chim"
        assert "16 operations stand out" in opened.page.locator("#details").text_content()
        assert part(opened, 64, AXIS) != plain, "the others stand back"
        opened.page.locator("#line-2").click()
        assert selected(opened).startswith("B m")
        assert opened.mistakes() == []


def test_texts_are_gone_through_by_keys(pages: Mapping[str, Path], browser: Any) -> None:
    with tab(browser) as opened:
        opened.open(pages["texts"])
        opened.page.locator("#texts select").select_option("lanes.sir")
        pane = opened.page.get_by_role("listbox", name="Lines of the text")
        pane.focus()
        for key in ("ArrowDown", "ArrowDown", "Enter"):
            pane.press(key)
        assert pane.get_attribute("aria-activedescendant") == "line-3"
        assert selected(opened).startswith(str(opened.page.locator("#line-3").text_content())[1:])


def test_what_an_operation_waits_for_is_drawn_and_can_be_followed(pages: Mapping[str, Path], browser: Any) -> None:
    with tab(browser) as opened:
        opened.open(pages["texts"])
        lanes = opened.page.locator("#lanes")
        lanes.focus()
        assert pixels_of(opened, WAITS) == 0
        for key in ("ArrowRight", "ArrowDown"):
            lanes.press(key)
        assert selected(opened) == "F m0 s1 on P1"
        assert pixels_of(opened, WAITS) > 50
        assert "message m0 s0->s1, there at 1" in opened.page.locator("#details").text_content()
        lanes.press("[")
        assert selected(opened) == "F m0 s0 on P0"
        lanes.press("]")
        assert selected(opened) == "F m0 s1 on P1"
        opened.page.locator("#details").get_by_role("button", name="F m0 s0 on P0").click()
        assert selected(opened) == "F m0 s0 on P0"


def test_a_sum_that_takes_time_is_a_bar_below_the_lanes_of_its_members(pages: Mapping[str, Path], browser: Any) -> None:
    with tab(browser) as opened:
        opened.open(pages["texts"])
        launches = pixels_of(opened, SUM)
        opened.page.get_by_label("sum of gradients, as a number").fill("4")
        opened.page.keyboard.press("Tab")
        assert pixels_of(opened, SUM) > 20 * launches > 0
        assert opened.mistakes() == []


def test_idle_time_can_be_selected_and_leads_to_what_it_waits_for(pages: Mapping[str, Path], browser: Any) -> None:
    with tab(browser) as opened:
        opened.open(pages["texts"])
        lanes, details = opened.page.locator("#lanes"), opened.page.locator("#details")
        lanes.focus()
        for key in ("ArrowRight", "ArrowDown", "i"):
            lanes.press(key)

        assert selected(opened) == "P1 is idle"
        assert "is idle" in opened.page.get_by_role("status").text_content()
        assert "It waits for" in details.text_content()
        assert opened.inaccessible() == []
        button = details.locator(".waits").get_by_role("button")
        maker = button.text_content()
        button.click()
        assert selected(opened) == maker
        opened.page.locator("#canvas").click(position={"x": 850, "y": AXIS + 20})
        assert selected(opened) == "P0 is idle"
        opened.page.get_by_label("forward, as a number").fill("2")
        opened.page.keyboard.press("Tab")
        assert selected(opened) == "No operation selected"
        assert opened.mistakes() == []


def test_an_operation_is_found_by_its_words_and_the_next_one_by_the_same(
    pages: Mapping[str, Path], browser: Any
) -> None:
    with tab(browser) as opened:
        opened.open(pages["texts"])
        field = opened.page.get_by_label("Find an operation")
        found = []
        for words in ("b m3", "b m3", "m3 P2", "X m9"):
            field.fill(words)
            field.press("Enter")
            found.append(selected(opened))
        first, second, third, fourth = found
        assert first.startswith("B m3 ")
        assert second.startswith("B m3 ")
        assert first != second
        assert " m3 " in third
        assert third.endswith("on P2")
        assert fourth == third
        assert field.get_attribute("aria-invalid") == "true"
        assert opened.inaccessible() == []
        assert opened.mistakes() == []


def test_many_workers_have_an_overview_and_each_a_column_in_the_table_of_idle_time(
    pages: Mapping[str, Path], browser: Any
) -> None:
    with tab(browser) as opened:
        opened.open(pages["wide"])
        assert opened.page.get_by_role("table", name="Idle time by cause").get_by_role("columnheader").count() == 3 + 32
        fits = "tall.offsetHeight <= canvas.offsetHeight"
        assert not opened.page.evaluate(fits)
        opened.page.get_by_role("button", name="Overview").click()
        opened.frame()
        assert opened.page.evaluate(fits), "all lanes are in the window"
        opened.page.locator("#lanes").press("o")
        opened.frame()
        assert not opened.page.evaluate(fits)
        assert opened.mistakes() == []
        assert opened.wider() <= 0
        opened.open(pages["texts"])
        assert opened.page.get_by_role("button", name="Overview").count() == 0


def test_the_legend_has_the_colour_of_idle_time_where_its_patterns_are_too_small(
    pages: Mapping[str, Path], browser: Any
) -> None:
    with tab(browser) as opened:
        opened.open(pages["long"])
        opened.frame()
        legend = opened.page.locator("#legend")
        assert "idle time, from afar" in legend.text_content()
        for _ in range(12):
            opened.page.locator("#lanes").press("+")
        opened.frame()
        assert "idle time, from afar" not in legend.text_content()
        assert opened.mistakes() == []


def test_a_stream_opens_on_its_warm_up_and_a_turn(pages: Mapping[str, Path], browser: Any) -> None:
    with tab(browser) as opened:
        opened.open(pages["stream"])

        def last() -> float:
            box = opened.page.locator("#canvas").bounding_box()
            opened.page.mouse.move(0, 0)
            opened.page.mouse.move(box["x"] + box["width"] - 12, box["y"] + AXIS + 20)
            opened.frame()
            (start,) = re.findall(r", ([\d.]+) to ", opened.page.locator("#tip").text_content())
            return float(start)

        assert 30 <= last() <= 34, "the idle time of the warm-up is over at 10, and an update takes 12"
        opened.page.get_by_role("button", name="Whole").click()
        assert last() > 100


def test_zooming_keeps_the_names_of_lanes_and_the_axis(pages: Mapping[str, Path], browser: Any) -> None:
    with tab(browser) as opened:
        opened.open(pages["texts"])
        opened.page.locator("#lanes").focus()
        names, axis, lanes = part(opened, 0, AXIS, 62), part(opened, 64, 0, 0, AXIS), part(opened, 64, AXIS)
        for key in ("+", "+", "Shift+ArrowRight"):
            opened.page.keyboard.press(key)
        assert part(opened, 0, AXIS, 62) == names
        zoomed = part(opened, 64, 0, 0, AXIS)
        assert zoomed != axis
        assert len(set(zoomed.split(","))) > 1, "it has times"
        assert part(opened, 64, AXIS) != lanes
        opened.page.keyboard.press("0")
        assert part(opened, 64, AXIS) == lanes


WRITTEN = """(() => {
  const write = CanvasRenderingContext2D.prototype.fillText;
  window.written = [];
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...room) {
    if (y < 30) written.push(text);
    write.call(this, text, x, y, ...room);
  };
})()"""
"""Keeps the texts that are written on the axis."""


def test_the_axis_tells_its_times_apart_at_the_closest_look(pages: Mapping[str, Path], browser: Any) -> None:
    with tab(browser) as opened:
        opened.open(pages["texts"])
        opened.page.evaluate(WRITTEN)
        opened.page.get_by_label("forward, as a number").fill("20000")
        opened.page.keyboard.press("Tab")
        opened.page.locator("#lanes").focus()
        for key in ("End", *["+"] * 40):
            opened.page.keyboard.press(key)
        opened.frame()
        opened.page.evaluate("written = []")
        opened.page.keyboard.press("Escape")
        opened.frame()
        times = opened.page.evaluate("written")
        assert len(times) > 4
        assert len(set(times)) == len(times), times


def test_only_the_first_button_moves_and_only_layers_that_there_are_can_be_shown(
    pages: Mapping[str, Path], browser: Any
) -> None:
    with tab(browser) as opened:
        opened.open(pages["texts"])
        lanes = opened.page.locator("#lanes")
        lanes.focus()
        for key in ("+", "+"):
            lanes.press(key)
        before = part(opened, 64, AXIS)
        for button in ("right", "left"):
            box = lanes.bounding_box()
            opened.page.mouse.move(box["x"] + 300, box["y"] + 60)
            opened.page.mouse.down(button=button)
            opened.page.mouse.move(box["x"] + 200, box["y"] + 60)
            opened.page.mouse.up(button=button)
            opened.page.mouse.move(0, 0)
            assert (part(opened, 64, AXIS) == before) == (button == "right")
        tall = opened.page.evaluate("tall.offsetHeight")
        lanes.press("r")
        assert opened.page.evaluate("tall.offsetHeight") == tall, "nothing was recorded"


def test_what_the_tip_says_is_true_after_the_lanes_have_moved_below_the_pointer(
    pages: Mapping[str, Path], browser: Any
) -> None:
    with tab(browser, height=700) as opened:
        opened.open(pages["texts"])
        tip = opened.page.locator("#tip")
        box = opened.page.locator("#canvas").bounding_box()
        x, y = box["x"] + 700, box["y"] + AXIS + 20

        def told() -> str:
            opened.frame()
            return str(tip.text_content()) if tip.is_visible() else ""

        opened.page.mouse.move(x, y)
        first = told()
        opened.page.keyboard.down("Control")
        opened.page.mouse.wheel(0, -1500)
        opened.page.keyboard.up("Control")
        assert told() == first, "what is under the pointer stays there"
        opened.page.mouse.wheel(900, 0)
        moved = told()
        assert moved not in ("", first)
        opened.page.mouse.move(x + 1, y)
        assert told() == moved
        opened.page.evaluate("document.activeElement.blur()")
        opened.page.mouse.wheel(0, 100)
        opened.page.wait_for_timeout(300)
        scrolled = told()
        opened.page.mouse.move(x + 1, y)
        assert scrolled in ("", told())


def test_a_tap_says_what_it_hits_until_the_next_touch(pages: Mapping[str, Path], browser: Any) -> None:
    with tab(browser, width=400, has_touch=True) as opened:
        opened.open(pages["texts"])
        tip, canvas = opened.page.locator("#tip"), opened.page.locator("#canvas")
        canvas.tap(position={"x": 50, "y": AXIS + 20})
        opened.frame()
        assert "F m0 s0 on P0" in tip.text_content()
        assert tip.is_visible()
        assert selected(opened) == "F m0 s0 on P0"
        canvas.tap(position={"x": 380, "y": AXIS + 20})
        opened.frame()
        assert tip.is_visible()
        assert "P0" in tip.text_content()
        opened.page.locator("h1").tap()
        opened.frame()
        assert not tip.is_visible()
        assert opened.mistakes() == []


def test_two_fingers_zoom_and_one_finger_moves(pages: Mapping[str, Path], browser: Any) -> None:
    with tab(browser, width=400, has_touch=True) as opened:
        opened.open(pages["texts"])
        box = opened.page.locator("#canvas").bounding_box()
        session = opened.page.context.new_cdp_session(opened.page)

        def touch(kind: str, *places: int) -> None:
            points = [{"x": box["x"] + x, "y": box["y"] + 60, "id": number} for number, x in enumerate(places)]
            session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

        whole = part(opened, 64, AXIS)
        touch("touchStart", 150, 250)
        for spread in (20, 40, 60):
            touch("touchMove", 150 - spread, 250 + spread)
        touch("touchEnd")
        closer = part(opened, 64, AXIS)
        assert closer != whole
        touch("touchStart", 200)
        for x in (190, 170, 140):
            touch("touchMove", x)
        touch("touchEnd")
        assert part(opened, 64, AXIS) != closer
        opened.page.get_by_role("button", name="Whole").click()
        opened.page.keyboard.press("Escape")
        assert selected(opened) == "No operation selected", "neither was a tap"
        assert part(opened, 64, AXIS) == whole


def test_a_mistake_is_drawn_on_lanes_without_times(pages: Mapping[str, Path], browser: Any) -> None:
    with tab(browser) as opened:
        opened.open(pages["mistake"])
        alert = opened.page.get_by_role("alert").text_content()
        assert "CH302: these operations wait for one another" in alert
        assert "no way" in alert
        assert pixels_of(opened, CRITICAL) > 500
        opened.page.get_by_role("alert").get_by_role("button", name="B m0 s0 on P0").first.click()
        assert selected(opened) == "B m0 s0 on P0"
        assert "not proven" in opened.page.get_by_role("status").text_content()
        assert opened.inaccessible() == []
        assert opened.mistakes() == []
    with tab(browser) as opened:
        opened.open(pages["no lanes"])
        assert not opened.page.locator("#lanes").is_visible()
        assert opened.inaccessible() == []
        opened.page.emulate_media(color_scheme="dark")
        opened.frame()
        assert opened.mistakes() == []


def test_all_lanes_are_printed_in_light_colours_and_then_the_page_is_as_before(
    pages: Mapping[str, Path], browser: Any
) -> None:
    seen = "[canvas.width, canvas.height, canvas.style.height, document.documentElement.className]"
    with tab(browser, dark=True) as opened:
        opened.open(pages["wide"])
        opened.page.keyboard.press("Tab")
        before = opened.page.evaluate(seen)
        tall = opened.page.evaluate("tall.offsetHeight")
        assert before[1] < tall, "not all of 32 lanes are in the window"
        opened.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        width, _, _, mode = opened.page.evaluate(seen)
        assert (width, mode) == (2000, "")
        heights = opened.page.evaluate("[...document.querySelectorAll('#lanes canvas')].map(({ height }) => height)")
        assert len(heights) > 1, "32 lanes are on several sheets"
        assert max(heights) < 2 * 560
        assert sum(heights) >= 2 * tall - 2
        opened.page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert opened.page.evaluate(seen) == before
        assert opened.page.locator("#lanes canvas").count() == 1
        assert before[3] == "dark"
        assert opened.mistakes() == []


def test_a_second_schedule_is_beside_the_first_and_what_differs_is_marked(
    pages: Mapping[str, Path], browser: Any
) -> None:
    with tab(browser, height=1200) as opened:
        opened.open(pages["compared"])
        figures = opened.page.locator("#figures").text_content()
        assert figures.count("makespan") == 2
        rows = opened.page.get_by_role("table", name="Beside each other").get_by_role("row")
        assert rows.nth(1).get_by_role("cell").count() == 3, "of each schedule, and the difference"
        lanes = opened.page.locator("#lanes")
        lanes.focus()
        plain = pixels_of(opened, DIFFERENCE)
        lanes.press("d")
        marks = pixels_of(opened, DIFFERENCE)
        assert marks > 100
        assert plain < marks / 10, "marks are off at first"
        lanes.press("d")
        lanes.press("ArrowRight")
        assert selected(opened) == "F m0 s0 on P0"
        assert "in dapple D=4 N=4: the same" in opened.page.locator("#details").text_content()
        for _ in range(3):
            lanes.press("ArrowDown")
        assert selected(opened).endswith("on P3")
        assert "dapple D=4 N=4: on P" in opened.page.locator("#details").text_content()
        lanes.press("ArrowDown")
        assert selected(opened).endswith("on P0")
        assert "in chimera D=4 N=4 f=1" in opened.page.locator("#details").text_content(), "the lane of the other one"
        assert opened.inaccessible() == []
        assert opened.mistakes() == []


def test_halves_of_a_backward_are_compared_with_the_whole_one_and_a_sentence_says_so(
    pages: Mapping[str, Path], browser: Any
) -> None:
    with tab(browser, height=1200) as opened:
        opened.open(pages["split"])
        below = opened.page.locator("#below").text_content()
        assert "has input gradient and weight gradient where dapple D=4 N=8 has backward; they are compared" in below
        assert "0 only in the first, 0 only in the second" in below
        lanes = opened.page.locator("#lanes")
        lanes.press("ArrowRight")
        lanes.press("End")
        assert selected(opened) == "W m7 s0 on P0"
        assert "in dapple D=4 N=8: there B m7 s0, starts" in opened.page.locator("#details").text_content()
        assert opened.mistakes() == []


def test_memory_is_shown_in_the_unit_that_is_chosen_where_it_is_known(pages: Mapping[str, Path], browser: Any) -> None:
    with tab(browser, height=1200) as opened:
        opened.open(pages["compared"])
        tall = opened.page.evaluate("tall.offsetHeight")
        assert opened.page.get_by_role("table", name="Memory").count() == 2
        opened.page.get_by_label("Unit of memory").select_option("memory (bytes)")
        opened.frame()
        (table,) = opened.page.get_by_role("table", name="Memory").all()
        assert "GiB" in table.text_content()
        assert "bound" in table.text_content()
        assert opened.page.evaluate("tall.offsetHeight") < tall, "bytes of the second schedule are not known"
        table.get_by_role("button").first.click()
        assert selected(opened) == f"{table.get_by_role('button').first.text_content()} on P0"
        assert opened.mistakes() == []
