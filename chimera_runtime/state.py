"""The state of a pipeline on this rank, by the model's own names, for torch.distributed.checkpoint and for one file."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import torch
import torch.distributed as dist

from chimera_runtime.errors import BadCheckpoint, Misuse
from chimera_runtime.meeting import learn
from chimera_runtime.naming import name_in_model, names_in_model
from chimera_runtime.setting import Setting
from chimera_runtime.shards import local, meshes_of, rest, spread_out, whole
from chimera_runtime.talk import Talk
from chimera_runtime.unfilled import fill, require_values

StateDict = dict[str, dict[str, Any]]
"""``model`` has parameters by name, ``replicas`` buffers by ``<replica>/<name>``; beside them there may be others."""


class State:
    """The parameters and buffers of a rank.

    A parameter is equal on all ranks that hold it, so its name is enough. A buffer may differ from replica to replica
    of a stage; these are numbered by the ranks that hold the stage, from 0.
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

        All buffers are called those of a ``replica``, if one is given.
        """
        buffers = {
            f"{number if replica is None else replica}/{name}": tensor.detach()
            for number, name, tensor in self._buffers()
        }
        return {"model": self._parameters(), "replicas": buffers}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any], replica: int | None = None) -> None:
        """Takes the tensors that are not there already; ``replica`` as in `saved`.

        Raises
        ------
        BadCheckpoint
            If one is missing.
        """
        for kind, tensors in self.saved(replica).items():
            for name, tensor in tensors.items():
                if name not in state.get(kind, {}):
                    raise BadCheckpoint(f"the state has no {name}, which this rank holds")
                if local(state[kind][name]).data_ptr() != local(tensor).data_ptr():
                    tensor.copy_(state[kind][name])
        for tensor in self._tensors().values():
            fill(tensor)

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
        return self._setting.world.chat

    @property
    def names(self) -> list[str]:
        """What a file may have for this rank: parameters, under each of their names, and buffers."""
        return [*self._parameters(), *self.aliases, *(name for _, name, _ in self._buffers())]

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
        return world.members[world.place.rank]

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
        return learn(self._setting.world.store_of_all, key, self._leader, what, patience).decode() or None

    def tell_verdict(self, complaint: str | None) -> None:
        """Lets the other rows of the mesh know what has become of the file."""
        self._setting.world.store_of_all.set(f"exported/{self._exports}/{self.rank}", complaint or "")
        self._exports += 1

    def whole(self) -> dict[str, torch.Tensor] | None:
        """All parameters, and the buffers of the first replicas, on the CPU of rank 0; every rank calls it.

        None on all ranks of a row of a mesh that is not the first: they give their parts of what is spread.
        """
        world = self._setting.world
        mine = self._parameters() | {name: tensor.detach() for replica, name, tensor in self._buffers() if not replica}
        talk = Talk(self.group, "the weights that are exported", world.timeout)
        described = {name: (tensor.shape, tensor.dtype) for name, tensor in mine.items()}
        heard, leads = zip(*talk.heard((described, self._leader == self.rank)), strict=True)
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
                world.send(tensor, 0, what)
            elif world.place.rank == 0:
                shape, dtype = heard[owner][name]
                gathered[name] = torch.empty(shape, dtype=dtype)
                if tensor is None:
                    world.recv(gathered[name], owner, what)
                else:
                    gathered[name].copy_(tensor)
        return gathered

    @torch.no_grad()
    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes what this rank holds from tensors by name, all parameters and the buffers that there are.

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

    # ---- what there is

    def _parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self._named.items()}

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**self._named, **{name: buffer for _, name, buffer in self._buffers()}}

    def _buffers(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """The buffers that a module's own ``state_dict`` has, with the number of the replica and their names."""
        world, model = self._setting.world, self._setting.model
        for stage, module in self._built.items():
            replica = world.ranks_of(stage).index(world.place.rank)
            kept, names = module.state_dict(), names_in_model(model, stage, module)
            for name, buffer in module.named_buffers():
                if name in kept:
                    yield replica, names[name], buffer


def _copy(name: str, theirs: torch.Tensor, mine: torch.Tensor) -> None:
    if theirs.shape != mine.shape:
        raise BadCheckpoint(f"{name} is {tuple(theirs.shape)} in it, and {tuple(mine.shape)} in this model")
    mine.copy_(spread_out(theirs, mine))
