"""Tunes a small vision-language model on pairs of a picture and its caption, and on text alone, in a loop of one's own.

    chimera compile examples/vision_language.chim
    torchrun --nproc-per-node=4 examples/vision_language.py vision_language.out

A frozen encoder reads patches, a trained projector makes words of them, and a language model of three stages goes on
with the caption. The lower stage of the text is frozen, the upper ones train low-rank adapters. Every third micro-batch
has no picture: then the encoder and the projector do nothing, and the projector's gradients are those of the others.
With `--alone` the same trains in one process. The data are made up: eight kinds of pictures, each with a caption.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from chimera_runtime import Pipeline, whole
from transformer import Attention

KINDS, PATCHES, PATCH, LENGTH, VOCABULARY = 8, 4, 12, 10, 32
SEEN, WIDTH, HEADS, RANK = 16, 24, 4, 2
ITEMS, MICRO_BATCHES, STAGES = 4, 6, 6
"""Items of a micro-batch, micro-batches of an update, and stages: vision, projector, words and three of the text."""


class Vision(nn.Module):
    """Patches (ITEMS * PATCHES, PATCH) to features (ITEMS * PATCHES, SEEN): its first dimension counts no items."""

    def __init__(self) -> None:
        super().__init__()
        self.perceptron = nn.Sequential(nn.Linear(PATCH, 2 * SEEN), nn.GELU(), nn.Linear(2 * SEEN, SEEN))

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Each patch by itself."""
        return self.perceptron(patches)


class Projector(nn.Module):
    """Features of patches to words of the text model, (ITEMS, PATCHES, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SEEN, WIDTH)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Puts the patches of an item together again."""
        return self.linear(features).unflatten(0, (-1, PATCHES))


class Adapted(nn.Module):
    """A frozen linear layer and a trained product of two small matrices beside it, which begins at zero."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(RANK, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(.., inputs) to (.., outputs)."""
        return self.frozen(x) + x @ self.down.T @ self.up.T


class Text(nn.Module):
    """A layer of the text model, of which only the adapters are trained, if it has any."""

    def __init__(self, linear: type[nn.Module]) -> None:
        super().__init__()
        self.attention = Attention(WIDTH, HEADS, causal=True).requires_grad_(False)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2)).requires_grad_(False)
        self.perceptron = nn.Sequential(linear(WIDTH, 4 * WIDTH), nn.GELU(), linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(ITEMS, PATCHES + LENGTH, WIDTH) to the same shape."""
        x = x + self.attention(self.norms[0](x))
        return x + self.perceptron(self.norms[1](x))


class FirstText(Text):
    """The frozen first stage of the text, which puts pictures before words."""

    def forward(self, words: torch.Tensor, pixels: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        """``pixels`` is None for a micro-batch without pictures: zeros take their place."""
        if pixels is None:
            pixels = words.new_zeros(len(words), PATCHES, WIDTH)
        return super().forward(torch.cat([pixels, words], dim=1))


class LastText(Text):
    """The last stage of the text, with the frozen projection to words."""

    def __init__(self, linear: type[nn.Module]) -> None:
        super().__init__(linear)
        self.head = nn.Linear(WIDTH, VOCABULARY).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The scores of the words behind each word, (ITEMS, LENGTH, VOCABULARY)."""
        return self.head(super().forward(x)[:, PATCHES:])


def build_stage(stage: int, _num_stages: int) -> nn.Module:
    """Stages have the numbers of the scheme's groups; each begins with the same weights wherever it is made."""
    torch.manual_seed(stage)
    frozen = {0: Vision, 2: lambda: nn.Embedding(VOCABULARY, WIDTH), 3: lambda: FirstText(nn.Linear)}
    trained = {1: Projector, 4: lambda: Text(Adapted), 5: lambda: LastText(Adapted)}
    if stage in frozen:
        return frozen[stage]().double().requires_grad_(False)
    return trained[stage]().double()


def loss(scores: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next word."""
    return functional.cross_entropy(scores.flatten(0, 1), words.flatten())


def micro_batch(step: int, micro: int) -> tuple[dict[str, Any], torch.Tensor]:
    """The inputs of the groups that nothing feeds, and the words to predict."""
    generator = torch.Generator().manual_seed(MICRO_BATCHES * step + micro)
    kinds = torch.randint(KINDS, (ITEMS,), generator=generator)
    with_pictures = (step + micro) % 3 != 2
    captions = 3 * kinds[:, None] if with_pictures else torch.randint(VOCABULARY, (ITEMS, 1), generator=generator)
    words = (captions + torch.arange(1, LENGTH + 1)) % VOCABULARY
    begun = torch.cat([torch.zeros(ITEMS, 1, dtype=torch.long), words[:, :-1]], dim=1)
    noise = torch.randn(ITEMS * PATCHES, PATCH, generator=generator, dtype=torch.float64)
    patches = torch.cos(kinds.repeat_interleave(PATCHES)[:, None] + torch.arange(PATCH)) + 0.1 * noise
    return {whole("vision"): patches if with_pictures else None, "words": begun}, words


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """AdamW for what is trained; a rank with frozen stages alone gives it an empty group."""
    trained = [p for p in parameters if p.requires_grad]
    return torch.optim.AdamW([{"params": trained}], lr=1e-2, weight_decay=0.01)


def train(directory: str, steps: int) -> list[float]:
    """The losses of so many updates, each rank with its stages."""
    dist.init_process_group("gloo")
    with Pipeline(directory, build_stage, loss, micro_batch(0, 0)) as pipe:
        optimizer = optimizer_of(pipe.parameters())
        losses = []
        for step in range(steps):
            outcome = pipe.step(lambda micro, step=step: micro_batch(step, micro))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(outcome.loss)
    return losses if dist.get_rank() == 0 else []


def train_alone(steps: int) -> list[float]:
    """Trains the same in one process, by autograd alone."""
    vision, projector, words, *text = stages = [build_stage(stage, STAGES) for stage in range(STAGES)]
    optimizer, losses = optimizer_of(p for stage in stages for p in stage.parameters()), []
    for step in range(steps):
        total = torch.zeros((), dtype=torch.float64)
        for inputs, target in (micro_batch(step, micro) for micro in range(MICRO_BATCHES)):
            patches = inputs["vision"]
            x = text[0](words(inputs["words"]), pixels=None if patches is None else projector(vision(patches)))
            total = total + loss(text[2](text[1](x)), target) / MICRO_BATCHES
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Tune a small vision-language model.")
    options.add_argument("directory", nargs="?", help="what chimera compile has written")
    options.add_argument("--alone", action="store_true", help="train in one process")
    options.add_argument("--steps", type=int, default=20)
    asked = options.parse_args()
    for number, value in enumerate(train_alone(asked.steps) if asked.alone else train(asked.directory, asked.steps)):
        print(f"step {number}: loss {value:.12f}")
