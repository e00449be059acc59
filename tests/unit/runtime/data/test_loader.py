"""The mini-batches of a dataset that a rank gets: their order, their beginning, and what the rank loads for them."""

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, RandomSampler, WeightedRandomSampler

from chimera_runtime.blame import ModelError
from chimera_runtime.data.item_order import Share
from chimera_runtime.data.loader import Loader, Messages, ReaderMessages
from chimera_runtime.data.micro_batch_source import Batches
from chimera_runtime.data.mini_batch import ItemLoading, MiniBatch
from chimera_runtime.data.readers import IterableReader, ReadPosition
from chimera_runtime.errors import BadCheckpoint, Misuse, PeerLost
from chimera_runtime.ranks.world import World
from tests.unit.runtime.datasets import (
    Drawing,
    Flowing,
    Sized,
    Stateful,
    StatefulIterator,
    draws,
    loader,
    numbers,
)
from tests.unit.runtime.thread_ranks import job, together, worlds

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with fewer cores

KINDS = [Drawing, Flowing, Sized, Stateful, StatefulIterator]


def endless(of: Loader) -> Iterator[MiniBatch]:
    while True:
        yield from of


def after(of: Loader, mini_batches: int) -> Loader:
    for _ in islice(endless(of), mini_batches):
        pass
    return of


# Epochs.


@pytest.mark.parametrize("kind", KINDS)
def test_an_iteration_is_an_epoch_without_the_items_that_fill_no_mini_batch(alone: World, kind: Any) -> None:
    """26 items, 4 in a mini-batch: 6 of them; the order is another one in each epoch if there is one to choose."""
    mine = loader(alone, kind())
    epochs = []
    for epoch in range(3):
        assert mine.epoch == epoch
        batches = [*mine]
        assert [batch.items for batch in batches] == [4] * 6
        epochs.append([number for batch in batches for number in numbers(batch)])
    for seen in epochs:
        assert set(Counter(seen).values()) == {1}
    if kind is Drawing:
        assert len({*map(tuple, epochs)}) == 3
        assert len(mine) == 6
    else:
        assert epochs == [[*range(24)]] * 3


def test_it_has_the_items_and_draws_that_train_py_begins_with(alone: World) -> None:
    """`Batches` are what a check sees: any update of three epochs, for the second of two copies."""
    for kind in (Drawing, Flowing):
        mine = endless(loader(alone, kind(), copies=2, copy=1))
        shown = Batches(kind(), 2, 2, 1, 2, 1, 7)
        for update, batch in enumerate(islice(mine, 8)):
            for micro in range(2):
                inputs, target, keywords = batch(micro)
                assert torch.equal(inputs, shown.input(update, micro)), (kind, update, micro)
                assert torch.equal(target, shown.target(update, micro))
                assert keywords == {}


@pytest.mark.parametrize("kind", KINDS)
def test_copies_share_what_one_copy_with_as_many_micro_batches_would_have(alone: World, kind: Any) -> None:
    copies = [[*loader(alone, kind(), copies=3, copy=copy)] for copy in range(3)]
    whole = [*loader(alone, kind(), micro_batches=6)]
    together = [[number for part in parts for number in numbers(part)] for parts in zip(*copies, strict=True)]
    assert together == [*map(numbers, whole)]
    assert [{k: v for part in parts for k, v in draws(part).items()} for parts in zip(*copies, strict=True)] == [
        *map(draws, whole)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [1, 3])
def test_data_workers_change_neither_the_order_nor_what_items_draw(alone: World, kind: Any, workers: int) -> None:
    plain, worked = loader(alone, kind()), loader(alone, kind(), workers=workers)
    for mine, theirs in zip(islice(endless(plain), 14), endless(worked), strict=False):
        assert numbers(mine) == numbers(theirs)
        assert draws(mine) == draws(theirs)
    worked.close()


