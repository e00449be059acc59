"""Costs of stages, taken from a recorded run.

They are medians of the run's operations. A rehearsal sleeps in place of computing: its costs are the lengths of its
sleeps.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from statistics import fmean

from chimera_ir.ir.ops import Compute, Instruction, Pair, Step
from chimera_ir.ir.streams import view_of
from chimera_ir.profile.costs import NO_OVERHEAD, StageCosts, Timing
from chimera_ir.trace.compare import costs
from chimera_ir.trace.forecast import Cost
from chimera_ir.trace.spans import Lane, UpdateWindow
from chimera_ir.trace.trace_files import Trace


def run_stages(
    trace: Trace, lanes: Sequence[Lane], windows: Iterable[Sequence[UpdateWindow]]
) -> tuple[StageCosts, ...]:
    """Returns the costs of each stage of a traced program.

    ``windows`` has, for each update that counts, the part of every rank's lane that the update takes. An operation that
    was never recorded takes the mean time of its kind or, if its kind was never recorded either, a time in proportion
    to its cost in the table of kinds. Sizes are not known and count as 0.
    """
    header, size = trace.header, trace.about.micro_batch_size
    seconds = _RunSeconds(costs(header, trace.about.rehearse, lanes, windows))
    instructions = [*chain.from_iterable(view_of(trace.program).lanes)]
    seconds.learn(instructions)
    # The times of each stage by the number of items; an operation over a part of a micro-batch gives those of a whole.
    times: list[dict[int, dict[str, float]]] = [{size: {}} for _ in range(header.stages)]
    for operation in instructions:
        if isinstance(operation, Compute | Pair):
            for part in operation.parts:
                of_stage = times[part.stage]
                for single in {operation, part}:
                    share, weight = Fraction(part.size, header.parts), Fraction(header.weight(part), part.size)
                    length = float(seconds.of(single) / weight)
                    if share == 1 or single.kind.letter not in of_stage[size]:
                        of_stage[size][single.kind.letter] = float(length / share)
                    if share != 1 and (size * share).denominator == 1:
                        of_stage.setdefault(int(size * share), {})[single.kind.letter] = length
    steps: dict[int, float] = {line.group[0]: seconds.of(line) for line in instructions if isinstance(line, Step)}
    return tuple(_stage(of_stage, size, steps.get(stage, 0.0)) for stage, of_stage in enumerate(times))


class _RunSeconds:
    """Seconds of instructions: those recorded in the run, and estimates for operations that were never recorded."""

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self._per_unit: float = 1e-3

    def learn(self, instructions: Iterable[Instruction]) -> None:
        """Computes from the recorded operations how many seconds one unit of cost in the table of kinds takes."""
        lengths = [
            self._cost(operation) / 1e9 / (operation.size * _weight(operation))
            for operation in instructions
            if isinstance(operation, Compute | Pair) and self._cost(operation)
        ]
        self._per_unit = fmean(lengths) if lengths else self._per_unit

    def of(self, instruction: Instruction) -> float:
        """Returns the seconds of an instruction; an operation that was never recorded gets an estimate, never 0."""
        if nanoseconds := self._cost(instruction):
            return nanoseconds / 1e9
        if isinstance(instruction, Compute | Pair):
            return self._per_unit * instruction.size * _weight(instruction)
        return 0.0


def _weight(operation: Compute | Pair) -> float:
    return sum(part.kind.cost for part in operation.parts)


def _stage(times: Mapping[int, Mapping[str, float]], size: int, step: float) -> StageCosts:
    """Returns the costs of a stage; ``times`` has, for each number of items, the seconds of each kind of operation.

    A micro-batch has ``size`` items. Where the time of a kind is known for a whole micro-batch alone, the time for
    fewer items is taken in proportion. ``step`` is the seconds of the stage's optimizer step.
    """
    unknown = StageCosts(0, 0, 0, dict.fromkeys(times, Timing(NO_OVERHEAD, 0, 0, 0, 0)))
    at: dict[int, Timing] = {}
    for items, of_kinds in times.items():
        scaled = {letter: seconds * items / size for letter, seconds in times[size].items()}
        at |= unknown.slept(items, {**scaled, **of_kinds}).at
    return replace(unknown, at=at, step=step)
