"""Rounds of measurement: every pass of a micro-batch through a stage, slice by slice, each timed or counted."""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from chimera_ir.measure.stations import MeasuredTurn, Station

Stopwatch = Callable[[Callable[[], None]], float]
"""Calls a function and returns what it costs: the seconds or, where work is counted, the floating-point operations."""


def cpu_clock(run: Callable[[], None]) -> float:
    """Calls ``run`` and returns the seconds that it takes, by the clock of this machine."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def cuda_clock(run: Callable[[], None]) -> float:
    """Calls ``run`` and returns its seconds by the GPU's own clock, from an idle GPU to the end of the last kernel."""
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


class PassCosts(NamedTuple):
    """Costs of the passes of a slice through a stage, in seconds or in floating-point operations.

    ``recomputing`` is a backward that runs the forward again; the last two are the halves of a split backward.
    """

    forward: float
    backward: float
    recomputing: float
    input_gradient: float
    weight_gradient: float


def costs_of_round(station: Station, number: int, clock: Stopwatch) -> list[PassCosts]:
    """Runs all passes of round ``number`` through a stage, measured by ``clock``; returns their costs, by slice.

    ``station`` is the stage, ready to run. A round has a micro-batch with an ordinary backward, one that recomputes,
    and one with a backward in halves. Backwards take the slices in reverse.
    """
    turn = MeasuredTurn.of(number)
    station.refill()
    forward = by_slice(station, clock, station.forward, turn.ordinary)
    backward = by_slice(station, clock, station.backward, turn.ordinary, reverse=True)
    station.refill()
    by_slice(station, clock, station.forward, turn.recomputed)
    recomputing = by_slice(station, clock, station.backward, turn.recomputed, reverse=True)
    station.refill()
    by_slice(station, clock, station.forward, turn.halved)
    halves = halves_by_slice(station, clock, turn.halved)
    station.forget_losses(turn)
    return [PassCosts(*costs) for costs in zip(forward, backward, recomputing, *halves, strict=True)]


def by_slice(
    station: Station, clock: Stopwatch, run: Callable[[int], None], micro_batch: int, reverse: bool = False
) -> list[float]:
    """Calls ``run`` for each slice of a micro-batch; returns the cost of each call, in the order of the sequence.

    With ``reverse`` the last slice comes first, as in a backward.
    """
    slices = station.slices_of(micro_batch)
    costs = {number: clock(partial(run, number)) for number in (slices[::-1] if reverse else slices)}
    return [costs[number] for number in slices]


def halves_by_slice(station: Station, clock: Stopwatch, micro_batch: int) -> tuple[list[float], list[float]]:
    """Runs the first halves of the backwards of all slices, then the second halves; returns the costs of each half."""
    first = by_slice(station, clock, station.backward_input, micro_batch, reverse=True)
    return first, by_slice(station, clock, station.stage.backward_weights, micro_batch, reverse=True)
