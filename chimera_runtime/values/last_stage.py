"""`LastStage`: the last stage together with a loss that is a module: what is done with a stage is done with both."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

import torch

from chimera_runtime.values.losses import CountedLoss

LOSS = ".loss"
"""Name of the loss in a `LastStage`. No child of a module may have a point in its name: no part of a stage has this."""

_PREFIX = f"{LOSS}."


def modules_in(loss: Any) -> list[torch.nn.Module]:
    """The module that a loss is, or of which it is a method; of a partial also those that are its arguments,
    and of a `CountedLoss` those of its sum."""
    if isinstance(loss, torch.nn.Module):
        return [loss]
    if isinstance(loss, partial):
        return [module for part in (loss.func, *loss.args, *loss.keywords.values()) for module in modules_in(part)]
    if isinstance(loss, CountedLoss):
        return modules_in(loss.total)
    owner = getattr(loss, "__self__", None)
    return [owner] if isinstance(owner, torch.nn.Module) else []


class LastStage(torch.nn.Module):
    """The module of the last stage, which is called ``alone``, and beside it the module of the loss.

    Parameters, buffers and entries of the ``state_dict`` of the stage have the names that they have without the loss;
    those of the loss begin with `LOSS`. ``judge`` computes the loss with this module.
    """

    def __init__(self, alone: torch.nn.Module, loss: torch.nn.Module, judge: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self._modules.update({"": alone, LOSS: loss})
        self._judge = None if judge is loss else judge
        self.training = alone.training

    @property
    def alone(self) -> torch.nn.Module:
        """The module of the stage, without the loss."""
        return self._child("")

    @property
    def judge(self) -> Callable[[Any, Any], Any]:
        """The loss, a function of output and target."""
        return self._judge or self._child(LOSS)

    def _child(self, name: str) -> torch.nn.Module:
        child = self._modules[name]
        assert child is not None
        return child

    def train(self, mode: bool = True) -> Self:
        """Puts both in training or evaluation mode; a stage that keeps its mode keeps that of the loss, too."""
        self.training = mode
        if self.alone.train(mode).training == mode:
            self._child(LOSS).train(mode)
        return self

    def state_dict(self, *_: Any, **options: Any) -> Any:
        """The entries of the stage, and those of the loss."""
        of_loss = self._child(LOSS).state_dict(**options)
        return {**self.alone.state_dict(**options), **{f"{_PREFIX}{name}": value for name, value in of_loss.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **options: Any) -> Any:
        """Gives the entries to the stage and to the loss."""
        of_loss = {name[len(_PREFIX) :]: value for name, value in state_dict.items() if name.startswith(_PREFIX)}
        self._child(LOSS).load_state_dict(of_loss, **options)
        of_stage = {name: value for name, value in state_dict.items() if not name.startswith(_PREFIX)}
        return self.alone.load_state_dict(of_stage, **options)


def alone(module: torch.nn.Module) -> torch.nn.Module:
    """The module of a stage as the user's function has made it, without a loss."""
    return module.alone if isinstance(module, LastStage) else module


def judge_in(module: torch.nn.Module) -> Callable[[Any, Any], Any] | None:
    """The loss whose module stands beside the last stage; None if there is none."""
    return module.judge if isinstance(module, LastStage) else None
