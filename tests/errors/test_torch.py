"""Each mistake of a schedule in torch's text with the message it gets: ``torch/<mistake>.csv`` beside its ``.err``."""

from pathlib import Path

import pytest

from chimera_ir.compilation import Compilation
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.errors import TextError
from chimera_ir.request import Request
from chimera_ir.source import Source
from tests.errors.goldens import compare, inputs, read

MISTAKES = inputs(Path(__file__).parent / "torch", "*.csv")


def diagnostics(source: Source) -> tuple[Diagnostic, ...]:
    with pytest.raises(TextError) as rejected:
        _ = Compilation(Request(source)).verified
    return rejected.value.diagnostics


@pytest.mark.parametrize("path", MISTAKES, ids=lambda path: path.stem)
def test_a_mistake_gets_its_message(path: Path, update_goldens: bool) -> None:
    source = read(path)
    compare(path, diagnostics(source), source, update_goldens)
