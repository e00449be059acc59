"""Errors of an update: gradients that are left over, and optimizers that do not fit the schedule."""

from chimera_runtime.errors import Misuse

SCALER_WITH_WIDER_SUMS = "a GradScaler unscales grad, not main_grad: scale for fp16, or sum in a wider dtype, not both"


def training_of_parameter_changed(name: str) -> Misuse:
    return Misuse(
        f"requires_grad of {name} has changed since the pipeline was made; set it where the stage is made, or make a "
        "new pipeline"
    )


def gradient_is_still_there(name: str) -> Misuse:
    return Misuse(
        f"{name} still has the gradient of the step before: call optimizer.zero_grad() after optimizer.step(), of an "
        "optimizer that holds pipe.parameters(), or step(accumulate=True) to add to it"
    )


def optimizer_is_missing(scheme: str) -> Misuse:
    return Misuse(
        f"{scheme} has no flush, so each stage steps inside the schedule: give Pipeline optimizer=, a function that "
        "makes an optimizer of a stage's [(name, parameter), ..]"
    )


def optimizer_would_not_be_called(scheme: str) -> Misuse:
    return Misuse(
        f"{scheme} has a flush, so nothing steps inside the schedule: leave out optimizer=, before_step= and "
        "after_step=, and call the step() of an optimizer of your own after each step of the pipeline"
    )


def not_an_optimizer(kind: str) -> Misuse:
    return Misuse(f"optimizer returned a {kind}, not a torch.optim.Optimizer")


def accumulation_without_flush(scheme: str) -> Misuse:
    return Misuse(
        f"the stages of {scheme} step inside the schedule, so accumulate=True would come too late: compile the scheme "
        "with more micro-batches to an update"
    )


def scaler_without_flush(scheme: str) -> Misuse:
    return Misuse(
        f"the stages of {scheme} step inside the schedule: when one finds infinite gradients, others have made the "
        "step already; train in bfloat16, which needs no scaler"
    )


def gradient_was_taken_away(stage: int, name: str) -> Misuse:
    return Misuse(
        f"the gradient of stages.{stage}.{name} was taken away while its update is under way: leave out zero_grad(), "
        "the stages of a stream clear their gradients themselves"
    )
