"""Programs of one model for several numbers of micro-batches, in one output directory.

The top of the directory has the program with the most micro-batches, and a folder ``n<number>`` each other one, without
the runtime and ``train.py``. A rank may run any of them for an update: they agree in all but the number.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Protocol

from chimera_ir.codegen.facts import Facts, with_numbers
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
    folders, digests = dict[int, Mapping[str, str]](), dict[int, str]()
    most, needed = largest.header.whole_micro_batches, json.loads(largest.files[FACTS])
    for other in others:
        number = other.header.whole_micro_batches
        if number in (most, *folders):
            raise ProgramsDiffer(f"there are two programs for {number} micro-batches: {other.header.title} is one")
        require_alike(other.header, largest.header)
        require_prepared(other.header, facts := json.loads(other.files[FACTS]), largest.header, needed)
        digests[number], kept = facts["program"], other.files.items()
        folders[number] = {f"n{number}/{path}": text for path, text in kept if not path.startswith(_AT_THE_TOP)}
    files = dict[str, str]()
    for name, text in largest.files.items():
        if name == FACTS and folders:
            for number in sorted(folders):
                files |= folders[number]
            files[name] = with_numbers(text, {str(number): digests[number] for number in sorted(digests)})
        else:
            files[name] = text
    return files


_OF_LARGEST = {
    "kinds": "the kinds of operations",
    "grouped": "the stages with operations over several micro-batches",
    "split_backward": "the stages with backwards in two halves",
    "moving": "the stages whose activations move to the host",
    "moving_operands": "the stages that move what is kept between the halves of a backward",
}
"""Facts of program.json by which a rank prepares its stages; in the largest program they are those of all."""


def require_prepared(header: Header, facts: Facts, largest: Header, of_largest: Facts) -> None:
    """Raises `ProgramsDiffer` if stages are not prepared for a program by the entries `used_by` of the largest one."""
    for name, words in _OF_LARGEST.items():
        if not {*facts.get(name, ())} <= {*of_largest.get(name, ())}:
            raise _differing(header, largest, words)


def require_alike(header: Header, largest: Header) -> None:
    """Raises `ProgramsDiffer` if headers differ in what a rank fixes when it starts, or the order of their numbers."""
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
        raise _differing(header, largest, differing[0])


def _differing(header: Header, largest: Header, what: str) -> ProgramsDiffer:
    both = f"{header.title} and {largest.title} differ in {what}"
    return ProgramsDiffer(f"{both}; programs in one directory differ in the number of micro-batches alone")


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
