"""A timeline as rows of plain values, for a table of pandas or polars: its operations, and what a worker keeps."""

from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter

from chimera_ir.cost.simulate import Timed, Timeline
from chimera_ir.flow import live
from chimera_ir.ir.kinds import Counted
from chimera_ir.ir.ops import singles
from chimera_ir.ir.text.printer import line

Row = dict[str, int | float | str | list[int]]
"""A row of a table, by column."""

COLUMN_OF: Mapping[Counted, str] = {
    Counted.ACTIVATIONS: "activations",
    Counted.OPERANDS: "activations",
    Counted.INPUT: "stashed_inputs",
    Counted.CARRIES: "carries",
    Counted.CARRY_GRADIENTS: "carry_gradients",
    Counted.HOST: "on_host",
}
"""The column in which each unit of what a stage keeps is counted."""


def operations(timeline: Timeline) -> list[Row]:
    """A row for each operation, worker by worker, with its start and end; a pair is two rows with the same times."""
    return [
        {
            "worker": worker,
            "operation": line(part),
            "kind": part.kind.letter,
            "micro_batches": [*part.micros],
            "stage": part.stage,
            "pipe": timeline.header.pipe_of[part.micros[0]].name,
            "start": float(timed.start * timeline.tick),
            "end": float(timed.end * timeline.tick),
        }
        for worker, lane in enumerate(timeline.lanes)
        for timed in lane
        for part in timed.operation.parts
    ]


def kept(timeline: Timeline, worker: int) -> list[Row]:
    """A row for each change of what a worker keeps: the time, the operation, and what is kept from then on.

    Amounts are in micro-batches on a stage: activations in M_a, in columns of their own other values, if there are any.
    What an operation makes is kept from its start, what it frees until its end.

    Raises `IndexError` if there is no such worker.
    """
    if worker not in range(workers := len(timeline.lanes)):
        raise IndexError(f"worker {worker!r:.60}: there are the workers 0 to {workers - 1}")
    changes = sorted((change for timed in timeline.lanes[worker] for change in _changes(timeline, timed)), key=_TIME)
    amounts = dict.fromkeys(["activations", *(column for _, _, column, _ in changes)], 0)
    rows: list[Row] = [{"time": 0.0, "operation": "", **dict.fromkeys(amounts, 0.0)}]
    for (time, operation), together in groupby(changes, itemgetter(0, 1)):
        for _, _, column, amount in together:
            amounts[column] += amount
        whole = {column: amount / timeline.header.parts for column, amount in amounts.items()}
        rows.append({"time": float(time * timeline.tick), "operation": operation, **whole})
    return rows


_TIME = itemgetter(0)


def _changes(timeline: Timeline, timed: Timed) -> Iterator[tuple[int, str, str, int]]:
    """Yields the changes by an operation: the tick, the operation, the column, and the amount, in parts.

    Operands alone take the place of the activations that are freed.
    """
    words = line(timed.operation)
    for _, unit, amount in live.changes(timeline.header, singles([timed.operation]), COLUMN_OF):
        at_end = amount < 0 or unit is Counted.OPERANDS
        yield timed.end if at_end else timed.start, words, COLUMN_OF[unit], amount
