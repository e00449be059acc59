"""Writes the checkpoint that later versions must read: python -m tests.unit.runtime.format_1 FOLDER.

Beside it, losses.json has the losses of the updates after it.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist
from torch import nn

from tests.unit.runtime.kept import UPDATES, WIDTH, Loop, compiled


def lean(_stage: int, _stages: int) -> nn.Module:
    """As little as there may be of parameters and buffers."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH, affine=False)).double()


def main(folder: Path) -> None:
    """Saves after two updates and trains on."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with TemporaryDirectory() as scratch:
        loop = Loop(compiled(Path(scratch) / "out"), folder, lean)
        loop.train(2)
        loop.checkpoints.save()
        loop.checkpoints.wait()
        losses = loop.train(UPDATES)
        loop.close()
    (folder / "losses.json").write_text(json.dumps(losses) + "\n")
    (folder / ".lock").unlink()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
