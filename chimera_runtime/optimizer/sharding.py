"""Weights cut into shards, one for each rank that holds them: a rank steps its shard, and gathers the other shards.

a parameter of shape (7, 4) that three ranks hold, cut along dimension 0

rank 0   rows 0, 1, 2
rank 1   rows 3, 4, 5
rank 2   row 6
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import optim

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import MISUSED, Misuse
from chimera_runtime.errors import stage as mistakes
from chimera_runtime.optimizer.optimizer_state import parameters_of, settings_in
from chimera_runtime.program.rank_facts import Group, group_name
from chimera_runtime.ranks.agreement import ObjectExchange
from chimera_runtime.ranks.world import World
from chimera_runtime.values.mesh_tensors import is_spread, local
from chimera_runtime.values.nested import first_part

BUCKET = 2**24
"""Bytes of weights that are gathered at once, which is also the memory that a step needs besides the weights."""


@dataclass(frozen=True)
class Cut:
    """A parameter cut along ``dimension`` into shards of ``rows`` rows, one for each rank; the last may have fewer."""

    parameter: torch.nn.Parameter
    dimension: int
    rows: int

    def part(self, tensor: torch.Tensor, rank: int, first: int = 0, count: int | None = None) -> torch.Tensor:
        """A view of a rank's shard of ``tensor`` (shaped like the parameter), or of ``count`` rows from ``first``."""
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
    complaint = next(
        (mistakes.parameters_overlap(first=names[a], second=names[b]) for a, b in both if overlap_in_part(a, b)), None
    )
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

    A parameter without a dimension that has a row for each rank stays whole, and every rank steps it. ``shards`` are
    the parts that this rank steps, as views with the attributes of the whole ``parameters``.
    """

    def __init__(self, world: World, group: Group, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._world = world
        self._name = group_name(group)
        self._group, (_, self._ranks) = group, world.sums[group]
        if any(map(is_spread, parameters)):
            raise mistakes.parameters_are_spread_already(group=self._name)
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
        """Copies the stepped shards of the other ranks into the parameters; all ranks that hold the group call it."""
        for bucket in self._buckets:
            self._gather(bucket)

    @cached_property
    def _buckets(self) -> list[list[list[torch.Tensor]]]:
        """The shards divided into buckets of one dtype: for each rank, views of rows that are gathered at once."""
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


# Optimizer whose state is sharded over the replicas of each stage.

ELEMENTWISE = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta),
    *(optim.RMSprop, optim.Rprop, optim.ASGD),
)
"""Optimizers of torch that compute each number of a parameter by itself: stepping shards gives the same weights."""

_MAKING = UserCode("make(named_parameters)", MISUSED)


class ShardedOptimizer(optim.Optimizer):
    """Steps this rank's shards of parameters, and gathers the shards that the other replicas have stepped.

    Its parameter groups have the whole parameters: a scheduler, a scaler and `zero_grad` act on these. Weights after a
    step are the same as with an optimizer that is not sharded. ``state_dict`` returns DTensors in the shape of the
    parameters, which torch.distributed.checkpoint stores like whole tensors; ``load_state_dict`` takes both.

    All ranks that hold a parameter must step together, and make the steps of several sharded optimizers in one order.

    ``make`` gets the shards of all parameters, in the order of ``groups``, and makes their optimizer, ``of_shards``. If
    all are frozen, it gets one empty parameter instead, and the optimizer steps nothing. ``elementwise`` says that it
    computes each number by itself; that is known of those in `ELEMENTWISE`, and required. If ``gathers`` is false, the
    caller calls `gather` after all steps of the rank.
    """

    def __init__(
        self,
        world: World,
        groups: Mapping[Group, Sequence[torch.nn.Parameter]],
        make: Callable[[list[torch.nn.Parameter]], Any],
        elementwise: bool = False,
        gathers: bool = True,
    ) -> None:
        self._shardings = shardings = [Sharding(world, group, parameters) for group, parameters in groups.items()]
        self._gathers = gathers
        self._sharding_of = {p: sharding for sharding in shardings for p in sharding.parameters}
        whole = {s: p for sharding in shardings for s, p in zip(sharding.shards, sharding.parameters, strict=True)}
        # torch refuses an optimizer of nothing: where all is frozen, it is made of a stand-in, which then leaves it.
        self.of_shards: optim.Optimizer = make([*whole] or [torch.nn.Parameter(torch.empty(0))])
        _require_elementwise(self.of_shards, elementwise)
        if not whole:
            for group in self.of_shards.param_groups:
                group.update({key: [] for key in ("params", "param_names") if key in group})
        of_whole = [
            {**settings_in(group), "params": [whole[shard] for shard in group["params"]]}
            for group in self.of_shards.param_groups
        ]
        self._is_made = False
        super().__init__(of_whole, dict(self.of_shards.defaults))
        self._is_made = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps the shards of this rank, with the gradients of the parameters, and gathers the other shards."""
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        for sharding in self._shardings:
            sharding.show_gradients()
        _take_settings(self.of_shards, self)
        self.of_shards.step()
        _take_settings(self, self.of_shards)
        for sharding in self._shardings:
            sharding.hide_gradients()
        if self._gathers:
            self.gather()
        return value

    def gather(self) -> None:
        """Gathers the shards that other ranks have stepped, one weight group after the other; errors as in `step`."""
        for sharding in self._shardings:
            sharding.gather()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group; only the constructor may call it. Raises `Misuse` if it is called later."""
        if self._is_made:
            raise Misuse(mistakes.SHARDED_TAKES_NO_FURTHER_PARAMETERS)
        super().add_param_group(param_group)

    def spread(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Returns a parameter as a DTensor that is sharded like its optimizer state, or unchanged if it is not cut."""
        sharding = self._sharding_of[parameter]
        return sharding.spread(parameter, sharding.part(parameter, parameter.data))

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's state in the form of one that is not sharded; sharded tensors are DTensors."""
        of_shards = self.of_shards.state_dict()
        return {**of_shards, **super().state_dict(), "state": self._converted(of_shards["state"], self._whole)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state that `state_dict` returned, or the state of an optimizer that is not sharded."""
        super().load_state_dict({**state_dict, "state": {}})
        self.of_shards.load_state_dict({**state_dict, "state": self._converted(state_dict["state"], self._part)})

    def _converted(self, state: Mapping[Any, Any], convert: Callable[[torch.nn.Parameter, Any], Any]) -> dict[Any, Any]:
        parameters = parameters_of(self)
        converted = dict(state)
        for index, entries in state.items():
            if isinstance(index, int):
                converted[index] = {key: convert(parameters[index], value) for key, value in entries.items()}
        return converted

    def _whole(self, parameter: torch.nn.Parameter, value: Any) -> Any:
        sharding = self._sharding_of[parameter]
        if isinstance(value, torch.Tensor) and value.shape == sharding.part(parameter, parameter).shape:
            return sharding.spread(parameter, value)
        return value

    def _part(self, parameter: torch.nn.Parameter, value: Any) -> Any:
        if is_spread(value):
            return local(value)
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
            return self._sharding_of[parameter].part(parameter, value).clone()
        return value


def sharded_by_name(
    world: World,
    groups: Mapping[Group, Sequence[torch.nn.Parameter]],
    names: Mapping[torch.Tensor, str],
    make: Callable[[list[tuple[str, torch.nn.Parameter]]], Any],
    *,
    elementwise: bool,
) -> ShardedOptimizer:
    """Makes a sharded optimizer of the trained parameters; ``make`` is called with (name, shard) pairs."""
    trained = {group: [p for p in parameters if p.requires_grad] for group, parameters in groups.items()}
    listed = [names[p] for parameters in trained.values() for p in parameters] or ["nothing"]
    require_memory_apart(world, trained, names)

    def made(shards: list[torch.nn.Parameter]) -> Any:
        with _MAKING:
            return make(list(zip(listed, shards, strict=True)))

    return ShardedOptimizer(world, trained, made, elementwise)


def _require_elementwise(optimizer: Any, elementwise: bool) -> None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, optim.Optimizer):
        raise mistakes.sharded_is_no_optimizer(name=name)
    if not elementwise and type(optimizer) not in ELEMENTWISE:
        raise mistakes.sharded_may_not_be_elementwise(
            name=name, elementwise=[optimizer.__name__ for optimizer in ELEMENTWISE]
        )


def _take_settings(optimizer: optim.Optimizer, other: optim.Optimizer) -> None:
    for group, of_other in zip(optimizer.param_groups, other.param_groups, strict=True):
        group.update(settings_in(of_other))
