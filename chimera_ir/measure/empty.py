"""A model whose middle stage computes nothing: its operations take the overhead that every operation has."""

from pathlib import Path

import torch

from chimera_runtime.model.model import ModelFile

STAGES, MIDDLE = 3, 1


class _Identity(torch.nn.Module):
    """Returns its input, through autograd and without a kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)


def _build(stage: int, _stages: int) -> torch.nn.Module:
    """The first stage has a weight, so that gradients come back as far as the middle one."""
    return torch.nn.Linear(1, 1) if stage == 0 else _Identity()


def model() -> ModelFile:
    """The model; an item of its dataset is one number."""
    return ModelFile(
        Path("an empty stage"),
        _build,
        lambda output, _target: output.mean(),
        lambda: [(torch.zeros(1), 0)],
        lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    )
