"""``--check``: runs the generated loops and compares them with the reference, gradient by gradient or weight by weight.

Where every update ends before the next one begins, one is run, with a recorder in place of the optimizer. Where updates
overlap, several are, with the model's optimizer, and what is compared are the weights after the last one.
"""

from typing import Any

import torch

from support import stages as build
from support.compare import Found, compare
from support.compute import Stage
from support.job import Job
from support.reference import Reference
from support.setting import Setting


class CheckFailed(Exception):
    """The loops do not compute what one process computes."""


class Recorder:
    """Stands in for the optimizer: keeps the gradients that the loops would have stepped with."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.gradients: list[torch.Tensor | None] = []

    def step(self) -> None:
        """Keeps a copy of every gradient."""
        self.gradients = [None if p.grad is None else p.grad.detach().clone() for p in self.parameters]


def check(setting: Setting, built: dict[int, torch.nn.Module]) -> None:
    """Compares the loops with one process; leaves the modules in whatever state they are then.

    Raises
    ------
    CheckFailed
        On rank 0, if they differ by more than the tolerance.
    """
    world, options, job = setting.world, setting.options, setting.world.job
    copies, device = world.place.copies, world.device
    reference = Reference(
        *(setting.model, job.stages, options.micro_batch_size, job.micro_batches, job.parts, copies),
        *(options.seed, device),
    )
    if job.period:
        updates = _enough(job)
        found = _run_stream(setting, built, updates)
        verdict = compare(world, found, setting.share, lambda: reference.train(updates, job.period, job.reads))
    else:
        found = _run_update(setting, built)
        verdict = compare(world, found, setting.share, lambda: reference.gradients(0))
    if verdict is None:
        return
    if not verdict.passed:
        raise CheckFailed(str(verdict))
    print(verdict, flush=True)


def _run_update(setting: Setting, built: dict[int, torch.nn.Module]) -> Found:
    """The gradients of one update."""
    recorders: list[Recorder] = []

    def record(parameters: list[torch.nn.Parameter]) -> Recorder:
        recorders.append(Recorder(parameters))
        return recorders[-1]

    stages = build.assemble(setting, built, record, None)
    setting.script.update(setting.lane(stages))
    recorded = dict(zip(stages, recorders, strict=True))
    return Found(
        {number: recorder.parameters for number, recorder in recorded.items()},
        {number: recorder.gradients for number, recorder in recorded.items()},
        _losses(stages, 1),
    )


def _enough(job: Job) -> int:
    """How many updates a check of overlapping ones runs: at least 4, and 2 * workers + 2 micro-batches."""
    return max(4, -(-(2 * job.workers + 2) // job.micro_batches))


def _run_stream(setting: Setting, built: dict[int, torch.nn.Module], updates: int) -> Found:
    """The newest weights after several updates: those that the optimizers were given."""
    stepped: list[list[torch.nn.Parameter]] = []

    def watch(parameters: list[torch.nn.Parameter]) -> Any:
        stepped.append(parameters)
        return setting.model.steps(parameters)

    stages = build.assemble(setting, built, watch, None)
    setting.script.stream(setting.lane(stages), updates)
    weights = dict(zip(stages, stepped, strict=True))
    newest = {number: [p.detach() for p in parameters] for number, parameters in weights.items()}
    return Found(weights, newest, _losses(stages, updates))


def _losses(stages: dict[int, Stage], updates: int) -> list[float]:
    return [sum(stage.take_loss(update) for stage in stages.values()) for update in range(updates)]
