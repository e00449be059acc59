"""The directory that `chimera compile` wrote: program.json with the facts, and the script of each worker.

Reading it does not import torch: `chimera run` does so before it starts torchrun.
"""

import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

from chimera_runtime.errors import start as mistakes
from chimera_runtime.program.job import Feed, Job
from chimera_runtime.program.rank_facts import RankFacts, Rooms, facts_of_rank
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
    """A directory that ``chimera compile`` wrote.

    ``others`` are the programs for fewer micro-batches, by their number; buffers and links of ``ranks`` are for all.
    """

    directory: Path
    job: Job
    ranks: tuple[RankFacts, ...]
    others: Mapping[int, "CompiledProgram"] = field(default_factory=dict)

    @property
    def programs(self) -> dict[int, "CompiledProgram"]:
        """All programs of the directory, by the number of micro-batches of an update."""
        return {**self.others, self.job.micro_batches: self}

    def updates(self, worker: int) -> dict[int, Callable[[Any], None]]:
        """The functions ``update`` of the scripts of a worker, by the number of micro-batches; none without a flush."""
        if self.job.period:
            return {}
        return {number: program.script(worker).update for number, program in self.programs.items()}

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
    """Reads the programs in a directory. Raises `Misuse` if there is none, or one is for another interface."""
    program = _read(directory)
    others = {number: _read(directory / folder_of(number)) for number, _ in program.job.numbers}
    for number, digest in program.job.numbers:
        if others[number].job.program != digest:
            raise mistakes.script_is_of_another_program(path=others[number].directory / FILE, facts=FILE)
    return _covering(program, others) if others else program


def folder_of(number: int) -> str:
    """The folder of the program for ``number`` micro-batches in an output directory with several programs."""
    return f"n{number}"


def _covering(program: CompiledProgram, others: Mapping[int, CompiledProgram]) -> CompiledProgram:
    """Returns a program with ``others`` beside it, whose ranks have what any of these needs."""
    programs = [program, *others.values()]
    links = dict.fromkeys(link for each in programs for link in each.job.links)
    choices = tuple(c for c in program.job.communicators if all(c in each.job.communicators for each in programs))
    ranks = tuple(map(_largest, zip(*(each.ranks for each in programs), strict=True)))
    return replace(
        program, job=replace(program.job, links=(*links,), communicators=choices), ranks=ranks, others=others
    )


def _largest(of_programs: tuple[RankFacts, ...]) -> RankFacts:
    """Returns the facts for a worker of the first program, with the links and the buffers of all."""
    incoming, outgoing = (
        tuple(dict.fromkeys(route for facts in of_programs for route in getattr(facts, name)))
        for name in ("incoming", "outgoing")
    )
    first, *_ = of_programs
    stages = {
        stage: replace(
            facts,
            slots={letter: _rooms(of.stages[stage].slots[letter] for of in of_programs) for letter in facts.slots},
            sending={letter: max(of.stages[stage].sending[letter] for of in of_programs) for letter in facts.sending},
        )
        for stage, facts in first.stages.items()
    }
    return replace(first, stages=stages, incoming=incoming, outgoing=outgoing)


def _rooms(of_programs: Iterable[Rooms]) -> Rooms:
    """Returns receive buffers that hold what those of any program hold, slot by slot."""
    return tuple(
        tuple(max(sizes) for sizes in zip_longest(*of_maker, fillvalue=0))
        for of_maker in zip_longest(*of_programs, fillvalue=())
    )


def _read(directory: Path) -> CompiledProgram:
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
    feeds = tuple(Feed(*edge) for edge in facts.get("feeds", ()))
    numbers = tuple((int(number), digest) for number, digest in dict(facts.get("numbers") or {}).items())
    return Job(**facts | {"feeds": feeds, "numbers": numbers}), ranks


def _frozen(value: Any) -> Any:
    """Returns a JSON value with tuples in place of lists, at every depth."""
    if isinstance(value, dict):
        return {name: _frozen(inside) for name, inside in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
