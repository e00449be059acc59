"""The example of a model for long contexts with fewer layers and a shorter context: otherwise as it is."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))

import long_context
from long_context import dataset, layers, loss, optimizer  # noqa: F401

long_context.LAYERS, long_context.CONTEXT = 2, 64
