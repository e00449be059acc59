"""What a model file may return as a stage."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed

from support.faults import Misuse
from support.model import Model, load

FILE = """\
import torch
from torch import nn
from torch.distributed import device_mesh, fsdp, tensor
from torch.utils.checkpoint import checkpoint


class Checkpointed(nn.Linear):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", tensor.distribute_tensor(torch.ones(2), mesh(), [tensor.Replicate()]))


def mesh():
    return device_mesh.init_device_mesh("cpu", (1,))


def build_stage(stage, num_stages):
    return {expression}


loss = dataset = optimizer = print
"""


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A process group of one, as wrappers ask for one when they are made."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def model(folder: Path, expression: str) -> Model:
    file = folder / "model.py"
    file.write_text(FILE.replace("{expression}", expression))
    return load(file)


@pytest.mark.parametrize(
    ("expression", "kind"),
    [
        ("fsdp.fully_shard(nn.Linear(2, 2), mesh=mesh())", "FSDPLinear"),
        ("nn.Sequential(fsdp.fully_shard(nn.Linear(2, 2), mesh=mesh()))", "FSDPLinear"),
        ("fsdp.FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device('cpu'))", "FullyShardedDataParallel"),
        ("nn.parallel.DistributedDataParallel(nn.Linear(2, 2))", "DistributedDataParallel"),
        ("tensor.distribute_module(nn.Linear(2, 2), mesh())", "DTensor"),
        ("Scale()", "DTensor"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_stage_that_is_spread_over_ranks_is_refused_by_name(
    group: None, tmp_path: Path, expression: str, kind: str
) -> None:
    with pytest.raises(Misuse, match=f"stage 1 uses {kind}; FSDP, DDP and tensor parallelism cannot be used within"):
        model(tmp_path, expression).stage(1, 2, 0, torch.device("cpu"))


@pytest.mark.parametrize("expression", ["nn.Linear(2, 2)", "Checkpointed(2, 2)"])
def test_any_other_module_may_be_a_stage(tmp_path: Path, expression: str) -> None:
    assert model(tmp_path, expression).stage(0, 2, 0, torch.device("cpu")).training
