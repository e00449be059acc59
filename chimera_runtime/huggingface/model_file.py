"""``--hf``: a model of transformers, a text and AdamW in place of a model file."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from chimera_runtime.errors import model as mistakes
from chimera_runtime.huggingface.layers import TransformerLayers, layers
from chimera_runtime.huggingface.skeleton import TextItems, has_tokenizer, read_text
from chimera_runtime.model.model import ModelFile

LENGTH = 512
"""Tokens of an item, unless ``--length`` says otherwise or the model has fewer positions."""


def model_file(options: Namespace, split: Sequence[int] | None) -> ModelFile:
    """Returns the functions of a model file for a model of transformers, as the options ask.

    Raises `Misuse` if the model cannot be read or cut, or an item is longer than the positions of the model.
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
    """Returns the functions of a model file, with items of ``length`` tokens that are all the same, for measurements.

    Errors as in `model_file`.
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