def test_a_rank_loads_what_it_uses_and_nothing_else(alone: World) -> None:
    dataset = Drawing()
    (batch, *_) = mine = [*loader(alone, dataset, shuffle=False, uses={1: frozenset({0})})]
    assert dataset.asked == [2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23]
    assert [*map(numbers, mine)] == [[n, n + 1] for n in range(2, 26, 4)]
    assert batch(1)[1:] == (None, {})
    with pytest.raises(Misuse, match="micro-batch 0 was not loaded: this rank does not use it in a step"):
        batch(0)
    idle = Drawing()
    assert [(batch.items, batch.micro_batches) for batch in loader(alone, idle, uses={}, workers=2)] == [(4, {})] * 6
    assert idle.asked == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_items_of_an_epoch_are_a_smaller_mini_batch_if_that_is_wanted(alone: World, kind: Any) -> None:
    """26 = 2 * 12 + 2: the first copy has them, and the second has one mini-batch less."""
    copies = [
        [*loader(alone, kind(), 3, 2, 2, copy, drop_last=False, shuffle=False, workers=copy)] for copy in range(2)
    ]
    assert [[batch.items for batch in batches] for batches in copies] == [[6, 6, 2], [6, 6]]
    assert numbers(copies[0][-1]) == [24, 25]
    assert [*copies[0][-1].micro_batches] == [0]
    with pytest.raises(Misuse, match=r"of an epoch has 2 items, and an update takes B\*N = 3\*2: make the loader with"):
        copies[0][-1].require_whole()
    copies[0][0].require_whole()


@pytest.mark.parametrize("kind", [Drawing, Flowing])
def test_the_data_workers_of_a_loader_end_with_it(alone: World, kind: Any) -> None:
    mine = loader(alone, kind(), workers=2)
    assert len([*islice(mine, 2)]) == 2
    assert len(multiprocessing.active_children()) == 2
    del mine
    assert multiprocessing.active_children() == []


def test_an_iteration_that_is_broken_off_is_followed_by_the_next_epoch(alone: World) -> None:
    """The next epoch follows as in a DataLoader; `set_epoch` chooses it, but a resumed iteration keeps its position."""
    expected = [*map(numbers, loader(alone, Drawing()))]
    mine = loader(alone, Drawing(), workers=1)
    assert [numbers(batch) for batch in islice(mine, 2)] == expected[:2]
    other = [numbers(batch) for batch in mine]
    assert len(other) == 6
    assert other != expected
    mine.set_epoch(0)
    assert [*map(numbers, mine)] == expected
    assert [*map(numbers, mine)] == other
    mine.close()


# Samplers.


@pytest.mark.parametrize(
    "make", [lambda data: RandomSampler(data), lambda data: WeightedRandomSampler([1.0] * len(data), 12)]
)
def test_a_sampler_that_draws_from_the_global_generator_draws_alike_on_all_ranks(
    alone: World, make: Callable[[Any], Any]
) -> None:
    orders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        data = Drawing()
        mine = loader(alone, data, sampler=make(data), shuffle=False)
        orders.append([[number for batch in mine for number in numbers(batch)] for _ in range(2)])
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]


def test_a_sampler_is_told_the_epoch_and_may_give_any_keys(alone: World) -> None:
    class Named:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, name: str) -> tuple[float, float]:
            return float(ord(name)), 0.0

    class Turning:
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[str]:
            return iter("abcd" if self.epoch % 2 == 0 else "dcba")

    mine = loader(alone, Named(), 1, 2, sampler=Turning())
    assert [numbers(batch) for batch in islice(endless(mine), 4)] == [[97, 98], [99, 100], [100, 99], [98, 97]]
    assert mine.state_dict() == {"epoch": 2, "items": 0, "length": 4}


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_for_which_a_sampler_gives_too_few_items_is_refused_when_it_comes(alone: World, workers: int) -> None:
    class Waning:
        def set_epoch(self, epoch: int) -> None:
            self.items = 8 - 5 * epoch

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.items))

    mine = loader(alone, Drawing(), sampler=Waning(), workers=workers)
    assert [numbers(batch) for batch in mine] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(Misuse, match="the dataset has 3 items and one update takes"):
        next(iter(mine))
    mine.close()


