"""Messages about model files: their functions, layers, stages, ties and names."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from chimera_runtime.errors import Misuse, worded

# Messages about models of transformers: their configuration, their weights, and architectures that do not fit.

NOT_INSTALLED = "models of transformers need the package transformers: pip install 'chimera_ir[hf]'"
_LONGEST_WORDS = 300


def reason(error: Exception) -> str:
    """The words of an error, of any number of lines, as part of a sentence."""
    words = " ".join((getattr(error, "strerror", None) or str(error)).split())
    words = words if isinstance(error, OSError) or len(words.split()) > 2 else f"{type(error).__name__} {words}"
    return words if len(words) <= _LONGEST_WORDS else f"{words[:_LONGEST_WORDS]} .."


source_cannot_be_read = Misuse.worded(
    "{source}: {why}; give a directory with config.json, a configuration file, or the name of a model of the hub"
)

# Architectures that do not fit.

QUANTIZED = "its weights are quantized, so that they have no gradients"
LAYERS_SEE_TOKENS = "its layers get something that is computed from the tokens, not only hidden states"
ROUTERS_ARE_UNKNOWN = (
    "its auxiliary loss is not the one that output_router_logits asks for in other mixtures of experts"
)
NO_LOGITS = "its result has no logits (B, T, vocabulary), as that of a causal language model has"
does_not_fit = Misuse.worded(
    "the architecture {architecture} cannot be cut into layers: {reason}; write a model file for it, in which "
    "build_stage(stage, num_stages) says what a stage is"
)
no_list_of_layers = worded("it has {count} lists of num_hidden_layers layers, not one")
layers_are_skipped = worded("its forward runs {reached} of its {count} layers")
runs_between_layers = worded("{name} runs between its layers")


def makes_no_model(error: Exception) -> str:
    return f"its configuration makes no model ({reason(error)})"


layer_gets_something_else = worded("layer {index} gets something else than the output of the layer before")
layer_gets_a_value_of_weights = worded(
    "layer {index} gets, besides hidden states, a value that is computed with weights outside the layer"
)
module_has_no_side = worded("{name} has parameters and does not run either before its layers or after them")


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


model_cannot_be_kept = Misuse.worded(
    "huggingface.layers(model): {obstacle}, which its layers in stages would leave out; {remedy}"
)
model_is_wrapped = Misuse.worded(
    "huggingface.layers(model): a {kind} is not a model of transformers; give the model itself, before it is compiled "
    "or wrapped"
)
adapter_is_not_lora = Misuse.worded(
    "huggingface.layers(model): an adapter of peft is {kind}, which layers in stages do not know; use LoraConfig, or "
    "train it with peft in one process"
)
model_is_quantized = Misuse.worded(
    "huggingface.layers(model): the weights of this {architecture} are quantized, so that they have no gradients; load "
    "it without quantization_config"
)
tie_is_not_of_the_library = Misuse.worded(
    "huggingface.layers(model): {first} and {other} are one parameter, which from_pretrained would not know; give each "
    "its own"
)

# Weights.

NOT_AN_INDEX = "it does not say which file has which weight"
weights_are_missing = Misuse.worded(
    "{directory}: its safetensors have no {names:first 1}, which the configuration asks for"
)
weights_are_unknown = worded(
    "{directory}: {architecture} has no {names:first 3}, which the checkpoint has: they are neither "
    "trained nor exported"
)
weights_have_another_shape = Misuse.worded(
    "{directory}: {name} has the shape {shape}, and by the configuration {wanted}"
)
weights_are_no_safetensors = Misuse.worded(
    "{directory} has {file} and no safetensors, of which a rank can read its part: convert it with "
    "from_pretrained(..).save_pretrained(..)"
)
weights_cannot_be_read = Misuse.worded("{file}: {why}")

# Text.

text_cannot_be_read = Misuse.worded("--text {path}: {why}")
text_is_too_short = Misuse.worded(
    "--text {path}: it has {tokens} tokens, and the fewest are {fewest}, two items (--length {length})"
)
tokens_are_outside = Misuse.worded(
    "--text {path}: token {largest} is outside the model's vocabulary of {size}: give the tokenizer of the model with "
    "--tokenizer DIR"
)
tokenizer_cannot_be_read = Misuse.worded("--tokenizer {path}: {why}")
sequence_is_too_long = Misuse.worded("--length {length}: the model has {most} positions")
NOT_REGULAR = "it is no regular file"
NOT_PYTHON = "not a Python file (its name must end in .py)"
NO_LAYERS = "layers: the list is empty; a model has one layer at least"

# The file and its functions.

file_cannot_be_read = Misuse.worded("model file {path}: {why}")


def text_is_not_python(
    path: Path, kind: str, why: str, *, line_number: int | None, line: str | None, column: int | None
) -> Misuse:
    """The error of a file with its line and a caret below the column, as Python shows it."""
    message = f"{path}{'' if line_number is None else f':{line_number}'}: {kind}: {why}"
    if line is None or column is None:
        return Misuse(message)
    text = line.strip()
    indent = len(line.rstrip()) - len(text)
    return Misuse(f"{message}\n  {text}\n  {' ' * max(0, column - 1 - indent)}^")


functions_are_missing = Misuse.worded("{path} lacks the {functions:function}")
nothing_takes_args = Misuse.worded(
    "{path}: none of its functions takes args, so nothing reads what follows -- on the command line: give one of them "
    "a parameter args, or leave the words out"
)


def parameter_is_unknown(file: Path, function: str, names: Iterable[str], offered: Iterable[str]) -> Misuse:
    return Misuse(
        f"{file}: {function} takes {', '.join(names)}, which it is not given: "
        f"by name it may take {', '.join(offered) or 'nothing here'}"
    )


tied_is_not_a_function = Misuse.worded(
    "{path}: tied is {kind}, not a function: def tied(num_stages: int) -> list[list[tuple]]"
)
result_is_wrong = Misuse.worded("{file}: {call} returned {kind}, not {wanted}")

# Layers and splits.

layers_and_build_stage = Misuse.worded(
    "{file} has both layers and build_stage: each says what the stages are; keep one, or rename it"
)
layers_is_not_a_function = Misuse.worded("{file}: layers is {kind}, not a function: def layers() -> list[Callable]")
split_without_layers = Misuse.worded(
    "--split: the build_stage of {path} decides what a stage is; with layers() in its place a split does"
)


def build_stage_is_wrong(kind: str, *, is_list: bool) -> Misuse:
    remedy = (
        "for layers write Layers(layers()), the functions that make them"
        if is_list
        else "give a function build_stage(stage, num_stages), or the Layers that stages are made of"
    )
    return Misuse(f"build_stage is {kind}: {remedy}")


layer_is_made_already = Misuse.worded(
    "layers: layer {index} is a {kind} itself; list functions that make the layers, as in [lambda: {kind}(..)], so "
    "that a rank builds only those of its stages"
)


split_is_no_list = Misuse.worded(
    "split=: it lists the number of the first layer of each stage, as [0, 3, 6] does, and is of type {kind}"
)
split_has_no_number = Misuse.worded(
    "split=: it lists the number of the first layer of each stage, as [0, 3, 6] does, and {layer!r} of type "
    "{layer.__class__.__name__} is no number of a layer"
)
split_does_not_begin_with_0 = Misuse.worded(
    "split {split:joined}: it lists the first layer of each stage, so it begins with 0"
)
split_does_not_ascend = Misuse.worded(
    "split {split:joined}: {layer} is not behind the layer before it; every stage has one layer at least"
)
split_goes_too_far = Misuse.worded(
    "split {split:joined}: there is no layer {layer}; there are the layers 0 to {layers:last}"
)
split_is_for_other_stages = Misuse.worded(
    "split {split:joined}: it begins the stages 0 to {split:last}, and the schedule has the stages 0 to {stages:last}; "
    "list the first layer of each"
)
layers_are_too_few = Misuse.worded(
    "layers: the schedule has the stages 0 to {stages:last}, and there are the layers 0 to {layers:last}: a stage has "
    "one layer at least; compile for fewer stages"
)

# Stages and what they return.

parameters_are_lazy = Misuse.worded("{file}: stage {stage} has lazy parameters; give every layer its sizes")
stage_is_spread = Misuse.worded("{file}: stage {stage} uses {wrapper}")
tensor_is_elsewhere = Misuse.worded(
    "{file}: stage {stage} has {name} on {place}, and its rank computes on {device}: build it on the CPU, from where "
    "it is moved, and leave the choice of a device to the pipeline (in train.py to --device)"
)
tensor_does_not_move = Misuse.worded(
    "{file}: stage {stage} has {name} on {place}, also after module.to({device!r}): a stage has to be one that moves "
    "as a whole"
)
loss_is_no_number = Misuse.worded(
    "{file}: loss returned {kind}; return the mean over the micro-batch, a tensor of one number, or (sum, count)"
)
count_is_no_number = Misuse.worded("{file}: loss returned {kind} as the count; return (sum, count), two numbers")


def output_has_no_form(file: Path, stage: int, kind: str, inside: str | None) -> Misuse:
    entry = "" if inside is None else f" with {inside} in it"
    return Misuse(
        f"{file}: stage {stage} returned {kind}{entry}; return a tensor, or tensors in "
        "tuples, lists and dicts; beside them there may be None, numbers and texts that are always the same"
    )


output_is_spread = Misuse.worded(
    "{file}: stage {stage} returned a DTensor; return plain tensors, the same on all ranks that the stage is spread "
    "over, as RowwiseParallel does by default and full_tensor() otherwise"
)

# Names of parameters.

names_are_equal = worded(
    "{file}: name gives {name} to {first} and to {second}: give each parameter, buffer or further entry a name of its "
    "own, as by the number of the stage or layer; if they are one parameter, declare it in tied(num_stages)"
)
names_differ = worded(
    "{file}: name gives {entry} the name {name} on rank {ranks[0]} and {other_name} on rank {ranks[1]}: let it depend "
    "on its two arguments alone"
)

# Ties.

Stages = tuple[int, ...]


def _options(ties: Iterable[Sequence[int]]) -> str:
    return " ".join(f"--tied {','.join(map(str, tie))}" for tie in ties)


def _ties_text(ties: Iterable[Stages]) -> str:
    groups = [" and ".join(map(str, tie)) for tie in ties]
    return f"ties stages {', and '.join(groups)}" if groups else "ties no stages"


def ties_differ(file: Path, program: str, declared: Sequence[Stages], compiled: Iterable[Stages]) -> Misuse:
    options = _options(sorted(declared)) or "no --tied"
    return Misuse(
        f"{file}: {_ties_text(declared)}, and {program} was compiled for a model that {_ties_text(compiled)}: "
        f"compile it again with {options}"
    )


ties_have_no_form = Misuse.worded(
    '{file}: tied({stages}) returned {returned!r:.80}: return lists of ends, as in [[(0, "embedding.weight"), ({last}, '
    '"head.weight")]]'
)
tied_number_does_not_exist = Misuse.worded(
    "{file}: tied({stages}) names {kind} {number}; there are the {kind}s 0 to {count:last}"
)


def tie_is_inside_one(file: Path, stages: int, kind: str, ends: Sequence[tuple[int, str]]) -> Misuse:
    where = "in build_stage" if kind == "stage" else "where it is made"
    return Misuse(f"{file}: tied({stages}): {ends} are not in two {kind}s; tie parameters of one {where}")


end_is_listed_twice = Misuse.worded(
    "{file}: tied({stages}) names {end} twice; list all ends of a parameter together, once"
)


def tied_parameter_is_missing(file: Path, name: str, place: str, *, suggestion: str | None) -> Misuse:
    advice = "it has no parameters" if suggestion is None else f"did you mean {suggestion}?"
    return Misuse(f"{file}: tied names {name!r} in {place}, which has no such parameter ({advice})")


tied_parameter_is_spread = Misuse.worded(
    "{file}: tied names {parameter}, a DTensor; parameters that are tied cannot be spread"
)
ends_differ = Misuse.worded(
    "{file}: tied names {first}, which is {traits}, and {other}, which is {other_traits}; let them be alike"
)


def declaration_of_ties(ties: Sequence[Sequence[str]], stages: Iterable[Sequence[int]]) -> str:
    """What declares ties, which have ends as Python writes them, in these stages. Long lists are cut."""
    listed = ", ".join(_shortened([f"[{', '.join(_shortened(ends))}]" for ends in ties]))
    options = _options(tie for tie in sorted({*map(tuple, stages)}) if len(tie) > 1)
    return f"write `def tied(num_stages): return [{listed}]`{options and f' and compile with {options}'}"


_LONGEST = 4
"""Most items of a list that a message has in full."""


def _shortened(items: Sequence[str]) -> Sequence[str]:
    return items if len(items) <= _LONGEST else [*items[: _LONGEST - 2], "..", items[-1]]


def tie_is_not_declared(file: Path, kind: str, parameter: str, *, places: str, declaration: str) -> Misuse:
    maker = "build_stage" if kind == "stage" else "the functions of layers()"
    return Misuse(
        f"{file}: {places} share the parameter {parameter}, and nothing says so: "
        f"{declaration}; or let {maker} make new modules every time"
    )


def values_are_equal(file: Path, parameters: Sequence[str], further: int, declaration: str) -> str:
    """A remark: ``parameters`` have equal initial values, and so have the parameters of ``further`` groups."""
    *most, last = _shortened(parameters)
    more = f" (and so do those of {further} more group{'s' if further > 1 else ''} of parameters)" if further else ""
    return (
        f"{file}: {', '.join(most)} and {last} begin with equal values{more}, and each is trained by itself: if the "
        f"model has one parameter there, {declaration}; if they only begin equal, as copies or draws from one seed, "
        "leave it so"
    )


def tied_weights_key_is_not_declared(
    file: Path, kind: str, number: int, *, parameter: str, partner: str, end: str, stage: int
) -> Misuse:
    return Misuse(
        f"{file}: {parameter} of {kind} {number} is tied by _tied_weights_keys to {partner}, which is "
        f"in another {kind}: write `def tied(num_stages): return [[({kind.upper()}, NAME), "
        f"{end}]]` with the {kind} and the name of the other end, and compile with "
        f"--tied STAGE,{stage}"
    )
