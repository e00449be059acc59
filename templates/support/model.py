"""The user's model file: loading it, calling its functions, and saying what is wrong with what they return."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runtime import draw_seed
from support.blame import Calling
from support.faults import FAILED, MISUSED, Misuse

_FUNCTIONS = {
    "build_stage": "build_stage(stage: int, num_stages: int) -> torch.nn.Module",
    "loss": "loss(output, target) -> torch.Tensor",
    "dataset": "dataset() -> torch.utils.data.Dataset",
    "optimizer": "optimizer(parameters) -> torch.optim.Optimizer",
}

_SPREADING = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed._tensor", "torch.nn.parallel")
_JUDGING = Calling("the loss", FAILED)


@dataclass(frozen=True)
class Model:
    """The four functions of a model file.

    What they raise under one of the methods below is a `ModelError`.
    """

    file: Path
    build_stage: Callable[[int, int], torch.nn.Module]
    loss: Callable[[Any, Any], torch.Tensor]
    dataset: Callable[[], Any]
    optimizer: Callable[[Any], Any]

    def stage(self, stage: int, stages: int, seed: int, device: torch.device) -> torch.nn.Module:
        """A stage with its initial weights, which depend on the seed and the stage alone."""
        torch.manual_seed(draw_seed("weights", seed, stage))
        with Calling(f"build_stage({stage}, {stages})", MISUSED):
            module = self.build_stage(stage, stages)
        if not isinstance(module, torch.nn.Module):
            raise Misuse(f"{self.file}: build_stage({stage}, {stages}) returned {_kind(module)}, not a torch.nn.Module")
        if any(torch.nn.parameter.is_lazy(p) for p in (*module.parameters(), *module.buffers())):
            raise Misuse(f"{self.file}: stage {stage} has lazy parameters; give every layer its sizes")
        if wrapper := next(_wrappers(module), None):
            raise Misuse(
                f"{self.file}: stage {stage} uses {wrapper}; FSDP, DDP and tensor parallelism cannot be used within a "
                "stage: return the plain module, its replicas are kept equal and their gradients summed already"
            )
        with Calling(f"placing stage {stage} on {device}", MISUSED):
            return module.to(device).train()

    def items(self) -> Any:
        """The dataset."""
        with Calling("dataset()", MISUSED):
            return self.dataset()

    def steps(self, parameters: list[torch.nn.Parameter]) -> Any:
        """The optimizer of a stage; a stage without parameters needs none."""
        with Calling("optimizer(parameters)", MISUSED):
            steps = self.optimizer(parameters) if parameters else _Idle()
        if not callable(getattr(steps, "step", None)):
            raise Misuse(f"{self.file}: optimizer returned {_kind(steps)}, not a torch.optim.Optimizer")
        return steps

    def judge(self, output: Any, target: Any) -> torch.Tensor:
        """The loss of a micro-batch."""
        with _JUDGING:
            return self.loss(output, target)

    def outputs(self, stage: int, returned: Any) -> tuple[bool, tuple[torch.Tensor, ...]]:
        """What a stage returned, as tensors, and whether it was a single one."""
        tensors = returned if isinstance(returned, tuple) else (returned,)
        wrong = [t for t in tensors if not isinstance(t, torch.Tensor)]
        if wrong or not tensors:
            found = (
                f"a tuple with {_kind(wrong[0])} in it" if wrong and isinstance(returned, tuple) else _kind(returned)
            )
            raise Misuse(f"{self.file}: stage {stage} returned {found}; return a tensor or a tuple of tensors")
        return not isinstance(returned, tuple), tensors

    def scalar(self, value: Any) -> torch.Tensor:
        """The loss, which must be one number."""
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else _kind(value)
            raise Misuse(
                f"{self.file}: loss returned {found}; return the mean over the micro-batch, a tensor of one number"
            )
        return value


class _Idle:
    """The optimizer of a stage without parameters."""

    def step(self) -> None:
        """Nothing to do."""


def _wrappers(module: torch.nn.Module) -> Iterator[str]:
    """The classes by which torch spreads a module or its tensors over several ranks."""
    for part in (*module.modules(), *module.parameters(), *module.buffers()):
        yield from (kind.__name__ for kind in type(part).__mro__ if kind.__module__.startswith(_SPREADING))


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def load(path: Path) -> Model:
    """The functions of a model file.

    Raises
    ------
    Misuse
        If the file cannot be read, or lacks a function.
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
    sys.path.insert(1, str(file.parent))
    with Calling("importing the model file", MISUSED):
        spec.loader.exec_module(module)
    missing = [name for name in _FUNCTIONS if not callable(getattr(module, name, None))]
    if missing:
        raise Misuse(
            f"{path} lacks the function{'s' if len(missing) > 1 else ''} {', '.join(_FUNCTIONS[n] for n in missing)}"
        )
    return Model(file, module.build_stage, module.loss, module.dataset, module.optimizer)
