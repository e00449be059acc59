"""Files that ``from_pretrained`` reads in a directory besides weights, and old weights, which it would read, too."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

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
    """Writes what belongs to new weights in a directory, and removes weights and files of a tokenizer of before.

    ``save`` writes the files that follow from the model. Others are copied from ``source``, where the model comes from,
    and those of the tokenizer from ``tokenizer``. Each file is replaced as a whole.
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
