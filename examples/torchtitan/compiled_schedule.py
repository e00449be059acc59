"""A compiled schedule in torchtitan: the ``pipelining_fn`` of a ModelSpec.

In a config of yours, where `model_registry` is that of a model of torchtitan:

    config.model_spec = with_compiled_schedule(model_registry("debugmodel"), "chimera.out")

Weights are initialized after the call of ``pipelining_fn``, and replicas of a stage take those of the first rank that
holds it. torchtitan clips by the norms of all ranks added up, which counts replicas once for each rank: with schedules
that have them, clip by ``trainer.pp_schedule.clip_grad_norm_``.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part, _split_module
from torchtitan.protocols.model_spec import ModelSpec

from chimera_runtime import CompiledSchedule, stages_of


def with_compiled_schedule(spec: ModelSpec, directory: str | Path) -> ModelSpec:
    """Returns a ModelSpec that is trained with the schedule in a directory that ``chimera compile`` wrote."""
    return replace(spec, pipelining_fn=partial(pipeline_compiled, directory=directory))


def pipeline_compiled(
    model: torch.nn.Module,
    *,
    directory: str | Path,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    device: torch.device,
    model_config: Any,
    parallelize_fn: Any,
    loss_fn: Any,
    **others: Any,
) -> tuple[CompiledSchedule, list[torch.nn.Module], bool, bool]:
    """Cuts the model into the stages of the schedule that this rank holds; arguments and results are torchtitan's."""
    mesh = parallel_dims.get_mesh("pp")
    held = stages_of(directory, mesh.get_local_rank())
    last = max(stage for rank in range(mesh.size()) for stage in stages_of(directory, rank))
    names = parallelism.module_fqns_per_model_part or _generate_llm_fqn_per_model_part(
        last + 1,
        len(model_config.layers),
        parallelism.pipeline_parallel_first_stage_less_layers,
        parallelism.pipeline_parallel_last_stage_less_layers,
    )
    options = {"parallel_dims": parallel_dims, "training": training, "parallelism": parallelism, **others}
    parts = {stage: parallelize_fn(_split_module(model, names[stage]), **options) for stage in held}

    def loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        return loss_fn(*args, **kwargs)[0]

    schedule = CompiledSchedule(directory, parts, loss, scale_grads=False, group=mesh.get_group(), device=device)
    count = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    if count != schedule.n_microbatches:
        wanted = schedule.n_microbatches * parallelism.pipeline_parallel_microbatch_size
        raise ValueError(f"training.local_batch_size must be {wanted} for the micro-batches of {directory}")
    return schedule, [*parts.values()], 0 in parts, last in parts
