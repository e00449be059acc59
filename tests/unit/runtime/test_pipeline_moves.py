"""`Pipeline` on one rank under schemes with moves: bitwise as under the same schemes without them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import chimera_ir
from chimera_runtime import Pipeline
from chimera_runtime.ranks.world import World
from chimera_runtime.stage import saved_tensors
from tests.unit.runtime.carrying import WIDTH, Dropping

B, N, LENGTH, UPDATES = 2, 4, 4, 3

TENSOR = B * LENGTH * WIDTH * 4
FIRST, LAST = 4 * TENSOR, 5 * TENSOR
"""Tensors that the stages save besides input and output: of tanh, dropout (two) and GELU; the last also the loss."""

MOVES = """
  offload(m, s) @ 10*m + 2 + s
  reload(m, s) @ 10*m + 30 + s"""
OPERANDS = """
  offload_operands(m, s) @ 10*m + 38 + s
  reload_operands(m, s) @ 10*m + 84 + s"""
WHOLE = f"""  micros m in 0..4
  F(m, s) @ 10*m + s {MOVES}
  B(m, s) @ 10*m + 35 - s"""
SCHEMES = {
    "whole": WHOLE,
    "halves of a backward": f"""  micros m in 0..4
  F(m, s) @ 10*m + s {MOVES}
  I(m, s) @ 10*m + 35 - s
  W(m, s) @ 10*m + 86 + s""",
    "operands": f"""  micros m in 0..4
  F(m, s) @ 10*m + s
  I(m, s) @ 10*m + 35 - s {OPERANDS}
  W(m, s) @ 10*m + 86 + s""",
    "activations, then operands": f"""  micros m in 0..4
  F(m, s) @ 10*m + s {MOVES}
  I(m, s) @ 10*m + 35 - s {OPERANDS}
  W(m, s) @ 10*m + 86 + s""",
    "recomputation": f"""  micros m in 0..4
  recompute when s == 0
  F(m, s) @ 10*m + s {re.sub("$", " when s == 1", MOVES, flags=re.M)[12:]}
  B(m, s) @ 10*m + 35 - s""",
    "two pipes": """  micros m in 0..2
  F(m, s) @ 10*m + s
  offload(m, s) @ 10*m + 2 + s
  reload(m, s) @ 10*m + 20 + s
  B(m, s) @ 10*m + 25 - s
}
pipe up {
  stages s in 0..2 on 0
  micros m in 2..4
  F(m, s) @ 10*m + s + 6
  offload(m, s) @ 10*m + 8 + s
  reload(m, s) @ 10*m + 27 + s
  B(m, s) @ 10*m + 33 - s""",
    "a pair": """  micros m in 0..4
  F(m, s) & B(m - 3, 1 - s) @ 10*m + s + 5 when m >= 3
  F(m, s) @ 10*m + s + 5 when m < 3
  offload(m, s) @ 10*m + 8 + s
  reload(m, s) @ 10*m + 22 + s
  B(m, s) @ 10*m + 36 - s when m >= 1""",
    "groups": """  micros m in 0..4
  F(m..m+2, s) @ 10*m + s when m % 2 == 0
  offload(m..m+2, s) @ 10*m + 2 + s when m % 2 == 0
  reload(m..m+2, s) @ 10*m + 30 + s when m % 2 == 0
  B(m, s) @ 10*m + 43 - s""",
    "slices": """  micros m in 0..4
  slices q in 0..2
  F(m, s, q) @ 20*m + 5*q + s
  offload(m, s, q) @ 20*m + 5*q + 2 + s
  reload(m, s, q) @ 20*m + 45 - 5*q + s
  B(m, s, q) @ 20*m + 48 - 5*q - s""",
    "stream": """  micros m in 0..
  reads version max(0, m/4 - 1)
  F(m, s) @ 10*m + s
  offload(m, s) @ 10*m + 2 + s
  reload(m, s) @ 10*m + 30 + s
  B(m, s) @ 10*m + 35 - s""",
}


MIXED = ("groups", "slices", "a pair")
"""Schemes that run under autocast: micro-batches share weights that were cast, which stay."""

PEAKS = {
    "whole": 4 * (FIRST + LAST),
    "halves of a backward": 4 * (FIRST + LAST),
    "recomputation": 4 * LAST,
    "two pipes": 2 * (FIRST + LAST),
    "stream": 4 * (FIRST + LAST),
}
"""The most bytes on the host: of four micro-batches, with two pipes of two at a time."""


def compiled(folder: Path, operations: str, moves: bool, tied: bool) -> Path:
    """The program of a scheme, with or without its moves."""
    head = "workers 1\nupdate every N" if "reads" in operations else "workers 1"
    text = f"{head}\npipe down {{\n  stages s in 0..2 on 0\n{operations}\n}}\n"
    if not moves:
        text = re.sub(r"^  (offload|reload)(_operands)?\(.*$", "", text, flags=re.M)
    scheme = folder / f"{'moves' if moves else 'stays'}.chim"
    scheme.write_text(f"scheme {scheme.stem}(D = 2, N = 4)\n{text}")
    chimera_ir.compile(scheme, options=chimera_ir.Options(tied=[[0, 1]] if tied else [])).write(folder / scheme.stem)
    return folder / scheme.stem


def build(_stage: int, _stages: int) -> nn.Module:
    layers = (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.25), nn.Linear(WIDTH, WIDTH), nn.GELU())
    return nn.Sequential(*layers)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def batch(update: int, items: int = B * N) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(2, items, LENGTH, WIDTH, generator=torch.Generator().manual_seed(update))
    return x, y


def trained(pipeline: Pipeline, is_stream: bool) -> list[torch.Tensor]:
    """The losses and gradients of some updates, the last one accumulated; in a stream the weights."""
    results = []
    for update in range(UPDATES):
        if is_stream:
            pipeline.step(batch(update))
            continue
        outcome = pipeline.step(batch(update), accumulate=update > 1)
        assert outcome is not None
        results.append(torch.tensor(outcome.loss))
        results += [p.grad.clone() for p in pipeline.parameters() if p.grad is not None]
        if update == 0:
            torch.optim.SGD(pipeline.parameters()).zero_grad()
    if is_stream:
        pipeline.drain()
    return [*results, *(p.detach().clone() for p in pipeline.parameters())]


@pytest.mark.parametrize("name", SCHEMES)
def test_whatever_moves_gradients_are_bitwise_the_same(
    alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With ties, dropout and accumulation."""
    monkeypatch.setattr(saved_tensors, "SMALLEST", 1)
    tied, is_stream = name in ("whole", "two pipes"), name == "stream"
    options: dict[str, Any] = {"tied": [[(0, "0.weight"), (1, "0.weight")]]} if tied else {}
    if is_stream:
        options["optimizer"] = lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)
    results, peaks = [], []
    for moves in (True, False):
        directory = compiled(tmp_path, SCHEMES[name], moves, tied)
        torch.manual_seed(0)
        make: Any = (lambda *_: Dropping()) if name == "slices" else build
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=name in MIXED),
            Pipeline(directory, make, loss, batch(0, B), **options) as pipeline,
        ):
            results.append(trained(pipeline, is_stream))
            peaks.append((pipeline._world.host_link.peak, pipeline._world.host_link.held))
    assert all(map(torch.equal, *results))
    assert peaks == [(PEAKS.get(name, peaks[0][0]), 0), (0, 0)]
    assert peaks[0][0] > 0
