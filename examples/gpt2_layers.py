"""GPT-2 of gpt2.py as a list of layers: the embeddings, the transformer's layers, and the projection to words.

A split decides what a stage is, so the projection, which takes as long as several layers, need not come on top of an
equal share of them. Weights are drawn layer by layer: the same for every number of stages and every split.
"""

import math
from collections.abc import Callable

import torch
from gpt2 import CHOSEN, Embedding, Head, Layer, dataset, loss, optimizer
from torch import nn

from transformer import initialise

__all__ = ["dataset", "layers", "loss", "optimizer", "tied"]


def initialised(module: nn.Module) -> nn.Module:
    """The layer with GPT-2's initial weights: what is added to the shortcuts begins smaller by their number's root."""
    module = module.to(getattr(torch, CHOSEN.dtype))
    initialise(module)
    if isinstance(module, Layer):
        with torch.no_grad():
            module.attention.result.weight /= math.sqrt(2 * CHOSEN.layers)
            module.perceptron.result.weight /= math.sqrt(2 * CHOSEN.layers)
    return module


def layers() -> list[Callable[[], nn.Module]]:
    """Two more than the transformer has."""
    parts = [Embedding, *[Layer] * CHOSEN.layers, Head]
    return [lambda part=part: initialised(part(CHOSEN)) for part in parts]


def tied(_num_stages: int) -> list[list[tuple[int, str]]]:
    """The table of words and the projection, if the settings say so."""
    return [[(0, "word.weight"), (CHOSEN.layers + 1, "1.weight")]] if CHOSEN.words == "tied" else []
