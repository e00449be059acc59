"""State of a pipeline on this rank by the names in the model, for torch.distributed.checkpoint and for one file."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from difflib import get_close_matches
from io import BytesIO
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store
from torch.optim.swa_utils import AveragedModel

from chimera_runtime.blame import ModelError, UserCode
from chimera_runtime.errors import MISUSED
from chimera_runtime.errors import stage as mistakes
from chimera_runtime.model.model import Model
from chimera_runtime.model.naming import buffers_of, further_entries, name_in_model
from chimera_runtime.model.ties import Tie
from chimera_runtime.program.job import Job
from chimera_runtime.ranks.agreement import ControlGroup, ObjectExchange
from chimera_runtime.ranks.rendezvous import wait_for_key
from chimera_runtime.stage.gradient_sums import is_due
from chimera_runtime.values.last_stage import LOSS
from chimera_runtime.values.mesh_tensors import fill, local, meshes_of, require_values, rest, spread_out, whole
from chimera_runtime.values.nested import digest

StateDict = dict[str, dict[str, Any]]
"""The state of the modules of a rank, in three parts.

``model`` has parameters by name. ``replicas`` has buffers by ``<replica>/<name>``. ``extra`` has, pickled and by
``<replica>/<name>``, the further entries of the modules' ``state_dict``, such as those of ``get_extra_state``.
"""


@dataclass
class State:
    """The parameters and buffers of a rank, and further entries of its modules' ``state_dict``.

    A parameter is equal on all ranks that hold it, so its name is enough. Everything else may differ between the
    replicas of a stage, which are numbered by copy and worker, from 0.
    """

    control_group: ControlGroup
    store_of_all: Store
    job: Job
    model: Model
    _: KW_ONLY
    ties: Iterable[Tie]
    modules: Mapping[int, torch.nn.Module]
    parameters: Mapping[str, torch.nn.Parameter]
    _has_values: bool = field(default=False, init=False)
    # Whether parameters have been compared with the modules' since weights were loaded.
    _is_known: bool = field(default=False, init=False)
    _exports: int = field(default=0, init=False)

    # ---- a checkpoint, to which each rank contributes its part

    def saved(self, replica: int | None = None) -> StateDict:
        """Returns the state of the rank's modules, with no copies of tensors: a checkpoint may be read into them.

        The names of buffers and further entries begin with ``replica`` or, by default, with this rank's replica.
        """

        def numbered(entries: Iterable[tuple[int, str, Any]]) -> dict[str, Any]:
            return {f"{number if replica is None else replica}/{name}": value for number, name, value in entries}

        buffers = ((number, name, tensor.detach()) for number, name, tensor in self._buffers())
        extra = ((number, name, packed(value, name)) for number, _, _, name, value in self._extra())
        return {"model": self._parameters(), "replicas": numbered(buffers), "extra": numbered(extra)}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any], replica: int | None = None) -> None:
        """Copies in the tensors of a state, unless they were read in place. ``replica`` is as in `saved`.

        Raises `BadCheckpoint` if an entry is missing, or a module refuses its own state.
        """
        self._is_known = False
        here = self.saved(replica)
        for kind, values in here.items():
            for name in values:
                if name not in state.get(kind, {}):
                    raise mistakes.state_lacks(name=name)
        for kind in ("model", "replicas"):
            for name, tensor in here[kind].items():
                if local(state[kind][name]).data_ptr() != local(tensor).data_ptr():
                    tensor.copy_(state[kind][name])
        for tensor in self._tensors().values():
            fill(tensor)
        extra = {name.partition("/")[2]: unpacked(state["extra"][name]) for name in here["extra"]}
        self._take_extra(extra)

    def require_trainable(self, updates: int) -> None:
        """Raises `Misuse` as `require_values`, and as `require_known`, which is slower, first and when `is_due`."""
        self.require_values()
        if not self._is_known or is_due(updates):
            self.require_known()
            self._is_known = True

    def require_values(self) -> None:
        """Raises `Misuse` if a parameter or buffer was built on the meta device, and nothing was loaded since."""
        if not self._has_values:
            require_values(
                self._tensors(),
                "load a file or a checkpoint that has them, with load_weights or Checkpoints.resume (in train.py with "
                "--load or --resume)",
            )
            self._has_values = True

    def require_known(self) -> None:
        """Raises `Misuse` if modules have parameters that the pipeline was not made with, which nothing would train."""
        known = {*self.parameters.values()}
        for stage, module in self.modules.items():
            if not known.issuperset(module.parameters()):
                rest(module)  # FSDP may have left other parameters after a forward
            unknown = next((name for name, parameter in module.named_parameters() if parameter not in known), None)
            if unknown is not None:
                raise mistakes.parameter_is_unknown(name=unknown, stage=stage)

    # ---- one file with the whole model

    @property
    def names(self) -> list[str]:
        """All names that a file may have for this rank: of parameters, also tied ones, buffers, further entries."""
        return [*self._parameters(), *self.aliases, *(name for _, name, _ in self._buffers()), *self.extra]

    @property
    def extra(self) -> list[str]:
        """Names of the further entries in the modules' ``state_dict``, besides parameters and buffers."""
        return [name for _, _, _, name, _ in self._extra()]

    @property
    def aliases(self) -> dict[str, str]:
        """Maps each name of a tied parameter, except the first, to the first, which the state has for all."""
        return {
            name_in_model(self.model, *end): name_in_model(self.model, *ends[0])
            for tie in self.ties
            for ends in tie.parameters
            for end in ends[1:]
        }

    @property
    def rank(self) -> int:
        """The number of this rank in the default process group."""
        return self.control_group.members[self.control_group.place.rank]

    @property
    def _leader(self) -> int:
        """The rank that exports weights for this one: the lowest in the meshes of its parameters, or itself."""
        return min([int(mesh.mesh.min()) for mesh in meshes_of(self.parameters.values())], default=self.rank)

    def wait_for_verdict(self, patience: float) -> str | None:
        """Waits for the row of the mesh that writes the file; returns its complaint. On that row None."""
        if self._leader == self.rank:
            return None
        what = f"rank {self.rank}: wait for the ranks of another row of the mesh to export the weights"
        key = f"exported/{self._exports}/{self._leader}"
        return wait_for_key(self.store_of_all, key, self._leader, what, seconds=patience).decode() or None

    def publish_verdict(self, complaint: str | None) -> None:
        """Publishes for the other rows of the mesh whether the file is written."""
        self.store_of_all.set(f"exported/{self._exports}/{self.rank}", complaint or "")
        self._exports += 1

    def whole(self, names: Collection[str] | None = None) -> dict[str, Any] | None:
        """Returns on rank 0 the state of the whole model, or some of its entries, on the CPU; every rank calls it.

        Buffers and further entries are those of the first replicas. The other ranks get no parameters: they only send.
        If pipelines in several rows of a mesh hold parts of one model, the first row has the result, and all ranks of
        the other rows get None.
        """
        control = self.control_group
        mine = self._parameters() | {name: tensor.detach() for replica, name, tensor in self._buffers() if not replica}
        if names is not None:
            mine = {name: tensor for name, tensor in mine.items() if name in names}
        exchange = ObjectExchange(control.group, "the weights that are exported", control.timeout)
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
            if control.place.rank == owner and owner and tensor is not None:
                control.send(tensor, 0, what)
            elif control.place.rank == 0:
                shape, dtype = heard[owner][name]
                gathered[name] = torch.empty(shape, dtype=dtype)
                if tensor is None:
                    control.recv(gathered[name], owner, what)
                else:
                    gathered[name].copy_(tensor)
        extra = exchange.gather_results(
            lambda: {name: packed(value, name) for replica, _, _, name, value in self._extra() if not replica}
        )
        return gathered | {name: unpacked(value) for of_rank in extra for name, value in of_rank.items()}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Any]) -> None:
        """Loads all parameters of this rank by name, and the buffers and further entries that ``tensors`` has.

        If they have no parameter of the loss, as files of other programs, those of the loss stay as they are.

        Raises `BadCheckpoint` if a parameter is missing, or a tensor has another shape.
        """
        self._is_known = False
        of_loss = {p for module in self.modules.values() for n, p in module.named_parameters() if n.startswith(LOSS)}
        may_stay = {name for name, parameter in self.parameters.items() if parameter in of_loss}
        if any(name in tensors for name in may_stay):
            may_stay.clear()
        others = {name: alias for alias, name in self.aliases.items()}
        for name, parameter in self._parameters().items():
            name_in_file = name if name in tensors else others.get(name, name)
            if name_in_file not in tensors:
                if name in may_stay:
                    continue
                raise mistakes.file_lacks_parameter(name, get_close_matches(name, tensors, 1))
            _copy(name, tensors[name_in_file], parameter)
            fill(self.parameters[name])
        for _, name, buffer in self._buffers():
            if name in tensors:
                _copy(name, tensors[name], buffer)
                fill(buffer)
        self._take_extra({name: tensors[name] for _, _, _, name, _ in self._extra() if name in tensors})

    # ---- tensors and further entries by name

    def _parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**self.parameters, **{name: buffer for _, name, buffer in self._buffers()}}

    def unsaved(self) -> dict[str, str]:
        """Digests of the buffers that are in no state dict, by name (``persistent=False``)."""
        return {
            name: "" if buffer.is_meta else digest([local(buffer)])
            for _, name, buffer, is_saved in self._all_buffers()
            if not is_saved
        }

    def _buffers(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """Replica, name and buffer, for the buffers in a module's own ``state_dict``."""
        return ((number, name, buffer) for number, name, buffer, is_saved in self._all_buffers() if is_saved)

    def _all_buffers(self) -> Iterator[tuple[int, str, torch.Tensor, bool]]:
        """Yields for each buffer: replica, name in the model, the buffer, and whether the module saves it."""
        for stage, module in self.modules.items():
            for name, buffer, is_saved in buffers_of(module):
                yield self._replica(stage), name_in_model(self.model, stage, name), buffer, is_saved

    def _extra(self) -> Iterator[tuple[int, int, str, str, Any]]:
        """Yields replica, stage, name in the stage and in the model, and value of other entries of a ``state_dict``."""
        for stage, module in self.modules.items():
            for name, value in further_entries(stage, module):
                yield self._replica(stage), stage, name, name_in_model(self.model, stage, name), value

    def _take_extra(self, values: Mapping[str, Any]) -> None:
        """Loads further entries by the modules' ``load_state_dict``, and undoes what its hooks do to tensors."""
        by_stage: dict[int, dict[str, Any]] = defaultdict(dict)
        for _, stage, inside, name, _ in self._extra():
            if name in values:
                by_stage[stage][inside] = values[name]
        for stage, entries in by_stage.items():
            module = self.modules[stage]
            snapshots = [(tensor, local(tensor).to("cpu", copy=True)) for _, tensor in _tensors_of(module)]
            state = module.state_dict()
            state.update(entries)
            try:
                with UserCode(f"load_state_dict() of stage {stage}", MISUSED):
                    module.load_state_dict(state)
            except ModelError as error:
                if "in loading state_dict" in str(error.__cause__):  # torch's own words of keys
                    raise mistakes.stage_refuses_its_state(stage, str(error.__cause__)) from error
                raise
            for tensor, before in snapshots:
                local(tensor).copy_(before)

    def _replica(self, stage: int) -> int:
        place, workers = self.control_group.place, self.job.members((stage,))
        return place.copy * len(workers) + workers.index(place.worker)


def packed(value: Any, what: str) -> bytes:
    """Pickles a value, tensors included. Raises `Misuse` if that fails; ``what`` names the value."""
    file = BytesIO()
    try:
        torch.save(value, file)
    except Exception as error:
        raise mistakes.cannot_be_saved(what=what, error=error) from error
    return file.getvalue()


def unpacked(saved: bytes) -> Any:
    """Returns the value that `packed` has pickled; its tensors are on the CPU."""
    return torch.load(BytesIO(saved), map_location="cpu", weights_only=False)


def _tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _copy(name: str, value: Any, tensor: torch.Tensor) -> None:
    if not isinstance(value, torch.Tensor):
        raise mistakes.entry_differs_in_file(name=name, in_file=f"a {type(value).__name__}", here="a tensor")
    if value.shape != tensor.shape:
        raise mistakes.entry_differs_in_file(name=name, in_file=tuple(value.shape), here=tuple(tensor.shape))
    tensor.copy_(spread_out(value, tensor))


# Averages of the weights that a loop keeps, such as an exponential moving average (EMA).
#
# An average is a second set of the pipeline's stages, or of some of their parameters: it is saved and loaded like them.

Average = Mapping[str, torch.Tensor] | Mapping[int, torch.nn.Module]
"""Tensors by the names of `Pipeline.named_parameters`; or by stage, copies of modules or AveragedModels of them."""


class AverageState:
    """The state of an average on this rank, by the names of the parameters that are averaged.

    ``average`` has copies of stages by number, or tensors by the name of their parameter. ``what`` is its name in
    messages, ``state`` that of the pipeline's own weights. Raises `Misuse` if it has a parameter that this rank lacks.
    """

    def __init__(self, what: str, average: Average, state: State) -> None:
        self._what = what
        self._names = {parameter: name for name, parameter in state.parameters.items()}
        self._wrappers = [copy for copy in average.values() if isinstance(copy, AveragedModel)]
        entries: Mapping[Any, Any] = average
        modules = {
            key: copy.module if isinstance(copy, AveragedModel) else copy
            for key, copy in entries.items()
            if isinstance(copy, torch.nn.Module)
        }
        unknown = [key for key in entries if not (key in state.modules if key in modules else isinstance(key, str))]
        if unknown:
            raise mistakes.average_has_unknown_key(what=what, key=unknown[0])
        self._tensors: dict[str, list[torch.Tensor]] = {}
        by_name = ((name, tensor) for name, tensor in entries.items() if isinstance(name, str))
        for name, tensor in (*by_name, *self._of_modules(modules, state.modules)):
            parameter = state.parameters.get(name)
            if parameter is None or not isinstance(tensor, torch.Tensor) or tensor.shape != parameter.shape:
                raise mistakes.average_is_not_of_a_parameter(what=what, name=name)
            self._tensors.setdefault(name, []).append(tensor)
        first: dict[str, Any] = {name: tensors[0] for name, tensors in self._tensors.items()}
        self._state = replace(state, modules=modules, parameters=first)

    def saved(self, replica: int | None = None) -> StateDict:
        """Returns the average as `State.saved`, and ``count``: the updates that an AveragedModel has averaged."""
        count = {"0": self._wrappers[0].n_averaged} if self._wrappers else {}
        return {**self._state.saved(replica), "count": count}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any], replica: int | None = None) -> None:
        """Loads an average that `saved` returned, and gives all copies of a tied parameter the same value."""
        self._state.load(state, replica)
        for copy in self._wrappers:
            copy.n_averaged.copy_(state["count"]["0"])
        for first, *others in self._tensors.values():
            for other in others:
                other.copy_(first)

    def _of_modules(
        self, modules: Mapping[int, torch.nn.Module], stages: Mapping[int, torch.nn.Module]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every parameter of averaged stages after its name in the model; ``stages`` are the originals."""
        for stage, module in modules.items():
            original = dict(stages[stage].named_parameters(remove_duplicate=False))
            for inside, tensor in module.named_parameters(remove_duplicate=False):
                if inside not in original:
                    raise mistakes.average_has_unknown_parameter(what=self._what, name=inside, stage=stage)
                yield self._names[original[inside]], tensor
