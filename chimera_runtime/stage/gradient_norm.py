"""The norm of the gradients of the whole model: each parameter counts once, however many ranks hold it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from chimera_runtime.errors.stage import norm_is_negative
from chimera_runtime.program.job import Job, Place
from chimera_runtime.program.weight_groups import Group
from chimera_runtime.ranks.control_group import ControlGroup
from chimera_runtime.stage.gradient_sums import main_gradient
from chimera_runtime.values.mesh_tensors import by_layout, local, whole


def total_norm(
    control_group: ControlGroup, job: Job, gradients: Mapping[Group, Sequence[torch.Tensor]], norm_type: float
) -> torch.Tensor:
    """Returns the norm over all weights, a number in float64, the same on every rank. Every rank must call it.

    ``gradients`` are the gradients on this rank by weight group. All ranks that hold a group have equal gradients, so
    only the first of them counts the group.
    """
    counted = [g for group, tensors in gradients.items() if _counts(control_group.place, job, group) for g in tensors]
    norms = [whole(torch.nn.utils.get_total_norm(tensors, norm_type)) for tensors in by_layout(counted)]
    numbers = torch.tensor([float(norm) for norm in norms], dtype=torch.float64)
    largest, power = math.isinf(norm_type), norm_type or 1.0  # a norm of order 0 is a count, and counts add up
    total = (numbers.amax() if largest and norms else (numbers**power).sum()).reshape(1)
    kind = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    control_group.reduce(total, "for the norm of the gradients", kind)
    return (total if largest else total ** (1 / power)).reshape(())


def _counts(place: Place, job: Job, group: Group) -> bool:
    """Whether this rank is the first of those that hold a weight group."""
    return place.ranks_of(job.members(group))[0] == place.rank


def gradients_of(parameters: Mapping[Group, Iterable[torch.nn.Parameter]]) -> dict[Group, list[torch.Tensor]]:
    """The gradients of parameters, by weight group, in the dtype that they were summed in."""
    return {
        group: [g for p in of_group if (g := main_gradient(p)) is not None] for group, of_group in parameters.items()
    }


def scale_down(parameters: Iterable[torch.nn.Parameter], max_norm: float, norm: torch.Tensor) -> None:
    """Scales gradients in place to a norm of at most ``max_norm``, as torch.nn.utils.clip_grads_with_norm_ does.

    Raises `Misuse` if ``max_norm`` is negative, which would turn the gradients around, or not a number.
    """
    if not max_norm >= 0:
        raise norm_is_negative(max_norm)
    share = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    shown = [(parameter.grad, main_gradient(parameter)) for parameter in parameters]
    gradients = {id(gradient): gradient for pair in shown for gradient in pair if gradient is not None}
    if gradients:
        parts = [local(gradient) for gradient in gradients.values()]
        torch._foreach_mul_(parts, share.to(parts[0].device))


def agree_on_infinite(
    control_group: ControlGroup, device: torch.device, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
) -> None:
    """Makes all ranks skip the step if ``scaler.unscale_(optimizer)`` found infinite gradients on any rank.

    Every rank must call it. A rank without gradients, such as a rank with a frozen stage, counts as finite.
    """
    flags: dict[Any, torch.Tensor] = scaler._found_inf_per_device(optimizer)
    if not flags:
        flags[device] = torch.zeros((), device=device)
    largest = torch.tensor([max(map(float, flags.values()))], dtype=torch.float64)
    control_group.reduce(largest, "for what any rank has found infinite", dist.ReduceOp.MAX)
    for flag in flags.values():
        flag.fill_(float(largest))
