"""Library schemes with pairs run the orders of their sources, and cost what is known of them.

The eight steps of DualPipe and DualPipeV (deepseek-ai/DualPipe, dualpipe.py and dualpipev.py) and the combined steps of
Megatron-LM's interleaved schedule are written down here once more, as the loops that they are there.
"""

from collections.abc import Iterator

import pytest

from chimera_ir import library
from chimera_ir.compilation import Compilation
from chimera_ir.cost.durations import Costs
from chimera_ir.cost.report import Figures
from chimera_ir.ir.ops import Operation, Pair
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.cluster import FREE, Cluster
from chimera_ir.profile.costs import StageCosts
from chimera_ir.request import Request
from tests.instructions import singly
from tests.simulator import Simulator
from tests.timings import stage_timing

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
    stage = StageCosts(1, 1, 0, {1: stage_timing(f, b, f + b, 1, 1, 1, 1, halves=halves, pair=times.get("pair"))})
    stages = (stage,) * compiled.schedule.header.stages
    simulated = Simulator(compiled.program, Setting(stages, Cluster("free", 4096, 1, 1, 0, FREE, FREE, FREE), 1, 1))
    assert max(end for *_, end in simulated.computes) == compiled.report.makespan
    return compiled.report


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


COSTS = [{}, {"pair": 3}, {"F": 2, "B": 4, "I": 2, "W": 2, "pair": 6}, {"F": 2, "B": 5, "I": 3, "W": 2, "pair": 7}]
"""Times at which the bubbles are those of the paper: B = I + W, and a pair takes as long as both."""


@pytest.mark.parametrize(("D", "N"), [(2, 4), (4, 8), (4, 14), (6, 12), (8, 16), (8, 22)])
@pytest.mark.parametrize("times", COSTS)
def test_dualpipe_has_the_bubbles_of_its_paper(times: dict[str, int], D: int, N: int) -> None:
    """(PP/2 - 1)(F&B + B - 3W) in table 1 of the repository, and D + 1 micro-batches on a worker."""
    of = figures("dualpipe", times, D=D, N=N)
    f, b, w = times.get("F", 1), times.get("B", 2), times.get("W", 1)
    pair = times.get("pair", f + b)
    assert of.makespan == N * (f + b) + (D // 2 - 1) * (pair + b - 3 * w)
    assert of.activations == (D + 1,) * D
    assert of.makespan == sum(of.costs[key] * count for key, count in of.counts.items())


@pytest.mark.parametrize(("P", "N"), [(1, 2), (2, 4), (2, 7), (4, 8), (4, 16), (4, 19)])
@pytest.mark.parametrize("times", COSTS[:2])
def test_dualpipe_v_has_the_bubbles_of_dualpipe_on_twice_the_workers(times: dict[str, int], P: int, N: int) -> None:
    of = figures("dualpipe_v", times, P=P, N=N)
    assert of.makespan == 6 * N + 2 * (P - 1)
    assert of.activations == (2 * P + 1,) * P
    assert of.weights == (2,) * P


@pytest.mark.parametrize("pair", [2])
def test_a_pair_that_takes_less_than_both_pays(pair: int) -> None:
    """In the steady state every pair is shorter by as much."""
    long, short = (figures("dualpipe", {"pair": time}, D=4, N=24).makespan for time in (3, pair))
    assert long - short >= (3 - pair) * 16


# Interleaved 1F1B in pairs.


def combined(rank: int, P: int, v: int, N: int, g: int) -> Iterator[tuple[Single, ...]]:
    """The loops of Megatron-LM's schedule: a warm-up that is one forward longer, pairs, and what is left."""
    table = [(m, chunk) for first in range(0, N, g) for chunk in range(v) for m in range(first, first + g)]
    warm = min(2 * (P - 1 - rank) + (v - 1) * g + 1, len(table))
    backwards = [(m, v - 1 - chunk) for m, chunk in table]

    def single(letter: str, which: tuple[int, int]) -> tuple[str, int, int]:
        return letter, which[0], which[1] * P + rank

    for which in table[:warm]:
        yield (single("F", which),)
    for ahead, behind in zip(table[warm:], backwards, strict=False):
        yield single("F", ahead), single("B", behind)
    for which in backwards[len(table) - warm :]:
        yield (single("B", which),)


SIZES = [
    (1, 1, 2, 1),
    (2, 1, 4, 2),
    (2, 2, 4, 2),
    (4, 2, 8, 4),
    (4, 2, 16, 8),
    (4, 3, 8, 4),
    (3, 2, 8, 4),
    (8, 4, 32, 8),
]


@pytest.mark.parametrize(("P", "v", "N", "g"), SIZES)
def test_interleaved_overlap_runs_the_loops_of_its_source(P: int, v: int, N: int, g: int) -> None:
    schedule = compilation("interleaved_overlap", {}, P=P, v=v, N=N, g=g).schedule
    for rank, lane in enumerate(schedule.lanes):
        told = [
            tuple((part.kind.letter, part.micros[0], part.stage) for part in singly([operation])) for operation in lane
        ]
        assert told == list(combined(rank, P, v, N, g))


@pytest.mark.parametrize(("P", "v", "N"), [(2, 1, 4), (2, 2, 4), (4, 1, 8), (4, 2, 8), (4, 3, 12), (8, 2, 16)])
def test_interleaved_overlap_takes_as_long_as_interleaved_where_a_pair_takes_as_long_as_both(
    P: int, v: int, N: int
) -> None:
    of = figures("interleaved_overlap", {}, P=P, v=v, N=N)
    assert of.makespan == 3 * (v * N + P - 1)
    if v > 1:
        assert of.makespan == figures("interleaved", {}, P=P, v=v, N=N).makespan
    assert of.activations == tuple(min(v * N, (v - 1) * P + 2 * (P - rank)) for rank in range(P))


@pytest.mark.parametrize("N", range(1, 12))
@pytest.mark.parametrize(("P", "v", "g"), [(1, 2, 1), (2, 2, 3), (4, 1, 4), (4, 2, 4), (4, 2, 6)])
def test_groups_that_are_not_full_are_priced(P: int, v: int, g: int, N: int) -> None:
    of = figures("interleaved_overlap", {}, P=P, v=v, N=N, g=g)
    assert of.makespan >= 3 * (v * N + P - 1) - 3 * (P - 1)
