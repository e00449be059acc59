"""How many orders per second a search can evaluate: makespans of shuffled orders, on one core.

    .venv/bin/python benchmarks/order_evaluation.py

Each row: a schedule, its operations, and orders per second.
"""

import random
from collections.abc import Sequence
from time import process_time

import chimera_ir

SCHEDULES = (("dapple", {"D": 4, "N": 12}), ("zb_h1", {"D": 4, "N": 8}), ("waves", {"P": 4, "N": 8}))
SCHEDULES += (("chimera", {"D": 8, "N": 8}), ("interleaved", {"P": 8, "v": 2, "N": 32}))
ORDERS = 2_000


def measured(scheme: str, settings: dict[str, int]) -> tuple[str, int, float]:
    """The schedule, its operations and orders per second; orders have an operation moved, and close no cycle."""
    c = chimera_ir.compile(scheme, **settings)
    graph = c.graph
    shuffle = random.Random(0)
    orders: list[list[Sequence[int]]] = []
    while len(orders) < ORDERS:
        worker = shuffle.randrange(len(graph.lanes))
        lane = [*graph.lanes[worker]]
        place = shuffle.randrange(len(lane))
        lane.insert(max(0, place + shuffle.choice((-2, -1, 1, 2))), lane.pop(place))
        order = [*graph.lanes[:worker], lane, *graph.lanes[worker + 1 :]]
        orders += [order] if graph.makespan(order) is not None else []
    begun = process_time()
    for order in orders:
        graph.makespan(order)
    return c.schedule.header.title, len(graph.operations), ORDERS / (process_time() - begun)


if __name__ == "__main__":
    for scheme, settings in SCHEDULES:
        title, operations, rate = measured(scheme, settings)
        print(f"{title:42} {operations:5} operations {rate:9,.0f} orders per second")
