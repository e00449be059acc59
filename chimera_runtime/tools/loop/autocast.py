"""``--autocast bf16``: wraps the model file's stages and loss, so that each call of them runs in ``torch.autocast``.

This covers every call: of the probe at start, which finds the dtypes of messages; of forwards, also when they run a
second time; of evaluations; and of the one process of ``--check``. Backwards run outside, as torch recommends.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial, update_wrapper, wraps
from typing import Any

import torch

from chimera_runtime.model.layers import Layers
from chimera_runtime.model.model import ModelFile


def under_autocast(model: ModelFile, device: str, dtype: torch.dtype) -> ModelFile:
    """Returns the model file with stages (or layers), loss and ``reference()`` that run under autocast."""

    def running(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*arguments: Any, **keywords: Any) -> Any:
            with torch.autocast(device, dtype):
                return function(*arguments, **keywords)

        return run

    def making(make: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(make, updated=())
        def made(*arguments: Any) -> Any:
            module = make(*arguments)
            if isinstance(module, torch.nn.Module):
                _change_forward(module, running)
            return module

        return made

    build = model.build_stage
    return replace(
        model,
        build_stage=replace(build, layers=tuple(map(making, build.layers)))
        if isinstance(build, Layers)
        else making(build),
        loss=update_wrapper(partial(_under, model.loss, device, dtype), model.loss, updated=()),
        reference=None if model.reference is None else making(model.reference),
        autocast=dtype,
    )


def _under(function: Callable[..., Any], device: str, dtype: torch.dtype, *arguments: Any, **keywords: Any) -> Any:
    """Calls a function under autocast; a partial of this shows a loss that is a module, as a closure does not."""
    with torch.autocast(device, dtype):
        return function(*arguments, **keywords)


def _change_forward(module: torch.nn.Module, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces the ``forward`` of a module by ``change(forward)``, in a class of its own, which copies have as well.

    If `torch.compile` has wrapped the module, the inner one is changed, and compiled with the change.
    """
    inside = getattr(module, "_orig_mod", module)
    if "forward" in vars(inside):
        inside.forward = change(inside.forward)
        return
    kind = type(inside)
    names = {"forward": change(kind.forward), "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    inside.__class__ = type(kind.__name__, (kind,), names)
