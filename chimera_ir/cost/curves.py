"""Converts a timeline to rows of plain values, for a table of pandas or polars: operations, or what a worker keeps."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from chimera_ir.cost.simulate import Timed, Timeline
from chimera_ir.flow import live
from chimera_ir.flow.host_moves import MoveStep, waited, waits_of
from chimera_ir.ir.kinds import Counted
from chimera_ir.ir.text.printer import line

Row = dict[str, int | float | str | list[int]]
"""A row of a table, by column."""

SizesByUnit = Callable[[int], Mapping[Counted, int]]
"""A function from a stage to the bytes that a micro-batch takes there, by unit: activations, inputs and so on."""

COLUMN_OF: Mapping[Counted, str] = {
    Counted.ACTIVATIONS: "activations",
    Counted.OPERANDS: "activations",
    Counted.INPUT: "stashed_inputs",
    Counted.CARRIES: "carries",
    Counted.CARRY_GRADIENTS: "carry_gradients",
    Counted.HOST: "on_host",
    Counted.HOST_OPERANDS: "on_host",
}
"""The column of `kept` in which each unit is counted: activations, inputs and so on."""


def operations(timeline: Timeline) -> list[Row]:
    """A row for each operation, worker by worker, with its start and end; a pair is two rows with the same times."""
    return [
        {
            "worker": worker,
            "operation": line(part, timeline.header),
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


class WorkerBytes(NamedTuple):
    """Bytes of a worker: ``at_first`` is what it needs before its first operation.

    ``sizes`` gives for a stage the bytes of each thing that operations keep of a micro-batch, such as its activations.
    """

    at_first: int
    sizes: SizesByUnit


def kept(timeline: Timeline, worker: int, bytes_of: Callable[[int], WorkerBytes] | None = None) -> list[Row]:
    """Lists the changes of what a worker keeps, a row for each: the time, the operation, what is kept from then on.

    Amounts are in micro-batches on a stage, so activations are in M_a; other values have columns of their own, if there
    are any. What an operation makes counts from its start, what it frees until its end. ``bytes_of`` gives the bytes of
    a worker; with it, each row has a number of bytes as well.

    Raises `IndexError` if there is no such worker.
    """
    if worker not in range(workers := len(timeline.lanes)):
        raise IndexError(f"worker {worker!r:.60}: there are the workers 0 to {workers - 1}")
    changes = sorted(_changes(timeline, timeline.lanes[worker]), key=_TIME)
    amounts = dict.fromkeys(["activations", *(COLUMN_OF[change.unit] for change in changes)], 0)
    parts, in_bytes = timeline.header.units, bytes_of(worker) if bytes_of else None
    size = in_bytes.at_first * parts if in_bytes else None
    rows = [_row(0.0, "", amounts, parts, size)]
    for (time, words), together in groupby(changes, itemgetter(0, 1)):
        for change in together:
            amounts[COLUMN_OF[change.unit]] += change.amount
            if in_bytes and size is not None:
                size += change.amount * in_bytes.sizes(change.stage).get(change.unit, 0)
        rows.append(_row(float(time * timeline.tick), words, amounts, parts, size))
    return rows


def _row(time: float, words: str, amounts: Mapping[str, int], parts: int, size: int | None) -> Row:
    """Makes a row of ``time``, of the operation that changes the amounts (``words``), of amounts and of bytes.

    Amounts in micro-batches and the ``size`` in bytes come as multiples of 1 / ``parts``, by which they are divided. If
    ``size`` is None, the row has no bytes.
    """
    whole = {column: amount / parts for column, amount in amounts.items()}
    return {"time": time, "operation": words, **whole, **({} if size is None else {"bytes": size / parts})}


class _KeptChange(NamedTuple):
    """A change of what a worker keeps of ``stage``: from ``tick`` on, ``amount`` more of ``unit``, such as activations.

    The amount is negative where something is freed; a whole micro-batch is the amount `Header.units`. ``words`` name
    the operation that makes the change, as a line of IR.
    """

    tick: int
    words: str
    unit: Counted
    stage: int
    amount: int


_TIME = itemgetter(0)


def _changes(timeline: Timeline, lane: Sequence[Timed]) -> Iterator[_KeptChange]:
    """Yields the changes of what a worker keeps, operation by operation: what each one adds, and what it frees.

    The first half of a split backward frees activations; in their place operands, which the second half needs, are
    kept. What a move to the host or back makes is kept from its launch; what it frees is kept until the lane has waited
    for it.
    """
    header, now = timeline.header, 0
    operations = [timed.operation for timed in lane]
    waits = waits_of(header, operations) if header.moves else {}

    def changes(steps: Iterable[MoveStep], start: int, end: int) -> Iterator[_KeptChange]:
        for step, unit, amount in live.changes(header, steps, COLUMN_OF):
            tick = end if live.is_at_end(step, unit, amount) else start
            yield _KeptChange(tick, words, unit, step.stage, amount)

    for place in range(len(lane) + bool(waits)):
        for move in waits.get(place, ()):
            now, words = max(now, lane[move].end), line(operations[move], header)
            yield from changes(waited(operations, [move]), now, now)
        for timed in lane[place : place + 1]:
            words = line(timed.operation, header)
            if timed.operation.kind.moves:
                yield from changes(timed.operation.parts, now, now)
            else:
                yield from changes(timed.operation.parts, timed.start, timed.end)
                now = timed.end
