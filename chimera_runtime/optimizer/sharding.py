"""Weights cut into shards, one for each rank that holds them: a rank steps its shard, and gathers the other shards.

a parameter of shape (7, 4) that three ranks hold, cut along dimension 0

rank 0   rows 0, 1, 2
rank 1   rows 3, 4, 5
rank 2   row 6
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from chimera_runtime.errors import Misuse
from chimera_runtime.errors.optimizer import parameters_are_spread_already, parameters_overlap
from chimera_runtime.program.weight_groups import Group, group_name
from chimera_runtime.ranks.object_exchange import ObjectExchange
from chimera_runtime.ranks.world import World
from chimera_runtime.values.mesh_tensors import is_spread
from chimera_runtime.values.tensors import first_part

BUCKET = 2**24
"""Bytes of weights that are gathered at once, which is also the memory that a step needs besides the weights."""


@dataclass(frozen=True)
class Cut:
    """A parameter cut along ``dimension`` into shards of ``rows`` rows, one for each rank; the last may have fewer."""

    parameter: torch.nn.Parameter
    dimension: int
    rows: int

    def part(self, tensor: torch.Tensor, rank: int, first: int = 0, count: int | None = None) -> torch.Tensor:
        """Rows of a rank's shard of ``tensor`` (shaped like the parameter), as a view.

        ``first`` and ``count`` choose rows of the shard; by default all.
        """
        length = tensor.shape[self.dimension]
        start = min(rank * self.rows + first, length)
        end = min((rank + 1) * self.rows, length, length if count is None else start + count)
        return tensor.narrow(self.dimension, start, max(0, end - start))


@dataclass(frozen=True)
class Piece:
    """Rows of a parameter that are gathered at once: ``count`` rows of each rank's shard, from row ``first`` on."""

    cut: Cut
    first: int
    count: int

    def of(self, rank: int) -> torch.Tensor:
        """Rows of the shard of a rank, as a view of the parameter; fewer than ``count`` at the end of the parameter."""
        return self.cut.part(self.cut.parameter.data, rank, self.first, self.count)


