"""Backwards in two halves: what they add up to is what autograd makes of the whole, and nothing is computed twice.

The reference is a plain backward of a second module of the same weights, in float64.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from chimera_runtime.stage.splitting import SplitBackward, WholeBackward, obstacle

Tensors = tuple[torch.Tensor, ...]
CALLS: Counter[str] = Counter()
EXACT = 1e-12


class Product(torch.autograd.Function):
    """A custom function: it computes both gradients at once, and counts its calls."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        CALLS["forward"] += 1
        context.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Tensors:  # type: ignore[override]
        CALLS["backward"] += 1
        x, w = context.saved_tensors
        return gradient @ w.T, x.flatten(0, -2).T @ gradient.flatten(0, -2)


class Halved(torch.autograd.Function):
    """A custom function of two results of one shape, with a gradient each."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, w: torch.Tensor) -> Tensors:  # type: ignore[override]
        context.save_for_backward(x, w)
        return x * w[0], x * w[1]

    @staticmethod
    def backward(context: Any, first: torch.Tensor, second: torch.Tensor) -> Tensors:  # type: ignore[override]
        x, w = context.saved_tensors
        weights = [(gradient * x).flatten(0, -2).sum(0) for gradient in (first, second)]
        return first * w[0] + second * w[1], torch.cat([torch.stack(weights), torch.zeros_like(w[2:])])


class Scaled(torch.autograd.Function):
    """A custom function that has no gradient for its weight."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        CALLS["scaled backward"] += 1
        (w,) = context.saved_tensors
        return gradient * w, None


