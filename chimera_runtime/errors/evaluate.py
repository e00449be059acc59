"""Messages of evaluation and inference."""

from chimera_runtime.errors import BadModel, Misuse

NOTHING_TO_EVALUATE = "there is nothing to evaluate: no batch was given"
PREDICTIONS_HAVE_NO_ITEMS = "the last stage returns something else than tensors with the items in dimension 0"
PREDICTIONS_HAVE_NO_SEQUENCE = (
    "micro-batches are cut into slices, and the last stage returns something else than tensors with the positions of "
    "the slice in dimension 1: return such tensors, or predict with a scheme without slices"
)


def evaluation_output_differs(stage: int, micro: int, difference: str) -> BadModel:
    return BadModel(
        f"stage {stage} returned for micro-batch {micro} of an evaluation: {difference}; return the same in evaluation "
        "mode"
    )


def rows_are_not_items(items: int, whole: int, stage: int) -> Misuse:
    return Misuse(
        f"the last micro-batch of an evaluation is smaller, {items} in place of {whole}, and what stage {stage} hands "
        "on has no rows of single items in dimension 0: leave the last items out (drop_last=True)"
    )


def evaluation_lacks_keyword(name: str) -> Misuse:
    return Misuse(f"a batch of an evaluation has no keyword argument {name}, and the example had")
