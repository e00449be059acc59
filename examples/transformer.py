"""What the transformers beside this file have in common: their settings, attention, and the split into stages."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import nn
from torch.nn import functional

import corpus

VARIABLE = "MODEL_SETTINGS"
DTYPES = ("float32", "float64", "bfloat16")


@dataclass(frozen=True)
class Settings:
    """The numbers of a network: ``layers`` of width ``hidden`` with ``heads`` each, tables of words and positions.

    ``words`` says whether the table of words and the projection to words are ``apart`` or ``tied``, one matrix.
    ``length`` is how many of the positions an item takes, ``rate`` the learning rate, ``text`` how many bytes of the
    corpus are read.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    positions: int
    length: int
    dropout: float = 0.1
    rate: float = 1e-4
    text: int = corpus.MOST
    dtype: str = "float32"
    words: str = "apart"

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type is int and getattr(self, field.name) < 1:
                raise ValueError(f"{field.name}={getattr(self, field.name)} is too small: at least 1")
        if self.hidden % self.heads:
            raise ValueError(f"{self.heads} heads cannot share hidden={self.hidden} evenly")
        if self.length > self.positions:
            raise ValueError(f"length={self.length} is more than positions={self.positions}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} is not a probability below 1")
        if not self.rate > 0:
            raise ValueError(f"rate={self.rate} is no learning rate: above 0")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype} is none of {', '.join(DTYPES)}")
        if self.words not in ("apart", "tied"):
            raise ValueError(f"words={self.words} is none of apart, tied")


def settings(sizes: Mapping[str, Settings]) -> Settings:
    """What the environment variable asks for: ``SIZE``, ``SIZE,NAME=VALUE,..`` or ``NAME=VALUE,..``.

    Without a size it is the first one.

    Raises
    ------
    ValueError
        If there is no such size or setting, or a value does not fit.
    """
    asked = os.environ.get(VARIABLE, "").split(",")
    size = next(iter(sizes))
    if asked[0] and "=" not in asked[0]:
        size, *asked = asked
    if size not in sizes:
        raise ValueError(f"{VARIABLE}: there is no size {size}; choose one of {', '.join(sizes)}")
    try:
        return replace(sizes[size], **dict(_setting(word) for word in asked if word))
    except ValueError as error:
        raise ValueError(f"{VARIABLE}: {error}") from error


def _setting(word: str) -> tuple[str, object]:
    name, _, value = word.partition("=")
    kinds = {field.name: field.type for field in fields(Settings)}
    kind = kinds.get(name)
    if not isinstance(kind, type):
        raise ValueError(f"there is no setting {name}; choose one of {', '.join(kinds)}, as in {next(iter(kinds))}=8")
    try:
        return name, kind(value)
    except ValueError as error:
        raise ValueError(f"{name}={value} is no {'whole number' if kind is int else 'number'}") from error


class Attention(nn.Module):
    """Multi-head self-attention, 4 h^2 + 4 h parameters: one matrix for queries, keys and values, one for the result.

    ``dropout`` is that of the attention's weights; a causal one lets no position look ahead.
    """

    def __init__(self, hidden: int, heads: int, dropout: float = 0.0, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.queries_keys_values = nn.Linear(hidden, 3 * hidden)
        self.result = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor, attended: torch.Tensor | None = None) -> torch.Tensor:
        """(B, T, h) to the same shape; ``attended`` (B, T) is true for what may be looked at."""
        batch, length, hidden = x.shape
        heads = self.queries_keys_values(x).view(batch, length, 3, self.heads, hidden // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            *(q, k, v),
            attn_mask=None if attended is None else attended[:, None, None, :],
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
        )
        mixed = mixed.transpose(1, 2).reshape(batch, length, hidden)
        return self.result(mixed)


class Perceptron(nn.Module):
    """Four times as wide inside: 8 h^2 + 5 h parameters."""

    def __init__(self, hidden: int, activation: nn.Module) -> None:
        super().__init__()
        self.wide = nn.Linear(hidden, 4 * hidden)
        self.activation = activation
        self.result = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, h) to the same shape."""
        return self.result(self.activation(self.wide(x)))


def initialise(module: nn.Module) -> None:
    """Matrices and tables from a normal distribution of deviation 0.02, biases 0: as in BERT and GPT-2."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=0.02)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)


def split(
    stage: int,
    num_stages: int,
    chosen: Settings,
    first: Callable[[Settings], nn.Module],
    layer: Callable[[Settings], nn.Module],
    last: Callable[[Settings], nn.Module],
) -> nn.Sequential:
    """A stage: its share of the layers, on stage 0 after ``first``, on the last one before ``last``.

    Raises
    ------
    ValueError
        If the stages cannot share the layers evenly.
    """
    if chosen.layers % num_stages:
        fitting = [d for d in range(1, chosen.layers + 1) if chosen.layers % d == 0]
        raise ValueError(
            f"{num_stages} stages cannot share {chosen.layers} layers evenly; "
            f"compile with D = {', '.join(map(str, fitting))}, or choose {VARIABLE}=layers=.."
        )
    parts = [first(chosen)] if stage == 0 else []
    parts += [layer(chosen) for _ in range(chosen.layers // num_stages)]
    parts += [last(chosen)] if stage == num_stages - 1 else []
    module = nn.Sequential(*parts).to(getattr(torch, chosen.dtype))
    initialise(module)
    return module


def decaying(parameters: list[nn.Parameter], decay: float) -> list[dict[str, object]]:
    """Weight decay for matrices and tables, none for biases and layer norms."""
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def table_of_words(num_stages: int, chosen: Settings, first: str, last: str) -> list[list[tuple[int, str]]]:
    """The two ends of the table of words, by their names in what `split` puts first and last; none if it is no tie."""
    behind = chosen.layers // num_stages + (num_stages == 1)
    return [[(0, f"0.{first}"), (num_stages - 1, f"{behind}.{last}")]] if chosen.words == "tied" else []