class Stage(nn.Module):
    """A module of some layers and a matrix, with the forward that it is given."""

    def __init__(self, run: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 12)
        self.norm, self.batch = nn.LayerNorm(6), nn.BatchNorm1d(6)
        self.matrix = nn.Parameter(torch.randn(6, 6) / 2)
        self.scale = nn.Parameter(torch.randn(()))
        self.table = nn.Embedding(5, 6)
        self.sparse = nn.Embedding(5, 6, sparse=True)
        self.convolution = nn.Conv1d(3, 3, 3, padding=1)
        self.recurrent = nn.LSTM(6, 6, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.normed = weight_norm(nn.Linear(6, 6))
        self.narrow = nn.Parameter(torch.randn(6, dtype=torch.float32))
        self.waves = nn.Parameter(torch.randn(6, dtype=torch.complex128))
        self.run = run

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


def _chunks(m: Stage, x: torch.Tensor) -> torch.Tensor:
    """pytorch #170277: a node of several outputs, each with a gradient of its own."""
    one, other = m.second(x).chunk(2, -1)
    return one * other.sigmoid()


def _two_results(m: Stage, x: torch.Tensor) -> torch.Tensor:
    """pytorch #170277: a custom function whose results have different gradients."""
    one, other = Halved.apply(m.first(x), m.matrix)
    return one * 2 + m.norm(other)


def _unbound_weight(m: Stage, x: torch.Tensor) -> torch.Tensor:
    one, other = (m.matrix * m.scale).chunk(2)
    return (x @ one.T + other.sum()) @ other


def _in_place_on_a_view(m: Stage, x: torch.Tensor) -> torch.Tensor:
    y = torch.cat([m.first(x), x], 1)
    y[:, 1:2] *= m.matrix[0]
    return y


def _branches(m: Stage, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Several results: one of the input, one of both, one of weights alone, and a weight itself."""
    return x * 2, m.first(x), m.table.weight * m.scale, m.matrix


def _several_uses(m: Stage, x: torch.Tensor) -> torch.Tensor:
    y = m.first(m.norm(m.first(x)))
    return m.normed(m.normed(y)) @ m.matrix + m.matrix.sum()


RUNS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "layers": lambda m, x: m.second(m.norm(m.first(x).relu())),
    "a weight behind itself (pytorch #180952)": lambda m, x: x @ m.matrix @ m.matrix,
    "chunks (pytorch #170277)": _chunks,
    "a custom function of two results (pytorch #170277)": _two_results,
    "chunks of a weight": _unbound_weight,
    "layers several times": _several_uses,
    "a change in place": _in_place_on_a_view,
    "branches": _branches,
    "views": lambda m, x: m.first(x.transpose(0, 1).reshape(-1, 6)).view(3, 2, 6)[:, ::2].expand(3, 2, 6) * m.scale,
    "broadcasts": lambda m, x: x * m.scale + m.matrix[0] + m.table(torch.arange(3)),
    "a table that has sparse gradients": lambda m, x: x + m.sparse(torch.tensor([1, 1, 4])),
    "batch norm": lambda m, x: m.batch(x.transpose(1, 2)).transpose(1, 2),
    "convolution": lambda m, x: m.convolution(x),
    "recurrent": lambda m, x: m.recurrent(x)[0],
    "attention": lambda m, x: m.attention(x, x, x)[0],
    "dropout": lambda m, x: nn.functional.dropout(m.first(x), 0.5) @ m.matrix,
    "a custom function": lambda m, x: m.first(Product.apply(m.first(x), m.matrix)),
    "a custom function alone": lambda m, x: Product.apply(x, m.matrix),
    "a custom function without a gradient": lambda m, x: m.first(Scaled.apply(x, m.scale)),
    "a weight of a custom function that comes from another one": lambda m, x: Product.apply(
        x, Scaled.apply(m.matrix, m.scale)
    ),
    "a custom function of weights alone": lambda m, x: (x * 2, Product.apply(m.matrix, m.matrix)),
    "no weights": lambda m, x: x.tanh(),
    "no use of the input": lambda m, x: m.first(torch.ones_like(x)),
    "several dtypes": lambda m, x: (x * m.narrow).to(torch.float32).double() * (m.waves * x).real,
    "a gradient that is not asked for": lambda m, x: m.first(x).detach() + m.norm(x),
}


def outputs_of(module: nn.Module, x: torch.Tensor) -> Tensors:
    torch.manual_seed(3)
    returned = module(x)
    return returned if isinstance(returned, tuple) else (returned,)


def seeds_of(outputs: Tensors) -> Tensors:
    generator = torch.Generator().manual_seed(4)
    return tuple(torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in outputs)


def pair(name: str) -> tuple[Stage, Stage]:
    with torch.random.fork_rng():
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)
        one, other = Stage(RUNS[name]), Stage(RUNS[name])
        torch.set_default_dtype(torch.float32)
    other.load_state_dict(one.state_dict())
    return one, other


def leaf(seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, 6, generator=generator, dtype=torch.float64).requires_grad_()


def halved(module: nn.Module, x: torch.Tensor) -> SplitBackward:
    outputs = outputs_of(module, x)
    return SplitBackward(outputs, seeds_of(outputs), (x,))


def assert_same(module: nn.Module, reference: nn.Module) -> None:
    for (name, mine), theirs in zip(module.named_parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None and theirs.grad is not None:
            difference = mine.grad.to_dense() - theirs.grad.to_dense()
            scale = max(1.0, float(theirs.grad.to_dense().abs().max()))
            assert difference.abs().max() <= (EXACT if mine.dtype != torch.float32 else 1e-6) * scale, name


@pytest.mark.parametrize("name", RUNS)
def test_the_input_s_gradient_comes_first_and_the_weights_later_as_of_the_whole(name: str) -> None:
    module, reference = pair(name)
    x, theirs = leaf(), leaf()
    wanted = outputs_of(reference, theirs)
    torch.autograd.backward(wanted, seeds_of(wanted))
    half = halved(module, x)
    assert (x.grad is None) == (theirs.grad is None)
    if x.grad is not None and theirs.grad is not None:
        torch.testing.assert_close(x.grad, theirs.grad, rtol=EXACT, atol=EXACT)
    assert all(parameter.grad is None for parameter in module.parameters())
    half.finish()
    assert_same(module, reference)


@pytest.mark.parametrize("name", RUNS)
def test_micro_batches_are_finished_in_any_order_and_add_up(name: str) -> None:
    module, reference = pair(name)
    for seed in (1, 2, 3):
        outputs = outputs_of(reference, leaf(seed))
        torch.autograd.backward(outputs, seeds_of(outputs))
    first, second = (halved(module, leaf(seed)) for seed in (1, 2))
    second.finish()
    third = halved(module, leaf(3))
    first.finish()
    third.finish()
    assert_same(module, reference)


@pytest.mark.parametrize("name", ["layers", "attention", "convolution", "layers several times", "chunks of a weight"])
def test_both_halves_together_compute_what_the_whole_does(name: str) -> None:
    """Cost in multiplications: one that is done twice would count twice."""
    module, _ = pair(name)

    def flops(run: Callable[[], object]) -> int:
        with FlopCounterMode(display=False) as counter:
            run()
        return int(counter.get_total_flops())

    x = leaf()
    outputs = outputs_of(module, x)
    whole = flops(lambda: torch.autograd.backward(outputs, seeds_of(outputs)))
    outputs = outputs_of(module, x)
    halves: list[SplitBackward] = []
    first = flops(lambda: halves.append(SplitBackward(outputs, seeds_of(outputs), (x,))))
    second = flops(halves[0].finish)
    assert first + second == whole
    assert min(first, second) > whole / 4


def test_the_gradients_that_are_kept_are_those_of_the_results_of_what_has_weights() -> None:
    """Operands of two layers and a norm; a whole backward that is kept apart keeps the gradients of the weights."""
    module, _ = pair("layers")
    half = halved(module, leaf())
    assert sorted(kept.numel() for kept in half.operands) == [2 * 3 * 6, 2 * 3 * 6, 2 * 3 * 12]
    half.finish()
    assert half.operands == []
    outputs = outputs_of(module, leaf())
    whole = WholeBackward(outputs, seeds_of(outputs), module.parameters(), apart=True)
    used = (*module.first.parameters(), *module.norm.parameters(), *module.second.parameters())
    assert sorted(tuple(kept.shape) for kept in whole.operands) == sorted(tuple(p.shape) for p in used)
    whole.finish()
    assert whole.operands == []


def test_a_custom_function_runs_once_each_way() -> None:
    CALLS.clear()
    halved(pair("a custom function")[0], leaf()).finish()
    assert CALLS == {"forward": 1, "backward": 1}
    halved(pair("a custom function without a gradient")[0], leaf()).finish()
    assert CALLS["scaled backward"] == 1


def test_hooks_run_once_and_what_they_return_counts() -> None:
    module, reference = pair("layers several times")
    ran: Counter[str] = Counter()
    for one in (module, reference):
        for name, parameter in one.named_parameters():
            parameter.register_hook(lambda gradient, name=name: (ran.update([name]), 2 * gradient)[1])

        def double(of: nn.Module, _: object, output: torch.Tensor) -> None:
            output.register_hook(lambda gradient: (ran.update([f"output of {of}"]), 2 * gradient)[1])

        one.first.register_forward_hook(double)
    outputs = outputs_of(reference, leaf())
    torch.autograd.backward(outputs, seeds_of(outputs))
    expected = ran.copy()
    ran.clear()
    halved(module, leaf()).finish()
    assert ran == expected
    assert_same(module, reference)


def test_an_input_without_a_gradient_leaves_all_to_the_second_half() -> None:
    module, reference = pair("layers")
    tokens = leaf().detach()
    for one in (module, reference):
        outputs = outputs_of(one, tokens)
        if one is reference:
            torch.autograd.backward(outputs, seeds_of(outputs))
        else:
            with FlopCounterMode(display=False) as counter:
                half = SplitBackward(outputs, seeds_of(outputs), (tokens,))
            assert counter.get_total_flops() == 0
            half.finish()
    assert_same(module, reference)


def test_without_roots_there_is_nothing_to_do() -> None:
    SplitBackward((), (), (leaf(),)).finish()


def test_many_small_gradients_and_one_large_one_are_made_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many forks a run of the engine takes together."""
    for limit in (1, 100, 10**9):
        monkeypatch.setattr("chimera_runtime.stage.splitting._AT_ONCE", limit)
        module, reference = pair("layers several times")
        outputs = outputs_of(reference, leaf())
        torch.autograd.backward(outputs, seeds_of(outputs))
        halved(module, leaf()).finish()
        assert_same(module, reference)


# What is not split.


def _recomputing(reentrant: bool) -> Callable[[Any, torch.Tensor], Any]:
    return lambda m, x: m.second(checkpoint(lambda t: m.norm(m.first(t)), x, use_reentrant=reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_would_run_again_keeps_a_backward_whole(
    monkeypatch: pytest.MonkeyPatch, reentrant: bool
) -> None:
    monkeypatch.setitem(RUNS, "again", _recomputing(reentrant))
    module, reference = pair("again")
    x, theirs = leaf(), leaf()
    runs: list[int] = []
    module.first.register_forward_hook(lambda *_: runs.append(1))
    outputs = outputs_of(module, x)
    assert obstacle(outputs, (x,)) == "torch.utils.checkpoint"
    assert len(runs) == 1
    whole = WholeBackward(outputs, seeds_of(outputs), module.parameters(), apart=True)
    assert len(runs) == 2
    assert all(parameter.grad is None for parameter in module.parameters())
    whole.finish()
    assert len(runs) == 2
    wanted = outputs_of(reference, theirs)
    torch.autograd.backward(wanted, seeds_of(wanted))
    torch.testing.assert_close(x.grad, theirs.grad, rtol=EXACT, atol=EXACT)
    assert_same(module, reference)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a custom function alone", "Product"),
        ("a custom function", ""),
        ("layers", ""),
        ("no weights", ""),
        ("branches", ""),
    ],
)
def test_where_custom_functions_are_all_that_have_weights_nothing_is_left_for_later(name: str, expected: str) -> None:
    x = leaf()
    assert obstacle(outputs_of(pair(name)[0], x), (x,)) == expected


@pytest.mark.parametrize("apart", [False, True])
def test_the_gradients_of_a_whole_backward_add_up_at_once_or_when_it_is_finished(apart: bool) -> None:
    module, reference = pair("layers")
    for seed in (1, 2):
        outputs = outputs_of(reference, leaf(seed))
        torch.autograd.backward(outputs, seeds_of(outputs))
    wholes = []
    for seed in (1, 2):
        outputs = outputs_of(module, leaf(seed))
        wholes.append(WholeBackward(outputs, seeds_of(outputs), module.parameters(), apart=apart))
    assert (module.first.weight.grad is None) is apart
    for whole in reversed(wholes):
        whole.finish()
    assert_same(module, reference)
