"""A causal language model of transformers as `Layers`, with its ties, names, loss, reference and export."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from chimera_runtime.errors import Misuse
from chimera_runtime.errors import model as mistakes
from chimera_runtime.errors.stage import weights_cannot_be_written
from chimera_runtime.huggingface.skeleton import (
    Skeleton,
    TextItems,
    adapters,
    given,
    has_tokenizer,
    names_of_adapter,
    read_text,
)
from chimera_runtime.huggingface.weights import (
    ADAPTER_FILE,
    GENERATION_FILE,
    WEIGHTS_FILE,
    Embedding,
    Head,
    Routing,
    SavedWeights,
    Surroundings,
    TransformerLayer,
    fill,
    write_companions,
)
from chimera_runtime.model.model import Layers, ModelFile
from chimera_runtime.values.files import require_regular

IGNORED = -100
"""The label of a token that does not count in the loss."""

_LARGEST_CONFIG = 2**26
_OF_HUB = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.spm", "*.tiktoken", "*.py"]


@dataclass(frozen=True)
class TransformerLayers(Layers):
    """A causal language model of transformers: its embeddings, each of its transformer layers, and its head.

    It is used as `Layers` are; its methods are further arguments of a `Pipeline`::

        model = huggingface.layers("path/of/model")
        with Pipeline("chimera.out", model, model.loss, example, tied=model.tied, name=model.name) as pipe:

    An item is tokens of shape (T), labels of the same shape and, if some tokens are padding, a dict with their
    ``attention_mask``. ``position_ids`` may be in that dict as well.
    """

    skeleton: Skeleton = field(kw_only=True, repr=False)
    routing: Routing | None = field(kw_only=True, repr=False)
    directory: Path | None = field(default=None, kw_only=True)
    tokenizer: Path | None = field(default=None, kw_only=True)

    @property
    def config(self) -> Any:
        """The configuration object of the transformers library."""
        return self.skeleton.config

    def tied(self, _num_stages: int) -> list[list[tuple[int, str]]]:
        """The parameters that layers share: in most models with ties, the embeddings and the projection to words."""
        ends = 0, self.skeleton.count + 1
        return [
            [(layer, f"{'model' if layer in ends else 'block'}.{name}") for layer, name in tie]
            for tie in self.skeleton.ties
        ]

    def name(self, layer: int, parameter: str) -> str:
        """Returns the name that a parameter of a layer has in the transformers library."""
        inside = parameter.partition(".")[2]
        is_end = layer in (0, self.skeleton.count + 1)
        return inside if is_end else f"{self.skeleton.path}.{layer - 1}.{inside}"

    def loss(self, output: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross entropy of every label after the first by the logits before it, in nats: its sum, and their number.

        Labels of -100 do not count. The auxiliary loss of a mixture of experts, where the configuration has
        ``output_router_logits``, is added to the mean.
        """
        logits, *sums = (output,) if isinstance(output, torch.Tensor) else output
        predicted, following = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        predicted = predicted.to(torch.promote_types(predicted.dtype, torch.float32))
        total = torch.nn.functional.cross_entropy(predicted, following, reduction="sum", ignore_index=IGNORED)
        count = (following != IGNORED).sum()
        if self.routing is not None:
            choices, probabilities, tokens = sums
            total = total + self.routing.loss((choices, probabilities, tokens)) * count
        return total, count

    def reference(self) -> torch.nn.Module:
        """The model of transformers in one piece, which returns what the last layer returns."""
        if self.skeleton.is_given:
            model = deepcopy(self.skeleton.model)
        else:
            with torch.device("cpu"):
                automatic = import_module("transformers").AutoModelForCausalLM
                model = automatic.from_config(deepcopy(self.config), dtype=self.skeleton.model.dtype)
        routing = self.routing

        def forward(
            tokens: torch.Tensor,
            attention_mask: torch.Tensor | None = None,
            position_ids: torch.Tensor | None = None,
            *,
            whole: Callable[..., Any] = model.forward,
        ) -> Any:
            result = whole(input_ids=tokens, attention_mask=attention_mask, position_ids=position_ids, use_cache=False)
            if routing is None:
                return result.logits
            return result.logits, *routing.add(routing.begin(result.logits), result.router_logits, attention_mask)

        model.forward = forward
        return model  # type: ignore[no-any-return]

    def export(self, pipe: Any, directory: Path | str) -> None:
        """Writes the model of a pipeline as a directory that ``from_pretrained`` reads; every rank must call it.

        The directory also gets the files of the tokenizer, the processor and generation, if the model came from a
        directory that has them. Weights that are there in other files are removed once the new ones are written. Of a
        model with adapters of peft only these are written, as ``PeftModel.from_pretrained`` reads them.
        """
        directory = Path(directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise weights_cannot_be_written(path=directory, reason=str(error.strerror)) from error
        if found := adapters(self.skeleton.model):
            self._export_adapters(pipe, directory, found)
            return
        pipe.export_weights(directory / WEIGHTS_FILE)
        if pipe.copy == pipe.worker == 0:
            self.describe(directory)

    def _export_adapters(self, pipe: Any, directory: Path, found: dict[str, Any]) -> None:
        for name, adapter in found.items():
            folder = directory if name == "default" else directory / name
            folder.mkdir(exist_ok=True)
            pipe.export_weights(folder / ADAPTER_FILE, names_of_adapter(self.skeleton.model, name))
            if pipe.copy == pipe.worker == 0:
                written = deepcopy(adapter)
                written.inference_mode = True
                written.base_model_name_or_path = adapter.base_model_name_or_path or self.skeleton.model.name_or_path
                written.save_pretrained(folder)

    def describe(self, directory: Path) -> None:
        """Writes the files, other than weights, that ``from_pretrained`` reads, and removes other weights. Raises
        `BadCheckpoint` if a file cannot be written.
        """

        def save(new: Path) -> None:
            config = deepcopy(self.config)
            model = self.skeleton.model
            config.architectures, config.dtype = [type(model).__name__], model.dtype
            if self.skeleton.is_given:
                config.tie_word_embeddings = any(0 in map(itemgetter(0), ends) for ends in self.skeleton.ties)
            config.save_pretrained(new)
            has_own = self.directory is not None and (self.directory / GENERATION_FILE).is_file()
            if not has_own and (generation := getattr(model, "generation_config", None)) is not None:
                generation.save_pretrained(new)

        source = None if self.directory is None else self.directory.resolve()
        tokenizer = source if self.tokenizer is None else self.tokenizer.resolve()
        here = directory.resolve()
        try:
            write_companions(here, None if source == here else source, None if tokenizer == here else tokenizer, save)
        except (OSError, ValueError) as error:
            raise weights_cannot_be_written(
                path=directory, reason=getattr(error, "strerror", None) or str(error)
            ) from error


def layers(
    source: Any,
    *,
    dtype: torch.dtype | None = None,
    checkpoints: bool = False,
    split: Sequence[int] | None = None,
) -> TransformerLayers:
    """Returns a causal language model of transformers as layers.

    Layer 0 is everything up to the first transformer layer; the last layer is everything behind them.

    Parameters
    ----------
    source
        A configuration, whose weights will be random; a model, whose own modules the layers then are, with all that was
        changed in them; or the path of a directory, or the name of a model of the hub. A rank reads only the weights of
        its layers from safetensors. A directory without weights, or the path of a configuration file, is a
        configuration.
    dtype
        Of the parameters; if it is None, those of a model, else torch's default dtype.
    checkpoints
        Whether each transformer layer keeps only its input, and runs again for the backward.
    split
        The first layer of each stage, as for `Layers`.

    Raises
    ------
    Misuse
        If the source cannot be read, the architecture cannot be cut, transformers is not installed, or the layers
        would leave out something that was changed in a model.
    """
    transformers = library()
    directory: Path | None = None
    weights: SavedWeights | None = None
    if isinstance(source, torch.nn.Module):
        skeleton = given(source, dtype)
        origin = Path(str(skeleton.model.name_or_path or ""))
        directory = origin if (origin / "config.json").is_file() else None
    else:
        is_config = isinstance(source, transformers.PretrainedConfig)
        directory, config = (None, source) if is_config else read_config(source)
        skeleton = Skeleton.of_config(config, torch.get_default_dtype() if dtype is None else dtype)
        if directory is not None:
            weights = SavedWeights.of_directory(directory, skeleton.tied_names)
    routing = Routing.of(skeleton.model, skeleton.config)
    remarks = [] if weights is None else weights.remarks(skeleton.model, skeleton.names)

    surroundings = Surroundings(skeleton)

    def filled(part: Embedding | Head) -> torch.nn.Module:
        if not skeleton.is_given:
            fill(part.model, weights)
        return part

    def layer(index: int) -> torch.nn.Module:
        block = skeleton.block(index)
        if not skeleton.is_given:
            model = skeleton.with_layer(index)
            fill(model, weights)
            block = model.get_submodule(f"{skeleton.path}.{index}")
        return TransformerLayer(block, index, surroundings, routing, checkpoints)

    makers: list[Callable[[], torch.nn.Module]] = [
        lambda: filled(Embedding(skeleton, routing)),
        *(partial(layer, index) for index in range(skeleton.count)),
        lambda: filled(Head(skeleton)),
    ]
    return TransformerLayers(makers, split, remarks=remarks, skeleton=skeleton, routing=routing, directory=directory)


def library() -> Any:
    """The package transformers. Raises `Misuse` if it is not installed."""
    try:
        return import_module("transformers")
    except ImportError as error:
        raise Misuse(mistakes.NOT_INSTALLED) from error


def local(source: Path | str) -> Path:
    """Returns the path of a model: ``source``, or where the files of the hub's model are. Raises `Misuse` if there is
    neither.
    """
    library()
    path = Path(source)
    try:
        if path.exists():
            return path
        download = import_module("huggingface_hub").snapshot_download
        return Path(download(str(source), allow_patterns=_OF_HUB))
    except (OSError, ValueError) as error:
        raise mistakes.source_cannot_be_read(source=str(source), why=mistakes.reason(error)) from error


def read_config(source: Path | str) -> tuple[Path | None, Any]:
    """Returns the directory of a model, None for a file, and its configuration, of a path or of the hub."""
    path = local(source)
    file = path / "config.json" if path.is_dir() else path
    try:
        require_regular(file, _LARGEST_CONFIG)
        config = library().AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # transformers refuses configurations with errors of any kind
        raise mistakes.source_cannot_be_read(source=str(file), why=mistakes.reason(error)) from error
    return (path if path.is_dir() else None), config


# ``--hf``: a model of transformers, a text and AdamW in place of a model file.

LENGTH = 512
"""Tokens of an item, unless ``--length`` says otherwise or the model has fewer positions."""


def model_file(options: Namespace, split: Sequence[int] | None) -> ModelFile:
    """Returns the functions of a model file for a model of transformers. Raises `Misuse` if it cannot be read or cut,
    or an item is longer than its positions.
    """
    model = layers(options.hf, checkpoints=options.checkpoint_layers, split=split)
    length = _length(model, options.length)
    tokenizer = options.tokenizer
    if tokenizer is None and has_tokenizer(model.directory):
        tokenizer = model.directory
    model = replace(model, tokenizer=tokenizer)

    @cache
    def items() -> TextItems:
        return read_text(options.text, tokenizer, length, int(model.config.vocab_size))

    def dataset() -> Any:
        return items() if options.eval_every is None else items().split()[0]

    file = _file(options.hf, model, dataset, options.learning_rate)
    return replace(file, reference=model.reference, validation=lambda: items().split()[1])


def without_text(source: str, length: int | None, split: Sequence[int] | None) -> ModelFile:
    """Returns the functions of a model file, with equal items of ``length`` tokens, for measurements; errors as in
    `model_file`.
    """
    model = layers(source, split=split)
    tokens = torch.zeros(2 * _length(model, length), dtype=torch.int64)
    return _file(source, model, lambda: TextItems(tokens, len(tokens) // 2), 0.0)


def _file(source: str, model: TransformerLayers, dataset: Callable[[], Any], rate: float) -> ModelFile:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)

    return ModelFile(
        *(Path(source), model, model.loss),
        tied=model.tied,
        name=model.name,
        dataset=dataset,
        optimizer=optimizer,
        describe=model.describe,
    )


def _length(model: TransformerLayers, length: int | None) -> int:
    most = int(getattr(model.config, "max_position_embeddings", LENGTH))
    if length is not None and length > most:
        raise mistakes.sequence_is_too_long(length=length, most=most)
    return min(LENGTH, most) if length is None else length
