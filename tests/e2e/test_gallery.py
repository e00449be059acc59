"""The page of `chimera compare` in a real browser."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from chimera_ir import library
from chimera_ir.commands.compare_command import compare_command
from tests.e2e.browser import Tab, needs_browser, tab
from tests.repeatable import also
from tests.unit.command import TINY

pytestmark = [needs_browser]

HOSTILE = "</style><script>document.title = 'taken'</script><img src=x onerror=document.title='taken'>"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All library schemes, and one whose words are not meant well."""
    folder = tmp_path_factory.mktemp("gallery")
    (folder / "tiny.chim").write_text(f"# {HOSTILE}\n{TINY}")
    (folder / "library.toml").write_text(f"[use]\ntiny = '''{HOSTILE}'''\n")
    target = folder / "gallery.html"
    words = ["dapple", "tiny", *(name for name in library.names() if name != "dapple"), "D=2", "N=4"]
    done = CliRunner().invoke(compare_command, [*words, "--library", str(folder), "--html", str(target)])
    assert (done.exit_code, done.stdout.endswith("gallery.html: open it in a browser\n")) == (0, True)
    return target


def opened(page: Path, opened_tab: Tab) -> Tab:
    opened_tab.page.goto(page.as_uri())
    return opened_tab


SIGHTS = ((1500, False), (400, True), (3000, False), (3000, True), (400, False), (1500, True))
"""Widths, and whether it is dark; axe looks at the page in the first three, in a search in all."""


def test_the_page_is_accessible_silent_and_as_wide_as_its_window(browser: Any, page: Path) -> None:
    with tab(browser) as found:
        opened(page, found)
        looks = also(SIGHTS[:3], SIGHTS[3:])
        for width, dark in SIGHTS:
            found.page.set_viewport_size({"width": width, "height": 900})
            found.page.emulate_media(color_scheme="dark" if dark else "light")
            assert found.wider() <= 0
            if (width, dark) in looks:
                assert found.inaccessible() == []
        assert found.mistakes() == []


def test_words_of_a_scheme_are_words_on_the_page(browser: Any, page: Path) -> None:
    with tab(browser) as found:
        opened(page, found)
        assert found.page.title() == "Schedules side by side"
        assert found.page.locator("script, img").count() == 0
        assert found.page.get_by_text(HOSTILE).count() == 2


@pytest.mark.parametrize("width", [400, 1500])
def test_the_ends_of_most_pictures_are_on_the_page_and_all_move_together(browser: Any, page: Path, width: int) -> None:
    places = "svgs => svgs.map((svg) => [svg.getBoundingClientRect(), svg.getAttribute('width')])"
    edges = f"svgs => ({places})(svgs).map(([box, whole]) => [box.left, box.right, box.width / whole])"
    with tab(browser, width=width) as found:
        opened(page, found)
        pictures, region = found.page.locator("section svg"), found.page.get_by_role("region", name="Pictures")
        fitted = pictures.evaluate_all(edges)
        assert sum(right <= width for _, right, _ in fitted) > 0.8 * len(fitted)
        assert max(factor for *_, factor in fitted) == pytest.approx(min(factor for *_, factor in fitted), rel=0.01)
        found.page.get_by_label("Pictures as wide as the page").uncheck()
        whole = pictures.evaluate_all(edges)
        assert {round(factor, 3) for *_, factor in whole} == {1}
        region.evaluate("region => region.scrollLeft = 150")
        assert [left for left, *_ in pictures.evaluate_all(edges)] == pytest.approx([left - 150 for left, *_ in whole])
        assert found.page.locator("h2").first.bounding_box()["x"] >= 0
        assert found.mistakes() == []


def test_pictures_are_on_one_scale_and_a_row_of_the_table_leads_to_its_picture(browser: Any, page: Path) -> None:
    with tab(browser) as found:
        opened(page, found)
        axis = "svg => svg.querySelector('path[d*=\"H\"]').getBBox().width"
        widths = {}
        for section in found.page.locator("section:has(svg)").all():
            name = section.locator("h2").inner_text().split()[0]
            widths[name] = section.locator("svg").evaluate(axis)
        times = {
            row.locator("th").inner_text(): float(row.locator("td").nth(1).inner_text())
            for row in found.page.locator("tbody tr").all()
            if "refused" not in row.inner_text()
        }
        assert times["gems"] / times["dapple"] == pytest.approx(widths["gems"] / widths["dapple"], rel=0.01)
        found.page.get_by_role("link", name="zb_v").click()
        assert found.page.url.endswith(f"#{found.page.locator('section', has_text='zb_v P=').get_attribute('id')}")
