"""The page: picture and tables in one file that needs nothing else."""

from chimera_ir.picture.sheet import Drawing
from chimera_ir.picture.svg import written
from chimera_ir.trace.compare import Comparison
from chimera_ir.trace.drawing import summary
from chimera_ir.trace.show import basis, blocks, bubbles, ground


def page(comparison: Comparison, drawing: str) -> str:
    """The HTML around a drawing that is an SVG document."""
    return written(
        "trace.html.j2",
        title=comparison.about.scheme,
        summary=summary(comparison),
        basis=basis(comparison),
        ground=ground(comparison),
        drawing=Drawing(drawing),
        blocks=blocks(comparison),
        bubbles=bubbles(comparison),
    )
