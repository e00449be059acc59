"""A model to train:  chimera run chimera --model model.py --micro-batch-size 8 --check

Replace the four numbered parts by your own; it runs at every step. Each rank imports this file and builds only the
layers of its stages, so nothing here starts processes, moves tensors or sends messages.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn

WIDTH, CLASSES = 64, 8


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU())
        self.outer = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tensors of one shape in and out: the micro-batch in dimension 0."""
        return x + self.outer(self.inner(x))


# 1. The model, layer by layer. Each entry is a function that makes one layer, which is called on what the layer before
#    it returned: a tensor, or a tuple or dict of tensors. A scheme of D stages needs D layers at least; `--split` says
#    where stages begin, and without it every stage has as many layers.
def layers() -> list[Callable[[], nn.Module]]:
    """Eight residual layers between two linear ones."""
    return [lambda: nn.Linear(WIDTH, WIDTH), *[Block] * 8, lambda: nn.Linear(WIDTH, CLASSES)]


# 2. The loss of a micro-batch: what the last layer returned, and the targets of the data set.
def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over the micro-batch."""
    return nn.functional.cross_entropy(output, target)


# 3. The data: a map-style or iterable data set of items (input, target).
class Clusters(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points around a centre for each class, made up from the number of the item."""

    def __init__(self) -> None:
        self.centres = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(WIDTH, generator=torch.Generator().manual_seed(i))
        return self.centres[i % CLASSES] + noise, torch.tensor(i % CLASSES)


def dataset() -> Clusters:
    """The training data; a function `validation` beside it may return held-out items."""
    return Clusters()


# 4. The optimizer, called once for the parameters of each stage. `scheduler(optimizer, steps)` may follow.
def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW, as usual."""
    return torch.optim.AdamW(parameters, lr=1e-3)
