"""Runs of autograd's engine, and the edges of the graph at which they begin.

`torch.autograd.backward` looks at each gradient before the engine, which looks at it again. On a small stage this takes
longer than the backward. So the engine is called as torch calls it, where torch still has that call.
"""

from collections.abc import Sequence
from contextvars import copy_context
from functools import cache
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

Tensors = Sequence[torch.Tensor]

Roots = Sequence[torch.Tensor | GradientEdge]
"""Tensors, or edges of a graph, at which a backward begins."""

_CONTEXT = "context"
"""Name under which the thread's context is kept during a run: for threads of devices, which read settings in it."""


_OTHERS = (None,) * (len(GradientEdge._fields) - 2)
_made = tuple.__new__  # makes a named tuple as its own constructor does, without a call of Python


def edge_of(result: torch.Tensor | GradientEdge) -> GradientEdge:
    """Returns the edge at which the backward of a result begins; it keeps the graph, and not the memory of the result.

    A node that Python code defines holds no graph by itself: it gets a node of torch in front.
    """
    if isinstance(result, GradientEdge):
        return result
    node = result.grad_fn
    if isinstance(node, BackwardCFunction):
        result = result.view_as(result)
        node = result.grad_fn
    return get_gradient_edge(result) if node is None else _made(GradientEdge, (node, result.output_nr, *_OTHERS))


@cache
def _engine() -> Any:
    """Torch's private call of the engine; None if this torch has none, or one with other arguments.

    This is found out at the first backward: a run starts the engine's threads, for the devices that there are by then.
    """
    leaf = torch.zeros((), requires_grad=True)
    try:
        call = torch.autograd.Variable._execution_engine.run_backward
        _KEEP(_CONTEXT, copy_context())
        _FORGET(_CONTEXT)
        call((leaf * 2,), (torch.ones(()),), False, False, (), True, True)
        return call
    except (AttributeError, TypeError, RuntimeError):
        return None


_KEEP: Any = getattr(torch._C, "_stash_obj_in_tls", None)
_FORGET: Any = getattr(torch._C, "_remove_obj_from_tls", lambda name: _KEEP(name, None))


def run(
    roots: Roots, gradients: Tensors, inputs: Roots = (), *, keep_graph: bool = False, accumulate: bool = True
) -> None:
    """Runs a backward from roots, with a gradient for each; without roots it does nothing.

    Without ``inputs`` all leaves get gradients. Otherwise the engine computes those of ``inputs`` alone, which get
    them if it is to ``accumulate``. Errors are those of `torch.autograd.backward`.
    """
    if not roots:
        return
    engine = _engine()
    if engine is None:
        starts: Any = [*roots]
        ends: Any = [*inputs]
        if accumulate:
            torch.autograd.backward(starts, [*gradients], inputs=ends or None, retain_graph=keep_graph)
        else:
            torch.autograd.grad(starts, ends, [*gradients], retain_graph=keep_graph, allow_unused=True)
        return
    _KEEP(_CONTEXT, copy_context())
    try:
        engine(tuple(roots), tuple(gradients), keep_graph, False, tuple(inputs), True, accumulate)
    finally:
        _FORGET(_CONTEXT)
