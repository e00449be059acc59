"""Figures that stand on a page of the docs, and that a test computes."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
EXAMPLES = DOCS / "examples"
SMALL = {"profile": EXAMPLES / "small.profile.toml", "cluster": EXAMPLES / "small.cluster.toml", "micro_batch_size": 8}
"""The options of a prediction for the examples of the docs."""

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "editors" / "README.md", *sorted(DOCS.rglob("*.md"))]


def page_of(name: str) -> Path:
    """The one page below docs/ that has this file name, in whatever folder it is."""
    (path,) = DOCS.rglob(name)
    return path


def page_text(name: str) -> str:
    """What is written on a page, by its file name."""
    return page_of(name).read_text(encoding="utf-8")


def compare(name: str, sentence: str, *figures: object, update: bool) -> None:
    """Holds a sentence of a page against its figures, or writes these; ``{}`` stands for each of them.

    Raises
    ------
    AssertionError
        If the page has no such sentence, or has it with other figures.
    """
    path = page_of(name)
    written = path.read_text(encoding="utf-8")
    words = (re.escape(word).replace(r"\{\}", r"(-?\d+(?:\.\d+)?)") for word in sentence.split())
    found = re.search(r"\s+".join(words), written)
    assert found, f"{name} has no sentence like: {sentence}"
    expected = tuple(map(str, figures))
    if update:
        for place in reversed(range(len(expected))):
            written = written[: found.start(place + 1)] + expected[place] + written[found.end(place + 1) :]
        path.write_text(written, encoding="utf-8")
        return
    assert found.groups() == expected, f"{name}: {sentence}: pytest --update-goldens writes the figures"
