"""How long a page takes to make and to open, how large it is, and how smoothly it moves.

    .venv/bin/python -m benchmarks.page [--sizes 8,16 16,128 32,1024] [--scheme chimera]

Each size is D,N. Times in Python are of the processor; compiling ends with scripts and report. The browser is the
headless one of the tests, without a GPU. It is ready once the page has drawn for the first time; "thread" is the
processor time of its main thread until then. While the page moves by a little in every frame, the frames are counted
that come later than after one and a half sixtieths of a second. The last column is how long the page takes to draw
again once a slider has moved.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import chimera_ir
from benchmarks.tables import table
from chimera_ir.page.contents import document, page
from tests.e2e.browser import headless, tab

SIZES = ("8,16", "16,128", "32,1024")
LATE = 1.5 / 60

MOVES = """async ([zooms, frames]) => {
  const lanes = document.getElementById("lanes");
  const press = (key, shiftKey = false) => lanes.dispatchEvent(new KeyboardEvent("keydown", { key, shiftKey }));
  const frame = () => new Promise(requestAnimationFrame);
  press("0");
  for (let zoom = 0; zoom < zooms; zoom++) press("+");
  await frame();
  const times = [];
  for (let number = 0; number < frames; number++) {
    press(number % 40 < 20 ? "ArrowRight" : "ArrowLeft", true);
    times.push(await frame());
  }
  return times;
}"""
"""Moves the lanes after so many zooms; the time of every frame, in milliseconds."""

SLIDES = """async () => {
  const slider = document.querySelector("input[type=range]");
  const frame = () => new Promise(requestAnimationFrame);
  const times = [];
  for (let number = 0; number < 9; number++) {
    await frame();
    const begin = performance.now();
    slider.value = String(1 + number / 4);
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    await frame();
    await frame();
    times.push(performance.now() - begin);
  }
  return times;
}"""
"""Moves the first slider; milliseconds until the frame after the next one."""


@contextmanager
def measured(seconds: list[float]) -> Iterator[None]:
    """Adds the processor's seconds of a block."""
    begin = time.process_time()
    yield
    seconds.append(time.process_time() - begin)


def late(times: list[float]) -> str:
    """The share of frames that come late, and the median of all."""
    lengths = [(after - before) / 1000 for before, after in pairwise(times)]
    share = sum(length > LATE for length in lengths) / len(lengths)
    return f"{1000 * statistics.median(lengths):.0f} ({share:.0%})"


def row(scheme: str, size: str, browser: Any, folder: Path) -> list[str]:
    """The row of one size."""
    workers, micro_batches = map(int, size.split(","))
    compilation = chimera_ir.compile(scheme, D=workers, N=micro_batches)
    compiling: list[float] = []
    making: list[float] = []
    with measured(compiling):
        operations = sum(map(len, compilation.verified.schedule.lanes))
        _ = compilation.report, compilation.scripts, compilation.summary
    with measured(making):
        html = page(document(compilation))
    path = folder / "page.html"
    path.write_text(html, encoding="utf-8")
    with tab(browser) as opened:
        session = opened.page.context.new_cdp_session(opened.page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        opened.open(path)
        metrics = {metric["name"]: metric["value"] for metric in session.send("Performance.getMetrics")["metrics"]}
        ready = opened.page.evaluate("performance.getEntriesByName('ready')[0].startTime")
        whole, close = (late(opened.page.evaluate(MOVES, [zooms, 120])) for zooms in (0, 8))
        slides = statistics.median(opened.page.evaluate(SLIDES))
    return [
        f"{operations:,}",
        *(f"{sum(seconds):.2f}" for seconds in (compiling, making)),
        f"{len(html.encode()) / 1000:,.0f}",
        f"{ready:.0f}",
        f"{1000 * metrics['TaskDuration']:.0f}",
        whole,
        close,
        f"{slides:.0f}",
    ]


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description="How long a page takes to make and to open.")
    parser.add_argument("--scheme", default="chimera", help="a scheme with the parameters D and N")
    parser.add_argument("--sizes", nargs="*", default=SIZES, help="D,N of each row")
    arguments = parser.parse_args()
    heads = [
        "operations",
        "compiling, CPU s",
        "page, CPU s",
        "kB",
        "ready, ms",
        "thread, ms",
        "frame, ms (late)",
        "closer",
        "slider, ms",
    ]
    with tempfile.TemporaryDirectory() as folder, headless() as browser:
        print(table(heads, [row(arguments.scheme, size, browser, Path(folder)) for size in arguments.sizes]))


if __name__ == "__main__":
    main()
