"""Bytecode of the runtime beside each copy of it: hundreds of ranks need not compile the same text again.

It belongs to the text that it was made from, not to a date (PEP 552): a module that a test has changed is compiled
where it is imported.
"""

import py_compile
from collections.abc import Mapping
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path
from tempfile import TemporaryDirectory

RUNTIME = Path(__file__).resolve().parents[2] / "chimera_runtime"


@cache
def _bytecode() -> Mapping[str, bytes]:
    """The bytecode of every module of the runtime, by the path that the module has in an output directory."""
    made = {}
    with TemporaryDirectory() as scratch:
        file = str(Path(scratch) / "module.pyc")
        for source in sorted(RUNTIME.rglob("*.py")):
            py_compile.compile(
                str(source), file, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH
            )
            made[source.relative_to(RUNTIME.parent).as_posix()] = Path(file).read_bytes()
    return made


def add_bytecode(directory: Path) -> None:
    """Puts the bytecode of the runtime into an output directory, where Python looks for it."""
    for name, bytecode in _bytecode().items():
        file = Path(cache_from_source(str(directory / name)))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytecode)