def cut(parameter: torch.nn.Parameter, ranks: int) -> Cut | None:
    """Cuts a parameter along its first dimension that has a row for each rank; None if there is no such dimension."""
    lengths = [length if ranks > 1 else 0 for length in parameter.shape]
    dimension = next((place for place, length in enumerate(lengths) if length >= ranks), None)
    return None if dimension is None else Cut(parameter, dimension, -(-lengths[dimension] // ranks))


def require_memory_apart(
    world: World, groups: Mapping[Group, Sequence[torch.nn.Parameter]], names: Mapping[torch.Tensor, str]
) -> None:
    """Raises `Misuse` on all ranks if parameters of a weight group overlap in memory in part; every rank calls it.

    Ranks would step shards of the same numbers. Parameters that are the same part of memory have the same shards.
    """
    both = (pair for parameters in groups.values() for pair in combinations(parameters, 2))
    complaint = next((parameters_overlap(names[a], names[b]) for a, b in both if overlap_in_part(a, b)), None)
    control = world.control_group
    ObjectExchange(control.group, "the sharded parameters", control.timeout).require_none(complaint, Misuse)


def overlap_in_part(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two parameters share numbers in memory, and are not the same part of it."""
    if is_spread(first) or is_spread(second) or not first.numel() or not second.numel():
        return False
    (start, end), (other_start, other_end) = _bytes_of(first), _bytes_of(second)
    if end <= other_start or other_end <= start or first.device != second.device:
        return False
    places = [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in (first, second)]
    if places[0] == places[1]:
        return False
    # Views may lie between each other: a picture of the memory has the bytes of the first.
    begin = min(start, other_start)
    picture = torch.zeros(max(end, other_end) - begin, dtype=torch.bool)
    parts = []
    for tensor in (first, second):
        size = tensor.element_size()
        lengths = (*(n if stride else 1 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)), size)
        strides = (*(stride * size for stride in tensor.stride()), 1)
        parts.append(picture.as_strided(lengths, strides, tensor.data_ptr() - begin))
    parts[0].fill_(True)
    return bool(parts[1].any())


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte of a tensor, and of the first one after it."""
    start = tensor.data_ptr()
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


class Sharding:
    """The parameters of a weight group, cut over the ranks that hold it.

    A parameter without a dimension that has a row for each rank stays whole, and every rank steps it. ``parameters``
    are whole; ``shards`` are the parts that this rank steps, as views with the attributes of the parameters.

    Raises `Misuse` if a parameter is spread over other ranks already.
    """

    def __init__(self, world: World, group: Group, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._world = world
        self._name = group_name(group)
        self._group, (_, self._ranks) = group, world.sums[group]
        if any(map(is_spread, parameters)):
            raise parameters_are_spread_already(self._name)
        members = sorted(world.control_group.members[rank] for rank in self._ranks)
        self._mine = members.index(world.control_group.members[world.place.rank])
        self._mesh: Any = None
        self._cuts = {p: made for p in parameters if (made := cut(p, len(members))) is not None}
        self.parameters = list(parameters)
        self.shards = [self._shard(parameter) for parameter in parameters]
        world.holders.add(self)

    def _shard(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        shard = torch.nn.Parameter(self.part(parameter, parameter.data))
        shard.__dict__.update(parameter.__dict__)
        return shard

    def part(self, parameter: torch.nn.Parameter, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's shard of ``tensor`` (shaped like ``parameter``), as a view."""
        made = self._cuts.get(parameter)
        return tensor if made is None else made.part(tensor, self._mine)

    def show_gradients(self) -> None:
        """Gives each shard its part of the gradient of its parameter, as a view."""
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            for name in ("grad", "main_grad"):
                gradient = getattr(parameter, name, None)
                if gradient is not None or hasattr(shard, name):
                    setattr(shard, name, None if gradient is None else self.part(parameter, gradient))

    def hide_gradients(self) -> None:
        """Removes the gradients from the shards: the views would keep the memory of whole gradients alive."""
        for shard in self.shards:
            for name in ("grad", "main_grad"):
                if hasattr(shard, name):
                    setattr(shard, name, None)

    def release(self) -> None:
        """Drops the communicator, which the mesh of the DTensors of `spread` holds."""
        getattr(self._mesh, "_pg_registry", {}).clear()

    @torch.no_grad()
    def gather(self) -> None:
        """Copies the stepped shards of the other ranks into the parameters; all ranks that hold the group call it.

        Raises `PeerLost` if that takes longer than the time-out, or a rank has ended.
        """
        for bucket in self._buckets:
            self._gather(bucket)

    @cached_property
    def _buckets(self) -> list[list[list[torch.Tensor]]]:
        """Returns the shards divided into buckets; the rows of a bucket are gathered at once.

        Each bucket has, for each rank, a list of views of rows in the rank's shards. All of a bucket have one dtype.
        """
        kinds: dict[Any, list[Cut]] = defaultdict(list)
        for parameter, made in self._cuts.items():
            if parameter.numel():
                kinds[parameter.dtype, parameter.device].append(made)
        return [
            [[piece.of(rank) for piece in bucket] for rank in range(len(self._ranks))]
            for cuts in kinds.values()
            for bucket in buckets(cuts, BUCKET // len(self._ranks))
        ]

    def _gather(self, parts: Sequence[list[torch.Tensor]]) -> None:
        # Every rank contributes a row of the same size to one tensor: its parts one after the other.
        sizes = [max(part.numel() for part in of_piece) for of_piece in zip(*parts, strict=True)]
        gathered = parts[0][0].new_empty(len(parts), sum(sizes))
        rooms = gathered.unbind()
        views = [
            [first_part(space, part.shape) for space, part in zip(torch.split(room, sizes), held, strict=True)]
            for room, held in zip(rooms, parts, strict=True)
        ]
        torch._foreach_copy_(views[self._mine], parts[self._mine])

        others = [rank for rank in self._ranks if rank != self._world.place.rank]
        what, world = f"for the weights of {self._name}", self._world
        with world.control_group.waiting(what, others):
            raw, work = gathered.view(torch.uint8), None
            communicator, _ = world.sums[self._group]
            if world.staging is not None:
                work = world.staging.all_gather(raw, self._mine, communicator)
            else:
                rows = list(raw.unbind())
                work = dist.all_gather(rows, rows[self._mine], group=communicator, async_op=True)
            if work is not None:
                world.control_group.wait(work, lambda error: world.control_group.names.lost(what, others, error))

        # From the rows of the others their parts go where they belong in the parameters.
        elsewhere = [rank for rank in range(len(parts)) if rank != self._mine]
        torch._foreach_copy_(
            [part for rank in elsewhere for part in parts[rank]], [view for rank in elsewhere for view in views[rank]]
        )

    def spread(self, parameter: torch.nn.Parameter, part: torch.Tensor) -> torch.Tensor:
        """Wraps a shard for a checkpoint: a DTensor in the shape of the parameter; unchanged if it is not cut."""
        made = self._cuts.get(parameter)
        if made is None:
            return part
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        if self._mesh is None:
            communicator, _ = self._world.sums[self._group]
            self._mesh = DeviceMesh.from_group(communicator, parameter.device.type)  # type: ignore[arg-type]
        return DTensor.from_local(
            part,
            self._mesh,
            [Shard(made.dimension)],
            run_check=False,
            shape=parameter.shape,
            stride=torch.empty_like(parameter, device="meta").stride(),
        )


def buckets(cuts: Sequence[Cut], limit: int) -> Iterator[list[Piece]]:
    """Divides shards into buckets of at most ``limit`` bytes, or of one row if that is larger."""
    bucket: list[Piece] = []
    left = limit
    for made in cuts:
        row, first = made.parameter.nbytes // made.parameter.shape[made.dimension], 0  # bytes of a row
        while first < made.rows:
            count = min(made.rows - first, max(left // max(row, 1), 0 if bucket else 1))
            if count:
                bucket.append(Piece(made, first, count))
                first += count
                left -= count * row
            if first < made.rows:
                yield bucket
                bucket, left = [], limit
    if bucket:
        yield bucket