# Going on elsewhere.


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_it_goes_on_from_every_place_as_if_it_had_not_stopped(alone: World, kind: Any, workers: int) -> None:
    whole = [*map(draws, islice(endless(loader(alone, kind())), 9))]
    for given in range(0, 8, 1 if workers == 0 else 3):
        first = after(loader(alone, kind(), workers=workers), given)
        state = first.state_dict()
        first.close()
        second = loader(alone, kind(), workers=workers)
        second.load_state_dict(state)
        assert [*map(draws, islice(endless(second), 9 - given))] == whole[given:], given
        second.close()


@pytest.mark.parametrize(("kind", "first"), [(Flowing, 0), (Stateful, 8), (StatefulIterator, 8)])
def test_a_stream_goes_on_by_its_own_state_and_else_by_skipping(alone: World, kind: Any, first: int) -> None:
    dataset = kind()
    again = loader(alone, dataset)
    again.load_state_dict(after(loader(alone, kind()), 2).state_dict())
    assert numbers(next(iter(again))) == [8, 9, 10, 11]
    assert dataset.read == [*range(first, 12)]


@pytest.mark.parametrize("kind", [Drawing, Flowing, Stateful])
@pytest.mark.parametrize("sizes", [(1, 4, 3), (4, 1, 3), (2, 3, 2), (1, 2, 3), (3, 1, 1)])
def test_other_mini_batches_go_on_with_the_items_that_are_next(
    alone: World, kind: Any, sizes: tuple[int, int, int]
) -> None:
    """Resumes after every mini-batch of 12 items, over three epochs of 24; B*N*W is 12, 6 or 3."""
    size, number, count = sizes
    larger = 12 // (size * number * count)
    first = loader(alone, kind(), 2, 6)
    others = [loader(alone, kind(), size, number, count, copy) for copy in range(count)]
    for _, expected in zip(range(5), endless(first), strict=False):
        state = first.state_dict()
        if state["items"] == 24:
            continue  # of a stream, which has not told yet that it ends there
        for other in others:
            other.load_state_dict(state)
        first_items = [[numbers(batch) for batch in islice(endless(other), larger)] for other in others]
        after = loader(alone, kind(), 2, 6)
        after.load_state_dict(state)
        seen = [item for parts in zip(*first_items, strict=True) for part in parts for item in part]
        assert seen == numbers(next(endless(after))), state
        assert expected.items == 12


def test_a_position_is_that_of_the_next_item_and_where_no_mini_batch_begins_is_refused(alone: World) -> None:
    """11 items, 4 in a mini-batch: two an epoch."""
    mine = after(loader(alone, Drawing(11)), 5)
    assert mine.state_dict() == {"epoch": 2, "items": 4, "length": 11}
    with pytest.raises(
        BadCheckpoint, match=r"has 11 items, and had 10 items .* take the weights alone, with load_weights"
    ):
        mine.load_state_dict({"epoch": 0, "items": 4, "length": 10})
    with pytest.raises(Misuse) as refused:
        loader(alone, Drawing(11), 3, 1).load_state_dict({"epoch": 0, "items": 4, "length": 11})
    assert str(refused.value) == (
        "training was at item 4 of the data, and B*N*W = 3*1*1 = 3 does not divide that: choose B, N or W so that it "
        "does"
    )
    with pytest.raises(BadCheckpoint, match="has a length that it does not say, and had 11 items"):
        loader(alone, Flowing(11)).load_state_dict({"epoch": 0, "items": 4, "length": 11})


# Ranks that read nothing of a stream.


