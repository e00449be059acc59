"""``--backend`` and ``--backend-module``: mistakes are one message each."""

from pathlib import Path

import pytest
import torch.distributed as dist

from chimera_runtime.blame import ModelError
from chimera_runtime.errors import MISUSED, Misuse
from chimera_runtime.tools.launch import register_backend

MADE = """
import torch.distributed as dist

dist.Backend.register_backend("made_up", lambda *_: None, devices=["cpu"])
"""


def module(folder: Path, text: str) -> Path:
    file = folder / "made.py"
    file.write_text(text)
    return file


def test_a_file_registers_a_backend(tmp_path: Path) -> None:
    assert "made_up" not in dist.Backend.backend_list
    register_backend("made_up", module(tmp_path, MADE))
    assert "made_up" in dist.Backend.backend_list
    assert dist.Backend.backend_capability["made_up"] == ["cpu"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("absent.py", None, "absent.py: there is no such file"),
        ("made.txt", "", r"not a Python file \(its name must end in .py\)"),
        ("made.py", "", "registers no backend of that name; it has to call torch.distributed.Backend.register_backend"),
    ],
)
def test_a_file_that_registers_none_is_refused(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises(Misuse, match=message):
        register_backend("nowhere", file)


def test_a_file_that_fails_is_blamed(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        register_backend("nowhere", module(tmp_path, "raise ValueError('not today')"))
    assert caught.value.status == MISUSED
    assert isinstance(caught.value.__cause__, ValueError)
