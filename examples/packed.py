"""Trains a small language model on documents that are packed by their tokens, in a loop of one's own.

    chimera compile dapple D=4 N=1..8 --out packed.out
    torchrun --nproc-per-node=4 examples/packed.py packed.out

An update takes a number of documents. They are packed into rows of at most so many tokens, each row a micro-batch: how
many there are, and how long each is, differs from update to update. Attention looks at tokens of the same document
alone: `doc_ids`, a keyword argument that every stage gets, says which these are. With `--alone` the same trains in one
process. The documents are made up: each counts in steps of its own.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from chimera_runtime import Pipeline

VOCABULARY, WIDTH, HEADS, STAGES = 24, 16, 2, 4
TOKENS, SHORTEST, LONGEST, DOCUMENTS = 48, 4, 40, 9
"""The most tokens of a row, of a document the fewest and the most, and the documents of an update."""

Row = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
"""Tokens (1, T), the tokens behind them, and ``doc_ids`` (1, T): the document of each token."""


class Layer(nn.Module):
    """Causal attention within documents and a perceptron, each around a shortcut; the first stage embeds tokens."""

    def __init__(self, *, embeds: bool, predicts: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if embeds else None
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mixed, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY) if predicts else None

    def forward(self, x: torch.Tensor, doc_ids: torch.Tensor) -> torch.Tensor:
        """Tokens (1, T) or vectors (1, T, WIDTH) to vectors or, at the end, scores (1, T, VOCABULARY)."""
        x = x if self.embedding is None else self.embedding(x)
        by_head = self.mixed(self.norms[0](x)).unflatten(2, (3 * HEADS, -1)).transpose(1, 2)
        of_one = (doc_ids[:, :, None] == doc_ids[:, None, :]).tril()[:, None]
        attended = functional.scaled_dot_product_attention(*by_head.chunk(3, dim=1), attn_mask=of_one)
        x = x + self.joined(attended.transpose(1, 2).flatten(2))
        x = x + self.perceptron(self.norms[1](x))
        return x if self.head is None else self.head(x)


def build_stage(stage: int, num_stages: int) -> nn.Module:
    """A stage of one layer; it begins with the same weights wherever it is made."""
    torch.manual_seed(stage)
    return Layer(embeds=stage == 0, predicts=stage == num_stages - 1).double()


def loss(scores: torch.Tensor, behind: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy as a sum and a count: every token weighs the same; behind the last one of a document is none."""
    summed = functional.cross_entropy(scores.flatten(0, 1), behind.flatten(), ignore_index=-1, reduction="sum")
    return summed, (behind >= 0).sum()


def document(number: int) -> torch.Tensor:
    """The tokens of a document: it counts from somewhere, in steps of its own."""
    generator = torch.Generator().manual_seed(number)
    length, start, step = (
        int(torch.randint(*bounds, (), generator=generator))
        for bounds in ((SHORTEST, LONGEST + 1), (0, VOCABULARY), (1, 4))
    )
    return (start + step * torch.arange(length)) % VOCABULARY


def packed(update: int) -> list[Row]:
    """The rows of an update: a document goes into the first row that has room for it."""
    rows: list[list[torch.Tensor]] = []
    for number in range(DOCUMENTS * update, DOCUMENTS * (update + 1)):
        tokens = document(number)
        row = next((row for row in rows if sum(map(len, row)) + len(tokens) <= TOKENS), None)
        if row is None:
            rows.append(row := [])
        row.append(tokens)
    return [*map(of_documents, rows)]


def of_documents(documents: list[torch.Tensor]) -> Row:
    """A micro-batch of some documents, one behind the other."""
    behind = torch.cat([torch.cat([tokens[1:], torch.tensor([-1])]) for tokens in documents])
    doc_ids = torch.cat([torch.full_like(tokens, place) for place, tokens in enumerate(documents)])
    return torch.cat(documents)[None], behind[None], {"doc_ids": doc_ids[None]}


def train(directory: str, updates: int) -> list[tuple[int, int, float]]:
    """Rows, tokens and loss of each update, each rank with its stages."""
    dist.init_process_group("gloo")
    largest = of_documents([torch.zeros(TOKENS, dtype=torch.long)])
    with Pipeline(directory, build_stage, loss, largest, varying=True) as pipe:
        optimizer, seen = torch.optim.AdamW(pipe.parameters(), lr=1e-2), []
        for update in range(updates):
            rows = packed(update)
            outcome = pipe.step(micro_batches=rows)
            optimizer.step()
            optimizer.zero_grad()
            seen.append((len(rows), int(outcome.weight), outcome.loss))
    return seen if dist.get_rank() == 0 else []


def train_alone(updates: int) -> list[tuple[int, int, float]]:
    """Trains the same in one process, by autograd alone."""
    stages = nn.ModuleList(build_stage(stage, STAGES) for stage in range(STAGES))
    optimizer, seen = torch.optim.AdamW(stages.parameters(), lr=1e-2), []

    def scores_of(x: Any, doc_ids: torch.Tensor) -> torch.Tensor:
        for stage in stages:
            x = stage(x, doc_ids)
        return x

    for update in range(updates):
        rows = packed(update)
        sums, counts = zip(*(loss(scores_of(x, **keywords), behind) for x, behind, keywords in rows), strict=True)
        mean = sum(sums) / sum(counts)
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((len(rows), int(sum(counts)), mean.item()))
    return seen


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Train a small language model on packed documents.")
    options.add_argument("directory", nargs="?", help="what chimera compile has written")
    options.add_argument("--alone", action="store_true", help="train in one process")
    options.add_argument("--updates", type=int, default=20)
    asked = options.parse_args()
    made = train_alone(asked.updates) if asked.alone else train(asked.directory, asked.updates)
    for number, (rows, tokens, value) in enumerate(made):
        print(f"update {number}: {rows} rows, {tokens} tokens, loss {value:.12f}")
