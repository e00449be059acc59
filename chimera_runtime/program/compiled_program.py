"""The directory that `chimera compile` wrote: program.json with the facts, and the script of each worker.

Reading it does not import torch: `chimera run` does so before it starts torchrun.
"""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from chimera_runtime.errors import start as mistakes
from chimera_runtime.program.job import Feed, Job
from chimera_runtime.program.rank_facts import RankFacts, facts_of_rank
from chimera_runtime.values.files import require_regular

INTERFACE = 5
"""Number of the interface between scripts and this package; it grows when older scripts would not run."""

FILE = "program.json"

LARGEST = 2**30


class RankScript(Protocol):
    """A ``rank_<k>.py``: the operations of a worker, as functions of its `Lane`.

    It has ``update`` if every update ends before the next one begins, else ``turn``; ``evaluate`` runs forwards alone.
    ``PROGRAM`` is the digest of the program; ``INTERFACE`` is the interface of this package that the script needs.
    """

    INTERFACE: int
    PROGRAM: str
    update: Callable[[Any], None]
    turn: Callable[[Any, int], None]
    evaluate: Callable[[Any], None]


@dataclass(frozen=True)
class CompiledProgram:
    """A directory that ``chimera compile`` wrote."""

    directory: Path
    job: Job
    ranks: tuple[RankFacts, ...]

    def script(self, worker: int) -> RankScript:
        """Loads the script of a worker. Raises `Misuse` if it is missing, or of another program.

        Scripts are written last: a script with the digest of program.json proves that program.json is complete.
        """
        path = self.directory / f"rank_{worker}.py"
        spec = importlib.util.spec_from_file_location(f"chimera_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        script: Any = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(script)
        except FileNotFoundError as error:
            raise mistakes.script_is_missing(directory=self.directory, name=path.name) from error
        require_interface(script.INTERFACE, path)
        if self.job.program != script.PROGRAM:
            raise mistakes.script_is_of_another_program(path=path, facts=FILE)
        return script  # type: ignore[no-any-return]


def require_interface(number: int, path: Path) -> None:
    """Raises `Misuse` unless a file was written for the interface of this package."""
    if number != INTERFACE:
        raise mistakes.interface_is_another(path=path, number=number, interface=INTERFACE)


def load(directory: Path) -> CompiledProgram:
    """Reads the program in a directory. Raises `Misuse` if there is no program, or it is for another interface."""
    path = directory / FILE
    try:
        text = require_regular(path, LARGEST).read_text(encoding="utf-8")
        require_interface(json.loads(text)["interface"], path)
        return CompiledProgram(directory.resolve(), *parsed(text))
    except (FileNotFoundError, NotADirectoryError):
        raise mistakes.no_output_directory(directory=directory) from None
    except OSError as error:
        raise mistakes.facts_cannot_be_read(path=path, why=error.strerror) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise mistakes.facts_are_damaged(path=path) from error


def parsed(text: str) -> tuple[Job, tuple[RankFacts, ...]]:
    """Parses a program.json. Raises `ValueError`, `TypeError`, `KeyError` or `AttributeError` for other text."""
    facts = _frozen(json.loads(text))
    ranks = tuple(map(facts_of_rank, facts.pop("ranks")))
    del facts["interface"]
    return Job(**facts | {"feeds": tuple(Feed(*edge) for edge in facts.get("feeds", ()))}), ranks


def _frozen(value: Any) -> Any:
    """Returns a JSON value with tuples in place of lists, at every depth."""
    if isinstance(value, dict):
        return {name: _frozen(inside) for name, inside in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
