"""Whatever a file holds, it is compiled or rejected: in words that can be printed, and never by an exception.

``CHIMERA_SEEDS=1000..9000 pytest tests/property/test_damaged_texts.py`` searches among other seeds.
"""

import os

import pytest

from chimera_ir.answer import produce
from chimera_ir.compilation import Compilation
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.diagnostics.render import MAX_NOTES, MAX_SHOWN, render_all
from chimera_ir.errors import CompileError
from chimera_ir.request import Request
from chimera_ir.source import Source
from tests.property.damaged import damaged

FIRST, LAST = map(int, os.environ.get("CHIMERA_SEEDS", "0..400").split(".."))
TOGETHER = 50
LIMIT = 3_000
"""Operations that a damaged text may have."""


def compiled(seed: int) -> str:
    """What is said of a damaged text; empty if nothing is wrong with it."""
    suffix, data = damaged(seed)
    source = Source(f"damaged{suffix}", data.decode("utf-8", errors="replace").removeprefix("\ufeff"))
    warnings: list[Diagnostic] = []
    try:
        produce(Compilation(Request(source, max_operations=LIMIT), warn=warnings.append), None)
    except CompileError as error:
        return str(error)
    return render_all(warnings, source)


@pytest.mark.parametrize("start", range(FIRST, LAST, TOGETHER))
def test_a_damaged_text_is_compiled_or_rejected(start: int) -> None:
    for seed in range(start, min(start + TOGETHER, LAST)):
        lines = compiled(seed).splitlines()
        assert all(line.isprintable() for line in lines), f"seed {seed}"
        assert len(lines) < 12 * MAX_SHOWN * MAX_NOTES, f"seed {seed}"
        assert all(len(line) < 700 for line in lines), f"seed {seed}"
