"""A model of how torch.distributed.pipelining adds messages to a compute order.

    0F0,0B0                    0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD
    1F0,1B0                    1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1RESHARD

torch goes over the ranks again and again, and takes one action of each if what it reads is there. A message is sent
right after the operation that makes it, and at that moment its receive is put into the row of the other rank. So the
order of receives depends on how far each rank is, actions of FSDP included: these come first. The installed torch is
compared with this model in the tests.
"""

from collections.abc import Iterable, Iterator

from chimera_ir.ir.kinds import Value
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Compute, Micro, Operation, Pair, Recv, Send, Stage
from chimera_ir.torch_text.csv_reader import REDUCE_GRAD, RESHARD, TRANSFERS, UNSHARD, Cell, MessageCell, WeightsCell

_MOST_UNSHARDED = 3
"""The number of stages that torch unshards ahead; one more where the last two are in one pair."""

_WORDS = {key: word for word, key in TRANSFERS.items()}


def lowered(schedule: Schedule) -> list[list[Cell]]:
    """The rows of a complete, placed, acyclic schedule that torch can run, with the messages that torch adds."""
    header = schedule.header
    pending = [[*_with_upkeep(header, lane)][::-1] for lane in schedule.lanes]
    rows: list[list[Cell]] = [[] for _ in pending]
    there: list[set[tuple[Value, Stage, Micro]]] = [set() for _ in pending]
    while any(pending):
        progress = False
        for rank, actions in enumerate(pending):
            parts = actions[-1].parts if actions and isinstance(actions[-1], Compute | Pair) else ()
            if not actions or not all(read in there[rank] for part in parts for read in _reads(header, part)):
                continue
            progress = True
            rows[rank].append(actions.pop())
            for part in parts:
                _hand_on(header, rank, part, rows, there)
        assert progress, "an acyclic schedule always goes on"
    return rows


def _reads(header: Header, part: Compute) -> Iterator[tuple[Value, Stage, Micro]]:
    for value in part.kind.reads:
        if value.crosses:
            yield from ((value, maker, part.micros[0]) for maker in header.makers(value, part.stage))


def _hand_on(
    header: Header,
    rank: int,
    part: Compute,
    rows: list[list[Cell]],
    there: list[set[tuple[Value, Stage, Micro]]],
) -> None:
    """Adds the messages of ``part`` to the rows of both ends, and its values to those that ranks can read."""
    micro, stage = part.micros[0], part.stage
    for value in part.kind.hands_on:
        there[rank].add((value, stage, micro))
        for reader in header.readers(value, stage):
            peer = header.worker(micro, reader)
            if peer != rank:
                rows[rank].append(MessageCell(_WORDS[Send, value], stage, micro, part.origin))
                rows[peer].append(MessageCell(_WORDS[Recv, value], reader, micro, part.origin))
                there[peer].add((value, stage, micro))


def _with_upkeep(header: Header, lane: tuple[Operation, ...]) -> Iterator[Cell]:
    """Yields the operations of a rank with the actions of FSDP around them.

    Before each operation the stages of the next operations are unsharded, and all others are resharded. After the last
    gradients of a stage, they are summed.
    """
    active: list[Stage] = []
    sums = dict.fromkeys(range(header.stages), 0)
    for operation, upcoming in zip(lane, _upcoming(lane), strict=True):
        evicted = [stage for stage in active if stage not in upcoming]
        fetched = [stage for stage in upcoming if stage not in active]
        yield from (WeightsCell(RESHARD, stage, operation.origin) for stage in evicted)
        yield from (WeightsCell(UNSHARD, stage, operation.origin) for stage in fetched)
        active = sorted({*active, *fetched} - {*evicted})
        yield operation
        for part in operation.parts:
            sums[part.stage] += part.kind.sums
            if part.kind.sums and sums[part.stage] == header.micro_batches:
                yield WeightsCell(REDUCE_GRAD, part.stage, part.origin)
    yield from (WeightsCell(RESHARD, stage, lane[-1].origin) for stage in active)


def _upcoming(lane: tuple[Operation, ...]) -> Iterable[tuple[Stage, ...]]:
    """Lists, for each operation of a lane, the few stages that the lane works on next, in order of use."""
    upcoming: list[tuple[Stage, ...]] = []
    following: dict[Stage, int] = {}
    for place, operation in reversed([*enumerate(lane)]):
        met = dict.fromkeys((part.stage for part in operation.parts), place)
        following = met | {stage: later for stage, later in following.items() if stage not in met}
        places = [*following.values()]
        several = places[_MOST_UNSHARDED - 1 : _MOST_UNSHARDED + 1]
        count = _MOST_UNSHARDED + (len(several) == 2 and several[0] == several[1])
        upcoming.append(tuple(following)[:count])
    return reversed(upcoming)
