"""Messages of the state of a pipeline: what cannot be saved or loaded, and files of weights."""

from pathlib import Path

from chimera_runtime.errors import BadCheckpoint, Misuse

NOT_REGULAR = "it is no regular file"
NOT_OF_SAFETENSORS = "and safetensors has tensors alone: choose another suffix"
NOT_WEIGHTS_ONLY = (
    "which torch.load does not read with weights_only=True: keep tensors, numbers, texts, lists or dicts of these there"
)
TORCH_CANNOT_READ = "it is no state dict that torch.load reads with weights_only=True"
NOT_A_STATE_DICT = "it is no state dict: one has tensors by their names, and nothing else"
SAFETENSORS_IS_NOT_INSTALLED = "files of safetensors need a package: pip install safetensors, or choose another suffix"

# ---- parameters, buffers and further state of modules


def state_lacks(name: str) -> BadCheckpoint:
    return BadCheckpoint(f"the state has no {name}, which this rank holds")


def parameter_is_unknown(name: str, stage: int) -> Misuse:
    return Misuse(
        f"{name} of stage {stage} is not a parameter that the pipeline was made with, so nothing would train it: add "
        "adapters, replace modules and call load_state_dict(assign=True) in build_stage; afterwards load with "
        "pipe.load_weights, or load_state_dict without assign, which copy"
    )


def file_lacks_parameter(name: str, nearest: list[str]) -> BadCheckpoint:
    hint = f"; the nearest is {nearest[0]}" if nearest else ""
    return BadCheckpoint(f"it has no parameter {name}{hint}")


def stage_refuses_its_state(stage: int, words_of_torch: str) -> BadCheckpoint:
    words = " ".join(line.strip() for line in words_of_torch.splitlines())
    return BadCheckpoint(f"stage {stage} does not take what it has in its own state_dict: {words}")


def cannot_be_saved(what: str, error: Exception) -> Misuse:
    return Misuse(f"{what} cannot be saved: {type(error).__name__}: {error}")


def entry_differs_in_file(name: str, in_file: object, here: object) -> BadCheckpoint:
    """An entry differs from the model's: ``in_file`` and ``here`` are its shapes, or say what it is in each."""
    return BadCheckpoint(f"{name} is {in_file} in it, and {here} in this model")


# ---- averages of the weights


def average_has_unknown_key(what: str, key: object) -> Misuse:
    return Misuse(
        f"{what} has {key!r}: give tensors by the names of pipe.named_parameters(), or modules by the numbers of "
        "pipe.stages"
    )


def average_is_not_of_a_parameter(what: str, name: str) -> Misuse:
    return Misuse(
        f"{what} has {name}, which is not a tensor in the shape of a parameter of pipe.named_parameters(): shared= or "
        "of_rank= keep anything else that has a state_dict"
    )


def average_has_unknown_parameter(what: str, name: str, stage: int) -> Misuse:
    return Misuse(f"{what} has the parameter {name} of stage {stage}, which that stage has not")


# ---- files of weights


def weights_cannot_be_written(path: Path, reason: str) -> BadCheckpoint:
    return BadCheckpoint(f"{path} cannot be written: {reason}")


def export_has_failed(complaint: str) -> BadCheckpoint:
    return BadCheckpoint(complaint)


def directory_is_missing(path: Path) -> BadCheckpoint:
    return weights_cannot_be_written(path, f"there is no directory {path.parent}")


def entry_cannot_be_exported(name: str, kind: str, why: str) -> BadCheckpoint:
    return BadCheckpoint(f"{name}, which the model has in its state_dict, is a {kind}, {why}")


def weights_cannot_be_read(error: OSError) -> BadCheckpoint:
    return BadCheckpoint(error.strerror or str(error))


def not_safetensors(error: Exception) -> BadCheckpoint:
    return BadCheckpoint(f"it is no file of safetensors: {error}")
