"""Messages about what a stage, a loss or a step does while a model trains."""

from collections.abc import Sequence

from chimera_runtime.errors import BadModel, Misuse

LOSS_COUNTS_AT_TIMES = "loss returns (sum, count) for one micro-batch and a mean for another"
LOSS_HAS_NO_GRADIENT = (
    "loss returned tensors that need no gradient for all micro-batches of an update, so nothing would be "
    "trained: compute it from the output, without detach(), item() or no_grad()"
)
BACKWARD_OF_PAIR_RAN_TWICE = "the backward of a pair runs once: it was called, or its roots were taken, before"

_RECOMPUTED_STAGES = (
    "a stage that recomputes may depend on its inputs, its weights, what its module holds, and the generators of torch "
    "(those of Python and NumPy only if it draws from them for the first micro-batch, too), but on no clock, file or "
    "global, and its kernels must be deterministic (torch.use_deterministic_algorithms(True)); mend that, or compile "
    "without recomputation"
)
"""The cause of a difference between the two runs of a forward, and what to do."""


def keyword_argument_is_missing(micro: int, name: str) -> BadModel:
    return BadModel(f"micro-batch {micro} has no keyword argument {name}, and the first had; give all the same names")


def tensor_was_unused_at_first(stage: int) -> BadModel:
    return BadModel(
        f"stage {stage} uses a tensor that it receives and did not use for the first micro-batch; use the same "
        "tensors every time"
    )


def output_differs(stage: int, micro: int, difference: str) -> BadModel:
    return BadModel(f"stage {stage} returned for micro-batch {micro}: {difference}; return the same every time")


def output_has_no_rows(micros: Sequence[int]) -> BadModel:
    return BadModel(
        f"the last stage returned for micro-batches {', '.join(map(str, micros))} together something that does not "
        "have them one after another in dimension 0, as for the first micro-batch; return the same every time"
    )


LEAF_WAS_WRITTEN = (
    "a forward must not write in place into its input, the carry of the slice before, or a parameter: let it work on a "
    "copy, such as x.clone()"
)


SAVED_WAS_WRITTEN = (
    "with several micro-batches under way, the forward of a later one may have written a buffer or a parameter that "
    "the backward of an earlier one needs as it was: let the forward compute with a copy, such as x.clone()"
)


def forward_begins_to_write(stage: int, name: str) -> BadModel:
    return BadModel(
        f"the forward of stage {stage} has written the parameter {name}, which it did not write for the micro-batch at "
        "start, in an evaluation or to see new shapes: its value before is lost, so go on from the last checkpoint; "
        "keep in a buffer (register_buffer) what a forward changes"
    )


def carry_is_empty(stage: int, place: int) -> BadModel:
    return BadModel(
        f"stage {stage} returned a carry without tensors for slice {place}, and slice {place + 1} needs one; return "
        "what the next slice must know of this one and of those before it"
    )


def carry_differs(stage: int, place: int, now: str, before: str) -> BadModel:
    return BadModel(
        f"stage {stage} returned for slice {place} the carry {now}, which was {before} for the first micro-batch; "
        "return the same structure, shapes and dtypes every time"
    )


REPORT_HAS_NO_NAME = "report(name, value, count): the name is a text"


def report_is_outside(name: object) -> Misuse:
    return Misuse(
        f"report({name!r}, ..) is called outside of a step or an evaluation of a pipeline: call it within the forward "
        "of a stage or within the loss"
    )


def report_is_no_number(name: str, what: str) -> str:
    return f"report({name!r}, ..): the {what} is to be a real number, or a tensor of one"


def report_has_wrong_count(name: str, count: float) -> str:
    return f"report({name!r}, ..): the count is {count}, and is to be positive and finite; report nothing for no item"


def report_had_wrong_count(name: str, count: float) -> BadModel:
    return BadModel(report_has_wrong_count(name, count))


def auxiliary_loss_has_no_gradient(name: str) -> BadModel:
    return BadModel(
        f"the auxiliary loss {name} would have no gradient: it is added under torch.no_grad(), or in a "
        "torch.utils.checkpoint with use_reentrant=True; use use_reentrant=False"
    )


def auxiliary_loss_is_new(stage: int, name: str, micro: int) -> BadModel:
    return BadModel(
        f"stage {stage} has the auxiliary loss {name} for micro-batch {micro}, and had it not for the first; have the "
        "same every time, of 0 where there is nothing to add"
    )


def backward_of_pair_did_not_run(method: str, stage: int) -> BadModel:
    return BadModel(f"{method} of stage {stage} returned without its backward; call it: `backward()`")


class DroppedTensorNeeded(BadModel):
    """A backward needs a tensor that a forward did not save, because it will be run again."""


def backward_goes_past_its_forward(stage: int) -> DroppedTensorNeeded:
    return DroppedTensorNeeded(
        f"stage {stage} goes back into the graph of a forward that is run again for its backward; detach what the "
        "module keeps from one forward to the next"
    )


def input_was_changed(stage: int) -> BadModel:
    return BadModel(
        f"stage {stage} changes an input, a target or a keyword argument in place, or the loop does, but is to run on "
        "it again; let it work on a copy"
    )


def recomputed_forward_writes_parameter(stage: int, names: Sequence[str]) -> BadModel:
    return BadModel(
        f"the forward of stage {stage} writes its parameter{'s' if len(names) > 1 else ''} {', '.join(names)}, but is "
        "to run again for the backward, and would find other values then: keep in a buffer (register_buffer) what a "
        "forward changes, or compile without recomputation"
    )


def second_run_changes_state(stage: int, names: Sequence[str]) -> BadModel:
    return BadModel(
        f"stage {stage} changes {', '.join(names)} when its forward is run again for the backward, and not at first: "
        f"{_RECOMPUTED_STAGES}"
    )


def second_run_differs(stage: int, micro: int, update: int) -> BadModel:
    return BadModel(
        f"stage {stage} gives something else for micro-batch {micro} of update {update} when its forward is run again "
        f"for the backward, so that gradients would be wrong: {_RECOMPUTED_STAGES}"
    )


def items_influence_each_other(stage: int, micro: int, update: int, others: int) -> BadModel:
    return BadModel(
        f"stage {stage} gives something else for micro-batch {micro} of update {update} alone than together with "
        f"{others} other{'s' if others > 1 else ''}, by more than rounding, so that gradients would be wrong: its "
        "items influence each other across dimension 0, as by batch statistics or a softmax over it, or it depends on "
        "how many there are; let each item be computed by itself, or compile a scheme whose forwards are over one "
        f"micro-batch each. If that is not so: {_RECOMPUTED_STAGES}"
    )


def saved_tensor_was_written(stage: int, shape: Sequence[int]) -> BadModel:
    return BadModel(
        f"stage {stage} saved a tensor of shape {tuple(shape)} for its backward that was written since, so that "
        "gradients would be wrong; write into a copy, as .clone() makes it"
    )


def saved_tensor_is_on_the_host(stage: int) -> BadModel:
    return BadModel(
        f"stage {stage} goes back into the graph of a forward whose tensors are on the host until its backward; detach "
        "what the module keeps from one forward to the next"
    )


def norm_is_negative(max_norm: float) -> Misuse:
    return Misuse(f"max_norm={max_norm}: a norm is 0 or more")
