"""Timings of stages, by the names that a profile has for their times."""

from chimera_ir.profile.costs import RECOMPUTING, Times, Timing
from chimera_runtime.program.kept_bytes import MicroBatchBytes


def stage_times(
    forward: float,
    backward: float,
    recomputing: float = 0.0,
    halves: tuple[float, float] | None = None,
    pair: float | None = None,
) -> Times:
    times = {"F": forward, "B": backward, RECOMPUTING: recomputing}
    if halves is not None:
        times |= {"I": halves[0], "W": halves[1]}
    return times if pair is None else {**times, "pair": pair}


def stage_timing(
    forward: float,
    backward: float,
    recomputing: float,
    activations: int,
    input: int,
    output: int,
    gradient: int,
    noise: float | None = None,
    halves: tuple[float, float] | None = None,
    released: int = 0,
    operands: int = 0,
    pair: float | None = None,
    resident: int = 0,
) -> Timing:
    times = stage_times(forward, backward, recomputing, halves, pair)
    return Timing(
        times, MicroBatchBytes(activations, input, released, operands, resident=resident), output, gradient, noise
    )
