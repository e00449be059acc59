"""Values for the parameters and buffers of a part of a model: from safetensors, or random."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from chimera_runtime.errors import huggingface as mistakes
from chimera_runtime.huggingface.exported import INDEX_FILE, WEIGHTS_FILE
from chimera_runtime.values.files import require_regular

_LARGEST_INDEX = 2**28

_NOT_SAVED_ANY_MORE = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
"""Buffers that old checkpoints have."""


@dataclass(frozen=True)
class SavedWeights:
    """Weights under the names of a checkpoint, of which a part of a model reads those that it has.

    ``files`` has the file of safetensors of each name. Names and forms of older checkpoints become those of the model,
    as in ``from_pretrained``. ``tied`` are names that a checkpoint may lack, because their values come from another
    part.
    """

    where: Path
    files: Mapping[str, Path]
    tied: Collection[str]

    @classmethod
    def of_directory(cls, directory: Path, tied: Collection[str]) -> "SavedWeights | None":
        """The weights of a directory as ``save_pretrained`` writes it; None if it has only a configuration.

        As in ``from_pretrained``, one file counts before an index, which may be of weights of before.

        Raises `Misuse` if the weights are in files that have to be read as a whole.
        """
        single, index = directory / WEIGHTS_FILE, directory / INDEX_FILE
        files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
        if not files and (others := sorted([*directory.glob("pytorch_model*.bin"), *directory.glob("*.pth")])):
            raise mistakes.weights_are_no_safetensors(directory, others[0].name)
        if index.is_file() and not single.is_file():
            try:
                places = json.loads(require_regular(index, _LARGEST_INDEX).read_bytes())["weight_map"]
                by_name = {str(name): directory / str(file) for name, file in places.items()}
            except OSError as error:
                raise mistakes.weights_cannot_be_read(index, mistakes.reason(error)) from error
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise mistakes.weights_cannot_be_read(index, mistakes.NOT_AN_INDEX) from error
            return cls(directory, by_name, tied)
        by_name = {name: file for file in files for name in _names(file)}
        return cls(directory, by_name, tied) if files else None

    def remarks(self, model: Any, names: Mapping[str, Any]) -> list[str]:
        """Returns what to tell of weights that a model with parameters and buffers of these ``names`` does not have.

        It is nothing of those that ``from_pretrained`` passes over, such as the frequencies of rotary embeddings.
        """
        _, is_known = _names_in(model, names)
        passed_over = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), *_NOT_SAVED_ANY_MORE]
        unknown = [
            name
            for name in self.files
            if not is_known(name) and not any(re.search(pattern, name) for pattern in passed_over)
        ]
        return [mistakes.weights_are_unknown(self.where, type(model).__name__, unknown)] if unknown else []

    def load(self, part: Any) -> None:
        """Gives a part of a model on the meta device its values.

        Raises `Misuse` if some are missing, or have another shape than the part.
        """
        conversions, is_known = _names_in(part, part.state_dict())
        wanted = [name for name in self.files if is_known(name)]
        with self._opened(wanted) as tensors:
            config = import_module("transformers.modeling_utils").LoadStateDictConfig(weight_mapping=conversions)
            with _quiet():
                report, _ = _loading().convert_and_load_state_dict_in_model(
                    part, tensors, config, disk_offload_index=None
                )
        if report.mismatched_keys:
            raise mistakes.weights_have_another_shape(self.where, *min(report.mismatched_keys))
        if missing := sorted(report.missing_keys - {*self.tied}):
            raise mistakes.weights_are_missing(self.where, missing)

    @contextmanager
    def _opened(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Tensors by name, which are read when they are used."""
        with ExitStack() as stack:
            opened = {file: stack.enter_context(_safe_open(file)) for file in {self.files[name] for name in names}}
            try:
                yield {name: opened[self.files[name]].get_slice(name) for name in names}
            except import_module("safetensors").SafetensorError as error:
                raise mistakes.weights_cannot_be_read(self.where, str(error)) from error


def fill(part: Any, weights: SavedWeights | None = None) -> None:
    """Gives a part of a model on the meta device memory and values: those of ``weights``, else the initial ones.

    Initial values are drawn as the architecture draws them. Buffers that are not saved, such as the frequencies of
    rotary embeddings, get their values in either case.
    """
    if weights is not None:
        weights.load(part)
    for module in part.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and tensor.is_meta:
                    memory = torch.empty_like(tensor, device="cpu")
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    held[name] = torch.nn.Parameter(memory, tensor.requires_grad) if is_parameter else memory
    part.initialize_weights()


def _names_in(model: Any, state: Mapping[str, Any]) -> tuple[Any, Callable[[str], bool]]:
    """Returns how weights of checkpoints become those of a model, and whether a name there becomes one of ``state``."""
    loading = _loading()
    conversions = import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, loading.WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, loading.WeightConverter)]

    def is_known(name: str) -> bool:
        renamed, _ = loading.rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        return renamed in state or name in state

    return conversions, is_known


def _loading() -> Any:
    return import_module("transformers.core_model_loading")


def _names(file: Path) -> list[str]:
    with _safe_open(file) as opened:
        return [*opened.keys()]


def _safe_open(file: Path) -> Any:
    safetensors = import_module("safetensors")
    try:
        return safetensors.safe_open(require_regular(file), framework="pt")
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise mistakes.weights_cannot_be_read(file, mistakes.reason(error)) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides the progress bar that transformers shows when it loads: each layer is loaded by itself."""
    logging = import_module("transformers.utils.logging")
    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()
