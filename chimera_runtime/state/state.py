"""The state of a pipeline on this rank, by the model's own names, for torch.distributed.checkpoint and for one file."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from io import BytesIO
from typing import Any

import torch
import torch.distributed as dist

from chimera_runtime.blame import ModelError, UserCode
from chimera_runtime.errors import FAILED, MISUSED, BadCheckpoint, Misuse
from chimera_runtime.model.naming import name_in_model, names_in_model
from chimera_runtime.ranks.object_exchange import ObjectExchange
from chimera_runtime.ranks.rendezvous import wait_for_key
from chimera_runtime.start.rank_context import Setting
from chimera_runtime.values.meta_weights import fill, require_values
from chimera_runtime.values.shards import local, meshes_of, rest, spread_out, whole
from chimera_runtime.values.tensors import digest

StateDict = dict[str, dict[str, Any]]
"""What a rank holds: tensors, and pickled what modules keep beside these.

``model`` has parameters by name, ``replicas`` buffers by ``<replica>/<name>``, and ``extra`` by such names further
entries of the modules' own ``state_dict``, as those of ``get_extra_state``.
"""


class State:
    """The parameters and buffers of a rank, and what else its modules have in their ``state_dict``.

    A parameter is equal on all ranks that hold it, so its name is enough. All else may differ from replica to replica
    of a stage; these are numbered by copy and worker, from 0.
    """

    def __init__(
        self, setting: Setting, built: Mapping[int, torch.nn.Module], named: Mapping[str, torch.nn.Parameter]
    ) -> None:
        self._setting = setting
        self._built = built
        self._named = named
        self._has_values = False
        self._exports = 0

    # ---- a checkpoint, of which each rank has its part

    def saved(self, replica: int | None = None) -> StateDict:
        """The tensors as they are, which is where a checkpoint may be read into.

        All but parameters is called that of a ``replica``, if one is given.

        Raises
        ------
        Misuse
            If a module has something in its ``state_dict`` that cannot be pickled.
        """

        def numbered(entries: Iterable[tuple[int, str, Any]]) -> dict[str, Any]:
            return {f"{number if replica is None else replica}/{name}": value for number, name, value in entries}

        buffers = ((number, name, tensor.detach()) for number, name, tensor in self._buffers())
        extra = ((number, name, packed(value, name)) for number, _, _, name, value in self._extra())
        return {"model": self._parameters(), "replicas": numbered(buffers), "extra": numbered(extra)}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any], replica: int | None = None) -> None:
        """Takes the tensors that are not there already, and the rest; ``replica`` as in `saved`.

        Raises
        ------
        BadCheckpoint
            If one is missing, or a module does not take what is its own.
        """
        here = self.saved(replica)
        for kind, values in here.items():
            for name in values:
                if name not in state.get(kind, {}):
                    raise BadCheckpoint(f"the state has no {name}, which this rank holds")
        for kind in ("model", "replicas"):
            for name, tensor in here[kind].items():
                if local(state[kind][name]).data_ptr() != local(tensor).data_ptr():
                    tensor.copy_(state[kind][name])
        for tensor in self._tensors().values():
            fill(tensor)
        extra = {name.partition("/")[2]: unpacked(state["extra"][name]) for name in here["extra"]}
        self._take_extra(extra)

    def require_values(self) -> None:
        """Passes if all parameters and buffers have values, also those that were built on the meta device.

        Raises
        ------
        Misuse
            If some wait for a checkpoint or a file of weights.
        """
        if not self._has_values:
            require_values(
                self._tensors(),
                "load a file or a checkpoint that has them, with load_weights or Checkpoints.resume (in train.py with "
                "--load or --resume)",
            )
            self._has_values = True

    def require_known(self) -> None:
        """Passes if the modules have no parameters but those that the pipeline was made with.

        Raises
        ------
        Misuse
            If there are others, which nothing would train.
        """
        known = {*self._named.values()}
        for stage, module in self._built.items():
            if not known.issuperset(module.parameters()):
                rest(module)  # FSDP may have left other parameters after a forward
            unknown = next((name for name, parameter in module.named_parameters() if parameter not in known), None)
            if unknown is not None:
                raise Misuse(
                    f"{unknown} of stage {stage} is not a parameter that the pipeline was made with, so nothing would "
                    "train it: add adapters, replace modules and call load_state_dict(assign=True) in build_stage; "
                    "afterwards load with pipe.load_weights, or load_state_dict without assign, which copy"
                )

    # ---- one file, which has the whole model

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that have parts of the model."""
        return self._setting.world.control_group.group

    @property
    def names(self) -> list[str]:
        """What a file may have for this rank: parameters, under each of their names, and buffers."""
        return [*self._parameters(), *self.aliases, *(name for _, name, _ in self._buffers()), *self.extra]

    @property
    def extra(self) -> list[str]:
        """The names of what modules have in their ``state_dict`` beside parameters and buffers."""
        return [name for _, _, _, name, _ in self._extra()]

    @property
    def aliases(self) -> dict[str, str]:
        """The further names of tied parameters, and the name that each is known by."""
        model, ties = self._setting.model, self._setting.ties
        return {
            name_in_model(model, *end): name_in_model(model, *ends[0])
            for tie in ties
            for ends in tie.parameters
            for end in ends[1:]
        }

    @property
    def rank(self) -> int:
        """The number of this rank in the default process group."""
        world = self._setting.world
        return world.control_group.members[world.place.rank]

    @property
    def _leader(self) -> int:
        """The first rank with parts of the same parameters, in the default process group: this one if all are whole."""
        return min([int(mesh.mesh.min()) for mesh in meshes_of(self._named.values())], default=self.rank)

    def learn_verdict(self, patience: float) -> str | None:
        """What another row of the mesh says of the file that it writes; None on ranks that share nothing with it."""
        if self._leader == self.rank:
            return None
        what = f"rank {self.rank}: wait for the ranks of another row of the mesh to export the weights"
        key = f"exported/{self._exports}/{self._leader}"
        return wait_for_key(self._setting.world.store_of_all, key, self._leader, what, patience).decode() or None

    def tell_verdict(self, complaint: str | None) -> None:
        """Lets the other rows of the mesh know what has become of the file."""
        self._setting.world.store_of_all.set(f"exported/{self._exports}/{self.rank}", complaint or "")
        self._exports += 1

    def whole(self) -> dict[str, Any] | None:
        """All parameters, and of the first replicas the rest, on the CPU of rank 0; every rank calls it.

        None on all ranks of a row of a mesh that is not the first: they give their parts of what is spread.
        """
        world = self._setting.world
        mine = self._parameters() | {name: tensor.detach() for replica, name, tensor in self._buffers() if not replica}
        exchange = ObjectExchange(self.group, "the weights that are exported", world.control_group.timeout)
        described = {name: (tensor.shape, tensor.dtype) for name, tensor in mine.items()}
        heard, leads = zip(*exchange.all_gather((described, self._leader == self.rank)), strict=True)
        if not all(leads):
            for name in sorted(mine):
                whole(mine[name])
            return None
        gathered: dict[str, torch.Tensor] = {}
        for name in sorted(set[str]().union(*heard)):
            owner = next(rank for rank, known in enumerate(heard) if name in known)
            tensor = whole(mine[name]).detach() if name in mine else None
            what = f"for {name}, which is to be exported"
            if world.place.rank == owner and owner and tensor is not None:
                world.control_group.send(tensor, 0, what)
            elif world.place.rank == 0:
                shape, dtype = heard[owner][name]
                gathered[name] = torch.empty(shape, dtype=dtype)
                if tensor is None:
                    world.control_group.recv(gathered[name], owner, what)
                else:
                    gathered[name].copy_(tensor)
        extra = exchange.gather_results(
            lambda: {name: packed(value, name) for replica, _, _, name, value in self._extra() if not replica}
        )
        return gathered | {name: unpacked(value) for of_rank in extra for name, value in of_rank.items()}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Any]) -> None:
        """Takes what this rank holds by name: all parameters, and of the rest what there is.

        Raises
        ------
        BadCheckpoint
            If a parameter is missing, or a tensor has another shape.
        """
        others = {name: alias for alias, name in self.aliases.items()}
        for name, parameter in self._parameters().items():
            known = name if name in tensors else others.get(name, name)
            if known not in tensors:
                near = get_close_matches(name, tensors, 1)
                raise BadCheckpoint(f"it has no parameter {name}{f'; the nearest is {near[0]}' if near else ''}")
            _copy(name, tensors[known], parameter)
            fill(self._named[name])
        for _, name, buffer in self._buffers():
            if name in tensors:
                _copy(name, tensors[name], buffer)
                fill(buffer)
        self._take_extra({name: tensors[name] for _, _, _, name, _ in self._extra() if name in tensors})

    # ---- what there is

    def _parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self._named.items()}

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**self._named, **{name: buffer for _, name, buffer in self._buffers()}}

    def unsaved(self) -> dict[str, str]:
        """Digests of the buffers that are in no state dict, by name (``persistent=False``)."""
        return {
            name: "" if buffer.is_meta else digest([local(buffer)])
            for _, name, buffer, is_saved in self._all_buffers()
            if not is_saved
        }

    def _buffers(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """The buffers that a module's own ``state_dict`` has, with the number of the replica and their names."""
        return ((number, name, buffer) for number, name, buffer, is_saved in self._all_buffers() if is_saved)

    def _all_buffers(self) -> Iterator[tuple[int, str, torch.Tensor, bool]]:
        """Number of the replica, name, buffer, and whether it is to be saved."""
        for stage, module in self._built.items():
            names = names_in_model(self._setting.model, stage, module)
            left_out = {
                f"{place}.{name}" if place else name
                for place, part in module.named_modules()
                for name in part._non_persistent_buffers_set
            }
            for name, buffer in module.named_buffers():
                yield self._replica(stage), names[name], buffer, name not in left_out

    def _extra(self) -> Iterator[tuple[int, int, str, str, Any]]:
        """The entries of a module's ``state_dict`` that are not its parameters and buffers.

        Of each the number of the replica, the stage, the name in the stage, that in the model, and the value.
        """
        for stage, module in self._built.items():
            tensors = dict(_tensors_of(module))
            ids = {id(tensor) for tensor in tensors.values()}
            with UserCode(f"state_dict() of stage {stage}", FAILED):
                entries = module.state_dict(keep_vars=True)
            for name, value in entries.items():
                if name not in tensors and id(value) not in ids:
                    yield self._replica(stage), stage, name, name_in_model(self._setting.model, stage, name), value

    def _take_extra(self, values: Mapping[str, Any]) -> None:
        """Gives modules the entries of `_extra` by ``load_state_dict``; parameters and buffers stay as they are.

        A hook or an override of it may need all of these, and write to them: so they are put back.
        """
        by_stage: dict[int, dict[str, Any]] = defaultdict(dict)
        for _, stage, inside, name, _ in self._extra():
            if name in values:
                by_stage[stage][inside] = values[name]
        for stage, entries in by_stage.items():
            module = self._built[stage]
            kept = [(tensor, local(tensor).to("cpu", copy=True)) for _, tensor in _tensors_of(module)]
            state = module.state_dict()
            state.update(entries)
            try:
                with UserCode(f"load_state_dict() of stage {stage}", MISUSED):
                    module.load_state_dict(state)
            except ModelError as error:
                if "in loading state_dict" in str(error.__cause__):  # torch's own words of keys
                    words = " ".join(line.strip() for line in str(error.__cause__).splitlines())
                    raise BadCheckpoint(
                        f"stage {stage} does not take what it has in its own state_dict: {words}"
                    ) from error
                raise
            for tensor, before in kept:
                local(tensor).copy_(before)

    def _replica(self, stage: int) -> int:
        """The number of this rank's replica of a stage: they are counted by copy, then by worker."""
        place, workers = self._setting.world.place, self._setting.world.job.members((stage,))
        return place.copy * len(workers) + workers.index(place.worker)


def packed(value: Any, what: str) -> bytes:
    """A value pickled, with tensors and all, as it is now.

    Raises
    ------
    Misuse
        If it cannot be pickled; ``what`` says what it is.
    """
    file = BytesIO()
    try:
        torch.save(value, file)
    except Exception as error:
        raise Misuse(f"{what} cannot be saved: {type(error).__name__}: {error}") from error
    return file.getvalue()


def unpacked(saved: bytes) -> Any:
    """What `packed` has pickled; its tensors are on the CPU."""
    return torch.load(BytesIO(saved), map_location="cpu", weights_only=False)


def _tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers under each of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _copy(name: str, theirs: Any, mine: torch.Tensor) -> None:
    if not isinstance(theirs, torch.Tensor):
        raise BadCheckpoint(f"{name} is a {type(theirs).__name__} in it, and a tensor in this model")
    if theirs.shape != mine.shape:
        raise BadCheckpoint(f"{name} is {tuple(theirs.shape)} in it, and {tuple(mine.shape)} in this model")
    mine.copy_(spread_out(theirs, mine))
