"""Messages of `CompiledSchedule`: stages and calls that do not fit the compiled schedule."""

from collections.abc import Sequence

from chimera_runtime.errors import Misuse

STEP_NEEDS_GRADIENTS = "step() computes gradients, and they are turned off here: call eval() under torch.no_grad()"
NOTHING_HAS_RUN = "there is no pipeline before the first step() or eval(), which gives it the shapes of a micro-batch"
STAGE_HAS_ITS_OWN_BACKWARD = "a PipelineStage with dw_builder runs weight gradients by itself: leave dw_builder out"
CHECK_NEEDS_A_LOSS = "check() compares gradients, which need a loss: give the schedule its loss_fn"
INPUTS_ARE_MISSING = "this rank holds stage 0: give step() and eval() the inputs, or arg_mbs"
TARGETS_ARE_MISSING = "this rank holds the last stage: give step() target=, or target_mbs"


def schedule_without_flush(scheme: str) -> Misuse:
    return Misuse(
        f"{scheme} has no flush, so its stages step inside the schedule, for which torch's interface has no place: "
        "use Pipeline"
    )


def schedule_has_slices(scheme: str) -> Misuse:
    return Misuse(
        f"{scheme} has slices, whose stages return a carry next to their output, for which torch's interface has no "
        "place: use Pipeline"
    )


def group_has_another_size(scheme: str, workers: int, ranks: int) -> Misuse:
    return Misuse(
        f"workers of {scheme}: {workers}; ranks of the process group: {ranks}. Give group= the pipeline's dimension of "
        "a mesh, as in mesh['pp'].get_group()"
    )


def stages_are_others(rank: int, wanted: Sequence[int], stages: Sequence[int]) -> Misuse:
    there = ", ".join(map(str, stages)) or "none"
    return Misuse(
        f"the stages that rank {rank} holds in this schedule are {', '.join(map(str, wanted))}, and those given to it: "
        f"{there}. stages_of(directory, rank) says which a rank makes"
    )


def number_of_stages_differs(scheme: str, stages: int, num_stages: int) -> Misuse:
    return Misuse(f"num_stages of a PipelineStage is {num_stages}, and of {scheme} it is {stages}")


def batch_cannot_be_cut(micro_batches: int, reason: str) -> Misuse:
    return Misuse(f"a batch cannot be cut into its micro-batches, of which there must be {micro_batches}: {reason}")


def argument_has_other_rows(name: str, shape: tuple[int, ...], rows: int | None) -> Misuse:
    wanted = "is to be cut into micro-batches" if rows is None else f"the batch is cut by its {rows} rows"
    return Misuse(
        f"{name} is a tensor of shape {shape}, and {wanted}: say how by kwargs_chunk_spec or args_chunk_spec; "
        'or give a keyword argument that goes whole to every micro-batch, by **{whole("name"): ..} with '
        "chimera_runtime.whole"
    )


def argument_looks_like_borders(name: str) -> str:
    return (
        f"{name} has whole numbers that rise from 0, as borders of documents would, and is cut into micro-batches. If "
        'it is one list for the whole batch, give it by **{whole("name"): ..} with chimera_runtime.whole'
    )


def wrong_number_of_micro_batches(name: str, micro_batches: int, length: int) -> Misuse:
    return Misuse(f"the length of {name} is {length}, and must be the number of micro-batches, {micro_batches}")


def batch_is_given_twice(whole: str, listed: str) -> Misuse:
    return Misuse(f"give either {whole}, which is cut into micro-batches, or {listed}")


def outputs_are_missing(rank: int) -> Misuse:
    return Misuse(
        f"rank {rank} holds the last stage, too, and does not return outputs: give the same return_outputs there"
    )
