"""GPT-2 of the Chimera paper (Table 4), 1,389,327,360 parameters: a model file for the generated train.py.

The decoder-only transformer of GPT-2 with 64 layers, in plain PyTorch, split evenly into stages. With h = 1280, the
vocabulary V = 50,257 and P = 1024 positions:

    embeddings     words V h, positions P h                                           65,639,680
    64 layers      attention 4 h^2 + 4 h, perceptron 8 h^2 + 5 h, layer norms 4 h     64 * 19,677,440 = 1,259,356,160
    last norm      2 h                                                                     2,560
    next word      projection V h, without a bias                                     64,328,960

`MODEL_SETTINGS` chooses other numbers, as in `MODEL_SETTINGS=tiny,dtype=float64`. The projection is a matrix of its
own, as in the paper; with `words=tied` it is the table of words, as in the original, and the schedule is compiled with
`--tied first,last`.
"""

import math

import torch
from torch import nn
from torch.nn import functional

import corpus
from transformer import Attention, Perceptron, Settings, decaying, settings, split, table_of_words

SIZES = {
    "full": Settings(layers=64, hidden=1280, heads=20, vocabulary=50257, positions=1024, length=632),
    "small": Settings(layers=8, hidden=192, heads=6, vocabulary=4096, positions=128, length=128, rate=1e-3),
    "tiny": Settings(layers=8, hidden=32, heads=4, vocabulary=128, positions=64, length=32, rate=5e-3, text=100_000),
}
CHOSEN = settings(SIZES)

WORD = r"'(?:[stmd]|re|ve|ll)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+"
"""What GPT-2's tokenizer takes for a word before it cuts words up: letters, digits or signs with the space before."""


class Embedding(nn.Module):
    """Words (B, T) to vectors (B, T, h), positions included."""

    def __init__(self, size: Settings) -> None:
        super().__init__()
        self.word = nn.Embedding(size.vocabulary, size.hidden)
        self.position = nn.Embedding(size.positions, size.hidden)
        self.drop = nn.Dropout(size.dropout)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Looks words and positions up."""
        return self.drop(self.word(words) + self.position(torch.arange(words.shape[1], device=words.device)))


class Layer(nn.Module):
    """Causal attention and a perceptron, a layer norm before each: 12 h^2 + 13 h parameters."""

    def __init__(self, size: Settings) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(size.hidden)
        self.attention = Attention(size.hidden, size.heads, size.dropout, causal=True)
        self.before_perceptron = nn.LayerNorm(size.hidden)
        self.perceptron = Perceptron(size.hidden, nn.GELU(approximate="tanh"))
        self.drop = nn.Dropout(size.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, h) to the same shape."""
        x = x + self.drop(self.attention(self.before_attention(x)))
        return x + self.drop(self.perceptron(self.before_perceptron(x)))


class Head(nn.Sequential):
    """(B, T, h) to the logits (B, T, V) of the next word."""

    def __init__(self, size: Settings) -> None:
        super().__init__(nn.LayerNorm(size.hidden), nn.Linear(size.hidden, size.vocabulary, bias=False))


def build_stage(stage: int, num_stages: int) -> nn.Module:
    """Stage 0 begins with the embeddings, the last stage ends with the projection to words.

    What is added to the shortcuts begins smaller by the root of their number, two in each layer of the whole network.
    """
    module = split(stage, num_stages, CHOSEN, Embedding, Layer, Head)
    with torch.no_grad():
        for layer in module:
            if isinstance(layer, Layer):
                layer.attention.result.weight /= math.sqrt(2 * CHOSEN.layers)
                layer.perceptron.result.weight /= math.sqrt(2 * CHOSEN.layers)
    return module


def tied(num_stages: int) -> list[list[tuple[int, str]]]:
    """The table of words and the projection, if the settings say so."""
    return table_of_words(num_stages, CHOSEN, "word.weight", "1.weight")


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next word, in nats, averaged over the micro-batch."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW at a constant rate; called once per stage."""
    return torch.optim.AdamW(decaying(list(parameters), 0.01), lr=CHOSEN.rate, betas=(0.9, 0.95))


class NextWord(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Item i: ``length`` words of the text, and the same shifted by one.

    A word that is none of the most frequent ones is word 0: there is no cutting up into pairs of bytes.
    """

    def __init__(self, size: Settings) -> None:
        self.text = corpus.words(WORD, size.vocabulary - 1, size.text, lower=False)
        self.length = size.length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.text[i * self.length : (i + 1) * self.length + 1]
        return window[:-1], window[1:]


def dataset() -> NextWord:
    """Text, and what comes next."""
    return NextWord(CHOSEN)
