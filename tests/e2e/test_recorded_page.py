"""The page of a recorded run in a browser: choice of an update, from a line of the table to its boxes, a hang."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from chimera_ir.commands.trace_command import trace_command
from tests.e2e.browser import Tab, needs_browser, tab
from tests.unit import traced
from tests.unit.test_recorded_page import TIMEOUT, stopped_run

pytestmark = [needs_browser]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of a run whose updates differ, and of a run that hung."""
    folder = tmp_path_factory.mktemp("recorded")
    made = {}
    for name, directory in {"run": uneven(folder / "run"), "hang": stopped_run(folder / "hang", 24, 23)}.items():
        assert CliRunner().invoke(trace_command, [str(directory)]).exit_code == 0
        made[name] = directory / "view" / "trace.html"
    return made


def uneven(directory: Path) -> Path:
    """A run in which the first forward of update u takes u * 100 µs less."""
    files = [traced.lines(rank) for rank in range(2)]
    for operation in (operation for block in files[0][1:-1] for operation in block["operations"]):
        if operation[1] == "F m0 s0":
            operation[3] -= operation[0] * 100_000
    return traced.write_of(directory, traced.program(), files)


@pytest.fixture
def run(browser: Any, pages: dict[str, Path]) -> Iterator[Tab]:
    with tab(browser) as opened:
        yield opened.open(pages["run"])
        assert opened.mistakes() == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["run", "hang"])
def test_the_page_is_silent_and_accessible_at_every_width(
    browser: Any, pages: dict[str, Path], name: str, dark: bool
) -> None:
    with tab(browser, dark=dark) as opened:
        opened.open(pages[name])
        for width in (400, 1500, 3000):
            opened.page.set_viewport_size({"width": width, "height": 900})
            assert opened.wider() <= 0
        assert opened.inaccessible() == []
        assert opened.mistakes() == []


def test_any_update_can_be_chosen_and_the_selected_operation_says_when_it_was_recorded(run: Tab) -> None:
    run.page.focus("#lanes")
    run.page.keyboard.press("ArrowRight")
    assert "20 µs to 820 µs, took 800 µs" in run.page.inner_text("#details")
    run.page.select_option("select[aria-label='Recorded update']", label="update 1: 7.2 ms")
    assert "20 µs to 1.02 ms, took 1 ms" in run.page.inner_text("#details")
    run.page.click("button[aria-label='Update after']")
    assert "20 µs to 920 µs, took 900 µs" in run.page.inner_text("#details")


def test_a_line_of_the_table_leads_to_its_boxes_and_keeps_names_and_axis(run: Tab) -> None:
    line = run.page.get_by_role("button", name="P1: wait for sends to worker 0")
    box = run.page.locator("#canvas").bounding_box()
    names = {"x": box["x"], "y": box["y"] + 30, "width": 44, "height": box["height"] - 30}
    before = run.page.screenshot(clip=names)
    for _ in range(6):
        run.page.click("text=Closer")
    assert run.page.screenshot(clip=names) == before
    line.click()
    assert line.get_attribute("aria-pressed") == "true"
    assert line.evaluate("button => button === document.activeElement")
    assert run.page.inner_text("#spoken") == "P1, wait for sends to worker 0: 1 span, the longest of 40 µs"
    chosen = run.page.locator("#canvas").screenshot()
    line.click()
    assert line.get_attribute("aria-pressed") == "false"
    assert run.page.locator("#canvas").screenshot() != chosen


def test_where_a_rank_stopped_is_said_and_found_on_its_lane(browser: Any, pages: dict[str, Path]) -> None:
    with tab(browser) as opened:
        page = opened.open(pages["hang"]).page
        headline = "Rank 0 stopped in wait recv m0 s1->s0 of update 3, where it had been for 4 s."
        assert page.inner_text("#mistake").startswith(f"The run ended early\n\n{headline}")
        assert TIMEOUT in page.inner_text("#mistake")
        page.get_by_role("button", name="F m0 s1", exact=True).first.click()
        assert page.inner_text("#details h2") == "F m0 s1 on P1"
