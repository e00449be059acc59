"""The user's model file: loads it, calls its functions and checks their results."""

import copy
import importlib.util
import inspect
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, update_wrapper, wraps
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Self

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import FAILED, MISUSED, Misuse
from chimera_runtime.errors import model as mistakes
from chimera_runtime.model.model_text import REQUIRED
from chimera_runtime.values.boundary import Stack
from chimera_runtime.values.last_stage import LOSS, LastStage, modules_in
from chimera_runtime.values.losses import Loss
from chimera_runtime.values.mesh_tensors import give_memory, is_spread, misplaced
from chimera_runtime.values.nested import Constant, Form, draw_seed, generators_kept, is_on, taken_apart

# A model as a list of layers, which a split cuts into stages. Names and weights depend only on a layer's index.


@dataclass(frozen=True)
class Layers:
    """A model as a list of layers, for a `Pipeline` in place of ``build_stage``.

    Parameter p of layer i has the name ``layers.<i>.p``, and an initial value that depends on the seed and i. Both are
    the same for any number of stages and any split. ``tied`` and ``name`` number layers in place of stages. The module
    of a stage has its layers as children by their index: ``pipe.stages[0]["3"]``.

    Parameters
    ----------
    layers
        A function for each layer, which makes the layer on the ranks that hold its stage. A layer is called with the
        output of the layer before, and with the keyword arguments that it accepts.
    split
        The first layer of each stage, from 0 upwards. By default stages have equal numbers of layers, or
        numbers that differ by one.

    Raises
    ------
    Misuse
        If a layer is not a function, or the split does not fit the layers.
    """

    layers: Sequence[Callable[[], torch.nn.Module]]
    split: Sequence[int] | None = None
    remarks: Sequence[str] = field(default=(), kw_only=True, repr=False)
    """Remarks on the model that a pipeline makes at start."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise Misuse(mistakes.NO_LAYERS)
        for index, make in enumerate(self.layers):
            if isinstance(make, torch.nn.Module) or not callable(make):
                raise mistakes.layer_is_made_already(index=index, kind=type(make).__name__)
        if self.split is not None:
            self._require_split(self.split)

    def _require_split(self, split: Sequence[int]) -> None:
        if isinstance(split, str) or not isinstance(split, Sequence):
            raise mistakes.split_is_no_list(kind=type(split).__name__)
        for layer in split:
            if isinstance(layer, bool) or not hasattr(layer, "__index__"):
                raise mistakes.split_has_no_number(layer=layer)
        if not split or split[0] != 0:
            raise mistakes.split_does_not_begin_with_0(split=split)
        after = next((second for first, second in pairwise(split) if second <= first), None)
        if after is not None:
            raise mistakes.split_does_not_ascend(split=split, layer=after)
        if split[-1] >= len(self.layers):
            raise mistakes.split_goes_too_far(split=split, layer=split[-1], layers=len(self.layers))

    def first(self, stages: int) -> Sequence[int]:
        """The number of the first layer of each stage.

        Raises
        ------
        Misuse
            If there are fewer layers than stages, or the split is for another number of stages.
        """
        count = len(self.layers)
        if stages > count:
            raise mistakes.layers_are_too_few(layers=count, stages=stages)
        if self.split is None:
            return [count * stage // stages for stage in range(stages)]
        if len(self.split) != stages:
            raise mistakes.split_is_for_other_stages(split=self.split, stages=stages)
        return self.split

    def ranges(self, stages: int) -> list[range]:
        """The numbers of the layers of each stage."""
        return [range(*ends) for ends in pairwise((*self.first(stages), len(self.layers)))]

    def stage_of(self, layer: int, stages: int) -> int:
        """The number of the stage that has a layer."""
        return bisect_right(self.first(stages), layer) - 1


# Arguments that functions of a model file may take by name, in addition to their positional ones.

_NAMED = "named_parameters"
_NAME = "_name_in_model"
"""Attribute of a parameter with its name, for an optimizer that takes named parameters."""


def bound(function: Callable[..., Any], positional: int, offered: Mapping[str, Any], file: Path) -> Callable[..., Any]:
    """Returns the function with those parameters filled in that have the name of an ``offered`` argument: it takes the
    first ``positional`` ones alone. Raises `Misuse`, with the ``file`` of the function, if it needs another argument.
    """
    by_name = _by_name(function, positional)
    by_keyword = {p.name: offered[p.name] for p in by_name if p.name in offered}
    unknown = [p.name for p in by_name if p.name not in offered and p.default is p.empty]
    if unknown:
        name = getattr(function, "__name__", "a function")
        raise mistakes.parameter_is_unknown(file, name, unknown, offered)
    if not by_keyword:
        return function

    return update_wrapper(partial(function, **by_keyword), function)


def takes(function: Any, positional: int, name: str) -> bool:
    """Whether `bound` would fill in ``name``: the function has such a parameter after its ``positional`` first ones."""
    return any(parameter.name == name for parameter in _by_name(function, positional))


def _by_name(function: Any, positional: int) -> list[inspect.Parameter]:
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        return []
    return [p for p in parameters[positional:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def takes_names(optimizer: Callable[..., Any]) -> bool:
    """Whether the first parameter of a function that makes an optimizer is called ``named_parameters``."""
    try:
        return next(iter(inspect.signature(optimizer).parameters), None) == _NAMED
    except (TypeError, ValueError):
        return False


def label(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Stores the name of each parameter in the parameter itself, for `with_names`."""
    for name, parameter in parameters.items():
        setattr(parameter, _NAME, name)


