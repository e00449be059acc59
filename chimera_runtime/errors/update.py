"""Errors of an update: gradients that are left over, and optimizers that do not fit the schedule."""

from chimera_runtime.errors import Misuse, RanksDiffer

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


def gradient_is_of_no_step(name: str) -> Misuse:
    return Misuse(
        f"{name} has a gradient that is of no step of a pipeline, and step(accumulate=True) averages those of steps: "
        "add gradients of your own after the last step that accumulates"
    )


def gradient_was_stepped(name: str) -> Misuse:
    return Misuse(
        f"{name} still has the gradient with which an optimizer has stepped it, and step(accumulate=True) would add to "
        "it: call zero_grad() after the optimizer's step()"
    )


def scale_has_changed(name: str, before: float, now: float) -> Misuse:
    return Misuse(
        f"{name} has a gradient that is scaled by {before:g}, and the scale of the GradScaler is {now:g} now: call "
        "scaler.update() after the last step that accumulates, and zero_grad() after that"
    )


def means_and_counts(name: str) -> Misuse:
    return Misuse(
        f"{name} has a gradient of a pipeline whose loss is of another kind: losses that return a mean and losses that "
        "return (sum, count) do not accumulate; let both return the same"
    )


def cleared_in_part(where: str) -> RanksDiffer:
    return RanksDiffer(
        f"{where}: the loop had cleared the gradients of some parameters and kept those of others, and a parameter "
        "without a gradient, on some rank, got its first one: whether the steps before count for it is unknown. Clear "
        "all gradients together, or let optimizers of torch step the parameters; clear by setting to None, and scale "
        "or clip gradients after the last step that accumulates"
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
