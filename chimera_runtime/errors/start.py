"""Messages of the start: stages that the schedule cannot run, and updates of several shapes."""

from collections.abc import Sequence

from chimera_runtime.errors import BadModel, Misuse

SAMPLER_AND_SHUFFLE = "a sampler decides the order: leave shuffle=True out"
SAMPLER_OF_ONE_RANK = "the sampler gives every rank other items, and so does the loader: use shuffle=True instead"


def stages_are_refused(complaint: str) -> Misuse:
    """An error of `inventory`, with one of the complaints below or of ``errors.model``."""
    return Misuse(complaint)


def initial_weights_differ(stage: int, parameter: str, ranks: tuple[int, int]) -> str:
    return (
        f"stage {stage} starts with other weights on rank {ranks[1]} than on rank {ranks[0]}, first in {parameter}: a "
        "stage or a layer may draw random numbers from torch alone, which is seeded alike on all ranks"
    )


def initial_loss_differs(parameter: str, ranks: tuple[int, int]) -> str:
    return (
        f"the loss starts with other weights on rank {ranks[1]} than on rank {ranks[0]}, first in {parameter}: seed "
        "torch alike on all ranks before the loss is made (torch.manual_seed), or give it fixed values"
    )


def parameters_differ(stage: int, ranks: tuple[int, int], here: str, there: str) -> str:
    """Replicas of a stage on two ranks differ: ``here`` and ``there`` are the first parameters that do."""
    return (
        f"stage {stage} has {here} on rank {ranks[0]} and {there} on rank {ranks[1]}: let build_stage make the same "
        "module on every rank"
    )


def no_stage_takes_keyword(name: str) -> Misuse:
    return Misuse(f"no stage takes the keyword argument {name}: its forward has no parameter of that name")


def recomputed_stage_changes_input(stage: int, what: str) -> Misuse:
    return Misuse(f"stage {stage} changes {what} in place, but is to run on it again; let it work on a copy")


def leaf_is_unknown(stage: int | None, words: str) -> Misuse:
    """``words`` name a leaf that the forward of a stage trains, or the loss if ``stage`` is None."""
    cause = "requires a gradient, and is no parameter that the pipeline would sum over ranks, step, save and check"
    if stage is None:
        return Misuse(
            f"the gradient of the loss reaches {words}, which {cause}: give an nn.Module that has it as a parameter as "
            "the loss, or detach it"
        )
    return Misuse(
        f"the gradient of stage {stage} reaches {words}, which {cause}: let the module of the stage have it as a "
        "parameter (nn.Parameter, register_parameter), or detach it; what stages share is declared in tied(num_stages)"
    )


def loss_writes_what_is_unknown(words: str) -> Misuse:
    return Misuse(
        f"the loss writes the buffer {words}, which the pipeline does not know, and so cannot restore after the start "
        "and evaluations, save or check: give the module itself as the loss, or one that has it in it"
    )


def backward_is_bent(stage: int) -> str:
    return (
        f"the backward of stage {stage} is not linear in the gradients with which it begins, as one with a hook that "
        "clips or rounds them, and loss returns (sum, count): backwards begin before the total of the counts is known, "
        "on gradients divided by an estimate, a power of 2, and these are corrected afterwards. So what such a hook "
        "sees is too large or too small, by a factor of up to about 1.5: let loss return a mean, or clip with "
        "clip_grad_norm_"
    )


_IN_A_BUFFER = "keep in a buffer (register_buffer) what a forward changes"


def forward_replaces_parameter(stage: int, name: str) -> Misuse:
    return Misuse(
        f"the forward of stage {stage} registers, replaces or deletes the parameter {name}, which no optimizer and no "
        f"checkpoint would notice: register parameters where the module is made, and {_IN_A_BUFFER}"
    )


def forward_writes_large_parameter(stage: int, name: str) -> Misuse:
    return Misuse(
        f"the forward of stage {stage} writes its frozen parameter {name}, which is too large for a copy at start, so "
        f"that its value is lost: {_IN_A_BUFFER}"
    )


