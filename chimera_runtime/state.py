"""The state of a pipeline on this rank, by the model's own names, for torch.distributed.checkpoint."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from chimera_runtime.errors import BadCheckpoint
from chimera_runtime.naming import names_in_model
from chimera_runtime.setting import Setting
from chimera_runtime.shards import local

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

    def saved(self, replica: int | None = None) -> StateDict:
        """The tensors as they are, which is where a checkpoint may be read into.

        All buffers are called those of a ``replica``, if one is given.
        """
        parameters = {name: parameter.detach() for name, parameter in self._named.items()}
        buffers = {f"{own if replica is None else replica}/{name}": tensor for own, name, tensor in self._buffers()}
        return {"model": parameters, "replicas": buffers}

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

    def _buffers(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """The buffers that a module's own ``state_dict`` has, with the number of the replica and their names."""
        world, model = self._setting.world, self._setting.model
        for stage, module in self._built.items():
            replica = world.ranks_of(stage).index(world.place.rank)
            kept, names = module.state_dict(), names_in_model(model, stage, module)
            for name, buffer in module.named_buffers():
                if name in kept:
                    yield replica, names[name], buffer.detach()
