"""Runs of autograd's engine: both ways give what torch gives, and an edge keeps the graph that it begins at."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime.stage import engine
from chimera_runtime.stage.engine import edge_of


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        assert context.saved_tensors
        return 2 * gradient


@pytest.fixture(params=["at once", "by torch"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    assert engine._engine() is not None, "this torch has the private call"
    if request.param == "by torch":
        monkeypatch.setattr(engine, "_engine", lambda: None)
    return engine.run


def test_a_backward_from_edges_and_tensors_is_that_of_torch(run: Callable[..., None]) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)
    y, loss, gradient = layer(x), layer(x).square().mean(), torch.randn(4, 2)
    torch.autograd.backward([y, loss], [gradient, torch.ones(())], retain_graph=True)
    wanted = [t.grad for t in (x, *layer.parameters())]
    for tensor in (x, *layer.parameters()):
        tensor.grad = None
    run((edge_of(y), loss), (gradient, torch.ones(())))
    assert all(map(torch.equal, [t.grad for t in (x, *layer.parameters())], wanted))


def test_a_run_for_some_inputs_leaves_the_others_alone_and_may_keep_the_graph(run: Callable[..., None]) -> None:
    layer, x = nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)
    roots, gradients = (edge_of(layer(x)),), (torch.ones(4, 2),)
    run(roots, gradients, [x], keep_graph=True, accumulate=False)
    assert x.grad is layer.weight.grad is None
    run(roots, gradients, [x], keep_graph=True)
    assert x.grad is not None
    assert layer.weight.grad is None
    run(roots, gradients)
    with pytest.raises(RuntimeError, match="second time"):
        run(roots, gradients)


def test_without_roots_nothing_runs(run: Callable[..., None]) -> None:
    run((), ())


def test_a_gradient_of_another_shape_is_refused(run: Callable[..., None]) -> None:
    with pytest.raises(RuntimeError, match="shape"):
        run((edge_of(torch.ones(3, requires_grad=True) * 2),), (torch.ones(2),))


@pytest.mark.parametrize("function", [torch.tanh, Doubled.apply], ids=["of torch", "of Python"])
def test_an_edge_keeps_the_graph_and_not_the_result(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.ones(3, requires_grad=True)
    result = function(x * 3) + 0 if function is torch.tanh else function(x * 3)
    edge, memory = edge_of(result), weakref.ref(result.untyped_storage())
    assert edge_of(edge) is edge
    del result
    gc.collect()
    assert memory() is None
    engine.run((edge,), (torch.ones(3),))
    assert x.grad is not None


def test_the_edge_of_a_leaf_leads_to_its_gradient() -> None:
    x = torch.ones(3, requires_grad=True)
    engine.run((edge_of(x),), (torch.full((3,), 5.0),))
    assert x.grad is not None
    assert x.grad.tolist() == [5, 5, 5]


def test_a_torch_whose_call_takes_other_arguments_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def other() -> None:
        raise AssertionError("called")

    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", type("Engine", (), {"run_backward": other}))
    assert engine._engine.__wrapped__() is None
    monkeypatch.delattr(torch.autograd.Variable, "_execution_engine")
    assert engine._engine.__wrapped__() is None
