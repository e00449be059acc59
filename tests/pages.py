"""Figures that stand on a page of the docs, and that a test computes."""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def compare(page: str, sentence: str, *figures: object, update: bool) -> None:
    """Holds a sentence of a page against its figures, or writes these; ``{}`` stands for each of them.

    Raises
    ------
    AssertionError
        If the page has no such sentence, or has it with other figures.
    """
    path = DOCS / page
    text = path.read_text(encoding="utf-8")
    words = (re.escape(word).replace(r"\{\}", r"(-?\d+(?:\.\d+)?)") for word in sentence.split())
    found = re.search(r"\s+".join(words), text)
    assert found, f"docs/{page} has no sentence like: {sentence}"
    expected = tuple(map(str, figures))
    if update:
        for place in reversed(range(len(expected))):
            text = text[: found.start(place + 1)] + expected[place] + text[found.end(place + 1) :]
        path.write_text(text, encoding="utf-8")
        return
    assert found.groups() == expected, f"docs/{page}: {sentence}: pytest --update-goldens writes the figures"
