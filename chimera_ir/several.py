"""Programs of one model for several numbers of micro-batches, in one output directory.

The top of the directory has the program with the most micro-batches, and a folder ``n<number>`` each other one, without
the runtime and ``train.py``. A rank may run any of them for an update: they agree in all but the number.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from chimera_ir.codegen.facts import with_numbers
from chimera_ir.errors import ProgramsDiffer
from chimera_ir.ir.levels import Header
from chimera_ir.plural import listed
from chimera_ir.verify.scripts import FACTS

_AT_THE_TOP = "chimera_runtime/", "train.py"
"""The beginnings of the names of files that all programs share."""


class Compiled(Protocol):
    """A program that is written: its header, and its files by relative path."""

    @property
    def header(self) -> Header:
        """The header of the program."""

    @property
    def files(self) -> Mapping[str, str]:
        """The files of a directory with this program alone."""


def joined(largest: Compiled, others: Iterable[Compiled]) -> dict[str, str]:
    """The files of ``largest`` with a folder for each of ``others``, by path; each relies only on files before it.

    Every one of ``others`` is asked for when the one before it is done. Raises `ProgramsDiffer` for one that has as
    many micro-batches as another one, or more than ``largest``, or differs in anything else.
    """
    of_number = {(most := largest.header.whole_micro_batches): largest.files}
    for other in others:
        number = other.header.whole_micro_batches
        if number in of_number:
            raise ProgramsDiffer(f"there are two programs for {number} micro-batches: {other.header.title} is one")
        _require_alike(other.header, largest.header)
        of_number[number] = other.files
    folders = {number: of_number[number] for number in sorted(of_number) if number != most}
    files = dict[str, str]()
    for name, text in largest.files.items():
        if name == FACTS and folders:
            for number, of_folder in folders.items():
                kept = {path: inside for path, inside in of_folder.items() if not path.startswith(_AT_THE_TOP)}
                files |= {f"n{number}/{path}": inside for path, inside in kept.items()}
            digests = {str(number): json.loads(of_folder[FACTS])["program"] for number, of_folder in folders.items()}
            files[name] = with_numbers(text, digests)
        else:
            files[name] = text
    return files


def _require_alike(header: Header, largest: Header) -> None:
    """Raises `ProgramsDiffer` if programs differ in what a rank fixes when it starts."""
    for each in (largest, header):
        if each.asynchronous:
            raise ProgramsDiffer(
                f"{each.title} has no flush: its micro-batches go on without end, so that no update has a number of its own"
            )
    if header.whole_micro_batches > largest.whole_micro_batches:
        raise ProgramsDiffer(
            f"{header.title} has more micro-batches than {largest.title}: write that one with the others"
        )
    differing = [what for what, *both in _compared(header, largest) if both[0] != both[1]]
    if differing:
        raise ProgramsDiffer(f"{header.title} and {largest.title} differ in {listed(differing)}")


def _compared(header: Header, largest: Header) -> Iterator[tuple[str, object, object]]:
    """Yields what programs agree in: a word for it, and its value in both; of ``largest`` for fewer micro-batches."""
    micros = range(header.micro_batches)

    def recomputed(each: Header) -> list[list[int]]:
        stages = range(each.stages) if each.recomputing else ()
        return [[micro for micro in micros if each.recomputes(micro, stage)] for stage in stages]

    yield "the number of workers", header.workers, largest.workers
    yield "the number of stages", header.stages, largest.stages
    yield "the workers of the stages", *([pipe.workers for pipe in each.pipes] for each in (header, largest))
    yield "the parts of a micro-batch", *((each.parts, each.slices, each.lengths) for each in (header, largest))
    if (header.parts, header.stages) == (largest.parts, largest.stages):
        recomputing = [[*map(any, recomputed(each))] and recomputed(each) for each in (header, largest)]
        yield "the micro-batches that stages recompute", *([r for r in each if r] for each in recomputing)
    yield "the tied stages", header.ties, largest.ties
    yield "the frozen stages", header.frozen, largest.frozen
    yield "the graph of the stages", (header.named, header.feeds), (largest.named, largest.feeds)
    lacking = [
        {s: {m for m in lacks if m < len(micros)} for s, lacks in each.lacks.items()} for each in (header, largest)
    ]
    yield "the micro-batches that groups lack", *({s: m for s, m in each.items() if m} for each in lacking)
