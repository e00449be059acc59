"""Messages of `Pipeline`: calls that come too late, or do not fit the schedule."""

from chimera_runtime.errors import Misuse

STEP_TAKES_ONE_OF_TWO = "step takes either a batch or micro_batches"
PIPELINE_IS_CLOSED = "the pipeline is closed: call its methods before close(), or inside the with block"
UPDATE_HAS_FAILED = "an update has failed on this pipeline: make a new one, from the last checkpoint"


def torch_is_too_old(version: str, oldest: str) -> Misuse:
    return Misuse(f"torch {version} is too old: chimera_runtime needs torch {oldest} or newer")


def example_cannot_be_cut(scheme: str, parts: int, items: int) -> Misuse:
    return Misuse(f"{scheme} cuts every micro-batch into {parts}, and dimension 0 of the example is {items}")


def schedule_has_no_flush(scheme: str, consequence: str) -> Misuse:
    return Misuse(f"{scheme} has no flush: {consequence}")


NO_NORM = (
    "the stages make an update at different times, so there is no norm of all its gradients: clip those of a stage in "
    "before_step, as in clip_grad_norm_([p for _, p in step.named_parameters], 1.0)"
)
NO_SCALER = "stages step without a scaler: train in bfloat16, which needs none"
NO_SHARDS = (
    "its stages step inside the schedule, which leaves no place to gather their weights; its optimizers keep the state "
    "of whole stages"
)
"""Consequences that `schedule_has_no_flush` names: for clip_grad_norm_, unscale_ and sharded_optimizer."""
