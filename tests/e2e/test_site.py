"""The site of the docs: it builds without a warning, loads nothing from elsewhere, and is searched without a server."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.browser import needs_browser, tab
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|iframe)[^>]* src=\"?(?:https?:)?//|<link[^>]* href=\"?(?:https?:)?//|@import")
    pages = {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert len(pages) > 50
    assert [name for name, text in pages.items() if loads.search(text)] == []


def test_a_link_to_a_file_of_the_repository_leads_to_a_page_with_the_file(site: Path) -> None:
    page = (site / "reference" / "language.html").read_text(encoding="utf-8")
    assert '<a href="../files/grammar/scheme.lark/index.html">' in page
    assert "The scheme language." in (site / "files/grammar/scheme.lark/index.html").read_text(encoding="utf-8")


def test_the_docstrings_of_what_is_public_are_on_the_page_about_python(site: Path) -> None:
    page = (site / "reference" / "python.html").read_text(encoding="utf-8")
    for name in ("chimera_ir.compile", "chimera_ir.Options", "chimera_runtime.Pipeline.step"):
        assert f'id="{name}"' in page


@needs_browser
def test_a_site_that_is_opened_as_a_file_can_be_searched(site: Path, browser: Any) -> None:
    with tab(browser) as opened:
        opened.page.goto(f"{(site / 'index.html').as_uri()}?q=deadlock")
        found = opened.page.wait_for_selector(
            ".md-search-result__link[href*='explanation/proofs.html']", state="attached"
        )
        assert found is not None
        uncaught = [line for line in opened.said if line.startswith("error: ") and "load resource" not in line]
        assert uncaught == []
