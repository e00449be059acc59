"""Pages of compilations in a real browser: what every page must hold, and what can be done with one."""

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import chimera_ir
from chimera_ir import Options
from chimera_ir.compilation import Compilation
from chimera_ir.errors import TextError
from chimera_ir.page.contents import document, page
from tests.e2e.browser import WIDTHS, Tab, needs_browser, tab
from tests.e2e.pictures import GOLDENS, changed, coarse
from tests.pages import DOCS, SMALL
from tests.repeatable import searching
from tests.sizes import on_workers

pytestmark = [needs_browser]

EXAMPLES = DOCS / "examples"
MEASURED = Options(**SMALL, copies=2)
CASES: Mapping[str, Callable[[], Compilation]] = {
    "two pipes": lambda: chimera_ir.compile("chimera", D=4, N=8),
    "several stages": lambda: chimera_ir.compile("interleaved", **on_workers("interleaved", 4, 8)),
    "pairs": lambda: chimera_ir.compile("dualpipe_v", **on_workers("dualpipe_v", 4, 8)),
    "stream": lambda: chimera_ir.compile("pipedream_2bw", D=4, N=4),
    "two schedules": lambda: chimera_ir.compile("chimera", options=Options(against="dapple"), D=4, N=4),
    "twins": lambda: chimera_ir.compile("chimera", options=Options(against="chimera"), D=4, N=4),
    "seconds": lambda: chimera_ir.compile("chimera", options=MEASURED, D=4, N=8),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    written = {name: folder / f"{name.replace(' ', '_')}.html" for name in CASES}
    for name, path in written.items():
        path.write_text(page(document(CASES[name]())), encoding="utf-8")
    return written


def figure(opened: Tab) -> str:
    """The first figure below the title: the makespan."""
    return str(opened.page.locator("#figures b").first.text_content())


SIGHTS = ((1500, "light"), (400, "dark"), (3000, "light"), (400, "light"), (3000, "dark"), (1500, "dark"))
"""Widths and modes; axe looks at one page in the first three, in a search in all, and at the others in two."""


@pytest.mark.parametrize("name", CASES)
def test_axe_finds_nothing_and_nothing_is_cut_off_in_any_size_and_mode(
    name: str, pages: Mapping[str, Path], browser: Any
) -> None:
    with tab(browser) as opened:
        opened.open(pages[name])
        for number, (width, mode) in enumerate(SIGHTS):
            opened.page.set_viewport_size({"width": width, "height": 900})
            opened.page.emulate_media(color_scheme=mode)
            opened.page.locator("#canvas").hover(position={"x": 90, "y": 66})
            opened.frame()
            assert opened.page.locator("#tip").is_visible()
            assert opened.wider() <= 0
            if number < 2 or (name == "two pipes" and (number == 2 or searching())):
                assert opened.inaccessible() == []
        assert opened.mistakes() == []


@pytest.mark.parametrize("name", ["deadlock.sir", "no_recv.sir", "clash.chim"])
def test_the_page_of_a_text_that_is_not_proven_says_the_mistake(name: str, tmp_path: Path, browser: Any) -> None:
    compilation = chimera_ir.compile(EXAMPLES / name)
    with pytest.raises(TextError) as caught:
        _ = compilation.verified
    path = tmp_path / "page.html"
    path.write_text(compilation.page_of_mistake(caught.value), encoding="utf-8")
    with tab(browser, dark=True) as opened:
        opened.open(path)
        (first, *_) = caught.value.diagnostics
        assert first.code in opened.page.get_by_role("alert").text_content()
        line = compilation.request.source.position(first.span.start).line
        assert opened.page.locator(f"#line-{line}.wrong").is_visible()
        assert opened.inaccessible() == []
        assert opened.wider() <= 0
        assert opened.mistakes() == []


def test_an_error_of_a_script_an_answer_from_elsewhere_and_a_rule_that_is_broken_are_noticed(
    tmp_path: Path, browser: Any
) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(
        "<html><script>performance.mark('ready'); nobody()</script><img src='other.png'>"
        "<p style='width: 9999px'>.</html>"
    )
    with tab(browser) as opened:
        opened.open(broken)
        mistakes = "\n".join(opened.mistakes())
        assert "nobody is not defined" in mistakes
        assert "other.png" in mistakes
        assert opened.wider() > 0
        assert [rule.split(":")[0] for rule in opened.inaccessible()] != []


def test_the_policy_of_a_page_stops_every_other_script_and_every_load(pages: Mapping[str, Path], browser: Any) -> None:
    with tab(browser) as opened:
        opened.open(pages["two pipes"])
        policy = opened.page.locator("meta[http-equiv=Content-Security-Policy]").get_attribute("content")
        assert policy.startswith("default-src 'none';")
        assert "unsafe" not in policy
        tried = opened.page.evaluate(
            """async () => {
              const script = document.createElement("script");
              script.textContent = "window.ran = true";
              document.body.append(script);
              document.body.insertAdjacentHTML("beforeend", "<p onclick='window.ran = true' style='color: red'>");
              document.body.lastElementChild.click();
              const loads = await fetch("https://127.0.0.1/").then(() => true, () => false);
              const evaluated = () => { try { return (0, eval)("true"); } catch { return false; } };
              const evaluates = await new Promise((done) => setTimeout(() => done(evaluated())));
              return { ran: "ran" in window, loads, evaluates, red: document.body.lastElementChild.style.color };
            }"""
        )
        assert tried == {"ran": False, "loads": False, "evaluates": False, "red": ""}


@pytest.mark.parametrize("name", ["two pipes", "two schedules", "seconds"])
def test_the_answers_stand_below_the_title_and_lead_to_what_says_more(
    name: str, pages: Mapping[str, Path], browser: Any
) -> None:
    with tab(browser) as opened:
        opened.open(pages[name])
        links = opened.page.locator("#answers a")
        words = links.all_text_contents()
        assert [text.split(":")[0] for text in words] == ["proven", "speed", "memory", "limit"]
        assert "times as fast as dapple" in words[1]
        notes = opened.page.locator("#said").text_content()
        assert all(text in notes for text in words[1:])
        places = [link.get_attribute("href") for link in links.all()]
        assert places == ["#said", "#compared" if name == "two schedules" else "#said", "#memory", "#idle"]
        for place, link in zip(places, links.all(), strict=True):
            link.click()
            assert opened.page.locator(place).is_visible()
        opened.page.locator("input#cost-F").fill("3")
        assert [link.is_visible() for link in links.all()] == [True, False, False, False]
        assert opened.mistakes() == []


@pytest.mark.parametrize("name", ["two pipes", "pairs", "stream"])
def test_a_slider_gives_the_compilers_makespan(name: str, pages: Mapping[str, Path], browser: Any) -> None:
    """The figures of the page after the forwards' slider has moved are those of ``--cost F=3``."""
    request = CASES[name]().request
    costly = chimera_ir.compile(request.source, options=Options(costs={"F": 3}), **request.settings)
    with tab(browser) as opened:
        opened.open(pages[name])
        before = figure(opened)
        assert float(before) == pytest.approx(float(CASES[name]().report.makespan), rel=1e-3)
        remark = opened.page.get_by_text("It speaks of the costs with which the schedule was compiled")
        assert not remark.is_visible()
        opened.page.locator("input#cost-F").fill("3")
        assert float(figure(opened)) == pytest.approx(float(costly.report.makespan), rel=1e-3)
        assert remark.is_visible()
        opened.page.get_by_role("button", name="Reset").click()
        assert figure(opened) == before
        assert not remark.is_visible()


def test_keys_choose_operations_and_a_live_region_says_them(pages: Mapping[str, Path], browser: Any) -> None:
    with tab(browser) as opened:
        opened.open(pages["two pipes"])
        lanes, spoken = opened.page.locator("#lanes"), opened.page.get_by_role("status")
        for _ in range(30):
            opened.page.keyboard.press("Tab")
            if lanes.evaluate("lanes => lanes === document.activeElement"):
                break
        outline = lanes.evaluate("lanes => getComputedStyle(lanes).outlineStyle")
        assert outline != "none", "the focus is seen"
        for key, words in (("ArrowRight", "F m0 s0"), ("ArrowRight", "F m1 s0"), ("ArrowDown", "P1")):
            opened.page.keyboard.press(key)
            opened.frame()
            assert words in spoken.text_content()
        opened.page.keyboard.press("Escape")
        opened.frame()
        assert "No operation selected" in opened.page.locator("#details").text_content()
        assert opened.mistakes() == []


def test_a_line_of_a_text_and_its_operation_lead_to_each_other(pages: Mapping[str, Path], browser: Any) -> None:
    """From the operation to its line in each text, and from a line of the program to its operation."""
    with tab(browser) as opened:
        opened.open(pages["two pipes"])
        lanes, details = opened.page.locator("#lanes"), opened.page.locator("#details")
        lanes.press("ArrowRight")
        lanes.press("ArrowRight")
        assert "F m1 s0" in details.text_content()
        for button, line in (("chim:", "F(m, s) @"), ("sir:", "F m1 s0"), ("rank_0.py:", "forward(1, ")):
            details.get_by_role("button", name=button).click()
            opened.frame()
            assert line in opened.page.locator("#texts [aria-selected=true]").first.text_content()
        opened.page.get_by_role("combobox", name="Text").select_option(label="schedule.sir")
        opened.frame()
        opened.page.locator("#texts").get_by_text("B m1 s0").first.click()
        opened.frame()
        assert "B m1 s0" in details.text_content()


def test_lines_of_messages_and_sums_lead_to_their_operations(pages: Mapping[str, Path], browser: Any) -> None:
    with tab(browser) as opened:
        opened.open(pages["two pipes"])
        text = opened.page.get_by_role("combobox", name="Text")
        for words, operation in (("wait recv m2 s2->s3", "F m2 s3 on P0"), ("send m0 s0->s1", "F m0 s0 on P0")):
            text.select_option(label="schedule.sir")
            opened.frame()
            opened.page.locator("#texts .line", has_text=words).first.click(timeout=9000)
            opened.frame()
            assert operation in opened.page.locator("#details h2").text_content()
        assert opened.mistakes() == []


def test_a_cost_that_is_none_is_refused_and_what_counts_is_said(pages: Mapping[str, Path], browser: Any) -> None:
    with tab(browser) as opened:
        opened.open(pages["two pipes"])
        field = opened.page.get_by_label("forward, as a number")
        before = figure(opened)
        for wrong in ("-5", ""):
            field.fill(wrong)
            field.blur()
            assert field.get_attribute("aria-invalid") == "true"
            assert opened.page.get_by_text("A cost is a number from 0 on; 1 counts.").is_visible()
            assert figure(opened) == before
        field.fill("2")
        field.blur()
        assert field.get_attribute("aria-invalid") == "false"
        assert figure(opened) != before


def test_two_schedules_stand_side_by_side_with_their_makespans_and_what_differs(
    pages: Mapping[str, Path], browser: Any
) -> None:
    report = CASES["two schedules"]().report
    with tab(browser) as opened:
        opened.open(pages["two schedules"])
        figures = opened.page.locator("#figures").text_content()
        assert "chimera D=4 N=4" in figures
        assert "dapple D=4 N=4" in figures
        spans = [float(text) for text in opened.page.locator("#figures b").all_text_contents()[::2]]
        assert spans == [float(report.makespan), float(report.baseline.makespan)]
        opened.page.locator("#lanes").press("ArrowRight")
        opened.frame()
        assert "in dapple D=4 N=4" in opened.page.locator("#details").text_content()


def test_a_page_of_256_operations_is_below_150_kb(tmp_path: Path) -> None:
    compilation = chimera_ir.compile("chimera", D=8, N=16)
    assert sum(map(len, compilation.verified.schedule.lanes)) == 256
    assert len(page(document(compilation)).encode()) < 150_000


HOSTILE = "</script><script>window.ran = true</script><img src=x onerror='window.ran = true'>\"'&amp;"


def test_hostile_names_and_texts_are_only_text(tmp_path: Path, browser: Any) -> None:
    text = (chimera_ir.compile("dapple", D=2, N=2).request.source.text).splitlines()
    path = tmp_path / f"{re.sub('[/]', '|', HOSTILE)}.chim"
    path.write_text("\n".join([f"# {HOSTILE}", *text]), encoding="utf-8")
    html = tmp_path / "page.html"
    html.write_text(page(document(chimera_ir.compile(path, D=2, N=2))), encoding="utf-8")
    with tab(browser) as opened:
        opened.open(html)
        assert not opened.page.evaluate("'ran' in window")
        assert opened.page.locator("img").count() == 0
        assert opened.mistakes() == []


def test_hostile_texts_with_a_mistake_and_beside_another_are_only_text(tmp_path: Path, browser: Any) -> None:
    name = re.sub("[/]", "|", HOSTILE)
    text = chimera_ir.compile("dapple", D=2, N=2).request.source.text
    wrong, right = tmp_path / f"{name}.chim", tmp_path / f"b{name}.chim"
    mistaken = text.replace("scheme dapple", f"# \u202e{HOSTILE}\nscheme dapple").replace("B(m", "Q(m")
    wrong.write_text(mistaken, encoding="utf-8")
    right.write_text(text, encoding="utf-8")
    commands = ["compile", wrong], ["compile", right, "--against", right], ["compare", right, "gpipe"]
    for number, words in enumerate(commands):
        page_file = tmp_path / f"{number}.html"
        command = [sys.executable, "-m", "chimera_ir", *map(str, words), "D=2", "N=2", "--html", str(page_file)]
        subprocess.run(command, check=False, capture_output=True, cwd=tmp_path)
        with tab(browser) as opened:
            opened.page.goto(page_file.as_uri())
            opened.page.wait_for_load_state()
            assert not opened.page.evaluate("'ran' in window")
            assert opened.page.locator("img").count() == 0
            assert opened.mistakes() == []


def test_a_printed_page_has_the_whole_schedule(pages: Mapping[str, Path], browser: Any) -> None:
    with tab(browser, width=400) as opened:
        opened.open(pages["two pipes"])
        for _ in range(6):
            opened.page.locator("#lanes").press("+")
        printed = opened.page.pdf()
        assert printed.startswith(b"%PDF")
        assert len(printed) > 20_000
        assert opened.mistakes() == []


@pytest.mark.parametrize("width", WIDTHS)
def test_the_lanes_look_as_they_did(width: int, pages: Mapping[str, Path], browser: Any, update_goldens: bool) -> None:
    """Colours of the lanes, cell by cell; in the other mode, or moved, the lanes are far from the same picture."""
    goldens = [GOLDENS / f"two_pipes_{width}_{mode}.txt" for mode in ("light", "dark")]
    with tab(browser, width=width) as opened:
        opened.open(pages["two pipes"])

        def look() -> list[str]:
            opened.frame()
            return coarse(browser, opened.page.locator("#canvas").screenshot())

        light = look()
        opened.page.emulate_media(color_scheme="dark")
        dark = look()
        opened.page.locator("#lanes").press("+")
        moved = look()
    if update_goldens:
        for golden, grid in zip(goldens, (light, dark), strict=True):
            golden.write_text("\n".join([*grid, ""]), encoding="utf-8")
    for golden, grid in zip(goldens, (light, dark), strict=True):
        assert changed(grid, golden.read_text(encoding="utf-8").splitlines()) <= 0.02
    assert changed(light, dark) > 0.5
    assert changed(moved, dark) > 0.1
