"""Schedules for tests, built from a place and a clock without the compiler's own front end."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from chimera_ir.ir.kinds import BACKWARD, FORWARD
from chimera_ir.ir.levels import Header, Pipe, Schedule
from chimera_ir.ir.ops import Compute, Micro, Stage, Version, Worker

Direction = tuple[str, Callable[[int], int], Iterable[int]]


def schedule(
    name: str,
    parameters: dict[str, int],
    stages: int,
    workers: int,
    directions: Iterable[Direction],
    forward: Callable[[int, int], int],
    backward: Callable[[int, int], int],
) -> Schedule:
    """Every direction (name, place of a stage, micro-batches) on the same clock of (number within the pipe, stage)."""
    pipes = []
    clocked: list[list[tuple[int, Compute]]] = [[] for _ in range(workers)]
    for pipe, place, numbers in directions:
        micros = tuple(Micro(number) for number in numbers)
        pipes.append(Pipe(pipe, tuple(Worker(place(s)) for s in range(stages)), micros))
        for m, micro in enumerate(micros):
            for s in range(stages):
                clocked[place(s)].append((forward(m, s), Compute(FORWARD, (micro,), Stage(s))))
                clocked[place(s)].append((backward(m, s), Compute(BACKWARD, (micro,), Stage(s))))
    lanes = tuple(tuple(operation for _, operation in sorted(lane, key=lambda pair: pair[0])) for lane in clocked)
    total = sum(len(pipe.micros) for pipe in pipes)
    return Schedule(Header(name, tuple(parameters.items()), workers, stages, total, tuple(pipes)), lanes)


def one_direction(D: int, N: int) -> Schedule:
    """1F1B with a flush, as LANGUAGE.md has it."""
    return schedule(
        "plain",
        {"D": D, "N": N},
        D,
        D,
        [("down", lambda s: s, range(N))],
        lambda m, s: 2 * m + s,
        lambda m, s: 2 * m + 2 * D - 1 - s,
    )


def two_directions(D: int, K: int = 1, name: str = "both") -> Schedule:
    """The same clock run in both directions over the same workers, K units of D micro-batches one after the other."""
    half = D // 2

    def unit(m: int) -> int:
        return 2 * (m % half) + 2 * D * (m // half)

    return schedule(
        name,
        {"D": D, "N": K * D},
        D,
        D,
        [
            ("down", lambda s: s, [D * k + m for k in range(K) for m in range(half)]),
            ("up", lambda s: D - 1 - s, [D * k + half + m for k in range(K) for m in range(half)]),
        ],
        lambda m, s: unit(m) + s,
        lambda m, s: unit(m) + 2 * D - 1 - s,
    )


def all_then_all(D: int, N: int) -> Schedule:
    """All forwards, then all backwards."""
    return schedule(
        "all",
        {"D": D, "N": N},
        D,
        D,
        [("down", lambda s: s, range(N))],
        lambda m, s: m + s,
        lambda m, s: N + D - 1 + m + D - 1 - s,
    )


def in_turns(D: int, N: int, workers: int) -> Schedule:
    """Stages dealt to fewer workers in turn, all forwards before all backwards."""
    return schedule(
        "turns",
        {"D": D, "N": N},
        D,
        workers,
        [("down", lambda s: s % workers, range(N))],
        lambda m, s: s * N + m,
        lambda m, s: 2 * D * N - s * N + m,
    )


def streamed(
    D: int,
    updates: int,
    reads: Callable[[int, int], int],
    *,
    K: int = 1,
    period: int | None = None,
    clock: Callable[[int, int], int] = lambda m, s: 2 * m + s,
    name: str = "streamed",
) -> Schedule:
    """One direction without a flush: so many updates of K micro-batches, each of which reads version (m, s) of a stage.

    ``clock`` is that of the forwards; a backward comes as long after the last stage's forward as its forward before.
    """
    flushed = schedule(
        name,
        {"D": D, "K": K},
        D,
        D,
        [("down", lambda s: s, range(K * updates))],
        clock,
        lambda m, s: 2 * clock(m, D) - 1 - clock(m, s),
    )
    header = replace(flushed.header, updates=updates, period=period or K)
    lanes = tuple(
        tuple(replace(each, version=Version(reads(each.micros[0], each.stage))) for each in lane)
        for lane in flushed.lanes
    )
    return Schedule(header, lanes)


def one_version_each(D: int, updates: int | None = None) -> Schedule:
    """An update after every micro-batch; the later the stage, the newer the weights that it reads."""
    return streamed(D, updates or 2 * D + 4, lambda m, s: max(0, m - (D - 1 - s)), name="each")


def two_versions(D: int, K: int, updates: int = 8) -> Schedule:
    """An update after every K micro-batches, which read the weights from before the one before."""
    return streamed(D, updates, lambda m, s: max(0, m // K - 1), K=K, name="two")
