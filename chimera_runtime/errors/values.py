"""Messages about values that pass between stages, keyword arguments and stages on the meta device."""

from chimera_runtime.errors import BadModel, Misuse

MICRO_BATCHES_ARE_NOT_ALIKE = (
    "micro-batches that run together differ in structure, or in something that is not a tensor; give all "
    "micro-batches the form of the first"
)

# Memory that stages share.


def memory_was_written(source: int, reader: str, micros: int | tuple[int, ...], verb: str = "handed on") -> BadModel:
    micro = micros[0] if isinstance(micros, tuple) else micros
    return BadModel(
        f"stage {source} {verb} memory for micro-batch {micro} that was written again before {reader} had it; "
        "return a copy, as .clone() makes it, of what a later call writes"
    )


def memory_was_returned_twice(stage: int, earlier: int, micro: int) -> BadModel:
    return BadModel(
        f"stage {stage} returned the same memory for micro-batches {earlier} and {micro}, which are both under "
        "way; return a copy, as .clone() makes it, of what a later forward writes"
    )


# Keyword arguments.


def keyword_is_not_in_the_example(what: str, name: str) -> Misuse:
    return Misuse(
        f"{what} has the keyword argument {name} and the example of the pipeline has none of that name, "
        "so no stage would get it: make the pipeline with an example that has all keyword arguments"
    )


def keyword_is_missing(what: str, name: str) -> Misuse:
    return Misuse(
        f"{what} has no keyword argument {name}, and the example of the pipeline has one: give all "
        "mini-batches the same names"
    )


def keyword_is_not_whole_in_the_example(what: str, name: str) -> Misuse:
    return Misuse(
        f'{what} declares whole("{name}"), and the example of the pipeline has {name} without it: declare it in the '
        "example, which decides for all batches"
    )


def keyword_was_written(stage: int, name: str) -> BadModel:
    return BadModel(
        f"stage {stage} changes its keyword argument {name} in place, and other stages take it, too; "
        "let it work on a copy, as .clone() makes it"
    )


def loss_takes_a_keyword(name: str) -> Misuse:
    return Misuse(
        f"loss has a parameter {name}, but keyword arguments are for stages and loss(output, target) gets none: "
        "put what the loss needs into the target, or give Pipeline a loss with two parameters"
    )


def count_is_impossible(stage: int, count: float) -> BadModel:
    return BadModel(
        f"stage {stage}: the counts that loss returned for an update add up to {count:g}; return "
        "(sum, count) with a count of 0 or more"
    )


# Stages on the meta device.


def buffer_has_no_values(where: str, name: str) -> Misuse:
    return Misuse(
        f"{where} has the buffer {name} on the meta device, which no file of weights has (persistent=False): "
        'compute it on a real device, as under torch.device("cpu")'
    )


def tensors_have_no_values(names: list[str], remedy: str) -> Misuse:
    further = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return Misuse(f"{names[0]}{further} of this rank were built on the meta device and have no values: {remedy}")


# Outputs of a stage that cannot be sent.


def output_is_elsewhere(stage: int, place: str, device: str) -> Misuse:
    return Misuse(
        f"stage {stage} returned a tensor on {place}, and its rank computes on {device}: make what a "
        "forward makes on the device of its input, as in torch.zeros(.., device=x.device)"
    )


def output_is_not_dense(stage: int, layout: str) -> Misuse:
    return Misuse(
        f"stage {stage} returned a tensor of layout {layout}, which is no message: return a dense one, "
        "as to_dense() makes it"
    )


def output_is_quantised(stage: int, dtype: str) -> Misuse:
    return Misuse(
        f"stage {stage} returned a quantised tensor, of {dtype}, which is no message: return "
        "dequantize(), or its int_repr() and its scale as tensors"
    )


def dtype_is_not_of_nccl(stage: int, dtype: str) -> Misuse:
    return Misuse(
        f"stage {stage} returned a tensor of {dtype}, which the backend nccl cannot send: return it "
        "in another dtype, as torch.int32 or torch.uint8, or use the backend gloo"
    )


# Carries.


def carry_is_not_returned(name: str, kind: str) -> BadModel:
    return BadModel(
        f"the forward of {name} has a parameter carry and returned a {kind}; return a pair: its output, and the "
        "carry for the next slice"
    )