def forward_writes_parameter(stage: int, names: Sequence[str]) -> str:
    return (
        f"the forward of stage {stage} writes its parameter{'s' if len(names) > 1 else ''} {', '.join(names)}, in the "
        "order in which the schedule runs micro-batches. Ranks that hold the same stage each write for their own "
        f"micro-batches, and replicas that drift apart by that are an error later: {_IN_A_BUFFER}, which may differ. "
        "Write under torch.no_grad(), not through .data, so that torch notices if a backward needs the former values"
    )


def stages_are_in_evaluation_mode(stages: Sequence[int]) -> str:
    several, numbers = len(stages) > 1, ", ".join(map(str, stages))
    return (
        f"stage{'s' if several else ''} {numbers} {'are' if several else 'is'} in evaluation mode, as from_pretrained "
        "returns a model, and will train without dropout, with normalizations by their running statistics: call "
        "model.train() where the stages are made, unless this is meant, as for a frozen encoder"
    )


def output_without_dimensions(stage: int) -> Misuse:
    return Misuse(
        f"stage {stage} returns a tensor without dimensions, but handles several micro-batches in one operation; "
        "return tensors with the micro-batch in dimension 0"
    )


def carry_is_opaque(stage: int, kind: str) -> Misuse:
    return Misuse(
        f"the carry of stage {stage} holds a {kind}, in which gradients would not be found: return tensors in tuples, "
        "lists or dicts, or in a class that torch.utils._pytree knows"
    )


def slices_differ(stage: int, number: int, shapes: object, first: object) -> Misuse:
    return Misuse(
        f"stage {stage} hands on tensors of shapes {shapes} for slice {number}, and {first} for slice 0: let it return "
        "the same structure and shapes for every slice"
    )


def slices_differ_in_form(stage: int) -> Misuse:
    return Misuse(
        f"stage {stage} hands on tensors that differ between slices in more than their lengths: let it return the same "
        "structure, dtypes and dimensions for every slice"
    )


MEAN_OF_UNEQUAL_SLICES = (
    "the slices of this program have unequal lengths, and loss returns a mean, which does not say how much each slice "
    "counts: return a pair of the sum and the number of items, or compile the scheme without --slice-lengths"
)

VARYING_IN_UNEQUAL_SLICES = (
    "the slices of this program have unequal lengths, which varying= does not know for other shapes: leave it out, or "
    "compile the scheme without --slice-lengths"
)


def shapes_vary_without_flush(scheme: str) -> Misuse:
    return Misuse(
        f"{scheme} has no flush: messages of several updates are under way together, so all have the example's shapes; "
        "leave out varying="
    )


def number_of_tensors_differs(here: int, in_example: int) -> Misuse:
    return Misuse(f"a micro-batch has other tensors than the example: {here} and not {in_example}")


def tensor_is_larger_than_example(here: tuple[int, ...], in_example: tuple[int, ...]) -> Misuse:
    return Misuse(
        f"a tensor of a micro-batch is {here}, and the example's is {in_example}: make the pipeline with an example of "
        "the largest shapes that are to come"
    )


def micro_batches_differ_in_shape(
    micro: int, here: tuple[tuple[int, ...], ...], first: tuple[tuple[int, ...], ...]
) -> Misuse:
    return Misuse(
        f"the input of micro-batch {micro} has shapes {', '.join(map(str, here))}, and that of micro-batch 0 "
        f"{', '.join(map(str, first))}: the micro-batches of one step have one shape: pad them to the longest, or give "
        "those of unlike length to steps of their own, with accumulate=True"
    )


def output_is_larger_than_for_example(stage: int, excess: str) -> BadModel:
    return BadModel(f"stage {stage} returned for shapes that are no larger than the example's: {excess}")


def loader_numbers_are_too_small(num_workers: int, prefetch_factor: int) -> Misuse:
    return Misuse(f"num_workers={num_workers}, prefetch_factor={prefetch_factor}: no such numbers of either")