def with_names(optimizer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function of parameters that calls ``optimizer`` with (name, parameter) pairs; see `label`."""

    @wraps(optimizer)
    def of_parameters(parameters: Sequence[torch.nn.Parameter]) -> Any:
        return optimizer([(getattr(parameter, _NAME), parameter) for parameter in parameters])

    return of_parameters


_STAGES = {"build_stage": 2, "layers": 0}
_OTHERS = {
    "loss": 2,
    "dataset": 0,
    "optimizer": 1,
    "reference": 0,
    "name": 2,
    "tied": 1,
    "scheduler": 2,
    "collate": 1,
    "cut_slice": 4,
    "sampler": 1,
    "validation": 0,
    "on_step": 2,
}
"""Functions of a model file, with the number of positional arguments of each."""

_JUDGING = UserCode("the loss", FAILED)
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Model:
    """The functions with which a user describes a model.

    ``file`` is where they are, for error messages. An error that a function raises becomes a `ModelError`.
    ``loss`` is a function of output and target, or a dict of such functions: `of_sink` returns the model with one.
    ``name(stage, parameter)`` returns the model's own name for a parameter of a stage, and ``tied(num_stages)`` returns
    the parameters that stages share. If ``build_stage`` is `Layers`, both functions number layers in place of stages.
    ``groups`` are the program's groups of stages with names: name, first stage, end.
    """

    file: Path
    build_stage: Callable[[int, int], torch.nn.Module] | Layers
    loss: Any
    tied: Callable[[int], Any] | None = field(default=None, kw_only=True)
    name: Callable[[int, str], str] | None = field(default=None, kw_only=True)
    groups: Sequence[tuple[str, int, int]] = field(default=(), kw_only=True)

    @property
    def layers(self) -> Layers | None:
        """The layers of the model, or None if ``build_stage`` is a function."""
        return self.build_stage if isinstance(self.build_stage, Layers) else None

    def of_sink(self, name: str) -> Self:
        """Returns the model with the loss of a stage that feeds no other, by the name of its group of stages."""
        return replace(self, loss=self.loss[name]) if isinstance(self.loss, Mapping) else self

    def locate(self, stage: int, name: str) -> tuple[str, int, str]:
        """Returns the place of a parameter in the model file: ``"stage"`` or ``"layer"``, its number, and the name.

        For a parameter of the loss it is ``"loss"``, the number of the last stage, and the name.
        """
        if name.startswith(LOSS):
            return "loss", stage, name[len(LOSS) + 1 :]
        index, _, inside = name.partition(".")
        if self.layers is None or not index.isdecimal():  # a hook of a layer may add any entry to its state_dict
            return "stage", stage, name
        return "layer", int(index), inside

    def words(self, end: tuple[int, str]) -> str:
        """Returns a parameter of a stage as text for messages, such as ``weight of layer 3``."""
        return f"{self.locate(*end)[2]} of {self.place(*end)}"

    def place(self, stage: int, name: str) -> str:
        """Returns the place of a parameter as text for messages: ``stage 1``, ``layer 3`` or ``the loss``."""
        kind, number, _ = self.locate(stage, name)
        return "the loss" if kind == "loss" else f"{kind} {number}"

    def stage(
        self,
        stage: int,
        stages: int,
        seed: int,
        device: torch.device,
        members: Sequence[int] | None = None,
        *,
        is_sink: bool | None = None,
    ) -> torch.nn.Module:
        """Builds a stage with its initial weights, which depend only on the seed and on the stage or the layer; on the
        meta device they are zeros until they are loaded. ``members`` are the ranks of the pipelines, if the stage may
        be spread over others. A stage that feeds no other, ``is_sink``, by default the last one, gets the loss.
        """
        build: Any = self.build_stage
        if isinstance(build, Layers):
            held = build.ranges(stages)[stage]
            module: torch.nn.Module = Stack({str(i): self._build(f"layer {i}", build.layers[i], seed, i) for i in held})
        else:
            module = self._build(f"build_stage({stage}, {stages})", partial(build, stage, stages), seed, stage)
        if stage == stages - 1 if is_sink is None else is_sink:
            module = self.with_loss(module)
        if any(torch.nn.parameter.is_lazy(p) for p in (*module.parameters(), *module.buffers())):
            raise mistakes.parameters_are_lazy(file=self.file, stage=stage)
        if wrapper := misplaced(module, members):
            raise mistakes.stage_is_spread(file=self.file, stage=stage, wrapper=wrapper)
        give_memory(module, device, f"{self.file}: stage {stage}")
        return to_training_mode(_on_device(module, device, stage, self.file))

    def with_loss(self, module: torch.nn.Module, *, copied: bool = False) -> torch.nn.Module:
        """Returns the module of the last stage together with that of the loss, or the first alone if there is no other.

        The loss is a copy if it is to be ``copied``; what it shares with the stage it then shares with ``module``. A
        method or a partial of a module that shares parameters with the stage is one of the model, no module of a loss.
        """
        mine = {*module.parameters()}
        loss = self.loss
        if not isinstance(loss, torch.nn.Module) and any(mine.intersection(m.parameters()) for m in modules_in(loss)):
            return module
        if copied:
            shared: list[Any] = [*mine, *module.buffers()]
            with UserCode("copying the loss", MISUSED):
                loss = copy.deepcopy(loss, {id(tensor): tensor for tensor in shared})
        modules = modules_in(loss)
        if not modules:
            return module
        return LastStage(module, modules[0] if len(modules) == 1 else torch.nn.ModuleList(modules), loss)

    def _build(self, what: str, make: Callable[[], Any], seed: int, number: int) -> torch.nn.Module:
        torch.manual_seed(draw_seed("weights", seed, number))
        with UserCode(what, MISUSED):
            module = make()
        if not isinstance(module, torch.nn.Module):
            raise mistakes.result_is_wrong(file=self.file, call=what, kind=_kind(module), wanted="a torch.nn.Module")
        return module

    def judge(self, output: Any, target: Any) -> Loss:
        """Returns the loss of a micro-batch: one number, or a sum and a count."""
        try:
            value = self.loss(output, target)
        except BaseException as error:
            _JUDGING.blame(error)
            raise
        if type(value) is torch.Tensor and value.numel() == 1:
            return value
        total, count = value if isinstance(value, tuple | list) and len(value) == 2 else (value, 1)
        if not isinstance(total, torch.Tensor) or total.numel() != 1:
            kind = f"a tensor of shape {tuple(total.shape)}" if isinstance(total, torch.Tensor) else _kind(total)
            raise mistakes.loss_is_no_number(file=self.file, kind=kind)
        if not (isinstance(count, int | float) or (isinstance(count, torch.Tensor) and count.numel() == 1)):
            raise mistakes.count_is_no_number(file=self.file, kind=_kind(count))
        return value

    def outputs(self, stage: int, returned: Any) -> tuple[Form, tuple[torch.Tensor, ...]]:
        """Splits the returned value of a stage into its structure and its tensors."""
        tensors, form = taken_apart(returned)
        others = [entry for entry in form.entries if entry is not ... and not isinstance(entry, Constant)]
        if others or not tensors:
            inside = _kind(others[0]) if others and others[0] is not returned else None
            raise mistakes.output_has_no_form(self.file, stage, _kind(returned), inside)
        if any(map(is_spread, tensors)):
            raise mistakes.output_is_spread(file=self.file, stage=stage)
        return form, tensors


@dataclass(frozen=True)
class ModelFile(Model):
    """The functions of a model file; those with a default are optional. Errors as in `Model`.

    ``reference()`` returns the model for one process, ``scheduler(optimizer, steps)`` a learning-rate scheduler,
    ``collate(items)`` a micro-batch, ``cut_slice(value, which, number, slices)`` a slice of its input, target or
    keyword arguments, ``sampler(dataset)`` the order of items, and ``validation()`` held-out items. ``on_step(pipe,
    outcome)`` is called after every update. ``describe(directory)`` writes what a library needs to read a model besides
    its weights. Stages and loss compute in the dtype ``autocast``, if there is one.
    """

    dataset: Callable[[], Any]
    optimizer: Callable[[Any], Any]
    reference: Callable[[], Any] | None = None
    scheduler: Callable[[Any, int], Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    cut_slice: Callable[[Any, str, int, int], Any] | None = None
    sampler: Callable[[Any], Any] | None = None
    validation: Callable[[], Any] | None = None
    on_step: Callable[[Any, Any], Any] | None = None
    describe: Callable[[Path], None] | None = None
    autocast: torch.dtype | None = None

    def items(self) -> Any:
        """Returns the result of ``dataset``, which `Batches.check` checks later."""
        with UserCode("dataset()", MISUSED):
            return self.dataset()

    def order(self, dataset: Any) -> Any:
        """Calls ``sampler``, and returns the sampler of a dataset; None if the model file has no such function."""
        if self.sampler is None:
            return None
        with UserCode("sampler(dataset)", MISUSED):
            sampler = self.sampler(dataset)
        if not hasattr(sampler, "__iter__") or hasattr(sampler, "__next__"):
            wanted = "a torch.utils.data.Sampler: an object whose __iter__ begins anew in every epoch"
            raise mistakes.result_is_wrong(file=self.file, call="sampler", kind=_kind(sampler), wanted=wanted)
        return sampler

    def held_out(self) -> Any:
        """Returns the held-out items; the model file must have ``validation``."""
        assert self.validation is not None
        with UserCode("validation()", MISUSED):
            return self.validation()

    def stepped(self, pipe: Any, outcome: Any) -> None:
        """Calls ``on_step``, if there is one, after an update of a pipeline."""
        if self.on_step is not None:
            with UserCode("on_step(pipe, outcome)", FAILED):
                self.on_step(pipe, outcome)

    def steps(self, parameters: list[torch.nn.Parameter]) -> Any:
        """Calls ``optimizer``, and returns the optimizer of some parameters; for none, one that does nothing."""
        with UserCode("optimizer(parameters)", MISUSED):
            steps = self.optimizer(parameters) if parameters else _NoOptimizer()
        return self._with_step("optimizer", steps, "a torch.optim.Optimizer")

    def schedule(self, optimizer: Any, updates: int) -> Any:
        """Returns a learning-rate scheduler for an optimizer, or None if the model file makes none."""
        if self.scheduler is None or isinstance(optimizer, _NoOptimizer):
            return None
        with UserCode("scheduler(optimizer, steps)", MISUSED):
            scheduler = self.scheduler(optimizer, updates)
        return self._with_step("scheduler", scheduler, "a scheduler of torch.optim")

    def _with_step(self, call: str, made: Any, wanted: str) -> Any:
        if not callable(getattr(made, "step", None)):
            raise mistakes.result_is_wrong(file=self.file, call=call, kind=_kind(made), wanted=wanted)
        return made


class _NoOptimizer:
    """Stand-in for the optimizer of a stage that has no parameters."""

    def step(self) -> None:
        """Does nothing."""


def require_build_stage(build_stage: object) -> None:
    """Raises `Misuse` unless ``build_stage`` is a function or `Layers`."""
    if isinstance(build_stage, Layers) or (callable(build_stage) and not isinstance(build_stage, torch.nn.Module)):
        return
    is_list = isinstance(build_stage, Sequence) and not isinstance(build_stage, str)
    raise mistakes.build_stage_is_wrong(_kind(build_stage), is_list=is_list)


def file_of(function: Callable[..., Any] | Layers) -> Path:
    """Returns the file of a function, or of the function that makes the first layer, for messages."""
    if isinstance(function, Layers):
        function = function.layers[0]
    try:
        return Path(inspect.getsourcefile(inspect.unwrap(function)) or "?")
    except TypeError:
        return Path(getattr(type(function), "__name__", "?"))


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _on_device(module: torch.nn.Module, device: torch.device, stage: int, file: Path) -> torch.nn.Module:
    """Moves the module of a stage from the CPU to ``device``; `Misuse` if a tensor is on another device."""
    for name, tensor in _tensors(module):
        if not is_on(tensor, device) and tensor.device.type != "cpu":
            raise mistakes.tensor_is_elsewhere(
                file=file, stage=stage, name=name, place=str(tensor.device), device=str(device)
            )
    with UserCode(f"placing stage {stage} on {device}", MISUSED):
        placed = module.to(device)
    for name, tensor in _tensors(placed):
        if not is_on(tensor, device):
            raise mistakes.tensor_does_not_move(
                file=file, stage=stage, name=name, place=str(tensor.device), device=str(device)
            )
    return placed


def to_training_mode(module: torch.nn.Module) -> torch.nn.Module:
    """Calls ``train()`` of a module, and returns it; what stands in evaluation mode in it, or is it, stays in it."""
    evaluating = [submodule for submodule in module.modules() if not submodule.training]
    if module.training:
        module.train()  # which the class may have made its own, to keep a module in it in evaluation mode
    for submodule in evaluating:
        submodule.training = False
    return module


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def load(path: Path, offered: Mapping[str, Any] = _NOTHING, split: Sequence[int] | None = None) -> ModelFile:
    """Loads a model file. Its functions may take ``offered`` arguments by name; ``split`` cuts its layers into stages.

    Raises `Misuse` if the file cannot be read, lacks a function, needs an argument that is not offered or takes no
    ``args``, or the split does not fit; `ModelError` if importing it fails.
    """
    try:
        file = path.resolve()
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise mistakes.file_cannot_be_read(path=path, why=mistakes.NOT_REGULAR)
        file.read_bytes()
    except OSError as error:
        raise mistakes.file_cannot_be_read(path=path, why=error.strerror) from error
    # Import the file as a module; its folder goes first on the path, so that it can import its neighbours.
    spec = importlib.util.spec_from_file_location("chimera_model", file)
    if spec is None or spec.loader is None:
        raise mistakes.file_cannot_be_read(path=path, why=mistakes.NOT_PYTHON)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(file.parent))
    with UserCode("importing the model file", MISUSED), generators_kept():
        torch.manual_seed(
            draw_seed("model file", offered.get("seed", 0))
        )  # alike on all ranks, as for a loss with weights
        spec.loader.exec_module(module)
    # Stages come from layers() or from build_stage(); the required functions are there.
    layered = hasattr(module, "layers") and (callable(module.layers) or not hasattr(module, "build_stage"))
    missing = [name for name in REQUIRED if not callable(getattr(module, name, None))]
    if "loss" in missing and isinstance(getattr(module, "loss", None), Mapping):
        missing.remove("loss")  # one for each group of stages that feeds no other
    if layered and "build_stage" in missing:
        missing.remove("build_stage")
    if missing:
        raise mistakes.functions_are_missing(path=path, functions=[REQUIRED[name] for name in missing])
    functions = {name: getattr(module, name, None) for name in _STAGES | _OTHERS}
    of_loss = functions["loss"]
    losses = of_loss.values() if isinstance(of_loss, Mapping) else ()
    taking = [*((functions[n], count) for n, count in (_STAGES | _OTHERS).items()), *((f, 2) for f in losses)]
    if offered.get("args") and not any(takes(function, count, "args") for function, count in taking):
        raise mistakes.nothing_takes_args(path=path)
    tied = functions["tied"]
    if tied is not None and not callable(tied):
        raise mistakes.tied_is_not_a_function(path=path, kind=_kind(tied))
    # Bind the arguments that functions take by name.
    bound_functions: dict[str, Any] = {
        name: bound(function, positional, offered, file)
        for name, positional in _OTHERS.items()
        if callable(function := functions[name])
    }
    if isinstance(functions["loss"], Mapping):
        count = _OTHERS["loss"]
        bound_functions["loss"] = {name: bound(f, count, offered, file) for name, f in functions["loss"].items()}
    if takes_names(module.optimizer):
        bound_functions["optimizer"] = with_names(bound_functions["optimizer"])
    if layered:
        bound_functions["build_stage"] = _layers(module, offered, split, file)
    elif split is None:
        bound_functions["build_stage"] = bound(module.build_stage, _STAGES["build_stage"], offered, file)
    else:
        raise mistakes.split_without_layers(path=path)
    return ModelFile(file, **bound_functions)


def _layers(module: ModuleType, offered: Mapping[str, Any], split: Sequence[int] | None, file: Path) -> Layers:
    if hasattr(module, "build_stage"):
        raise mistakes.layers_and_build_stage(file=file)
    if not callable(module.layers):
        raise mistakes.layers_is_not_a_function(file=file, kind=_kind(module.layers))
    with UserCode("layers()", MISUSED):
        makers = bound(module.layers, _STAGES["layers"], offered, file)()
    if not isinstance(makers, Sequence):
        wanted = "a list of functions, each of which makes a layer"
        raise mistakes.result_is_wrong(file=file, call="layers()", kind=_kind(makers), wanted=wanted)
    return Layers(makers, split)
