"""Programs of one model for several numbers of micro-batches, in one output directory.

The top of the directory has the program with the most micro-batches, and a folder ``n<number>`` each other one, without
the runtime and ``train.py``. A rank may run any of them for an update: they agree in all but the number.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Protocol

from chimera_ir.codegen.facts import with_numbers
from chimera_ir.errors import ProgramsDiffer
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Micro, Stage
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
                f"{each.title} has no flush: its micro-batches have no end, so no update has its own number"
            )
    if header.whole_micro_batches > largest.whole_micro_batches:
        raise ProgramsDiffer(f"{header.title} has more micro-batches than {largest.title}: write it with the others")
    micros = range(min(header.micro_batches, largest.micro_batches))
    ours, others = _facts(header, micros), _facts(largest, micros)
    if differing := [name for name, value in ours.items() if value != others[name]]:
        both = f"{header.title} and {largest.title} differ in {differing[0]}"
        raise ProgramsDiffer(f"{both}; programs in one directory differ in the number of micro-batches alone")


def _facts(header: Header, micros: range) -> dict[str, object]:
    """What programs of one directory agree in, by name; of micro-batches, what is so for ``micros``."""
    recomputed = {
        stage: [micro for micro in micros if header.recomputes(Micro(micro), Stage(stage))]
        for stage in (range(header.stages) if header.recomputing else ())
    }
    lacking = {stage: sorted(absent.intersection(micros)) for stage, absent in header.lacks.items()}
    return {
        "the number of workers": header.workers,
        "the number of stages": header.stages,
        "the workers of the stages": [pipe.workers for pipe in header.pipes],
        "the parts of a micro-batch": (header.parts, header.slices, header.lengths),
        "the groups of stages": header.named,
        "the edges between groups": header.feeds,
        "the stages that are tied": header.ties,
        "the stages that are frozen": header.frozen,
        "the micro-batches that stages recompute": {stage: some for stage, some in recomputed.items() if some},
        "the micro-batches that groups lack": {stage: some for stage, some in lacking.items() if some},
    }
