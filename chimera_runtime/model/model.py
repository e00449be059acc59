"""The user's model file: loading it, calling its functions, and saying what is wrong with what they return."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import FAILED, MISUSED, Misuse
from chimera_runtime.model.arguments import bound, takes, takes_names, with_names
from chimera_runtime.model.layers import Layers
from chimera_runtime.model.model_text import REQUIRED, lacks
from chimera_runtime.model.moving import moved
from chimera_runtime.values.keywords import Stack
from chimera_runtime.values.losses import Loss
from chimera_runtime.values.meta_weights import give_memory
from chimera_runtime.values.nested import Constant, Form, taken_apart
from chimera_runtime.values.shards import is_spread, misplaced
from chimera_runtime.values.tensors import draw_seed

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
    "sampler": 1,
    "validation": 0,
    "on_step": 2,
}
"""The functions of a model file, each with the number of arguments that it is called with."""

_JUDGING = UserCode("the loss", FAILED)
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Model:
    """The functions that make a model; ``file`` is where they stand, for messages. The last two may be missing.

    What they raise under one of the methods below is a `ModelError`. ``name(stage, parameter)`` is what the model calls
    a parameter of a stage, ``tied(num_stages)`` what stages share; where there are layers, both have these in place of
    stages.
    """

    file: Path
    build_stage: Callable[[int, int], torch.nn.Module] | Layers
    loss: Callable[[Any, Any], Loss]
    tied: Callable[[int], Any] | None = field(default=None, kw_only=True)
    name: Callable[[int, str], str] | None = field(default=None, kw_only=True)

    @property
    def layers(self) -> Layers | None:
        """The layers that stages are made of, if it is they that are given."""
        return self.build_stage if isinstance(self.build_stage, Layers) else None

    def locate(self, stage: int, name: str) -> tuple[str, int, str]:
        """Where the model file has a parameter of a stage: in a ``"stage"`` or a ``"layer"``, its number, the name."""
        if self.layers is None:
            return "stage", stage, name
        index, _, inside = name.partition(".")
        return "layer", int(index), inside

    def words(self, end: tuple[int, str]) -> str:
        """A parameter of a stage in the words of the model file, as ``weight of layer 3``."""
        kind, number, inside = self.locate(*end)
        return f"{inside} of {kind} {number}"

    def stage(
        self, stage: int, stages: int, seed: int, device: torch.device, members: Sequence[int] | None = None
    ) -> torch.nn.Module:
        """A stage with its initial weights, which depend on the seed and the stage alone, or on the layer.

        One that is built on the meta device has none yet: zeros, marked as `is_unfilled`.

        ``members`` are the ranks of the pipelines where there are others, over which the stage may be spread.
        """
        build: Any = self.build_stage
        if isinstance(build, Layers):
            held = build.ranges(stages)[stage]
            module: torch.nn.Module = Stack({str(i): self._made(f"layer {i}", build.layers[i], seed, i) for i in held})
        else:
            module = self._made(f"build_stage({stage}, {stages})", partial(build, stage, stages), seed, stage)
        if any(torch.nn.parameter.is_lazy(p) for p in (*module.parameters(), *module.buffers())):
            raise Misuse(f"{self.file}: stage {stage} has lazy parameters; give every layer its sizes")
        if wrong := misplaced(module, members):
            raise Misuse(f"{self.file}: stage {stage} uses {wrong}")
        give_memory(module, device, f"{self.file}: stage {stage}")
        return moved(module, device, stage, f"{self.file}: stage {stage}").train()

    def _made(self, what: str, make: Callable[[], Any], seed: int, number: int) -> torch.nn.Module:
        """A stage or a layer, by its number."""
        torch.manual_seed(draw_seed("weights", seed, number))
        with UserCode(what, MISUSED):
            module = make()
        if not isinstance(module, torch.nn.Module):
            raise Misuse(f"{self.file}: {what} returned {_kind(module)}, not a torch.nn.Module")
        return module

    def judge(self, output: Any, target: Any) -> Loss:
        """The loss of a micro-batch, which must be one number, or a sum and a count."""
        with _JUDGING:
            value = self.loss(output, target)
        total, count = value if isinstance(value, tuple | list) and len(value) == 2 else (value, 1)
        if not isinstance(total, torch.Tensor) or total.numel() != 1:
            kind = f"a tensor of shape {tuple(total.shape)}" if isinstance(total, torch.Tensor) else _kind(total)
            raise Misuse(
                f"{self.file}: loss returned {kind}; return the mean over the micro-batch, a tensor of one number, or "
                "(sum, count)"
            )
        if not (isinstance(count, int | float) or (isinstance(count, torch.Tensor) and count.numel() == 1)):
            raise Misuse(f"{self.file}: loss returned {_kind(count)} as the count; return (sum, count), two numbers")
        return value

    def outputs(self, stage: int, returned: Any) -> tuple[Form, tuple[torch.Tensor, ...]]:
        """The structure of what a stage returned, and its tensors."""
        tensors, form = taken_apart(returned)
        wrong = [entry for entry in form.entries if entry is not ... and not isinstance(entry, Constant)]
        if wrong or not tensors:
            inside = f" with {_kind(wrong[0])} in it" if wrong and wrong[0] is not returned else ""
            raise Misuse(
                f"{self.file}: stage {stage} returned {_kind(returned)}{inside}; return a tensor, or tensors in "
                "tuples, lists and dicts; beside them there may be None, numbers and texts that are always the same"
            )
        if any(map(is_spread, tensors)):
            raise Misuse(
                f"{self.file}: stage {stage} returned a DTensor; return plain tensors, the same on all ranks that the "
                "stage is spread over, as RowwiseParallel does by default and full_tensor() otherwise"
            )
        return form, tensors


@dataclass(frozen=True)
class ModelFile(Model):
    """The functions of a model file, of which it need not have the last six; what they raise is as in `Model`.

    ``reference()`` is the model in one process, ``scheduler(optimizer, steps)`` makes a learning-rate scheduler for so
    many updates, ``collate(items)`` a micro-batch of a list of items, ``sampler(dataset)`` says which come when,
    ``validation()`` has held-out items, and ``on_step(pipe, outcome)`` is called after every update. The products of
    stages and loss are computed in the dtype ``autocast``, if there is one.
    """

    dataset: Callable[[], Any]
    optimizer: Callable[[Any], Any]
    reference: Callable[[], Any] | None = None
    scheduler: Callable[[Any, int], Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    sampler: Callable[[Any], Any] | None = None
    validation: Callable[[], Any] | None = None
    on_step: Callable[[Any, Any], Any] | None = None
    autocast: torch.dtype | None = None

    def items(self) -> Any:
        """What ``dataset`` returns, not yet known to be one: see `Batches.check`."""
        with UserCode("dataset()", MISUSED):
            return self.dataset()

    def order(self, dataset: Any) -> Any:
        """The sampler of a dataset, None if there is none."""
        if self.sampler is None:
            return None
        with UserCode("sampler(dataset)", MISUSED):
            sampler = self.sampler(dataset)
        if not hasattr(sampler, "__iter__") or hasattr(sampler, "__next__"):
            raise Misuse(
                f"{self.file}: sampler returned {_kind(sampler)}, not a torch.utils.data.Sampler: an object whose "
                "__iter__ begins anew in every epoch"
            )
        return sampler

    def held_out(self) -> Any:
        """What ``validation`` returns, which there is."""
        assert self.validation is not None
        with UserCode("validation()", MISUSED):
            return self.validation()

    def stepped(self, pipe: Any, outcome: Any) -> None:
        """Tells ``on_step``, if there is one, of an update of a pipeline."""
        if self.on_step is not None:
            with UserCode("on_step(pipe, outcome)", FAILED):
                self.on_step(pipe, outcome)

    def steps(self, parameters: list[torch.nn.Parameter]) -> Any:
        """The optimizer of a stage; a stage without parameters needs none."""
        with UserCode("optimizer(parameters)", MISUSED):
            steps = self.optimizer(parameters) if parameters else _Idle()
        if not callable(getattr(steps, "step", None)):
            raise Misuse(f"{self.file}: optimizer returned {_kind(steps)}, not a torch.optim.Optimizer")
        return steps

    def schedule(self, optimizer: Any, updates: int) -> Any:
        """The scheduler of an optimizer, None if there is none."""
        if self.scheduler is None or isinstance(optimizer, _Idle):
            return None
        with UserCode("scheduler(optimizer, steps)", MISUSED):
            scheduler = self.scheduler(optimizer, updates)
        if not callable(getattr(scheduler, "step", None)):
            raise Misuse(f"{self.file}: scheduler returned {_kind(scheduler)}, not a scheduler of torch.optim")
        return scheduler


class _Idle:
    """The optimizer of a stage without parameters."""

    def step(self) -> None:
        """Changes nothing: there are no parameters."""


def require_build_stage(build_stage: object) -> None:
    """Refuses what makes no stages.

    Raises
    ------
    Misuse
        If it is neither a function nor `Layers`.
    """
    if isinstance(build_stage, Layers) or (callable(build_stage) and not isinstance(build_stage, torch.nn.Module)):
        return
    remedy = (
        "for layers write Layers(layers()), the functions that make them"
        if isinstance(build_stage, Sequence) and not isinstance(build_stage, str)
        else "give a function build_stage(stage, num_stages), or the Layers that stages are made of"
    )
    raise Misuse(f"build_stage is {_kind(build_stage)}: {remedy}")


def file_of(function: Callable[..., Any] | Layers) -> Path:
    """Where a function stands, or that of the first layer, for messages."""
    if isinstance(function, Layers):
        function = function.layers[0]
    try:
        return Path(inspect.getsourcefile(inspect.unwrap(function)) or "?")
    except TypeError:
        return Path(getattr(type(function), "__name__", "?"))


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def load(path: Path, offered: Mapping[str, Any] = _NOTHING, split: Sequence[int] | None = None) -> ModelFile:
    """The functions of a model file; they may take by name what is ``offered``. ``split`` cuts its layers into stages.

    Raises
    ------
    Misuse
        If the file cannot be read, lacks a function, or one needs what is not offered; if ``args`` are offered and none
        takes them; if the split is not one of its layers.
    ModelError
        If it cannot be run.
    """
    try:
        file = path.resolve()
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise Misuse(f"model file {path}: it is no regular file")
        file.read_bytes()
    except OSError as error:
        raise Misuse(f"model file {path}: {error.strerror}") from error
    spec = importlib.util.spec_from_file_location("chimera_model", file)
    if spec is None or spec.loader is None:
        raise Misuse(f"model file {path}: not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(file.parent))
    with UserCode("importing the model file", MISUSED):
        spec.loader.exec_module(module)
    layered = hasattr(module, "layers") and (callable(module.layers) or not hasattr(module, "build_stage"))
    missing = [name for name in REQUIRED if not callable(getattr(module, name, None))]
    if layered and "build_stage" in missing:
        missing.remove("build_stage")
    if missing:
        raise lacks(path, missing)
    functions = {name: getattr(module, name, None) for name in _STAGES | _OTHERS}
    if offered.get("args") and not any(takes(functions[n], count, "args") for n, count in (_STAGES | _OTHERS).items()):
        raise Misuse(
            f"{path}: none of its functions takes args, so nothing reads what follows -- on the command line: give one "
            "of them a parameter args, or leave the words out"
        )
    tied = functions["tied"]
    if tied is not None and not callable(tied):
        raise Misuse(f"{path}: tied is {_kind(tied)}, not a function: def tied(num_stages: int) -> list[list[tuple]]")
    given: dict[str, Any] = {
        name: bound(function, positional, offered, file)
        for name, positional in _OTHERS.items()
        if callable(function := functions[name])
    }
    if takes_names(module.optimizer):
        given["optimizer"] = with_names(given["optimizer"])
    if layered:
        given["build_stage"] = _layers(module, offered, split, file)
    elif split is None:
        given["build_stage"] = bound(module.build_stage, _STAGES["build_stage"], offered, file)
    else:
        raise Misuse(
            f"--split: the build_stage of {path} decides what a stage is; with layers() in its place a split does"
        )
    return ModelFile(file, **given)


def _layers(module: ModuleType, offered: Mapping[str, Any], split: Sequence[int] | None, file: Path) -> Layers:
    """What ``layers()`` of a model file returns, with the split."""
    if hasattr(module, "build_stage"):
        raise Misuse(f"{file} has both layers and build_stage: each says what the stages are; keep one, or rename it")
    if not callable(module.layers):
        raise Misuse(f"{file}: layers is {_kind(module.layers)}, not a function: def layers() -> list[Callable]")
    with UserCode("layers()", MISUSED):
        listed = bound(module.layers, _STAGES["layers"], offered, file)()
    if not isinstance(listed, Sequence):
        raise Misuse(f"{file}: layers() returned {_kind(listed)}, not a list of functions, each of which makes a layer")
    return Layers(listed, split)
