"""Output of a notebook in a real browser: a page in a frame, and tables."""

from pathlib import Path
from typing import Any

import pytest

import chimera_ir
from chimera_ir.source import Source
from tests.e2e.browser import READY, needs_browser, tab
from tests.patience import PATIENCE
from tests.unit.command import TINY

pytestmark = [needs_browser]

HOSTILE = "<img src=x onerror=parent.document.title='taken'>"

NOTEBOOK = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>A notebook</title></head><body><main><h1>A notebook</h1>
{}
</main></body></html>
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A notebook with a compilation, its report and a sweep, all of a file with a name that is not meant well."""
    source = Source(f"{HOSTILE}.chim", TINY)
    shown = [chimera_ir.compile(source, D=2), chimera_ir.compile(source).report, chimera_ir.sweep([source, "dapple"])]
    target = tmp_path_factory.mktemp("notebook") / "notebook.html"
    target.write_text(NOTEBOOK.format("\n".join(each._repr_html_() for each in shown)))
    return target


def test_the_page_draws_in_its_frame_which_cannot_reach_the_notebook(browser: Any, notebook: Path) -> None:
    with tab(browser) as found:
        found.page.goto(notebook.as_uri())
        _, frame = found.page.frames
        frame.evaluate(READY, PATIENCE * 1000)
        assert frame.title() == "tiny D=2"
        assert frame.evaluate("origin") == "null"
        assert frame.locator("canvas").count() > 0
        assert found.page.title() == "A notebook"
        assert found.mistakes() == []


def test_a_notebook_with_it_is_accessible(browser: Any, notebook: Path) -> None:
    with tab(browser) as found:
        found.page.goto(notebook.as_uri())
        assert found.inaccessible() == []
        assert found.page.locator("table").count() == 2
        assert found.page.locator("img").count() == 0
