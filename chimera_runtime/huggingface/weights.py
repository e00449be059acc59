"""Values for the parameters and buffers of a part of a model: from safetensors, or random."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from chimera_runtime.errors import model as mistakes
from chimera_runtime.huggingface.skeleton import LayersReached, Skeleton, apart
from chimera_runtime.values.files import require_regular

# The auxiliary loss of a mixture of experts, whose routers are in many stages.
#
# The loss multiplies two means over the tokens of all layers, so it is not a sum of terms of layers. Each layer adds
# what it contributes to these means, and the sums go on with the hidden states to the last stage.

RoutingSums = tuple[torch.Tensor, ...]
"""Choices (B, E) and probabilities (B, E) of the experts, and the number of routed tokens (B), of each sequence."""


@dataclass(frozen=True)
class Routing:
    """The routers of a model with a mixture of experts, and the settings of their auxiliary loss.

    Routers are the modules of the class ``router``. Their logits are the entry number ``place`` of their result, if
    that is not a tensor. Each token chooses ``chosen`` of ``experts``. ``weight`` is the factor of the auxiliary loss.
    """

    router: type[torch.nn.Module]
    place: int
    experts: int
    chosen: int
    weight: float

    @classmethod
    def of(cls, model: Any, config: Any) -> "Routing | None":
        """Returns the routing of a model if its configuration asks for the auxiliary loss, else None. Raises `Misuse`
        if that loss is not the Switch Transformer's.
        """
        if not getattr(config, "output_router_logits", False):
            return None
        recorder = getattr(model, "_can_record_outputs", {}).get("router_logits")
        router = getattr(recorder, "target_class", recorder)
        if not isinstance(router, type) or not hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func"):
            raise mistakes.does_not_fit(architecture=config.model_type, reason=mistakes.ROUTERS_ARE_UNKNOWN)
        chosen, weight = model.num_experts_per_tok, float(model.router_aux_loss_coef)
        return cls(router, getattr(recorder, "index", 1), model.num_experts, chosen, weight)

    def begin(self, hidden: torch.Tensor) -> RoutingSums:
        """Returns the sums before the first layer."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        by_expert = hidden.new_zeros((len(hidden), self.experts), dtype=dtype)
        return by_expert, by_expert.clone(), hidden.new_zeros(len(hidden), dtype=dtype)

    @contextmanager
    def listening(self, block: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
        """Yields a list that gets the logits (tokens, E) of each router of a layer when it runs."""
        logits: list[torch.Tensor] = []

        def listen(_router: torch.nn.Module, _inputs: Any, result: Any) -> None:
            logits.append(result if isinstance(result, torch.Tensor) else result[self.place])

        hooks = [m.register_forward_hook(listen) for m in block.modules() if isinstance(m, self.router)]
        try:
            yield logits
        finally:
            for hook in hooks:
                hook.remove()

    def add(
        self, sums: RoutingSums, logits: Sequence[torch.Tensor], attention_mask: torch.Tensor | None
    ) -> RoutingSums:
        """Returns ``sums`` with what the logits of further routers contribute; masked tokens contribute nothing."""
        choices, probabilities, tokens = sums
        for of_router in logits:
            shares = torch.softmax(of_router, dim=-1).to(probabilities.dtype).reshape(len(tokens), -1, self.experts)
            counted = shares.new_ones(shares.shape[:2]) if attention_mask is None else attention_mask.to(shares.dtype)
            selected = shares.detach().topk(self.chosen, dim=-1).indices
            by_choice = counted.unsqueeze(-1).expand_as(selected)
            choices = choices.scatter_add(1, selected.flatten(1), by_choice.flatten(1))
            probabilities = probabilities + (shares * counted.unsqueeze(-1)).sum(1)
            tokens = tokens + counted.sum(1)
        return choices, probabilities, tokens

    def loss(self, sums: RoutingSums) -> torch.Tensor:
        """Returns the weighted auxiliary loss: equations 4 to 6 of the Switch Transformer (arXiv:2101.03961)."""
        choices, probabilities, tokens = sums
        total = tokens.sum()
        return self.weight * self.experts * (choices.sum(0) / total * (probabilities.sum(0) / total)).sum()


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
        """The weights of a directory as ``save_pretrained`` writes it, one file before an index, as in
        ``from_pretrained``; None if it has only a configuration. Raises `Misuse` if weights are in files that have to
        be read as a whole.
        """
        single, index = directory / WEIGHTS_FILE, directory / INDEX_FILE
        files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
        if not files and (others := sorted([*directory.glob("pytorch_model*.bin"), *directory.glob("*.pth")])):
            raise mistakes.weights_are_no_safetensors(directory=directory, file=others[0].name)
        if index.is_file() and not single.is_file():
            try:
                places = json.loads(require_regular(index, _LARGEST_INDEX).read_bytes())["weight_map"]
                by_name = {str(name): directory / str(file) for name, file in places.items()}
            except OSError as error:
                raise mistakes.weights_cannot_be_read(file=index, why=mistakes.reason(error)) from error
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise mistakes.weights_cannot_be_read(file=index, why=mistakes.NOT_AN_INDEX) from error
            return cls(directory, by_name, tied)
        by_name = {name: file for file in files for name in _names(file)}
        return cls(directory, by_name, tied) if files else None

    def remarks(self, model: Any, names: Mapping[str, Any]) -> list[str]:
        """Returns what to tell of weights that the model with ``names`` lacks, without those that ``from_pretrained``
        passes over.
        """
        _, is_known = _names_in(model, names)
        passed_over = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), *_NOT_SAVED_ANY_MORE]
        unknown = [
            name
            for name in self.files
            if not is_known(name) and not any(re.search(pattern, name) for pattern in passed_over)
        ]
        return (
            [mistakes.weights_are_unknown(directory=self.where, architecture=type(model).__name__, names=unknown)]
            if unknown
            else []
        )

    def load(self, part: Any) -> None:
        """Gives a part of a model on the meta device its values. Raises `Misuse` if some are missing, or of another
        shape.
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
            name, shape, wanted = min(report.mismatched_keys)
            raise mistakes.weights_have_another_shape(
                directory=self.where, name=name, shape=tuple(shape), wanted=tuple(wanted)
            )
        if missing := sorted(report.missing_keys - {*self.tied}):
            raise mistakes.weights_are_missing(directory=self.where, names=missing)

    @contextmanager
    def _opened(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        with ExitStack() as stack:
            opened = {file: stack.enter_context(_safe_open(file)) for file in {self.files[name] for name in names}}
            try:
                yield {name: opened[self.files[name]].get_slice(name) for name in names}
            except import_module("safetensors").SafetensorError as error:
                raise mistakes.weights_cannot_be_read(file=self.where, why=str(error)) from error


def fill(part: Any, weights: SavedWeights | None = None) -> None:
    """Gives a part of a model on the meta device memory and values: those of ``weights``, else the initial ones.
    Buffers that are not saved, such as the frequencies of rotary embeddings, get theirs in either case.
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
    """Returns how weights of checkpoints become those of a model, and whether a name becomes one of ``state``."""
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
        raise mistakes.weights_cannot_be_read(file=file, why=mistakes.reason(error)) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides the progress bar of transformers: each layer is loaded by itself."""
    logging = import_module("transformers.utils.logging")
    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()


# The modules of a model as layers: what runs before the transformer layers, each of those, and what runs after.

Hidden = torch.Tensor | tuple[torch.Tensor, ...]
"""Hidden states of shape (B, T, width); of a mixture of experts followed by the sums of `Routing`."""


class Embedding(torch.nn.Module):
    """Everything before the transformer layers: tokens of shape (B, T) become hidden states."""

    def __init__(self, skeleton: Skeleton, routing: Routing | None) -> None:
        super().__init__()
        self.model = skeleton.surroundings(skeleton.before, _stop)
        self.training = self.model.training
        self._routing = routing

    def forward(
        self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None, position_ids: torch.Tensor | None = None
    ) -> Hidden:
        """Runs the model's own forward up to its first layer."""
        keywords = _given(attention_mask=attention_mask, position_ids=position_ids)
        try:
            self.model(input_ids=tokens, use_cache=False, **keywords)
        except LayersReached as reached:
            hidden = reached.hidden
        return hidden if self._routing is None else (hidden, *self._routing.begin(hidden))


