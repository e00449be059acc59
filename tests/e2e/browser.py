"""One headless browser for all tests of pages, and what every page has to hold in it."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"),
    "--font-render-hinting=none",
)

WIDTHS = (400, 1500, 3000)
"""Widths in pixels at which a page is looked at: of a phone, of a laptop, of a wall."""


READY = """(patience) => new Promise((done, fail) => {
  const seen = (marks) => marks.getEntriesByName("ready").length > 0 && done();
  new PerformanceObserver(seen).observe({ type: "mark", buffered: true });
  setTimeout(() => fail(new Error("the page is not ready")), patience);
})"""
"""Ends once a page has made the mark "ready". The policy of a page forbids what playwright would poll with."""


def missing() -> str:
    """Packages and programs that the tests of pages need and that are missing, as text; empty if none is."""
    if CHROMIUM is None:
        return "no Chromium here; tests/browser.sh installs it where it may"
    if not all(map(find_spec, ("playwright", "axe_playwright_python"))):
        return "no playwright here; it is among the extra 'dev'"
    return ""


needs_browser = pytest.mark.skipif(bool(missing()), reason=missing())
"""Mark of tests that open a page; the fixture `browser` is theirs."""


@contextmanager
def headless() -> Iterator[Any]:
    """Starts the browser, which ends with the context."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=[*FLAGS])
        yield browser
        IDLE.clear()
        browser.close()


class Tab:
    """A page in a tab of its own, with all that it said: messages on the console, errors, and what it asked for.

    ``page`` is playwright's page. A page that is ready has made the mark "ready".
    """

    def __init__(self, page: Any) -> None:
        self.page = page
        self.said: list[str] = []
        self.asked_for: list[str] = []
        page.set_default_timeout(PATIENCE * 1000)
        self._heard: dict[str, Callable[[Any], None]] = {
            "console": lambda message: self.said.append(f"{message.type}: {message.text}"),
            "pageerror": lambda error: self.said.append(f"error: {error}"),
            "request": lambda request: self.asked_for.append(request.url),
        }
        for event, hear in self._heard.items():
            page.on(event, hear)

    def open(self, path: Path) -> "Tab":
        """Opens a file and waits until it has drawn for the first time."""
        self.page.goto(path.as_uri())
        self.page.evaluate(READY, PATIENCE * 1000)
        return self

    def leave(self) -> None:
        """Hears no more of the page, and empties it."""
        for event, hear in self._heard.items():
            self.page.remove_listener(event, hear)
        self.page.mouse.move(0, 0)
        self.page.goto("about:blank")

    def frame(self) -> None:
        """Waits until all that has changed is drawn."""
        self.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def mistakes(self) -> list[str]:
        """Lines on the console, and requests for anything but the page itself: a page must make none."""
        foreign = [url for url in self.asked_for[1:] if not url.startswith(("data:", "blob:", "about:"))]
        return [*self.said, *(f"asks for {url}" for url in foreign)]

    def inaccessible(self) -> list[str]:
        """Rules of axe-core that the page breaks, each with the elements that break it."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page).response["violations"]
        return [f"{rule['id']}: {[node['html'][:120] for node in rule['nodes']]}" for rule in found]

    def wider(self) -> int:
        """By how many pixels the page is wider than its window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - innerWidth"))


IDLE: dict[tuple[Any, frozenset[tuple[str, Any]]], list[Any]] = {}
"""Pages of a browser that no test has now, by what they were opened with: a new one costs more than most tests."""


@contextmanager
def tab(browser: Any, width: int = 1500, height: int = 900, dark: bool = False, **how: Any) -> Iterator[Tab]:
    """An empty tab of this size and mode; ``how`` goes to playwright's ``new_context``.

    Afterwards another test has its page, empty again; the page of a test that failed is closed.
    """
    idle = IDLE.setdefault((browser, frozenset(how.items())), [])
    page = idle.pop() if idle else browser.new_context(reduced_motion="reduce", **how).new_page()
    try:
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme="dark" if dark else "light")
        opened = Tab(page)
        yield opened
        opened.leave()
    except BaseException:
        page.context.close()
        raise
    idle.append(page)
