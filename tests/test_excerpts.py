"""Code on a page is code of the repository: each block of Python says which file it is from, and a test compares them.

    <!-- all of docs/examples/loop.py -->                      the whole file, with or without its docstring
    <!-- from docs/examples/cnn.py -->                         lines of it, in which ``...`` stands for any lines
    <!-- from rank_0.py of chimera compile chimera D=2 -->     lines of a generated file

What a reader writes is not in a file: a test runs it, or it is counted below.
"""

import re
from collections import Counter
from functools import cache
from pathlib import Path
from textwrap import dedent

import pytest

import chimera_ir
from chimera_ir.cost.durations import Costs
from chimera_ir.diagnostics.catalogue import schedule as catalogue
from chimera_ir.diagnostics.render import render_all
from chimera_ir.ir.text.reader import parse
from chimera_ir.source import Source
from tests.lowered import scripts_of
from tests.pages import PAGES, page_text
from tests.unit.test_replay import setting

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(
    r"(?:^<!-- (?P<amount>all of|from) (?P<source>[^\n]+?) -->\n)?(?:^<!-- fmt: off -->\n)?"
    r"^```(?:python|py)\n(?P<text>.*?)^```$",
    re.M | re.S,
)
BLOCKS = [
    (path.relative_to(ROOT).as_posix(), block)
    for path in PAGES
    for block in BLOCK.finditer(path.read_text(encoding="utf-8"))
]
EXCERPTS = [(page, *block.group("amount", "source", "text")) for page, block in BLOCKS if block["source"]]

WRITTEN = {
    "docs/explanation/replay.md": 1,
    "docs/howto/check.md": 1,
    "docs/howto/checkpoints.md": 3,
    "docs/howto/clause.md": 4,
    "docs/howto/compare.md": 1,
    "docs/howto/coupled_optimizers.md": 1,
    "docs/howto/data.md": 1,
    "docs/howto/from_pipelining.md": 1,
    "docs/howto/loop.md": 14,
    "docs/howto/lora.md": 2,
    "docs/howto/micro_batches.md": 3,
    "docs/howto/networkx.md": 1,
    "docs/howto/rule.md": 3,
    "docs/howto/transformers.md": 2,
    "docs/howto/watch.md": 1,
    "docs/reference/model_file.md": 4,
}
"""Blocks that a reader writes; the last tests of this file run some, tests/e2e/test_adoption.py others."""


def test_every_block_of_python_is_an_excerpt_or_is_written_by_the_reader() -> None:
    assert Counter(page for page, block in BLOCKS if not block["source"]) == WRITTEN


@pytest.mark.parametrize(("page", "amount", "source", "text"), EXCERPTS, ids=[f"{p}-{s}" for p, _, s, _ in EXCERPTS])
def test_every_excerpt_is_in_the_file_that_it_names(page: str, amount: str, source: str, text: str) -> None:
    if amount == "all of":
        assert text in whole(source), page
    else:
        assert is_part(text, source_text(source)), page


@cache
def source_text(source: str) -> str:
    """The text of a file of the repository, or of one that a command generates."""
    name, generated, command = source.partition(" of chimera compile ")
    if not generated:
        return (ROOT / source).read_text(encoding="utf-8")
    scheme, *settings = command.split()
    sizes = {size: int(value) for size, _, value in (setting.partition("=") for setting in settings)}
    return scripts_of(chimera_ir.compile(scheme, **sizes).verified)[name]


def whole(source: str) -> tuple[str, str]:
    """A file, and the same file without its docstring."""
    text = source_text(source)
    return text, text.partition('"""\n\n')[2]


def is_part(excerpt: str, text: str) -> bool:
    """Whether the lines of an excerpt stand in a text, in their order; only ``...`` may leave lines out.

    The excerpt may be indented less than the text, and align its comments otherwise.
    """
    lines, at = text.splitlines(), 0
    for run in re.split(r"^ *\.\.\.\n", excerpt, flags=re.M):
        wanted = run.splitlines()
        places = range(at, len(lines) - len(wanted) + 1)
        place = next((i for i in places if plain(lines[i : i + len(wanted)]) == plain(wanted)), None)
        if place is None:
            return False
        at = place + len(wanted)
    return True


def plain(lines: list[str]) -> list[str]:
    """Lines without their common indentation, and without what aligns comments at their ends."""
    return [re.sub(r" {2,}#", "  #", line) for line in dedent("\n".join(lines)).split("\n")]


@pytest.mark.parametrize(
    ("excerpt", "is_one"),
    [
        ("b = 2\nc = 3\n", True),
        ("if c:\n    d = 4\n", True),
        ("if c:\nd = 4\n", False),
        ("a = 1  # one\n...\nc = 3\n", True),
        ("...\nd = 4\n...\n", True),
        ("a = 1  # one\nc = 3\n", False),
        ("c = 3\n...\nb = 2\n", False),
        ("b = 2\nc = 4\n", False),
        ("b =\n", False),
    ],
)
def test_an_excerpt_leaves_lines_out_only_where_it_says_so(excerpt: str, is_one: bool) -> None:
    assert is_part(excerpt, "    a = 1    # one\n    b = 2\n    c = 3\n    if c:\n        d = 4\n") is is_one


def test_the_lines_of_the_page_on_the_replay_run() -> None:
    (lines,) = (block["text"] for page, block in BLOCKS if page.endswith("replay.md"))
    names = {"program": chimera_ir.compile("chimera").verified.program, "setting": setting(4)}
    exec(lines, names | {"Costs": Costs})


def test_the_rule_that_a_page_adds_gives_the_message_that_the_page_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    message, rule, _ = (block["text"] for page, block in BLOCKS if page.endswith("rule.md"))
    names = dict(vars(catalogue))
    exec(message, names)
    monkeypatch.setattr(catalogue, "FewMicroBatches", names["FewMicroBatches"], raising=False)
    exec(rule, names)
    (text,) = re.findall(r"^```sir\n(.*?)^```$", page_text("rule.md"), re.M | re.S)
    source = Source("few_micro_batches.sir", text)
    assert f"```\n{render_all(names['filled'](parse(source)), source)}\n```\n" in page_text("rule.md")
