"""A text file as a dataset: its tokens, or its bytes, cut into items of one length."""

from importlib import import_module
from itertools import chain
from pathlib import Path

import torch
from torch.utils.data import Dataset

from chimera_runtime.errors import huggingface as mistakes
from chimera_runtime.values.files import require_regular

Item = tuple[torch.Tensor, torch.Tensor]
"""Tokens of shape (length), and the same as labels, which the loss shifts by one."""

HELD_OUT = 10
"""One of this number of items is held out: the last ones of the text."""

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class TextItems(Dataset[Item]):
    """Items of ``length`` tokens, cut from a text one after the other; the rest at its end is left out."""

    def __init__(self, tokens: torch.Tensor, length: int) -> None:
        self._rows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Item:
        return self._rows[index], self._rows[index]

    def split(self) -> tuple["TextItems", "TextItems"]:
        """Returns the items for training, and the last ones as held-out items; at least one of each if two exist."""
        length, last = self._rows.shape[1], max(1, len(self) // HELD_OUT)
        return TextItems(self._rows[:-last].flatten(), length), TextItems(self._rows[-last:].flatten(), length)


def read_text(path: Path, tokenizer: Path | None, length: int, vocabulary: int) -> TextItems:
    """Reads a text file by the tokenizer of a directory, or as bytes if there is none.

    Raises `Misuse` if a file cannot be read, the text is shorter than two items, or a token is outside the vocabulary.
    """
    try:
        text = require_regular(path).read_bytes()
    except OSError as error:
        raise mistakes.text_cannot_be_read(path, str(error.strerror)) from error
    if tokenizer is None:
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int64) if text else torch.zeros(0).long()
    else:
        tokens = _tokens(path, text, tokenizer)
    if len(tokens) < 2 * length:
        raise mistakes.text_is_too_short(path, len(tokens), length)
    if (largest := int(tokens.max())) >= vocabulary:
        raise mistakes.tokens_are_outside(path, largest, vocabulary)
    return TextItems(tokens, length)


def has_tokenizer(directory: Path | None) -> bool:
    """Whether a directory has the files of a tokenizer."""
    return directory is not None and any((directory / name).is_file() for name in _TOKENIZERS)


def _tokens(path: Path, text: bytes, tokenizer: Path) -> torch.Tensor:
    """Tokens of a text, tokenized line by line: tokenizers are slow on long texts."""
    try:
        encode = import_module("transformers").AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    except Exception as error:  # transformers refuses files of tokenizers with errors of any kind
        raise mistakes.tokenizer_cannot_be_read(tokenizer, mistakes.reason(error)) from error
    try:
        lines = text.decode().splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise mistakes.text_cannot_be_read(path, f"it is not UTF-8: {error.reason} at byte {error.start}") from error
    rows = encode(lines, add_special_tokens=False)["input_ids"] if lines else []
    return torch.tensor([*chain.from_iterable(rows)], dtype=torch.int64)
