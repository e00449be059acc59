"""Messages about a dataset to the ranks that do not read it; test_loader.py has them in a loader."""

import time
from typing import Any

import pytest

from chimera_runtime.data.loader import Messages, ReaderMessages
from chimera_runtime.errors import PeerLost
from chimera_runtime.ranks.world import World
from tests.unit.runtime.thread_ranks import job, together, worlds

LONG = 300
THREE: Any = {"workers": 3, "stages": 3, "placement": ((0, 1, 2),)}


def test_the_first_reader_of_each_copy_tells_and_the_others_of_the_copy_hear_in_order(alone: World) -> None:
    """Worker 1 reads, as does worker 2, which neither tells nor hears; a reader may be some way ahead."""

    def run(reader_messages: ReaderMessages, world: World) -> list[int]:
        if world.place.worker:
            for items in range(LONG):
                reader_messages.send_items(1000 * world.place.copy + items)
            return []
        time.sleep(0.1)
        return [reader_messages.receive_items() for _ in range(LONG)]

    with worlds(alone, job(**THREE), copies=2) as ranks:
        told = [Messages() for _ in ranks]
        made = [
            ReaderMessages(world.control_group, frozenset({1, 2}), 4, mine)
            for world, mine in zip(ranks, told, strict=True)
        ]
        heard = together([lambda pair=pair: run(*pair) for pair in zip(made, ranks, strict=True)])  # type: ignore[misc]
        assert heard == [[*range(LONG)], [], [], [*range(1000, 1000 + LONG)], [], []]
        assert [*map(len, told)] == [0, 256, 0] * 2, "the last of which may not have been heard yet"


def test_loaders_of_two_numbers_do_not_mix(alone: World) -> None:
    with worlds(alone, job()) as ranks:
        kept = Messages()
        telling, hearing = (
            [ReaderMessages(world.control_group, frozenset({0}), number, kept) for number in (1, 2)] for world in ranks
        )
        for number, reader_messages in enumerate(telling):
            reader_messages.send_items(number)
        del telling, reader_messages
        assert [reader_messages.receive_items() for reader_messages in reversed(hearing)] == [1, 0]


def test_all_ranks_learn_what_the_reader_of_the_first_copy_has(alone: World) -> None:
    with worlds(alone, job(**THREE), copies=2) as ranks:

        def run(world: World) -> list[Any]:
            reader_messages = ReaderMessages(world.control_group, frozenset({1}), 4, Messages())
            return [reader_messages.share_state({"of": world.place.rank, "time": time}) for time in range(2)]

        share_state = together([lambda world=world: run(world) for world in ranks])  # type: ignore[misc]
    assert share_state == [[{"of": 1, "time": 0}, {"of": 1, "time": 1}]] * 6


def test_a_reader_that_says_nothing_is_named(alone: World) -> None:
    with (
        worlds(alone, job(), timeout=0.1) as ranks,
        pytest.raises(PeerLost, match="for the state of the dataset"),
    ):
        ReaderMessages(ranks[1].control_group, frozenset({0}), 1, Messages()).share_state(None)