class TransformerLayer(torch.nn.Module):
    """A transformer layer, with the masks and positions that the model gives it. If it ``checkpoints``, it runs again
    for the backward.
    """

    def __init__(
        self,
        block: torch.nn.Module,
        index: int,
        surroundings: "Surroundings",
        routing: Routing | None,
        checkpoints: bool,
    ) -> None:
        super().__init__()
        self.block = block
        self.training = block.training
        self._index, self._surroundings, self._routing, self._checkpoints = index, surroundings, routing, checkpoints

    def forward(
        self, value: Hidden, attention_mask: torch.Tensor | None = None, position_ids: torch.Tensor | None = None
    ) -> Hidden:
        """Returns hidden states of the same shape; of a mixture of experts with its part of the sums added."""
        hidden, sums = _taken_apart(value)
        tensors = _given(attention_mask=attention_mask, position_ids=position_ids)
        arguments, keywords = self._surroundings.arguments(self._index, hidden, tensors)

        def run(hidden: torch.Tensor, *sums: torch.Tensor) -> Hidden:
            if self._routing is None:
                return _tensor(self.block(hidden, *arguments, **keywords))
            with self._routing.listening(self.block) as logits:
                result = _tensor(self.block(hidden, *arguments, **keywords))
            return result, *self._routing.add(sums, logits, attention_mask)

        if self._checkpoints and torch.is_grad_enabled():
            result: Hidden = checkpoint(run, hidden, *sums, use_reentrant=False)
            return result
        return run(hidden, *sums)


