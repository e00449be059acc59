"""Turns that run while later updates have not been given: they end, whatever the other workers have been given."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random

import pytest

from chimera_ir import library
from chimera_ir.compilation import Compilation
from chimera_ir.flow.net import RunnableTurn, lag, runnable_stream, runnable_turns
from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import Instruction, Step
from chimera_ir.ir.streams import ProgramStream, header_of
from chimera_ir.ir.turns import by_turn, unroll
from chimera_ir.lower.lower import lower
from chimera_ir.request import Request, Tie
from chimera_ir.source import Source
from chimera_ir.verify.verify import verify_program
from tests.executor import TRANSPORTS, Executor, Wrong
from tests.lowered import level
from tests.property.streams import random_stream

TESTS = Path(__file__).resolve().parent.parent
FOLDERS = (TESTS / "e2e" / "schemes" / "streams", TESTS.parent / "docs" / "examples")
CASES = [
    ("pipedream", {"D": 1}),
    ("pipedream", {"D": 4}),
    ("pipedream_2bw", {"D": 4}),
    ("pipedream_2bw", {"D": 2, "N": 5}),
    ("amdp", {"D": 4}),
    ("accumulate", {"D": 4, "K": 2}),
    ("folded", {"N": 3}),
    ("crossing", {}),
    ("streams", {"D": 4}),
    ("turns", {}),
    ("late", {}),
]


@cache
def stream(name: str, parameters: tuple[tuple[str, int], ...], ties: tuple[Tie, ...] = ()) -> ProgramStream:
    path = next((folder / f"{name}.chim" for folder in FOLDERS if (folder / f"{name}.chim").exists()), None)
    source = library.source(name) if path is None else Source(path.name, path.read_text())
    schedule = Compilation(Request(source, dict(parameters), ties=ties)).schedule
    return lower(schedule)


def case(name: str, parameters: dict[str, int]) -> ProgramStream:
    return stream(name, tuple(parameters.items()))


def random_case(seed: int) -> ProgramStream:
    drawn = random_stream(Random(seed))
    return level(drawn.schedule((2 * drawn.turns + 7) * 2))


def lanes(of: ProgramStream, turns: Sequence[RunnableTurn], given: int, updates: int) -> list[tuple[Instruction, ...]]:
    """What each worker has run when some updates are given, in a run of so many."""
    per_turn = of.header.per_turn
    return [
        tuple(
            instruction
            for number, instruction in by_turn(of.header, worker.turn, updates)
            if number * per_turn + worker.ahead < given
        )
        for worker in turns
    ]


def ends(
    of: ProgramStream, turns: Sequence[RunnableTurn], given: int, seeds: int = 2, transports: Sequence[str] = TRANSPORTS
) -> bool:
    """Whether all that runs when some updates are given comes to its end, by the executor."""
    program = Program(header_of(of.header, given), tuple(lanes(of, turns, given, given)))
    for transport in transports:
        for seed in range(seeds):
            executor = Executor(program, transport, seed)
            with suppress(Wrong):  # what is under way is left undone
                executor.run()
            if any(worker.place < len(worker.lane) for worker in executor.workers):
                return False
    return True


def assert_runnable(of: ProgramStream) -> None:
    turns = runnable_turns(of)
    per_turn = of.header.per_turn
    for given in range(per_turn, 8 * per_turn, per_turn):
        assert lanes(of, turns, given, given) == lanes(of, turns, given, given + 20), "about no later update"
        assert ends(of, turns, given)
    for runnable, turn in zip(turns, of.turns, strict=True):
        assert [*unroll(of.header, runnable.turn, 9)] == [*unroll(of.header, turn, 9)], "the same lane"


@pytest.mark.full
@pytest.mark.parametrize(("name", "parameters"), CASES)
def test_what_is_run_ends_without_a_later_update(name: str, parameters: dict[str, int]) -> None:
    assert_runnable(case(name, parameters))


@pytest.mark.parametrize(("name", "parameters"), [("pipedream_2bw", {"D": 4}), ("pipedream_2bw", {"D": 2, "N": 5})])
def test_the_sums_of_tied_stages_are_waited_for_like_others(name: str, parameters: dict[str, int]) -> None:
    of = stream(name, tuple(parameters.items()), (("first", "last"),))
    assert of.header.ties
    assert_runnable(of)
    turns = runnable_turns(of)
    behind = lag(turns)
    for update in range(4):
        given = update + behind + 1
        ran = [line for lane in lanes(of, turns, given, given) for line in lane if isinstance(line, Step)]
        steps = Counter(line.group for line in ran if line.version == update + 1)
        held = [of.header.stages_of[worker] for worker in range(of.header.workers)]
        groups = [*((stage,) for stage in range(of.header.stages)), *of.header.ties]
        assert steps == {group: sum(not {*group}.isdisjoint(stages) for stages in held) for group in groups}


@pytest.mark.full
@pytest.mark.parametrize("seed", range(25))
def test_what_is_run_of_a_random_stream_ends_without_a_later_update(seed: int) -> None:
    assert_runnable(random_case(seed))


@pytest.mark.parametrize(("name", "parameters"), CASES)
def test_an_update_is_complete_on_every_worker_when_so_many_further_ones_are_given(
    name: str, parameters: dict[str, int]
) -> None:
    of = case(name, parameters)
    turns = runnable_turns(of)

    def complete(given: int, update: int) -> bool:
        ran = [line for lane in lanes(of, turns, given, given) for line in lane if isinstance(line, Step)]
        stages = sum(len(of.header.stages_of[worker]) for worker in range(of.header.workers))
        return sum(line.version == update + 1 for line in ran) == stages

    behind = lag(turns)
    assert all(complete(update + behind + 1, update) for update in range(6))
    assert not all(complete(update + behind, update) for update in range(6)), "or it could be smaller"


@pytest.mark.parametrize(("name", "parameters"), CASES)
def test_turns_begin_elsewhere_only_where_whole_turns_wait_for_one_another(
    name: str, parameters: dict[str, int]
) -> None:
    of = case(name, parameters)
    runnable = runnable_stream(of)
    assert (runnable == of) == (name != "late")
    assert runnable_stream(runnable) == runnable
    assert verify_program(of).level == runnable, "its text says what the scripts say"


def test_a_turn_waits_for_updates_that_it_is_not_about_where_another_worker_does() -> None:
    """Worker 0 of 1F1B waits for gradients that worker 1 makes in a turn that posts a receive of the next update."""
    of = case("pipedream_2bw", {"D": 4})
    turns = runnable_turns(of)
    assert [worker.ahead for worker in turns] == [1, 1, 1, 1]
    sooner = [turns[0]._replace(ahead=0), *turns[1:]]
    assert lanes(of, sooner, 5, 5) == lanes(of, sooner, 5, 9), "its own lines need nothing more"
    assert not ends(of, sooner, 5)


def test_the_depths_of_the_library_complete_an_update_as_late_as_they_must() -> None:
    """Where each micro-batch is an update, stage 0 has its backward D-1 forwards later, and steps in the next turn."""
    assert [lag(runnable_turns(case("pipedream", {"D": depth}))) for depth in (2, 4, 8)] == [2, 4, 8]
    assert [lag(runnable_turns(case("pipedream_2bw", {"D": depth}))) for depth in (2, 4, 8)] == [2, 2, 2]
