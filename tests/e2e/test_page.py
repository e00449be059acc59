"""The page of ``chimera-trace`` in a real browser: it renders, its script runs without an error, its buttons work."""

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from chimera_ir.trace.compare import compare
from chimera_ir.trace.drawing import draw
from chimera_ir.trace.presentation import page
from chimera_ir.trace.trace_files import read
from tests.patience import PATIENCE
from tests.unit import traced

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--window-size=1500,900"),
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium here; tests/browser.sh installs it where it may"),
]

PROBE = """
<script>
addEventListener("load", () => {
  const drawing = document.querySelector("#view svg"), tell = (name, value) => document.body.dataset[name] = value;
  const shown = [...document.querySelectorAll("#view rect:has(title)")].filter((each) => {
    const box = each.getBoundingClientRect();
    return box.width > 0 && box.height > 0 && box.right <= innerWidth;
  });
  tell("shown", shown.length);
  tell("before", drawing.getAttribute("viewBox"));
  document.getElementById("closer").click();
  tell("closer", drawing.getAttribute("viewBox"));
  drawing.dispatchEvent(new WheelEvent("wheel", { deltaY: -1, clientX: 700, clientY: 300, cancelable: true }));
  tell("wheel", drawing.getAttribute("viewBox"));
  document.getElementById("whole").click();
  tell("whole", drawing.getAttribute("viewBox"));
});
addEventListener("error", (event) => console.log("UNCAUGHT " + event.message));
</script>
</body>"""


def browse(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    command = [BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)


def console(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What the page said on its console; an uncaught error is among it."""
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    found = compare(read(traced.write(folder / "t")))
    html = page(found, draw(found))
    (folder / "trace.html").write_text(html)
    (folder / "probed.html").write_text(html.replace("</body>", PROBE))
    (folder / "broken.html").write_text(html.replace("</body>", "<script>nobody();</script></body>"))
    return folder


def test_lanes_and_tables_are_there_and_the_console_is_silent(written: Path) -> None:
    done = browse(written, "--dump-dom", (written / "trace.html").as_uri())
    assert console(done) == []
    assert 'data-ready="yes"' in done.stdout
    lanes = re.findall(r"<text [^>]*>(P\d .*?)</text>", done.stdout)
    assert lanes == ["P0 predicted", "P0 measured", "P1 predicted", "P1 measured"]
    assert len(re.findall(r'<table class="residuals">', done.stdout)) == 3
    assert "<td>wait for a message</td><td>3.000</td><td>4.060</td><td>+1.060</td><td>56.4%</td>" in done.stdout
    assert "<td>worker 1: done; waits for the last worker</td><td>2.000</td><td>2.890</td>" in done.stdout


def test_an_error_of_the_script_would_be_noticed(written: Path) -> None:
    assert any(
        "nobody is not defined" in line
        for line in console(browse(written, "--dump-dom", (written / "broken.html").as_uri()))
    )


def test_boxes_are_on_the_screen_and_the_picture_can_be_looked_at_closely(written: Path) -> None:
    done = browse(written, "--dump-dom", (written / "probed.html").as_uri())
    assert console(done) == []
    told = dict(re.findall(r'data-(\w+)="([^"]*)"', done.stdout))
    assert int(told["shown"]) >= 4 + 4 + 6, "computes twice and the waits"
    before, closer, wheel, whole = (
        [float(n) for n in told[name].split()] for name in ("before", "closer", "wheel", "whole")
    )
    assert closer[2:] == [before[2] / 2, before[3] / 2]
    assert wheel[2] == pytest.approx(closer[2] * 0.8)
    assert whole == before


def test_a_screenshot_has_the_colours_of_the_lanes(written: Path) -> None:
    """A PNG of the size that was asked for, with far more in it than a white page has."""
    target = written / "page.png"
    browse(written, f"--screenshot={target}", (written / "trace.html").as_uri())
    content = target.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", content[16:24]) == (1500, 900)
    assert len(content) > 20_000