class Head(torch.nn.Module):
    """Everything after the transformer layers: hidden states become logits of shape (B, T, vocabulary)."""

    def __init__(self, skeleton: Skeleton) -> None:
        super().__init__()
        self._injection = _Injection(skeleton.as_result)
        self.model = skeleton.surroundings(skeleton.after, self._injection)
        self.training = self.model.training

    def forward(self, value: Hidden) -> Hidden:
        """Runs the model's own forward from the output of its last layer on; passes on what `Routing` has summed."""
        hidden, sums = _taken_apart(value)
        self._injection.hidden = hidden
        logits: torch.Tensor = self.model(inputs_embeds=hidden, use_cache=False).logits
        self._injection.hidden = None
        return (logits, *sums) if sums else logits


class _Injection:
    """Stand-in for every layer: returns ``hidden`` as the output, in the form in which a layer returns it."""

    def __init__(self, as_result: Callable[[torch.Tensor], Any]) -> None:
        self._as_result = as_result
        self.hidden: torch.Tensor | None = None

    def __call__(self, _index: int, _arguments: tuple[Any, ...], _keywords: dict[str, Any]) -> Any:
        assert self.hidden is not None
        return self._as_result(self.hidden)


class Surroundings:
    """Computes what the model gives to its layers besides hidden states: masks, positions and rotary embeddings.

    They depend on the shape of the hidden states and on keyword arguments, so they are computed once for all layers of
    a stage, and again when these change; in the dtype of hidden states before the first layer.
    """

    def __init__(self, skeleton: Skeleton) -> None:
        self._skeleton = skeleton
        self._model = skeleton.surroundings((), self._visit).eval()
        if not skeleton.is_given:  # else buffers, such as the frequencies of rotary embeddings, have values
            fill(self._model)
        self._of_layers: list[Any] = []
        self._key: tuple[Any, ...] = ()
        self._tensors: dict[str, torch.Tensor] = {}  # the key has their identities, which are valid while they live

    def arguments(self, index: int, hidden: torch.Tensor, tensors: dict[str, torch.Tensor]) -> Any:
        """Returns the positional and the keyword arguments of a layer, except for the hidden states."""
        identities = ((name, id(tensor), tensor._version) for name, tensor in tensors.items())
        key = (hidden.shape, hidden.dtype, hidden.device, *identities)
        if key != self._key:
            self._of_layers.clear()
            with torch.no_grad():
                try:
                    embeddings = hidden.detach().to(self._skeleton.dtype)
                    self._model.to(hidden.device)(inputs_embeds=embeddings, use_cache=False, **tensors)
                except LayersReached:
                    self._key, self._tensors = key, tensors
        return self._of_layers[index]

    def _visit(self, index: int, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        hidden, others = apart(arguments, keywords)
        self._of_layers.append(others)
        if index + 1 == self._skeleton.count:
            raise LayersReached(hidden)
        return self._skeleton.as_result(hidden)


def _stop(_index: int, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    raise LayersReached(apart(arguments, keywords)[0])


def _given(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _taken_apart(value: Hidden) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    return (value, ()) if isinstance(value, torch.Tensor) else (value[0], tuple(value[1:]))


def _tensor(result: Any) -> torch.Tensor:
    hidden: torch.Tensor = result if isinstance(result, torch.Tensor) else result[0]
    return hidden


# Files that ``from_pretrained`` reads in a directory besides weights, and old weights, which it would read, too.

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
ADAPTER_FILE = "adapter_model.safetensors"
GENERATION_FILE = "generation_config.json"

_OLDER = (
    *(INDEX_FILE, "model-*-of-*.safetensors"),
    *("pytorch_model.bin", "pytorch_model-*-of-*.bin", "pytorch_model.bin.index.json"),
    *("adapter_config.json", ADAPTER_FILE, "adapter_model.bin"),
)
"""Weights in other files than `WEIGHTS_FILE`, and an adapter, which ``from_pretrained`` would put upon new weights."""

_OF_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "additional_chat_templates/*"),
    *("vocab.*", "vocab-*", "merges.txt", "bpe.codes", "tekken.json", "*.model", "*.spm", "*.tiktoken", "*.bpe.*"),
)

_OF_OTHERS = (GENERATION_FILE, "*processor_config.json", "audio_tokenizer_config.json", "normalizer.json")
"""Files of generation and of processors, whose code may be in the directory, too: `_OF_CODE`."""

_OF_CODE = ("*.py", "custom_generate/*")


def write_companions(
    directory: Path, source: Path | None, tokenizer: Path | None, save: Callable[[Path], object]
) -> None:
    """Writes what belongs to new weights in a directory, each file as a whole, and removes weights and files of a
    tokenizer of before. ``save`` writes files of the model; others come from ``source`` and ``tokenizer``.
    """
    with TemporaryDirectory(prefix=".writing-", dir=directory) as name:
        new = Path(name)
        save(new)
        for origin, patterns in ((source, (*_OF_OTHERS, *_OF_CODE)), (tokenizer, _OF_TOKENIZER)):
            for file in [] if origin is None else _files(origin, patterns):
                assert origin is not None
                copy = new / file.relative_to(origin)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
        written = [file.relative_to(new) for file in _files(new, ("*", "*/*"))]
        for path in written:
            (directory / path).parent.mkdir(exist_ok=True)
            os.replace(new / path, directory / path)
    if tokenizer is not None:
        for file in _files(directory, _OF_TOKENIZER):
            if file.relative_to(directory) not in written:
                file.unlink()
    _remove_older_weights(directory)


def _remove_older_weights(directory: Path) -> None:
    """Removes weights in other files than `WEIGHTS_FILE`: the index first, so that nothing leads to what is missing."""
    listed: set[str] = set()
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        listed = {*map(str, json.loads((directory / INDEX_FILE).read_bytes())["weight_map"].values())}
    for file in _files(directory, _OLDER):
        file.unlink()
    for name in listed - {WEIGHTS_FILE}:
        if Path(name).name == name and name.endswith(".safetensors"):
            (directory / name).unlink(missing_ok=True)


def _files(directory: Path, patterns: Sequence[str]) -> Iterator[Path]:
    for file in dict.fromkeys(file for pattern in patterns for file in sorted(directory.glob(pattern))):
        if file.is_file() or file.is_symlink():
            yield file
