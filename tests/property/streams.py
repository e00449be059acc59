"""Random asynchronous schedules, for any number of updates: clocks that are linear in the micro-batch, and versions.

Written from the definitions, without the language: an oracle for what the compiler makes of a few updates.
"""

from dataclasses import dataclass, replace
from random import Random

from chimera_ir.ir.kinds import BACKWARD, FORWARD
from chimera_ir.ir.levels import Header, Pipe, Schedule
from chimera_ir.ir.ops import Compute, Micro, Stage, Version, WeightGroup, Worker
from tests.property.programs import random_ties


@dataclass(frozen=True)
class Stream:
    """``F(m, s) @ rate*m + forward[s]`` and ``B(m, s) @ rate*m + backward[s]``, stage s on worker ``places[s]``.

    A micro-batch m of stage s reads version ``max(0, (m + shift[s]) // per_update)``, the same on tied stages.
    """

    rate: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    places: tuple[int, ...]
    shift: tuple[int, ...]
    per_update: int
    ties: tuple[WeightGroup, ...] = ()

    def schedule(self, updates: int) -> Schedule:
        """The lanes of so many updates: sorted by clock, nothing else."""
        stages, total = len(self.places), updates * self.per_update
        workers = max(self.places) + 1
        header = Header(
            scheme="stream",
            parameters=(),
            workers=workers,
            stages=stages,
            micro_batches=total,
            pipes=(Pipe("down", tuple(map(Worker, self.places)), tuple(map(Micro, range(total)))),),
            updates=updates,
            period=self.per_update,
            ties=self.ties,
        )
        lanes: list[list[tuple[int, Compute]]] = [[] for _ in range(workers)]
        for m in range(total):
            for s, worker in enumerate(self.places):
                version = Version(max(0, (m + self.shift[s]) // self.per_update))
                clock = self.rate * m
                lanes[worker].append(
                    (clock + self.forward[s], Compute(FORWARD, (Micro(m),), Stage(s), version=version))
                )
                lanes[worker].append(
                    (clock + self.backward[s], Compute(BACKWARD, (Micro(m),), Stage(s), version=version))
                )
        return Schedule(header, tuple(tuple(each for _, each in sorted(lane, key=lambda x: x[0])) for lane in lanes))

    @property
    def turns(self) -> int:
        """Over how many turns the micro-batches of one turn spread, and the versions that they read."""
        spread = self.backward[0] // self.rate // self.per_update + 2
        return spread + max(-shift for shift in self.shift) // self.per_update + 1


def one_forward_one_backward(stages: int, per_update: int) -> Stream:
    """1F1B without a flush; updates of one micro-batch read the newest weights of a stage, others those before."""
    return Stream(
        rate=2,
        forward=tuple(range(stages)),
        backward=tuple(2 * stages - 1 - s for s in range(stages)),
        places=tuple(range(stages)),
        shift=tuple(s + 1 - stages if per_update == 1 else -per_update for s in range(stages)),
        per_update=per_update,
    )


def tied(stream: Stream, ties: tuple[WeightGroup, ...]) -> Stream:
    """The stream with ties: each of their stages reads what is there when any of them needs it."""
    shift = list(stream.shift)
    for _ in ties:
        for tie in ties:
            behind = max(stream.backward[s] - stream.forward[t] for s in tie for t in tie) // stream.rate + 1
            oldest = min(1 - behind, *(shift[s] for s in tie))
            for s in tie:
                shift[s] = oldest
    return replace(stream, shift=tuple(shift), ties=ties)


def random_stream(random: Random) -> Stream:
    """A stream in which stages may share workers, operations wait, and stages read weights of any age."""
    stages, per_update = random.randint(1, 4), random.randint(1, 3)
    workers = random.randint(1, stages)
    places = tuple(sorted([*range(workers), *(random.randrange(workers) for _ in range(stages - workers))]))
    rate = 2 * max(places.count(worker) for worker in range(workers)) + random.randint(0, 2)
    taken: list[set[int]] = [set() for _ in range(workers)]
    clock = 0
    clocks: list[int] = []
    for s in [*range(stages), *reversed(range(stages))]:
        clock += random.randint(0, 2)
        while clock % rate in taken[places[s]]:
            clock += 1
        taken[places[s]].add(clock % rate)
        clocks.append(clock)
        clock += 1
    forward, backward = tuple(clocks[:stages]), tuple(reversed(clocks[stages:]))
    # B(m', s) is over before F(m, s) begins if m' is at most m - behind: that many updates are there to be read.
    behind = [(backward[s] - forward[s]) // rate + 1 for s in range(stages)]
    shift = tuple(1 - behind[s] - random.choice([0, 0, per_update, random.randint(0, 3)]) for s in range(stages))
    stream = Stream(rate, forward, backward, places, shift, per_update)
    return tied(stream, tuple(tie for tie in random_ties(random, range(stages)) if _in_step(stream, tie)))


def _in_step(stream: Stream, tie: WeightGroup) -> bool:
    """Whether no backward of an update runs on a stage of a tie after one of the next update has on another."""
    clocks = [stream.backward[s] for s in tie]
    return max(clocks) - min(clocks) < stream.rate