@pytest.mark.parametrize("kind", [Flowing, Stateful])
def test_ranks_that_read_nothing_end_their_epochs_with_those_that_read(alone: World, kind: Any) -> None:
    """Three workers, of which the first and the last read, in two copies; and they know the stream's state."""
    uses = [{0: frozenset({0})}, {}, {0: frozenset({1}), 1: frozenset({1})}]
    three = job(workers=3, stages=3, placement=((0, 1, 2),))
    datasets = [kind() for _ in range(6)]
    with worlds(alone, three, copies=2) as ranks:
        loaders = [
            loader(world, dataset, 2, 2, 2, world.place.copy, uses=uses[world.place.worker], readers=frozenset({0, 2}))
            for world, dataset in zip(ranks, datasets, strict=True)
        ]

        def epochs(mine: Loader) -> tuple[list[list[int]], Any]:
            ended = [[batch.items for batch in mine] for _ in range(2)]
            began = iter(mine)
            next(began)
            return ended, mine.state_dict()

        outcomes = together([lambda mine=mine: epochs(mine) for mine in loaders])  # type: ignore[misc]
    stream = None if kind is Flowing else {"of_iterator": False, "state": {"next": 8}}
    state = {"epoch": 2, "items": 8, "length": None, "stream": stream}
    assert outcomes == [([[4] * 3] * 2, state)] * 6
    assert [bool(dataset.read) for dataset in datasets] == [True, False, True] * 2


# What cannot be.


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (Drawing(3), r"the dataset has 3 items and one update takes B\*N\*W = 2\*2\*1 = 4; use a larger dataset"),
        (Sized(3), r"the dataset has 3 items and one update takes B\*N\*W"),
        (Flowing(3), r"the dataset ended after 3 items, and a mini-batch takes B\*N\*W = 2\*2\*1 = 4"),
        (Flowing(0), r"the dataset ended after 0 items"),
        (Sized(9, said=12), r"the dataset ended after 9 items, and its __len__ says 12"),
        (iter([(1, 2)]), r"of type list_iterator, is none: .* an iterable one an __iter__ that begins anew"),
        (5, r"of type int, is none: a map-style one has __len__ and __getitem__"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_cannot_be_used_is_refused_with_the_reason(
    alone: World, dataset: Any, words: str, workers: int
) -> None:
    with pytest.raises(Misuse, match=words):
        for _ in loader(alone, dataset, workers=workers):
            pass


def test_a_dataset_without_an_item_is_refused_also_where_a_few_would_do(alone: World) -> None:
    with pytest.raises(Misuse, match="the dataset has no item"):
        loader(alone, Drawing(0), drop_last=False)


def test_a_stream_does_not_say_how_many_mini_batches_it_has(alone: World) -> None:
    with pytest.raises(TypeError, match="does not say how many mini-batches an epoch has"):
        len(loader(alone, Flowing()))
    assert len(loader(alone, Sized())) == 6
    assert len(loader(alone, Sized(), drop_last=False)) == 7


def test_another_stream_than_the_one_it_was_saved_of_is_refused(alone: World) -> None:
    shorter = loader(alone, Flowing(10))
    shorter.load_state_dict(after(loader(alone, Flowing()), 4).state_dict())
    with pytest.raises(Misuse, match=r"ended after 10 items, and training was at item 16 of it: is it the same one\?"):
        next(iter(shorter))


def test_loading_leaves_the_generators_of_the_process_as_they_are(alone: World) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    for kind in (Drawing, Flowing):
        for workers in (0, 1):
            mine = loader(alone, kind(), sampler=None, workers=workers)
            next(iter(mine))
            mine.close()
    assert torch.equal(torch.get_rng_state(), before)


def test_mini_batches_have_positions_that_differ_where_their_items_do(alone: World) -> None:
    """A rank that loads nothing knows them as well; what others draw is seen by seed, epoch, place and sampler."""

    def positions(kind: Any = Drawing, **changed: Any) -> list[tuple[int, ...]]:
        return [batch.position for batch in islice(endless(loader(alone, kind(), **changed)), 8)]

    for kind in (Drawing, Flowing):
        assert positions(kind) == positions(kind, workers=1)
        assert len({*positions(kind)}) == 8
        assert positions(kind)[0] != positions(kind, seed=8)[0]
    assert positions() == positions(uses={})
    assert positions()[0] != positions(shuffle=False)[0]
    ascending, descending = positions(sampler=[*range(26)]), positions(sampler=[*range(25, -1, -1)])
    assert ascending[0] != descending[0]
    assert positions(sampler=[*map(str, range(26))]) == positions(sampler=[*map(str, range(26))])


# An iterable dataset as mini-batches, in one process; test_loader.py has it in several, and resumed.


SHARE = Share(2, 2, 2, 1)


def stream(dataset: Any, begin: ReadPosition | None = None, **changed: Any) -> Iterator[Any]:
    given = {"uses": {1: frozenset({0})}, "drop_last": True, "collate": None} | changed
    loading = ItemLoading(dataset, 0, given["collate"])
    return iter(IterableReader(loading, SHARE, given["uses"], given["drop_last"], begin or ReadPosition()))


def test_all_is_read_and_what_is_used_is_collated_epoch_after_epoch() -> None:
    """Items of the second micro-batch of the second copy, in mini-batches of 8."""
    collated = []

    def collate(items: list[Any]) -> Any:
        collated.extend(int(x) for x, _ in items)
        return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])

    dataset = Flowing(20)
    reads = [*islice(stream(dataset, collate=collate), 4)]
    assert [(read.items, numbers(read)) for read in reads] == [(8, [6, 7]), (8, [14, 15]), (0, []), (8, [6, 7])]
    assert collated == [6, 7, 14, 15, 6, 7]
    assert dataset.read == [*range(20), *range(8)]


