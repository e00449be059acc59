"""The example for torchtitan: its debug Llama under compiled schedules, with what its trainer calls.

The trainer as a whole does not run here, as it demands a GPU.
"""

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.ranks import compiled, torchrun_script

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "torchtitan" / "debug_llama.py"
INSTALLED = Path(sys.prefix) / "torchtitan"
"""Where `make torchtitan` puts it, apart from what other tests import."""

pytestmark = [
    pytest.mark.skipif(not (INSTALLED.is_dir() or find_spec("torchtitan")), reason="needs torchtitan: make torchtitan")
]


def test_the_debug_llama_of_torchtitan_has_the_losses_and_gradients_of_the_model_in_one_piece(tmp_path: Path) -> None:
    sizes = {"dapple": {"D": 4}, "chimera": {"D": 4}, "dualpipe_v": {"P": 4}}
    directories = [str(compiled(tmp_path, scheme, **size, N=8)) for scheme, size in sizes.items()]
    path = os.pathsep.join(map(str, (EXAMPLE.parent, INSTALLED, ROOT)))
    done = torchrun_script(EXAMPLE, 4, *directories, folder=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    for directory in directories:
        off = re.findall(rf"^rank \d: {re.escape(directory)}: off by (\S+)$", done.stdout, re.M)
        assert len(off) == 4, done.stdout
        assert max(map(float, off)) < 1e-5
