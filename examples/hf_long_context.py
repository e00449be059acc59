"""A Llama of the transformers library for long contexts: a model file whose carry is the library's own cache.

Each layer is the library's decoder layer. On a slice of a sequence it gets a cache with the keys and values of the
slices before, as it does in generation, but gradients flow back through them. `--check` compares with the library's own
model on whole sequences. The weights are random and the text is Python's standard library, so nothing is downloaded.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

import corpus

CONTEXT = 256
CONFIG = LlamaConfig(
    vocab_size=256,
    max_position_embeddings=CONTEXT,
    hidden_size=96,
    intermediate_size=256,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    bos_token_id=None,
    eos_token_id=None,
    attn_implementation="sdpa",
)


class Past(NamedTuple):
    """Keys and values of all positions so far."""

    keys: torch.Tensor
    values: torch.Tensor


class Layer(LlamaDecoderLayer):
    """A decoder layer of the library that looks back over slices."""

    def __init__(self) -> None:
        super().__init__(CONFIG, layer_idx=0)
        self.rotary = LlamaRotaryEmbedding(CONFIG)

    def forward(self, x: torch.Tensor, carry: Past | None = None, start: int = 0) -> tuple[torch.Tensor, Past]:
        """(B, T, hidden) to the same shape; ``start`` is the position of the first item."""
        cache = DynamicCache()
        if carry is not None:
            cache.update(*carry, 0)
        end = start + x.shape[1]
        places = torch.arange(start, end, device=x.device)
        visible = places[:, None] >= torch.arange(end, device=x.device)
        y = super().forward(
            x,
            attention_mask=visible[None, None],
            past_key_values=cache,
            position_embeddings=self.rotary(x, places[None]),
        )
        return y, Past(cache.layers[0].keys, cache.layers[0].values)


class Embedding(nn.Embedding):
    """The table of bytes."""

    def __init__(self) -> None:
        super().__init__(CONFIG.vocab_size, CONFIG.hidden_size)


class Head(nn.Module):
    """Hidden states to a score for each possible next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(CONFIG.hidden_size, eps=CONFIG.rms_norm_eps)
        self.lm_head = nn.Linear(CONFIG.hidden_size, CONFIG.vocab_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, hidden) to (B, T, 256)."""
        return self.lm_head(self.norm(x))


def layers() -> list[type[nn.Module]]:
    """The embedding, the decoder layers and the head."""
    return [Embedding, *[Layer] * CONFIG.num_hidden_layers, Head]


class Whole(LlamaForCausalLM):
    """The library's own model, which returns what the head returns."""

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Bytes (B, T) to (B, T, 256)."""
        return super().forward(text, use_cache=False).logits


def reference() -> Whole:
    """The model for one process."""
    return Whole(CONFIG)


def name(layer: int, parameter: str) -> str:
    """The library's name for a parameter of a layer."""
    if layer == 0:
        return f"model.embed_tokens.{parameter}"
    if layer <= CONFIG.num_hidden_layers:
        return f"model.layers.{layer - 1}.{parameter}"
    return parameter if parameter.startswith("lm_head") else f"model.{parameter}"


def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Cross entropy of the next byte, in nats: the sum over the bytes, and their number."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW; called once per stage."""
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)


def dataset() -> corpus.NextByte:
    """The corpus in pieces of CONTEXT bytes."""
    return corpus.NextByte(CONTEXT)
