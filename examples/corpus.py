"""The text that the model files train on: the sources of Python's standard library, which lie on the machine anyway."""

import re
import sysconfig
from collections import Counter
from functools import lru_cache
from pathlib import Path

import torch

MOST = 4_000_000
"""The bytes of text that are read, at most."""


@lru_cache(maxsize=1)
def text() -> bytes:
    """The standard library's top-level sources, in the order of their names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"\n".join(file.read_bytes() for file in files)[:MOST]


def characters() -> torch.Tensor:
    """The text as bytes, of dtype int64."""
    return torch.frombuffer(bytearray(text()), dtype=torch.uint8).long()


class NextByte(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Item i: ``context`` bytes of the text, and the same shifted by one."""

    def __init__(self, context: int) -> None:
        self.text, self.context = characters(), context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.text[i * self.context : (i + 1) * self.context + 1]
        return window[:-1], window[1:]


def ranks(words: list[str], most: int) -> torch.Tensor:
    """Each word as its rank by frequency, from 1 on, or 0 where it is none of the ``most`` frequent ones.

    Words of one frequency are in the order in which they first occur.
    """
    rank = {word: i for i, (word, _) in enumerate(Counter(words).most_common(most), 1)}
    return torch.tensor([rank.get(word, 0) for word in words])


@lru_cache(maxsize=1)
def words(pattern: str, most: int, size: int, lower: bool) -> torch.Tensor:
    """The first ``size`` bytes of the text as `ranks` of what matches a pattern, in lower case if wished."""
    written = text()[:size].decode("utf-8", errors="replace")
    return ranks(re.findall(pattern, written.lower() if lower else written), most)
