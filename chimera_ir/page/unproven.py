"""The page of a text that cannot be proven: its lanes, as far as it has any, with the mistake drawn on them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise, product
from pathlib import PurePath

from chimera_ir.diagnostics.catalogue.program import Deadlock, Launches, LaunchOrder
from chimera_ir.diagnostics.catalogue.schedule import Conflict, Cycle, MissingLine, MissingSend, MissingWaitRecv
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.errors import TextError
from chimera_ir.flow.flow import ABSENT, Flow
from chimera_ir.ir.levels import Header, Plan
from chimera_ir.ir.ops import Compute, Instruction, Pair, Planned
from chimera_ir.ir.streams import Level, PlanStream, ProgramStream, ScheduleStream
from chimera_ir.ir.text.printer import line
from chimera_ir.lower.lower import order
from chimera_ir.page import tables
from chimera_ir.page.tables import OperationRow, PageDocument, ScheduleTables, ShownMistake
from chimera_ir.picture.looks import Row
from chimera_ir.source import Source

_FEW = 64
"""The most operations of one line of the text that are marked: a wrong formula may stand for thousands."""

_Arrow = dict[str, object]
_Place = tuple[int, int]
"""A worker, and how many operations that occupy its lane stand before another one."""


def document(error: TextError, source: Source, level: Level | PlanStream | None) -> PageDocument:
    """The contents of the page of a text with errors; ``level`` is what it describes, if it can be read as a level."""
    header, lanes = _lanes(level)
    sketch = _Sketch(header, lanes, level.clocked if isinstance(level, Plan) and level.is_clocked else ())
    return PageDocument(
        title=PurePath(source.name).name if sketch.header is None else tables.name_of(sketch.header),
        notes=[],
        schedules=[] if sketch.header is None else [sketch.tables(sketch.header)],
        texts=[tables.source_text(source, sketch.rows)],
        mistake=sketch.mistake(error, source),
    )


def _lanes(level: Level | PlanStream | None) -> tuple[Header | None, Sequence[Sequence[Instruction]]]:
    """The header and the lanes to show: of a plan once ordered, of a stream some updates; None, () without a level."""
    if level is None:
        return None, ()
    ordered = order(level) if isinstance(level, Plan | PlanStream) else level
    shown = ordered.view(ordered.updates_shown) if isinstance(ordered, ScheduleStream | ProgramStream) else ordered
    return shown.header, shown.lanes


@dataclass(frozen=True)
class _Sketch:
    """The lanes of a text with mistakes, as far as it could be read; ``header`` is None if there are no lanes.

    The operations are ``planned`` on clocks if all of them have one.
    """

    header: Header | None
    lanes: Sequence[Sequence[Instruction]]
    planned: Sequence[Planned]

    def line(self, instruction: Instruction) -> str:
        assert self.header is not None, "lanes have a header"
        return line(instruction, self.header)

    @cached_property
    def rows(self) -> list[OperationRow]:
        """The rows of the operations of the lanes, without those of a micro-batch or a stage that the header lacks."""
        rows = tables.rows(
            [instruction for instruction in lane if isinstance(instruction, Compute | Pair)] for lane in self.lanes
        )
        placed = (row for row in rows if self.header is not None and _is_placed(self.header, row.operation))
        return [row._replace(height=self.halves.get((row.worker, row.place), row.height)) for row in placed]

    @cached_property
    def clocks(self) -> dict[_Place, int]:
        """The clock of each operation; empty where the lanes are of no plan, or not all operations have clocks."""
        lanes: dict[int, list[int]] = {worker: [] for worker in range(len(self.lanes))}
        for planned in self.planned:
            if not planned.operation.kind.moves:
                lanes[planned.worker].append(planned.clock)
        sizes = [sum(_occupies(instruction) for instruction in lane) for lane in self.lanes]
        if sizes != [*map(len, lanes.values())]:
            return {}  # the order has operations that the text does not have, such as recomputations
        return {(worker, place): clock for worker, lane in lanes.items() for place, clock in enumerate(sorted(lane))}

    @cached_property
    def halves(self) -> dict[_Place, Row]:
        """The half of the lane of operations that share a clock of a worker: upper for the first, lower for others."""
        places: dict[tuple[int, int], list[_Place]] = defaultdict(list)
        for place, clock in self.clocks.items():
            places[place[0], clock].append(place)
        clashing = (shared for shared in places.values() if len(shared) > 1)
        return {place: Row.LOWER if number else Row.UPPER for shared in clashing for number, place in enumerate(shared)}

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The row of each operation, keyed by its line in the text; of operations with equal lines, the last one."""
        return {self.line(row.operation): number for number, row in enumerate(self.rows)}

    @cached_property
    def of_lines(self) -> dict[tuple[int, str], int]:
        """The row of the operation to mark for a line, keyed by the worker and the text of the line.

        It is the operation that the line itself is. Any other line has the next operation of its lane, or without one
        the last operation before it.
        """
        rows: dict[tuple[int, str], int] = {}
        for worker, lane in enumerate(self.lanes):
            following = None
            for instruction in (*reversed(lane), *lane):
                following = self.numbers.get(self.line(instruction), following)
                if following is not None:
                    rows.setdefault((worker, self.line(instruction)), following)
        return rows

    def tables(self, header: Header) -> ScheduleTables:
        return ScheduleTables(
            name=tables.name_of(header),
            workers=header.workers,
            unit="",
            updates=header.updates,
            clocks=[self.clocks[row.worker, row.place] for row in self.rows] if self.clocks else None,
            **tables.tables_of_operations(header, self.rows, [-1] * len(self.rows))._asdict(),
        )

    def mistake(self, error: TextError, source: Source) -> ShownMistake:
        first = error.diagnostics[0]
        arrows = list(self._arrows(first))
        ends = [int(str(arrow[end])) for arrow in arrows for end in ("from", "to")]
        # The places of all errors, and of the notes of the first: the lines that take part in it.
        noted = (note.span for note in first.notes() if note.span is not None)
        spans = [*(diagnostic.span for diagnostic in error.diagnostics), *noted]
        return ShownMistake(
            code=first.code,
            title=first.fill(first.title),
            text=str(error),
            operations=list(dict.fromkeys([*ends, *self._named(first)])),
            arrows=arrows,
            lines=list(dict.fromkeys(source.position(span.start).line for span in spans)),
            missing=[d.fill(d.title) for d in error.diagnostics if isinstance(d, MissingLine)],
        )

    def _arrows(self, mistake: Diagnostic) -> Iterator[_Arrow]:
        """Yields arrows between the operations of a mistake, each from an operation to one that waits for it."""
        match mistake:
            case Cycle(steps=steps):
                ring = [(self.numbers.get(step.operation), step.reason) for step in (*steps, steps[0])]
                for (before, reason), (after, _) in pairwise(ring):
                    yield from _arrow(before, after, reason)
            case Deadlock(blocked=blocked):
                for lane in blocked:
                    needed = self.of_lines.get((lane.peer, lane.needs))
                    words = f"worker {lane.worker} waits for {lane.meaning}"
                    yield from _arrow(needed, self.of_lines.get((lane.worker, lane.line)), words)
            case LaunchOrder(first=first, others=others):
                orders = [first, *others]
                for ahead, behind in product(orders, orders):
                    if ahead.earlier == behind.later:
                        words = f"the sum of {ahead.earlier}: worker {behind.worker} launches {behind.earlier} first"
                        yield from _arrow(self._launched(behind), self._launched(ahead), words)
            case MissingSend(operation=operation, user=user, line=missing):
                yield from _arrow(self.numbers.get(operation), self.numbers.get(user), f"no `{missing}`")
            case MissingWaitRecv(user=user, peer=peer, line=missing):
                yield from _arrow(self._made_on(peer, user), self.numbers.get(user), f"no `{missing}`")
            case _:
                pass

    def _launched(self, order: Launches) -> int | None:
        """The row of the operation nearest in the lane to the later launch of ``order``; None if unknown."""
        lines = (self.line(launch) for launch in self.lanes[order.worker] if launch.origin == order.span)
        return self.of_lines.get((order.worker, next(lines, "")))

    def _made_on(self, worker: int, user: str) -> int | None:
        """The row of an operation on ``worker`` that makes a value for ``user``, an operation as text; else None."""
        assert self.header is not None, "what an operation lacks is known of lanes"
        flow = Flow(self.header, enumerate(row.operation for row in self.rows))
        makers = flow.needs(self.rows[self.numbers[user]].operation) if user in self.numbers else ()
        return next((row for row in makers if row != ABSENT and self.rows[row].worker == worker), None)

    def _named(self, mistake: Diagnostic) -> Iterable[int]:
        """The rows of the operations to mark for a mistake.

        Of a conflict they are all operations that share a clock. Of others they are the operations that the texts in
        the mistake's fields name; where such a text is another line of a lane, it is the operation nearest to that
        line. If no text names a line, they are the operations that come from the mistake's place in the text, or none
        if these are more than a few.
        """
        if isinstance(mistake, Conflict):
            return [number for number, row in enumerate(self.rows) if (row.worker, row.place) in self.halves]
        texts = [value for entry in fields(mistake) if isinstance(value := getattr(mistake, entry.name), str)]
        worker = getattr(mistake, "worker", -1)
        named = [self.numbers.get(text, self.of_lines.get((worker, text))) for text in texts]
        if any(row is not None for row in named):
            return [row for row in named if row is not None]
        placed = [number for number, row in enumerate(self.rows) if row.operation.origin == mistake.span]
        return placed if len(placed) <= _FEW else []


def _arrow(before: int | None, after: int | None, words: str) -> Iterator[_Arrow]:
    if before is not None and after is not None:
        yield {"from": before, "to": after, "words": words}


def _occupies(instruction: Instruction) -> bool:
    return isinstance(instruction, Compute | Pair) and not instruction.kind.moves


def _is_placed(header: Header, operation: Compute) -> bool:
    return {*operation.micros} <= header.pipe_of.keys() and operation.stage < header.stages