def test_the_dataset_is_told_the_epoch() -> None:
    class Turning(Flowing):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[Any]:
            yield from ((torch.tensor(100.0 * self.epoch + number), 0) for number in range(8))

    assert [numbers(read) for read in islice(stream(Turning(), ReadPosition(3)), 3)] == [[306, 307], [], [406, 407]]


def test_a_state_is_that_after_the_mini_batch_and_no_view_of_it() -> None:
    first, second = islice(stream(Stateful()), 2)
    assert [read.state for read in (first, second)] == [{"of_iterator": False, "state": {"next": n}} for n in (8, 16)]
    dataset = Stateful()
    (again,) = islice(stream(dataset, ReadPosition(0, 8, first.state)), 1)
    assert numbers(again) == numbers(second) == [14, 15]
    assert dataset.read == [*range(8, 16)]


def test_a_length_ends_the_reading_though_more_would_come() -> None:
    dataset = Sized(30, said=17)
    assert [read.items for read in islice(stream(dataset), 3)] == [8, 8, 0]
    assert dataset.read == [*range(17)]


def test_an_error_names_the_item_and_is_the_datasets() -> None:
    class Failing(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from [(1.0, 1.0)] * 3
            raise ConnectionError("reset by peer")

    with pytest.raises(ModelError, match=r"item 3 of the dataset: .*ConnectionError: reset by peer"):
        next(stream(Failing()))

    class Unopened(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            raise FileNotFoundError("shard-0")

    with pytest.raises(ModelError, match=r"the beginning of the dataset: .*FileNotFoundError: shard-0"):
        next(stream(Unopened()))


def test_a_stream_that_is_too_short_is_refused_with_what_a_mini_batch_takes() -> None:
    words = r"the dataset ended after 7 items, and a mini-batch takes B\*N\*W = 2\*2\*2 = 8"
    with pytest.raises(Misuse, match=words):
        next(stream(Flowing(7)))
    (read, end) = islice(stream(Flowing(7), drop_last=False), 2)
    assert (read.items, numbers(read), end.items) == (7, [6], 0)


def test_a_stream_without_items_is_refused_also_where_a_few_would_do() -> None:
    with pytest.raises(Misuse, match="the dataset ended after 0 items"):
        next(stream(Flowing(0), drop_last=False))


# Messages about a dataset to the ranks that do not read it; test_loader.py has them in a loader.


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
