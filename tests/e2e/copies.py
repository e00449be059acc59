"""Copies of the runtime in output directories, and whether their files are those of the project."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

RUNTIME = Path(__file__).resolve().parents[2] / "chimera_runtime"

States = Mapping[str, tuple[int, int]]
"""Size and date of each module of a package, by its path in the package."""


def states(package: Path) -> States:
    """The state of each module of a package."""
    found: dict[str, tuple[int, int]] = {}
    folders = [""]
    for folder in folders:
        for entry in os.scandir(os.path.join(package, folder)):
            if entry.is_dir():
                if entry.name != "__pycache__":
                    folders.append(f"{folder}{entry.name}/")
            elif entry.name.endswith(".py"):
                state = entry.stat()
                found[folder + entry.name] = state.st_size, state.st_mtime_ns
    return found


def date_as_originals(output: Path) -> None:
    """Gives the files of an output directory's copy, which has just been made, the dates of the project's own.

    A file that a test writes later has another date.
    """
    for name, (_, date) in states(RUNTIME).items():
        os.utime(output / RUNTIME.name / name, ns=(date, date))


def add_bytecode(output: Path) -> None:
    """Gives an output directory's copy the bytecode of the project's own modules, before some of them are changed.

    A rank imports such a copy anew. It compiles what was changed, and not all that is beside it.
    """
    shutil.copytree(RUNTIME, output / RUNTIME.name, dirs_exist_ok=True)


def is_copy(package: Path, originals: States) -> bool:
    """Whether a package has the modules of the project's own. It reads those whose dates differ."""
    found = states(package)
    return found.keys() == originals.keys() and all(
        found[name] == state or (package / name).read_bytes() == (RUNTIME / name).read_bytes()
        for name, state in originals.items()
    )
