"""A byte-level transformer for long contexts, in plain PyTorch: a model file whose stages look back over slices.

Its sequences are long and its micro-batches small, so that activations fill the memory. A scheme with slices, such as
`seq1f1b`, cuts each sequence into slices: a layer gets one slice at a time, with the keys and values of the slices
before as its ``carry``, and the position at which its slice starts. Without slices a layer gets whole sequences.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

import corpus

LAYERS, WIDTH, HEADS, CONTEXT, BYTES = 8, 128, 4, 512, 256


class Past(NamedTuple):
    """Keys and values (B, HEADS, T, WIDTH / HEADS) of all positions so far."""

    keys: torch.Tensor
    values: torch.Tensor


class Embedding(nn.Module):
    """Bytes (B, T) to vectors (B, T, WIDTH), positions included."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        nn.init.normal_(self.byte.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, text: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Looks bytes and positions up; ``start`` is the position of the first byte."""
        return self.byte(text) + self.position(torch.arange(start, start + text.shape[1], device=text.device))


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each behind a layer norm and around a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.inputs, self.outputs = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor, carry: Past | None = None) -> tuple[torch.Tensor, Past]:
        """(B, T, WIDTH) to the same shape; ``carry`` is what the slices before have returned next to it."""
        by_head = self.inputs(self.before_attention(x)).unflatten(2, (3 * HEADS, -1)).transpose(1, 2)
        queries, keys, values = by_head.chunk(3, dim=1)
        if carry is not None:
            keys = torch.cat([carry.keys, keys], dim=2)
            values = torch.cat([carry.values, values], dim=2)
        mask = _visible(x.shape[1], keys.shape[2], x.device)
        attended = functional.scaled_dot_product_attention(queries, keys, values, mask)
        x = x + self.outputs(attended.transpose(1, 2).flatten(2))
        return x + self.perceptron(x), Past(keys, values)


def _visible(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """Which keys each of the last ``queries`` positions sees: those up to itself."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


class Head(nn.Module):
    """Vectors to a score for each possible next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.bytes = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, WIDTH) to (B, T, BYTES)."""
        return self.bytes(self.norm(x))


def layers() -> list[type[nn.Module]]:
    """The embedding, the blocks and the head; train.py distributes them over the stages."""
    return [Embedding, *[Block] * LAYERS, Head]


def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Cross entropy of the next byte, in nats: the sum over the bytes, and their number."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW; called once per stage."""
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)


def dataset() -> corpus.NextByte:
    """The corpus in pieces of CONTEXT bytes."""
    return corpus.NextByte(CONTEXT)
