"""A training loop of one's own beside the same training in one process: clipped, with AdamW, in float64.

    torchrun --nproc-per-node=4 agree.py DIRECTORY RESULT.json [--tied]

Every rank trains the whole model beside its stages, on all copies' data, and compares losses, norms, gradients and, at
the end, weights. Rank 0 writes the largest differences: of losses and norms relative to their size, of gradients
relative to the largest gradient of the stage, of weights as they are.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from chimera_runtime import Pipeline

WORDS, WIDTH, LENGTH, UPDATES, CLIP = 11, 6, 5, 4, 0.2
TIED = "--tied" in sys.argv


class Block(nn.Module):
    """A residual block in which positions see those before them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return x + self.outer(nn.functional.gelu(self.inner(self.norm(x).cumsum(1) / steps)))


class Stage(nn.Module):
    """Embedding, block and head, or what of these a stage has."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        torch.manual_seed(100 + stage)
        self.embedding = nn.Embedding(WORDS, WIDTH) if stage == 0 else None
        self.block = Block()
        self.head = nn.Linear(WIDTH, WORDS, bias=False) if stage == stages - 1 else None
        if self.head is not None and TIED:
            torch.manual_seed(100)
            self.head.weight = nn.Parameter(nn.Embedding(WORDS, WIDTH).weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(x if self.embedding is None else self.embedding(x))
        return x if self.head is None else self.head(x)


def build_stage(stage: int, stages: int) -> nn.Module:
    return Stage(stage, stages).double()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def one_process(stages: int) -> nn.Sequential:
    """The model of the pipeline in one piece."""
    model = nn.Sequential(*(build_stage(s, stages) for s in range(stages)))
    if TIED:
        model[-1].head.weight = model[0].embedding.weight
    return model


def relative(mine: float, theirs: float) -> float:
    return abs(mine - theirs) / abs(theirs)


def apart(pipeline: Pipeline, model: nn.Sequential, gradients: bool) -> float:
    """The largest difference of gradients, relative to the stage's largest, or of weights."""
    largest = 0.0
    for stage, module in pipeline.stages.items():
        pairs = zip(module.parameters(), model[stage].parameters(), strict=True)
        tensors = [(p.grad, q.grad) if gradients else (p.detach(), q.detach()) for p, q in pairs]
        scale = max(float(theirs.abs().max()) for _, theirs in tensors) if gradients else 1.0
        largest = max(largest, *(float((mine - theirs).abs().max()) / scale for mine, theirs in tensors))
    return largest


def main(directory: Path, result: Path) -> None:
    facts = json.loads((directory / "program.json").read_text())
    stages, size, copies = facts["stages"], 2, dist.get_world_size() // facts["workers"]
    per_copy = size * facts["micro_batches"]
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(WORDS, (copies * per_copy, LENGTH + 1), generator=generator)
    inputs, targets = words[:, :-1], words[:, 1:]
    options = {"tied": [[(0, "embedding.weight"), (stages - 1, "head.weight")]]} if TIED else {}
    pipeline = Pipeline(directory, build_stage, loss, (inputs[:size], targets[:size]), **options)
    model = one_process(stages)
    optimizer, theirs = (torch.optim.AdamW(of.parameters(), lr=0.05) for of in (pipeline, model))
    start = dist.get_rank() // facts["workers"] * per_copy
    mine = inputs[start : start + per_copy], targets[start : start + per_copy]
    seen = {"losses": 0.0, "norms": 0.0, "gradients": 0.0, "clipped": 0}
    for _ in range(UPDATES):
        outcome = pipeline.step(mine)
        value = loss(model(inputs), targets)
        value.backward()
        seen["gradients"] = max(seen["gradients"], apart(pipeline, model, gradients=True))
        norm, expected = pipeline.clip_grad_norm_(CLIP), nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        seen["clipped"] += int(expected > CLIP)
        seen["losses"] = max(seen["losses"], relative(outcome.loss, value.item()))
        seen["norms"] = max(seen["norms"], relative(float(norm), float(expected)))
        for of in (optimizer, theirs):
            of.step()
            of.zero_grad()
    seen["weights"] = apart(pipeline, model, gradients=False)
    everybody: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everybody, seen)
    pipeline.close()
    if dist.get_rank() == 0:
        result.write_text(json.dumps({name: max(of[name] for of in everybody) for name in seen}))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    dist.destroy_process_group()
