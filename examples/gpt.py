"""A byte-level GPT on Python's own standard library: a model file for the generated train.py.

A decoder-only transformer in plain PyTorch: 8 layers of width 192, 3.6 million parameters, split evenly into stages. It
predicts the next byte of the source files that lie on the machine anyway.
"""

import torch
from torch import nn
from torch.nn import functional

import corpus
from transformer import Attention

LAYERS, WIDTH, HEADS, CONTEXT, BYTES = 8, 192, 6, 128, 256


class Embedding(nn.Module):
    """Bytes (B, T) to vectors (B, T, WIDTH), positions included."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        nn.init.normal_(self.byte.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Looks bytes and positions up."""
        return self.byte(text) + self.position(torch.arange(text.shape[1], device=text.device))


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each behind a layer norm and around a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.attention = Attention(WIDTH, HEADS, causal=True)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.05)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, WIDTH) to the same shape."""
        x = x + self.attention(self.before_attention(x))
        return x + self.perceptron(x)


def build_stage(stage: int, num_stages: int) -> nn.Module:
    """Stage 0 begins with the embedding, the last stage ends with the projection to bytes."""
    first, last = LAYERS * stage // num_stages, LAYERS * (stage + 1) // num_stages
    parts: list[nn.Module] = [Embedding()] if stage == 0 else []
    parts += [Block() for _ in range(first, last)]
    parts += [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES)] if stage == num_stages - 1 else []
    return nn.Sequential(*parts)


def name(stage: int, parameter: str, num_stages: int = 1) -> str:
    """What a parameter is called where the model is one stage: ``build_stage(0, 1)``."""
    number, _, inside = parameter.partition(".")
    before = 1 + LAYERS * stage // num_stages if stage else 0  # the embedding, and the layers of earlier stages
    return f"{before + int(number)}.{inside}"


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next byte, in nats, averaged over the micro-batch."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW; called once per stage."""
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)


def dataset() -> corpus.NextByte:
    """Text, and what comes next."""
    return corpus.NextByte(CONTEXT)
