"""Pictures of results, for the page of the documentation; they need matplotlib: pip install -e '.[bench]'."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from paired import Middle

INK, OURS = "#444444", "#2a6fb0"
STYLE = {
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "chimera_ir",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


@dataclass(frozen=True)
class Panel:
    """One ratio of all rows, with the value it is held against."""

    title: str
    reference: float


@dataclass(frozen=True)
class Row:
    """What was measured in one setting: a ratio for each panel."""

    label: str
    ratios: tuple[Middle, ...]


def ready() -> None:
    """Ends a command that could not draw, before it has measured anything."""
    if find_spec("matplotlib") is None:
        raise SystemExit("pictures need matplotlib: pip install -e '.[bench]'")


def ratios(path: Path, panels: Sequence[Panel], rows: Sequence[Row]) -> None:
    """Draws every ratio as a dot with its interval, a panel beside the other, a row per setting."""
    from matplotlib import pyplot, rc_context

    with rc_context(STYLE):
        size = (3.2 + 2.8 * len(panels), 0.6 + 0.24 * len(rows))
        figure, axes = pyplot.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained")
        heights = range(len(rows), 0, -1)
        for place, (axis, panel) in enumerate(zip(axes[0], panels, strict=True)):
            found = [row.ratios[place] for row in rows]
            values = [each.value for each in found]
            spread = [[each.value - each.low for each in found], [each.high - each.value for each in found]]
            axis.axvline(panel.reference, color=INK, linewidth=0.8, linestyle="--")
            axis.errorbar(values, heights, xerr=spread, fmt="o", color=OURS, markersize=3.5, linewidth=1.2)
            axis.set_title(panel.title, fontsize=9)
            axis.set_yticks(list(heights), [row.label for row in rows])
            axis.set_ylim(0.4, len(rows) + 0.6)
            axis.grid(axis="x", linewidth=0.3)
            axis.tick_params(axis="y", length=0)
        _save(figure, path)


def _save(figure: object, path: Path) -> None:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    pyplot.figure(figure)
    pyplot.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    path.write_text("\n".join(line.rstrip() for line in path.read_text(encoding="utf-8").splitlines()) + "\n")
