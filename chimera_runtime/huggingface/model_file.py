"""``--hf``: a model of transformers, a text and AdamW in place of a model file."""

from argparse import Namespace
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from chimera_runtime.errors import huggingface as mistakes
from chimera_runtime.huggingface.layers import layers
from chimera_runtime.huggingface.text import TextItems, has_tokenizer, read_text
from chimera_runtime.model.model import ModelFile

LENGTH = 512
"""Tokens of an item, unless ``--length`` says otherwise or the model has fewer positions."""


def model_file(options: Namespace, split: Sequence[int] | None) -> ModelFile:
    """Returns the functions of a model file for a model of transformers, as the options ask.

    Raises `Misuse` if the model cannot be read or cut, or an item is longer than the positions of the model.
    """
    model = layers(options.hf, checkpoints=options.checkpoint_layers, split=split)
    most = int(getattr(model.config, "max_position_embeddings", LENGTH))
    length = min(LENGTH, most) if options.length is None else options.length
    if length > most:
        raise mistakes.sequence_is_too_long(length, most)
    tokenizer = options.tokenizer
    if tokenizer is None and has_tokenizer(model.directory):
        tokenizer = model.directory

    @cache
    def items() -> TextItems:
        return read_text(options.text, tokenizer, length, int(model.config.vocab_size))

    def dataset() -> Any:
        return items() if options.eval_every is None else items().split()[0]

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=options.learning_rate, weight_decay=0.0)

    return ModelFile(
        Path(options.hf),
        model,
        model.loss,
        tied=model.tied,
        name=model.name,
        dataset=dataset,
        optimizer=optimizer,
        reference=model.reference,
        validation=lambda: items().split()[1],
        describe=model.describe,
    )
