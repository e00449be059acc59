"""Makes schedules from lanes that were not compiled from a scheme, given as operations or as their texts.

lanes                           the text that they are read as
["F m0 s0", "B m0 s0"]          schedule by_hand
["F m0 s1", "B m0 s1"]          parameters D=2 N=1
                                workers 2
                                stages 2
                                micro_batches 1
                                pipe down on 0 1 micros 0..1

                                worker 0:
                                  F m0 s0
                                  B m0 s0
                                ..
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from chimera_ir.diagnostics.model import Rejected
from chimera_ir.errors import OptionError, TextError
from chimera_ir.ir.kinds import KINDS
from chimera_ir.ir.levels import MAX_MICRO_BATCHES, MAX_STAGES, Header, Pipe, Schedule, in_full
from chimera_ir.ir.ops import Compute, Micro, Operation, Pair, Worker
from chimera_ir.ir.text.printer import line, show
from chimera_ir.ir.text.reader import parse
from chimera_ir.plural import counted
from chimera_ir.source import Source

Given = Operation | str
"""An operation, or its line in IR text, such as ``F m0 s1``."""

_NUMBERS = re.compile(r"[ ,]([ms])([0-9]{1,9})(?![0-9])", re.ASCII)


def schedule_of(lanes: Iterable[Iterable[Given]], like: Header | None, name: str) -> Schedule:
    """Returns the schedule in which worker w runs the operations ``lanes[w]``, under the header ``like``.

    Without ``like`` the header follows from the lanes, and ``name`` is the name of its scheme.

    Raises `OptionError` if no header follows from the lanes, and `TextError` with the mistakes of their texts.
    """
    whole = [tuple(lane) for lane in lanes]
    operations = [tuple(part for part in lane if isinstance(part, Compute | Pair)) for lane in whole]
    if like is not None and whole == operations:
        return Schedule(like, in_full(like, operations))
    texts = [[_text(part, like or _WHOLE) for part in lane] for lane in whole]
    header = _header(texts, name) if like is None else like
    body = "".join(
        f"\nworker {number}:\n" + "".join(f"  {text}\n" for text in lane) for number, lane in enumerate(texts)
    )
    source = Source(f"{header.scheme}.sir", show(Schedule(header, ())) + body)
    try:
        level = parse(source)
    except Rejected as rejected:
        raise TextError([(source, rejected.diagnostics)]) from None
    assert isinstance(level, Schedule)
    return level


_WHOLE = Header("", (), 1, 1, 1, ())
"""A header without halves or slices: operations are written as text under it if the caller gives no header."""


def _text(part: Given, header: Header) -> str:
    """A line of IR text; one that is a text already keeps its words, with single spaces."""
    if isinstance(part, str):
        return " ".join(part.split())
    if not isinstance(part, Compute | Pair):
        raise OptionError(f'lanes: {part!r:.60} is not an operation: give those of a schedule, or texts as "F m0 s1"')
    return line(part, header)


def _header(lanes: Sequence[Sequence[str]], name: str) -> Header:
    """The header that follows from the lines of each worker: a pipe for micro-batches with the same workers.

    Raises `OptionError` if a micro-batch lacks a stage, or has it on two workers.
    """
    places: dict[int, dict[int, int]] = defaultdict(dict)
    for worker, lane in enumerate(lanes):
        for micro, stage in chain.from_iterable(map(_cells, lane)):
            other = places[micro].setdefault(stage, worker)
            if other != worker:
                raise OptionError(f"lanes: micro-batch {micro} is on stage {stage} of the workers {other} and {worker}")
    stages = 1 + max((stage for placed in places.values() for stage in placed), default=0)
    micro_batches = 1 + max(places, default=0)
    for noun, count, most in (("stage", stages, MAX_STAGES), ("micro-batch", micro_batches, MAX_MICRO_BATCHES)):
        if count > most:
            raise OptionError(f"lanes: they have {counted(count, noun)}, and the limit is {most:,}")
    pipes: dict[tuple[int, ...], list[int]] = {}
    for micro in range(micro_batches):
        missing = next((stage for stage in range(stages) if stage not in places[micro]), None)
        if missing is not None:
            raise OptionError(f"lanes: micro-batch {micro} has no operation on stage {missing}")
        pipes.setdefault(tuple(places[micro][stage] for stage in range(stages)), []).append(micro)
    letters = {text.split()[0] for lane in lanes for text in lane if text.strip()}
    kinds = tuple(kind for letter, kind in KINDS.items() if letter in letters)
    return Header(
        scheme=name,
        parameters=(("D", stages), ("N", micro_batches)),
        workers=len(lanes),
        stages=stages,
        micro_batches=micro_batches,
        pipes=tuple(
            Pipe("down" if len(pipes) == 1 else f"p{number}", tuple(map(Worker, workers)), tuple(map(Micro, micros)))
            for number, (workers, micros) in enumerate(pipes.items())
        ),
        only=() if any(kind.sums for kind in kinds) else kinds,
    )


def _cells(text: str) -> Iterator[tuple[int, int]]:
    """Yields each micro-batch that a line names, with the stage of its operation."""
    for part in text.split("&"):
        numbers = [(letter, int(digits)) for letter, digits in _NUMBERS.findall(part)]
        stages = [number for letter, number in numbers if letter == "s"]
        yield from ((number, stages[0]) for letter, number in numbers if letter == "m" and stages)
