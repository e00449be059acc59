"""The user's model file: loading it, calling its functions, and saying what is wrong with what they return."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from chimera_runtime.arguments import bound, naming, takes_names, with_names
from chimera_runtime.blame import Calling
from chimera_runtime.errors import FAILED, MISUSED, Misuse
from chimera_runtime.losses import Loss
from chimera_runtime.nested import Constant, Form, taken_apart
from chimera_runtime.shards import is_spread, misplaced
from chimera_runtime.tensors import draw_seed

_FUNCTIONS = {
    "build_stage": "build_stage(stage: int, num_stages: int) -> torch.nn.Module",
    "loss": "loss(output, target) -> torch.Tensor",
    "dataset": "dataset() -> torch.utils.data.Dataset",
    "optimizer": "optimizer(parameters) -> torch.optim.Optimizer",
}

_JUDGING = Calling("the loss", FAILED)
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Model:
    """The functions that make a model; ``file`` is where they stand, for messages. ``tied`` may be missing.

    What they raise under one of the methods below is a `ModelError`.
    """

    file: Path
    build_stage: Callable[[int, int], torch.nn.Module]
    loss: Callable[[Any, Any], Loss]
    tied: Callable[[int], Any] | None = field(default=None, kw_only=True)

    def stage(
        self, stage: int, stages: int, seed: int, device: torch.device, members: Sequence[int] | None = None
    ) -> torch.nn.Module:
        """A stage with its initial weights, which depend on the seed and the stage alone.

        ``members`` are the ranks of the pipelines where there are others, over which the stage may be spread.
        """
        torch.manual_seed(draw_seed("weights", seed, stage))
        with Calling(f"build_stage({stage}, {stages})", MISUSED):
            module = self.build_stage(stage, stages)
        if not isinstance(module, torch.nn.Module):
            raise Misuse(f"{self.file}: build_stage({stage}, {stages}) returned {_kind(module)}, not a torch.nn.Module")
        if any(torch.nn.parameter.is_lazy(p) for p in (*module.parameters(), *module.buffers())):
            raise Misuse(f"{self.file}: stage {stage} has lazy parameters; give every layer its sizes")
        if wrong := misplaced(module, members):
            raise Misuse(f"{self.file}: stage {stage} uses {wrong}")
        with Calling(f"placing stage {stage} on {device}", MISUSED):
            return module.to(device).train()

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
    """The functions of a model file, of which it need not have the last two; what they raise is as in `Model`.

    ``reference()`` is the model in one process, ``name(stage, parameter)`` what a parameter of a stage is called there.
    """

    dataset: Callable[[], Any]
    optimizer: Callable[[Any], Any]
    reference: Callable[[], Any] | None = None
    name: Callable[[int, str], str] | None = None

    def items(self) -> Any:
        """What ``dataset`` returns, not yet known to be map-style: see `Batches.check`."""
        with Calling("dataset()", MISUSED):
            return self.dataset()

    def steps(self, parameters: list[torch.nn.Parameter]) -> Any:
        """The optimizer of a stage; a stage without parameters needs none."""
        with Calling("optimizer(parameters)", MISUSED):
            steps = self.optimizer(parameters) if parameters else _Idle()
        if not callable(getattr(steps, "step", None)):
            raise Misuse(f"{self.file}: optimizer returned {_kind(steps)}, not a torch.optim.Optimizer")
        return steps


class _Idle:
    """The optimizer of a stage without parameters."""

    def step(self) -> None:
        """Changes nothing: there are no parameters."""


def file_of(function: Callable[..., Any]) -> Path:
    """Where a function stands, for messages."""
    try:
        return Path(inspect.getsourcefile(inspect.unwrap(function)) or "?")
    except TypeError:
        return Path(getattr(type(function), "__name__", "?"))


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def load(path: Path, offered: Mapping[str, Any] = _NOTHING) -> ModelFile:
    """The functions of a model file; they may take by name what is ``offered``.

    Raises
    ------
    Misuse
        If the file cannot be read, lacks a function, or one needs what is not offered.
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
    with Calling("importing the model file", MISUSED):
        spec.loader.exec_module(module)
    missing = [name for name in _FUNCTIONS if not callable(getattr(module, name, None))]
    if missing:
        raise Misuse(
            f"{path} lacks the function{'s' if len(missing) > 1 else ''} {', '.join(_FUNCTIONS[n] for n in missing)}"
        )
    given = {
        name: bound(getattr(module, name), positional, offered, file)
        for name, positional in (("build_stage", 2), ("loss", 2), ("dataset", 0), ("optimizer", 1))
    }
    if takes_names(module.optimizer):
        given |= {"build_stage": naming(given["build_stage"]), "optimizer": with_names(given["optimizer"])}
    tied = getattr(module, "tied", None)
    if tied is not None and not callable(tied):
        raise Misuse(f"{path}: tied is {_kind(tied)}, not a function: def tied(num_stages: int) -> list[list[tuple]]")
    reference, name, tied = (
        bound(f, positional, offered, file) if callable(f := getattr(module, other, None)) else None
        for other, positional in (("reference", 0), ("name", 2), ("tied", 1))
    )
    return ModelFile(file, **given, tied=tied, reference=reference, name=name)
