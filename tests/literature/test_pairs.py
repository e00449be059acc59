"""Library schemes with pairs run the orders of their sources, and cost what is known of them.

The eight steps of DualPipe and DualPipeV (deepseek-ai/DualPipe, dualpipe.py and dualpipev.py) and the combined steps of
Megatron-LM's interleaved schedule are written down here once more, as the loops that they are there.
"""

from collections.abc import Iterator

import pytest

from chimera_ir import library
from chimera_ir.compilation import Compilation
from chimera_ir.cost.model import Costs
from chimera_ir.cost.report import Figures
from chimera_ir.ir.ops import Operation, Pair
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.cluster import FREE, Cluster
from chimera_ir.profile.costs import StageCosts, Timing
from chimera_ir.request import Request
from tests.simulator import Simulator

Single = tuple[str, int, int]
"""The letter of an operation, its micro-batch in the count of its pipe, its pipe."""


def compilation(name: str, times: dict[str, int], **settings: int) -> Compilation:
    costs = Costs()
    for kind, time in times.items():
        costs = costs.using(kind, str(time))
    return Compilation(Request(library.source(name), settings, costs), warn=lambda warning: pytest.fail(warning.code))


def figures(name: str, times: dict[str, int], **settings: int) -> Figures:
    """The figures of a schedule without a warning, whose makespan the simulator of programs confirms."""
    compiled = compilation(name, times, **settings)
    f, b = times.get("F", 1), times.get("B", 2)
    halves = times.get("I", 1), times.get("W", 1)
    stage = StageCosts(1, 1, 0, {1: Timing(f, b, f + b, 1, 1, 1, 1, halves=halves, pair=times.get("pair"))})
    stages = (stage,) * compiled.schedule.header.stages
    simulated = Simulator(compiled.program, Setting(stages, Cluster("free", 4096, 1, 1, 0, FREE, FREE, FREE), 1, 1))
    assert max(end for *_, end in simulated.computes) == compiled.report.figures.makespan
    return compiled.report.figures


def orders(compiled: Compilation) -> list[list[tuple[Single, ...]]]:
    """The operations of every worker, each as its parts: letter, micro-batch of the pipe, pipe."""
    pipes = compiled.schedule.header.pipes
    where = {micro: (place, number) for number, pipe in enumerate(pipes) for place, micro in enumerate(pipe.micros)}

    def told(operation: Operation) -> tuple[Single, ...]:
        parts = [operation.forward, operation.backward] if isinstance(operation, Pair) else [operation]
        return tuple((part.kind.letter, *where[part.micros[0]]) for part in parts)

    return [[told(operation) for operation in lane] for lane in compiled.schedule.lanes]


# DualPipe.


def eight_steps(half: int, ranks: int, micros: int, own: int, other: int) -> Iterator[tuple[Single, ...]]:
    """The loops of a rank: ``half`` from the nearer end of ``ranks``, with so many micro-batches in each phase.

    ``own`` and ``other`` name what phases 0 and 1 run.
    """
    middle, done, late = ranks // 2, {(letter, phase): 0 for letter in "FB" for phase in (0, 1)}, list[Single]()
    pipe = {0: own, 1: other}

    def take(letter: str, phase: int) -> Single:
        number = done[letter, phase]
        done[letter, phase] += 1
        return letter, number, pipe[phase]

    def split(phase: int) -> Single:
        _, number, of = take("B", phase)
        late.append(("W", number, of))
        return "I", number, of

    for _ in range(2 * (middle - half - 1)):
        yield (take("F", 0),)
    for _ in range(half + 1):
        yield (take("F", 0),)
        yield (take("F", 1),)
    for _ in range(middle - half - 1):
        yield (split(1),)
        yield (late.pop(0),)
        yield (take("F", 1),)
    for _ in range(micros - ranks + half + 1):
        yield (take("F", 0), take("B", 1))
        yield (take("F", 1), take("B", 0))
    for _ in range(middle - half - 1):
        yield (take("B", 1),)
        yield (take("F", 1), take("B", 0))
    for number in range(2 * (half + 1)):
        phase = 1 - number % 2
        yield (split(phase) if number > half else take("B", phase),)
    for _ in range(middle - half - 1):
        yield (late.pop(0),)
        yield (split(0),)
    while late:
        yield (late.pop(0),)


@pytest.mark.parametrize(("D", "N"), [(2, 4), (2, 10), (4, 8), (4, 10), (4, 20), (6, 12), (8, 16), (8, 26)])
def test_dualpipe_runs_its_eight_steps(D: int, N: int) -> None:
    lanes = orders(compilation("dualpipe", {}, D=D, N=N))
    for worker, lane in enumerate(lanes):
        own, other = (0, 1) if worker < D // 2 else (1, 0)
        assert lane == list(eight_steps(min(worker, D - 1 - worker), D, N // 2, own, other))


@pytest.mark.parametrize(("P", "N"), [(1, 2), (1, 5), (2, 4), (2, 7), (4, 8), (4, 16), (4, 19)])
def test_dualpipe_v_runs_its_eight_steps(P: int, N: int) -> None:
    lanes = orders(compilation("dualpipe_v", {}, P=P, N=N))
    for worker, lane in enumerate(lanes):
        assert lane == list(eight_steps(worker, 2 * P, N, 0, 0))


def test_dualpipe_at_the_size_that_others_computed() -> None:
    of = figures("dualpipe", {"pair": 3}, D=4, N=8)
    assert of.makespan == 26
    assert of.activations == (5,) * 4
    assert of.weights == (2,) * 4
    assert of.makespan == sum(dict(of.costs.told(of.header))[key] * count for key, count in of.counts.items())
