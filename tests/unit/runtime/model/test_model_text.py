"""What can be told of a model file by its text: mistakes that are certain, and nothing else."""

from pathlib import Path

import pytest

from chimera_runtime.errors import Misuse
from chimera_runtime.model.model_text import require_plausible

COMPLETE = """
from elsewhere import layers, loss
optimizer = None
if True:
    def dataset(): ...
"""
LACKING = "model.py lacks the functions build_stage(stage: int, num_stages: int) -> torch.nn.Module, or in its place"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def loss(a, b)\n    pass\n", "model.py:1: SyntaxError: expected ':'\n  def loss(a, b)\n                ^"),
        ("def loss():\nreturn 1", "model.py:2: IndentationError: expected an indented block"),
        ("x = 1\nreturn x", "model.py:2: SyntaxError: 'return' outside function"),
        ("", LACKING),
        ("loss\0", "model.py: SyntaxError: source code string cannot contain null bytes"),
        ("def main():\n    loss = layers\n\nclass A:\n    def dataset(self): ...\n", LACKING),
        (COMPLETE.replace("dataset", "data"), "model.py lacks the function dataset() -> torch.utils.data.Dataset"),
        (COMPLETE.replace("layers", "blocks"), "model.py lacks the function build_stage("),
    ],
)
def test_a_text_that_is_certain_to_fail_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "model.py").write_text(text)
    with pytest.raises(Misuse) as refused:
        require_plausible(tmp_path / "model.py")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        COMPLETE,
        "from elsewhere import *",
        "exec('loss = dataset = layers = optimizer = print')",
        "import sys\nsys.modules[__name__] = 1",
        "globals().update(other)",
        "def __getattr__(name): ...",
        "def define():\n    global loss, dataset, layers, optimizer\n    loss = dataset = layers = optimizer = 1",
        "for loss, dataset in pairs:\n    with a as layers, b as optimizer: ...",
        "loss = '\\d'; import dataset, layers.optimizer as optimizer, a as layers",
    ],
)
def test_a_text_that_may_define_its_functions_is_left_to_the_ranks(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.py").write_text(text)
    require_plausible(tmp_path / "model.py")


def test_what_is_no_python_file_is_left_to_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "model.txt").write_text("def")
    require_plausible(tmp_path / "model.txt")
    require_plausible(tmp_path / "none.py")
