"""Screenshots as coarse grids of colours, which fonts and releases of a browser hardly change.

A golden has a line for each row of cells; three hexadecimal digits are the mean red, green and blue of a cell.
"""

from base64 import b64encode
from pathlib import Path
from typing import Any

from tests.e2e.browser import tab

GOLDENS = Path(__file__).parent / "pictures"
COLUMNS = 48
NEAR = 2
"""By how many of 15 steps a colour may differ in a cell that counts as equal."""

COARSE = """async ([picture, columns]) => {
  const data = Uint8Array.from(atob(picture), (letter) => letter.charCodeAt(0));
  const whole = await createImageBitmap(new Blob([data]));
  const side = whole.width / columns;
  const rows = Math.round(whole.height / side);
  const canvas = new OffscreenCanvas(columns, rows);
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(whole, 0, 0, columns, rows);
  const pixels = context.getImageData(0, 0, columns, rows).data;
  return { rows, pixels: [...pixels] };
}"""


def coarse(browser: Any, picture: bytes) -> list[str]:
    """The grid of a PNG picture, by the browser: its rows from the top, each of ``COLUMNS`` cells."""
    with tab(browser) as empty:
        grid = empty.page.evaluate(COARSE, [b64encode(picture).decode(), COLUMNS])
    digits = [f"{round(value / 17):x}" for place, value in enumerate(grid["pixels"]) if place % 4 < 3]
    lines = ["".join(digits[start : start + 3 * COLUMNS]) for start in range(0, len(digits), 3 * COLUMNS)]
    return [" ".join(line[cell : cell + 3] for cell in range(0, len(line), 3)) for line in lines]


def changed(grid: list[str], golden: list[str]) -> float:
    """The share of cells whose colours are not near; 1 if the grids have other sizes."""
    if len(grid) != len(golden):
        return 1.0
    cells = [pair for rows in zip(grid, golden, strict=True) for pair in zip(*map(str.split, rows), strict=True)]
    apart = (any(abs(int(a, 16) - int(b, 16)) > NEAR for a, b in zip(one, other, strict=True)) for one, other in cells)
    return sum(apart) / len(cells)
