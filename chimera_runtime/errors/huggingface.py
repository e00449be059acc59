"""Messages about models of transformers: their configuration, their weights, and architectures that do not fit."""

from collections.abc import Sequence
from pathlib import Path

from chimera_runtime.errors import Misuse

NOT_INSTALLED = "models of transformers need the package transformers: pip install 'chimera_ir[hf]'"


_LONGEST_WORDS = 300


def reason(error: Exception) -> str:
    """The words of an error, of any number of lines, as part of a sentence."""
    words = " ".join((getattr(error, "strerror", None) or str(error)).split())
    words = words if isinstance(error, OSError) or len(words.split()) > 2 else f"{type(error).__name__} {words}"
    return words if len(words) <= _LONGEST_WORDS else f"{words[:_LONGEST_WORDS]} .."


def source_cannot_be_read(source: str, why: str) -> Misuse:
    return Misuse(
        f"{source}: {why}; give a directory with config.json, a configuration file, or the name of a model of the hub"
    )


# Architectures that do not fit.

QUANTIZED = "its weights are quantized, so that they have no gradients"
LAYERS_SEE_TOKENS = "its layers get something that is computed from the tokens, not only hidden states"
ROUTERS_ARE_UNKNOWN = (
    "its auxiliary loss is not the one that output_router_logits asks for in other mixtures of experts"
)
NO_LOGITS = "its result has no logits (B, T, vocabulary), as that of a causal language model has"


def does_not_fit(architecture: str, reason: str) -> Misuse:
    return Misuse(
        f"the architecture {architecture} cannot be cut into layers: {reason}; write a model file for it, in which "
        "build_stage(stage, num_stages) says what a stage is"
    )


def no_list_of_layers(count: int) -> str:
    return f"it has {count} lists of num_hidden_layers layers, not one"


def layers_are_skipped(reached: int, count: int) -> str:
    return f"its forward runs {reached} of its {count} layers"


def runs_between_layers(name: str) -> str:
    return f"{name} runs between its layers"


def makes_no_model(error: Exception) -> str:
    return f"its configuration makes no model ({reason(error)})"


def layer_gets_something_else(index: int) -> str:
    return f"layer {index} gets something else than the output of the layer before"


def layer_gets_a_value_of_weights(index: int) -> str:
    return f"layer {index} gets, besides hidden states, a value that is computed with weights outside the layer"


def module_has_no_side(name: str) -> str:
    return f"{name} has parameters and does not run either before its layers or after them"


def forward_fails(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"its forward fails on shapes alone ({type(error).__name__}: {first})"


# Models that are handed over.

WITHOUT_DEVICE_MAP = "load it without device_map: each rank moves its own layers to its device"
HOOK_ON_LAYERS = "register it on a transformer layer, or on a module inside or outside of one, which run as they are"
FORWARD_IS_NOT_CUT = "write a model file for it, in which build_stage(stage, num_stages) says what a stage is"
COMPILE_LAYERS = "compile the transformer layers instead: for layer in model.model.layers: layer.compile()"
LOSS_OF_ONES_OWN = "give the Pipeline a loss of your own in place of model.loss, and leave that of the model as it is"
CHECKPOINTS = (
    "call gradient_checkpointing_disable(), and layers(.., checkpoints=True), or "
    "gradient_checkpointing_enable({'use_reentrant': False})"
)


def place(name: str, module: object) -> str:
    """Words for a module, such as ``model.decoder (OPTDecoder)``."""
    kind = type(module).__name__
    return f"{name} ({kind})" if name else f"the model ({kind})"


def model_cannot_be_kept(obstacle: str, remedy: str) -> Misuse:
    return Misuse(f"huggingface.layers(model): {obstacle}, which its layers in stages would leave out; {remedy}")


def model_is_wrapped(kind: str) -> Misuse:
    return Misuse(
        f"huggingface.layers(model): a {kind} is not a model of transformers; give the model itself, before it is "
        "compiled or wrapped"
    )


def adapter_is_not_lora(kind: str) -> Misuse:
    return Misuse(
        f"huggingface.layers(model): an adapter of peft is {kind}, which layers in stages do not know; use LoraConfig, "
        "or train it with peft in one process"
    )


def model_is_quantized(architecture: str) -> Misuse:
    return Misuse(
        f"huggingface.layers(model): the weights of this {architecture} are quantized, so that they have no gradients; "
        "load it without quantization_config"
    )


def tie_is_not_of_the_library(first: str, other: str) -> Misuse:
    return Misuse(
        f"huggingface.layers(model): {first} and {other} are one parameter, which from_pretrained would not know; give "
        "each its own"
    )


# Weights.

NOT_AN_INDEX = "it does not say which file has which weight"


def weights_are_missing(directory: Path, names: Sequence[str]) -> Misuse:
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return Misuse(f"{directory}: its safetensors have no {names[0]}{others}, which the configuration asks for")


def weights_are_unknown(directory: Path, architecture: str, names: Sequence[str]) -> str:
    others = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"{directory}: {architecture} has no {', '.join(names[:3])}{others}, which the checkpoint has: they are "
        "neither trained nor exported"
    )


def weights_have_another_shape(directory: Path, name: str, shape: Sequence[int], wanted: Sequence[int]) -> Misuse:
    return Misuse(f"{directory}: {name} has the shape {tuple(shape)}, and by the configuration {tuple(wanted)}")


def weights_are_no_safetensors(directory: Path, file: str) -> Misuse:
    return Misuse(
        f"{directory} has {file} and no safetensors, of which a rank can read its part: convert it with "
        "from_pretrained(..).save_pretrained(..)"
    )


def weights_cannot_be_read(file: Path, why: str) -> Misuse:
    return Misuse(f"{file}: {why}")


# Text.


def text_cannot_be_read(path: Path, why: str) -> Misuse:
    return Misuse(f"--text {path}: {why}")


def text_is_too_short(path: Path, tokens: int, length: int) -> Misuse:
    return Misuse(
        f"--text {path}: it has {tokens} tokens, and the fewest are {2 * length}, two items (--length {length})"
    )


def tokens_are_outside(path: Path, largest: int, size: int) -> Misuse:
    return Misuse(
        f"--text {path}: token {largest} is outside the model's vocabulary of {size}: give the tokenizer of the model "
        "with --tokenizer DIR"
    )


def tokenizer_cannot_be_read(path: Path, why: str) -> Misuse:
    return Misuse(f"--tokenizer {path}: {why}")


def sequence_is_too_long(length: int, most: int) -> Misuse:
    return Misuse(f"--length {length}: the model has {most} positions")
