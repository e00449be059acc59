"""Orders of many micro-batches from an order of few: its middle is repeated.

An order of n micro-batches becomes one of N if the micro-batches from the a-th on, p of them, come again and again, a
period later each time: the operations of a micro-batch keep their distances, so nothing is before what it waits for.

    4 micro-batches, a = 1, p = 2       F0 F1 B0 F2 B1 F3 B2 B3
    6 micro-batches                     F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from chimera_ir.orders.instance import OrderInstance


def first_micro_batches(instance: OrderInstance, count: int) -> tuple[OrderInstance, list[int]]:
    """Cuts an instance down to the first ``count`` micro-batches of each pipe.

    Returns the smaller instance, and for each of its operations the number that it has in the whole one.
    """
    header = instance.header
    pipes = tuple(replace(pipe, micros=tuple(sorted(pipe.micros)[: count * header.slices])) for pipe in header.pipes)
    micros = frozenset(micro for pipe in pipes for micro in pipe.micros)
    numbers = [
        number for number, operation in enumerate(instance.operations) if micros.issuperset(operation.parts[0].micros)
    ]
    place_of = {number: place for place, number in enumerate(numbers)}
    few = replace(
        instance,
        header=replace(header, pipes=pipes, micro_batches=len(micros)),
        operations=tuple(instance.operations[number] for number in numbers),
        blocks=[(place,) for place in range(len(numbers))],
        machines=[instance.machines[number] for number in numbers],
        durations=[instance.durations[number] for number in numbers],
        waits=[tuple(place_of[other] for other in instance.waits[number]) for number in numbers],
        delays=[instance.delays[number] for number in numbers],
        steps=[instance.steps[number] for number in numbers],
        changes=[instance.changes[number] for number in numbers],
        lanes=tuple(tuple(place_of[number] for number in lane if number in place_of) for lane in instance.lanes),
    )
    return few, numbers


def repeated(instance: OrderInstance, numbers: Sequence[int], starts: Sequence[int], count: int) -> Iterator[list[int]]:
    """Extends an order of few micro-batches to all operations of an instance: its middle is repeated.

    ``numbers`` are the operations of the first ``count`` micro-batches of each pipe, ``starts`` their starts in ticks.
    Yields the starts of all operations, once for each middle that is tried. They give lanes without cycles, but may
    exceed limits of memory.
    """
    header, slices = instance.header, instance.header.slices
    places = {micro: divmod(place, slices) for pipe in header.pipes for place, micro in enumerate(sorted(pipe.micros))}
    parts = [operation.parts[0] for operation in instance.operations]
    classes = [(header.pipe(part.micros[0]).name, part.kind, part.stage, places[part.micros[0]][1]) for part in parts]
    at = [places[part.micros[0]][0] for part in parts]
    start_of = {(classes[number], at[number]): start for number, start in zip(numbers, starts, strict=True)}
    added = max(at) + 1 - count
    for width, begin in _middles(count):
        lengths = [start_of[key, begin + width] - start for (key, place), start in start_of.items() if place == begin]
        period = max(1, round(sum(lengths) / len(lengths)))
        sources = [(place, 0) for place in range(begin)]
        sources += [(begin + turn % width, turn // width * period) for turn in range(added)]
        sources += [(place, added * period // width) for place in range(begin, count)]
        yield [start_of[key, sources[place][0]] + sources[place][1] for key, place in zip(classes, at, strict=True)]


def _middles(count: int) -> Iterator[tuple[int, int]]:
    """Yields the middles of ``count`` micro-batches to try: how many to repeat, and from which one on."""
    for width in dict.fromkeys((1, 2, 3, 4, count // 4, count // 3)):
        for begin in range((count - width) // 2 - 2, (count - width) // 2 + 3):
            if width and 0 <= begin < count - width:
                yield width, begin
