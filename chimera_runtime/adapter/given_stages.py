"""Stages that a user's script gives, as PipelineStage objects or as modules, and their wrappers for a `Pipeline`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist

from chimera_runtime.errors import Misuse
from chimera_runtime.errors import adapter as mistakes
from chimera_runtime.program.job import Job
from chimera_runtime.values.mesh_tensors import local


@dataclass(frozen=True)
class GivenStages:
    """The stages of a rank that a script has given.

    ``modules`` has, for each stage, a function that returns its module: the user may replace a module before the first
    step. ``group`` and ``device`` are those of the PipelineStage objects; None if modules are given.
    """

    modules: Mapping[int, Callable[[], torch.nn.Module]]
    group: dist.ProcessGroup | None = None
    device: torch.device | None = None

    @classmethod
    def of(cls, stages: Any, job: Job) -> Self:
        """Takes one or several PipelineStage objects, or modules by the numbers of their stages.

        Raises `Misuse` if a PipelineStage is for another number of stages, or runs weight gradients by itself.
        """
        if isinstance(stages, Mapping):
            return cls({number: partial(stages.__getitem__, number) for number in stages})
        listed = [*stages] if isinstance(stages, Sequence) else [stages]
        for stage in listed:
            if stage.num_stages != job.stages:
                raise mistakes.number_of_stages_differs(job.name, job.stages, stage.num_stages)
            if stage.dw_builder is not None:
                raise Misuse(mistakes.STAGE_HAS_ITS_OWN_BACKWARD)
        modules = {stage.stage_index: partial(getattr, stage, "submod") for stage in listed}
        first = next(iter(listed), None)
        return cls(modules, getattr(first, "group", None), getattr(first, "device", None))


class CalledStage(torch.nn.Module):
    """A stage of torch as one of a `Pipeline`: its module is called with positional arguments, in the mode it has.

    The number of the micro-batch is a keyword argument so that the runtime joins no micro-batches: tensors need not
    have items in dimension 0. In one process, ``given`` has the stage's own keyword arguments of each micro-batch.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.given: Sequence[dict[str, Any]] | None = None

    def forward(self, inputs: Any, *, micro_batch: int, keywords: dict[str, Any]) -> Any:
        """Calls the module with a tuple or list of inputs, or with one."""
        named = keywords if self.given is None else self.given[micro_batch]
        return self.module(*(inputs if isinstance(inputs, tuple | list) else (inputs,)), **named)

    def train(self, mode: bool = True) -> Self:
        """Does nothing: the mode of the module is its owner's."""
        return self


@torch.no_grad()
def make_replicas_equal(
    job: Job, modules: Mapping[int, torch.nn.Module], worker: int, ranks: Sequence[int], group: dist.ProcessGroup | None
) -> None:
    """Copies parameters and buffers of each stage from the first worker that holds it to the others.

    Every rank of the group calls it; ``ranks`` are those of the workers.
    """
    device = "cuda" if "nccl" in str(dist.get_backend(group)) else "cpu"
    for stage, (first, *others) in enumerate(job.holders):
        if not others or stage not in modules:
            continue
        module = modules[stage]
        tensors = [local(t) for t in (*module.parameters(), *module.buffers()) if not t.is_meta and t.numel()]
        if not tensors:
            continue
        values = torch.cat([t.contiguous().reshape(-1).view(torch.uint8).to(device) for t in tensors])
        if worker == first:
            for other in others:
                dist.send(values, ranks[other], group)
            continue
        dist.recv(values, ranks[first], group)
        sizes = [t.numel() * t.element_size() for t in tensors]
        for tensor, value in zip(tensors, torch.split(values, sizes), strict=True):
            tensor.copy_(value.clone().view(tensor.dtype).view(tensor.shape))
