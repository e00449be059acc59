"""Plans of moves to the host, compared with all choices of what moves, and when."""

import random
from collections.abc import Iterator

import pytest

import chimera_ir
from chimera_ir.cost.host_plan import TimedLane, TimedStep, moving_lane
from chimera_ir.ir.kinds import BACKWARD, FORWARD
from chimera_ir.ir.ops import Compute, Micro, Stage

HEADER = chimera_ir.compile("dapple", D=2, N=4).schedule.header
LENGTHS = {"F": 2, "B": 4}


def random_lane(rng: random.Random, micros: int) -> TimedLane:
    """Forwards and backwards of a stage in any order that has each backward after its forward, with idle times."""
    waiting = [("F", micro) for micro in range(micros)]
    steps, begun, now = list[TimedStep](), list[int](), 0
    while waiting or begun:
        letter, micro = waiting.pop(0) if waiting and (not begun or rng.random() < 0.8) else ("B", begun.pop(0))
        begun += [micro] if letter == "F" else []
        now += rng.choice([0, 0, 0, 1, 3])
        kind = FORWARD if letter == "F" else BACKWARD
        steps.append(TimedStep(Compute(kind, (Micro(micro),), Stage(0)), now, now + LENGTHS[letter]))
        now += LENGTHS[letter]
    return TimedLane(steps)


def best(lane: TimedLane, transfer: int) -> int:
    """The least that the lane can keep: of all choices of what moves, and all whole times of the transfers."""
    times = {(step.operation.kind.letter, step.operation.micros[0]): (step.start, step.end) for step in lane.steps}
    micros = sorted(micro for letter, micro in times if letter == "F")
    events = sorted({time for step in lane.steps for time in (step.start, step.end)})

    def launched(start: int) -> int:
        """The time from which a reload needs memory: the start of the operation during which it begins."""
        return next((step.start for step in lane.steps if step.start < start < step.end), start)

    def choices(micro: int) -> Iterator[tuple[int, int] | None]:
        yield None
        made, read = times["F", micro][1], times["B", micro][0]
        for out in range(made, read - 2 * transfer + 1):
            for back in range(out + transfer, read - transfer + 1):
                yield out, back

    def kept(plan: dict[int, tuple[int, int] | None]) -> int:
        """The most that is kept at any time by the micro-batches of a plan."""
        spans = []
        for micro, moves in plan.items():
            start, end = times["F", micro][0], times["B", micro][1]
            spans += [(start, end)] if moves is None else [(start, moves[0] + transfer), (launched(moves[1]), end)]
        instants = {*events, *(start for start, _ in spans)}
        return max(sum(start <= time < end for start, end in spans) for time in instants)

    def feasible(limit: int, plan: dict[int, tuple[int, int] | None], taken: list[int]) -> bool:
        if plan and kept(plan) > limit:
            return False
        if len(plan) == len(micros):
            return True
        for moves in choices(micros[len(plan)]):
            new = [*moves] if moves else []
            is_free = all(abs(a - b) >= transfer for a in new for b in taken)
            if is_free and feasible(limit, {**plan, micros[len(plan)]: moves}, [*taken, *new]):
                return True
        return False

    return next(limit for limit in range(1, len(micros) + 1) if feasible(limit, {}, []))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(40))
def test_a_plan_keeps_as_little_as_the_best_of_all_choices(seed: int) -> None:
    rng = random.Random(seed)
    lane, transfer = random_lane(rng, rng.choice([3, 4])), rng.randint(1, 4)
    planned = moving_lane(HEADER, lane, lambda _: transfer, 0)
    assert planned.limit == best(lane, transfer), (transfer, lane.steps)


def test_a_quarter_of_these_plans_keep_less_than_without_moves() -> None:
    """So the test above is about plans, not about lanes on which nothing can move."""
    gains = 0
    for seed in range(40):
        rng = random.Random(seed)
        lane, transfer = random_lane(rng, rng.choice([3, 4])), rng.randint(1, 4)
        gains += moving_lane(HEADER, lane, lambda _, transfer=transfer: transfer, 0).limit < best(lane, 1000)
    assert gains >= 10
