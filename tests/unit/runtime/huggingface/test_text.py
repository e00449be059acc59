"""A text becomes items of tokens or bytes; what cannot be trained on is refused."""

from pathlib import Path

import pytest
import torch

from chimera_runtime import Misuse
from chimera_runtime.huggingface.skeleton import read_text


def test_bytes_are_cut_into_items_and_the_last_are_held_out(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(23)))
    items = read_text(file, None, 4, 256)
    assert [item.tolist() for item, _ in items] == [[*range(n, n + 4)] for n in range(0, 20, 4)]
    assert all(torch.equal(item, labels) for item, labels in items)
    training, held_out = items.split()
    assert [len(training), held_out[0][0].tolist()] == [4, [16, 17, 18, 19]]


def test_a_tokenizer_reads_the_text_line_by_line(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "a": 1, "b": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path / "words")
    (tmp_path / "text").write_text("a b\nb c a\nb")
    assert [item.tolist() for item, _ in read_text(tmp_path / "text", tmp_path / "words", 3, 3)] == [
        [1, 2, 2],
        [0, 1, 2],
    ]
    with pytest.raises(
        Misuse, match=r"--text .*text: token 2 is outside the model's vocabulary of 2: give the tokenizer"
    ):
        read_text(tmp_path / "text", tmp_path / "words", 3, 2)
    with pytest.raises(Misuse, match="--tokenizer"):
        read_text(tmp_path / "text", tmp_path, 3, 3)


def test_a_text_that_is_missing_or_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"seven..")
    with pytest.raises(Misuse, match=r"it has 7 tokens, and the fewest are 8, two items \(--length 4\)"):
        read_text(tmp_path / "text", None, 4, 256)
    with pytest.raises(Misuse, match=r"--text /dev/zero: it is no regular file"):
        read_text(Path("/dev/zero"), None, 4, 256)
    with pytest.raises(Misuse, match=r"--text .*none: No such file"):
        read_text(tmp_path / "none", None, 4, 256)
