"""The texts beside the lanes, and the line of each operation in them: of the scheme, the program and the scripts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import PurePath

from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import NOWHERE, Compute
from chimera_ir.ir.streams import ProgramStream
from chimera_ir.ir.turns import in_turn
from chimera_ir.page.operation_tables import OperationRow
from chimera_ir.page.tables import SourceText
from chimera_ir.source import Source
from chimera_ir.verify.scripts import call_lines
from chimera_ir.verify.verify import ProvenScripts, Verified


def source_text(source: Source, rows: Iterable[OperationRow]) -> SourceText:
    """The text that was compiled, named without its folder, with the line that each operation comes from."""

    @cache
    def line_at(offset: int) -> int:
        return source.position(offset).line

    language = "csv" if source.is_csv else "sir" if source.is_ir else "chim"
    origins = [row.operation.origin for row in rows]
    lines = [0 if origin == NOWHERE else line_at(origin.start) for origin in origins]
    return SourceText(PurePath(source.name).name, language, source.text.replace("\r\n", "\n"), lines)


def program_text(text: str, verified: Verified, rows: Sequence[OperationRow]) -> SourceText:
    """The ``text`` of a program with the line of each operation; without a flush, its line in the turn."""
    headings = _headings(text, len(verified.program.lanes))
    place = _places(verified)
    return SourceText("schedule.sir", "sir", text, [headings[row.worker] + 1 + place(row) for row in rows])


def script_texts(scripts: ProvenScripts, program: Program, rows: Sequence[OperationRow]) -> Iterator[SourceText]:
    """The script of each rank, with the lines of the rank's own operations."""
    for worker, numbers in enumerate(call_lines(program, scripts.by_worker)):
        computes = program.parts[worker].computes.places
        lines = [numbers[computes[row.place]] if row.worker == worker else 0 for row in rows]
        yield SourceText(scripts.by_worker[worker].name, "python", scripts.by_worker[worker].text, lines, worker)


def _headings(text: str, workers: int) -> list[int]:
    """The line of the heading of each worker's lane in the text of a program."""
    lines = text.split("\n")
    headings, line = list[int](), 0
    for worker in range(workers):
        line = lines.index(f"worker {worker}:", line)
        headings.append(line + 1)
    return headings


def _places(verified: Verified) -> Callable[[OperationRow], int]:
    """Returns a function from the row of an operation to the operation's line in its worker's lane, counted from 0.

    For a stream it is the line in the worker's turn, which stands for all repetitions.
    """
    level, parts = verified.level, verified.program.parts
    if isinstance(level, Program):
        return lambda row: parts[row.worker].computes.places[row.place]
    turns = [_turn_places(level, worker) for worker in range(len(level.turns))]
    return lambda row: turns[row.worker][in_turn(level.header, row.operation)[0]]


def _turn_places(stream: ProgramStream, worker: int) -> dict[object, int]:
    """Maps each operation of a worker's turn to its line in the turn, counted from 0.

    The keys are operations as in turn 0 (`in_turn`): their micro-batches are numbered from the beginning of the turn.
    """
    lines = enumerate(stream.turns[worker].instructions)
    return {in_turn(stream.header, line)[0]: place for place, line in lines if isinstance(line, Compute)}
