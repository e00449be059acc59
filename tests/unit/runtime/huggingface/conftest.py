"""A program for the layers of a model of transformers."""

from pathlib import Path

import pytest

import chimera_ir


@pytest.fixture(scope="session")
def four_stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four stages on one worker, four micro-batches."""
    directory = tmp_path_factory.mktemp("transformers") / "out"
    chimera_ir.compile("interleaved", P=1, v=4, N=4).write(directory)
    return directory
