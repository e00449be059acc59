"""Node.js, which runs the scripts of a page without a browser."""

import json
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "templates" / "page"


def _node() -> str | None:
    """The program: that of this machine, or the one in the package of playwright."""
    if (found := shutil.which("node")) or find_spec("playwright") is None:
        return found
    from playwright._impl._driver import compute_driver_executable

    return str(compute_driver_executable()[0])


NODE = _node()
needs_node = pytest.mark.skipif(NODE is None, reason="no node here, and no playwright, which has one")


def calls(script: Path, folder: Path, cases: list[Any]) -> list[Any]:
    """The results of a script for ``cases``; it finds the scripts of the page in ``folder``."""
    for path in (*SCRIPTS.glob("*.js"), script):
        shutil.copy(path, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [NODE, folder / script.name, folder, folder / "cases.json", folder / "results.json"]
    subprocess.run(command, check=True, timeout=PATIENCE)
    return json.loads((folder / "results.json").read_text())
