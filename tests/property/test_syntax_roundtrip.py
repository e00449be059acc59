"""What is printed reads back; and no text whatsoever ends in anything but a scheme or diagnostics."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimera_ir.diagnostics.model import Rejected
from chimera_ir.diagnostics.render import render_all
from chimera_ir.elaborate.elaborate import elaborate
from chimera_ir.ir.kinds import KINDS
from chimera_ir.ir.levels import Quantity, Strategy
from chimera_ir.source import Source, Span, schemes
from chimera_ir.syntax import ast
from chimera_ir.syntax.formatter import show
from chimera_ir.syntax.mistakes import KEYWORDS
from chimera_ir.syntax.parser import parse
from tests.repeatable import examples

here = st.just(Span(0, 0))
LIBRARY = sorted(schemes().glob("*.chim"))
TEXTS = [path.read_text(encoding="utf-8") for path in LIBRARY]

names = st.from_regex(r"[A-Za-z_][A-Za-z_0-9]{0,5}", fullmatch=True).filter(lambda name: name not in KEYWORDS)
words = st.builds(ast.Word, names, span=here)


def _extended(inner: st.SearchStrategy[ast.Expression]) -> st.SearchStrategy[ast.Expression]:
    comparisons = st.integers(1, 3).flatmap(
        lambda count: st.builds(
            ast.Comparison,
            st.tuples(*[inner] * (count + 1)),
            st.tuples(*[st.sampled_from(ast.Comparator)] * count),
            span=here,
        )
    )
    return st.one_of(
        st.builds(ast.Call, words, st.lists(inner, max_size=3).map(tuple), span=here),
        st.builds(ast.Lookup, words, inner, span=here),
        st.builds(ast.Minus, inner, span=here),
        st.builds(ast.Binary, st.sampled_from(ast.Arithmetic), inner, inner, span=here),
        comparisons,
        st.builds(ast.Not, inner, span=here),
        st.builds(ast.Logical, st.sampled_from(ast.Logic), inner, inner, span=here),
        st.builds(ast.Choice, inner, inner, inner, span=here),
    )


expressions: st.SearchStrategy[ast.Expression] = st.recursive(
    st.builds(ast.Integer, st.integers(0, 2**63 - 1), span=here) | st.builds(ast.Name, names, span=here),
    _extended,
    max_leaves=12,
)
guards = st.none() | expressions
ranges = st.builds(ast.Range, expressions, expressions, span=here)
pipes = st.none() | st.builds(ast.PipeName, words, guards, span=here)

tables = st.builds(ast.NumberTable, st.lists(expressions, min_size=1, max_size=3).map(tuple), span=here)
lets = st.builds(ast.Let, words, expressions | tables, span=here)


def subjects(of: st.SearchStrategy[ast.PipeName | None] = st.none()) -> st.SearchStrategy[ast.Subject]:  # noqa: B008
    kinds = st.sampled_from([*KINDS.values()])
    return st.builds(ast.Subject, kinds, expressions | ranges, expressions, st.none() | expressions, of, span=here)


operations = st.tuples(subjects()) | st.tuples(subjects(), subjects(pipes))
indices = st.builds(ast.Index, words, ranges, span=here)
unnamed = st.builds(ast.Index, st.just(ast.Word("", span=Span(0, 0))), ranges, span=here)
ends = expressions | st.builds(ast.Several, words, indices | unnamed, span=here)
messages = st.text(st.characters(blacklist_characters='"\ufffd', blacklist_categories=("Cc", "Cs")))

CLAUSES: list[st.SearchStrategy[ast.Clause]] = [
    st.builds(ast.Stages, st.none() | words, words, ranges, st.none() | words, expressions, span=here),
    st.builds(
        ast.Micros,
        words,
        ranges | st.builds(ast.Endless, expressions, span=here),
        st.none() | st.builds(ast.Halves, span=here),
        guards,
        guards,
        guards,
        span=here,
    ),
    st.builds(ast.Slices, words, ranges, span=here),
    lets,
    st.builds(ast.Operation, operations, st.none() | expressions, st.none(), guards, span=here),
    st.builds(ast.Operation, operations, st.none(), expressions, guards, span=here),
    st.builds(ast.Reads, expressions, span=here),
    st.builds(ast.Recompute, guards, span=here),
    st.builds(ast.Sync, st.sampled_from(Strategy), guards, span=here),
]


def pipes_of(clauses: st.SearchStrategy[ast.Clause]) -> st.SearchStrategy[ast.Item]:
    lines = st.lists(clauses, min_size=1, max_size=2).map(tuple)
    return st.builds(ast.PipeBlock, words, st.none() | indices, lines, span=here)


ITEMS: list[st.SearchStrategy[ast.Item]] = [
    st.builds(ast.Workers, expressions, st.lists(expressions | ranges, max_size=2).map(tuple), span=here),
    st.builds(ast.Frozen, st.lists(ends | ranges, min_size=1, max_size=2).map(tuple), span=here),
    st.builds(ast.Feeds, ends, ends, st.none() | words, span=here),
    lets,
    st.builds(ast.Function, words, st.lists(words, max_size=3).map(tuple), expressions, span=here),
    st.builds(ast.Require, expressions, messages, span=here),
    st.builds(ast.Update, expressions, span=here),
    st.builds(ast.Memory, st.sampled_from(Quantity), st.none() | words, expressions, span=here),
    *map(pipes_of, CLAUSES),
    pipes_of(st.one_of(CLAUSES)),
]
parameters = st.builds(ast.Parameter, words, expressions, span=here)


@pytest.mark.parametrize("item", [*ITEMS, st.one_of(ITEMS)])
@given(st.data())
@examples(15)
def test_what_is_printed_reads_back_and_prints_as_itself(
    item: st.SearchStrategy[ast.Item], data: st.DataObject
) -> None:
    """Each kind of line has examples of its own: among whole schemes alone, most would never be drawn."""
    items = st.lists(item, min_size=1, max_size=2).map(tuple)
    scheme = data.draw(
        st.builds(ast.Scheme, words, st.lists(parameters, max_size=2).map(tuple), items, span=here), label="scheme"
    )
    text = show(scheme)
    again = parse(Source("printed", text))
    assert again == scheme
    assert show(again) == text


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.stem)
def test_a_library_scheme_reads_back(path: Path) -> None:
    scheme = parse(Source(path.name, path.read_text(encoding="utf-8")))
    assert parse(Source("printed", show(scheme))) == scheme


def compile_or_reject(text: str) -> None:
    source = Source("garbage", text)
    try:
        elaborate(parse(source), {}, 10_000)
        said = ["accepted"]
    except Rejected as rejected:
        said = render_all(rejected.diagnostics, source).splitlines()
    assert said
    assert all(line.isprintable() for line in said)


@given(st.text())
def test_any_text_is_a_scheme_or_is_rejected(text: str) -> None:
    compile_or_reject(text)
    compile_or_reject("scheme a(D = 4)\n" + text)
    compile_or_reject("scheme a(D = 4)\npipe p {\n" + text)


SIGNS = "+ - * / % == != <= < >= > = @ .. , ; ( ) [ ] { } m s D N F B I W 0 1 2 4 share min # // -> 1.5 2m $"
TOKENS = [*sorted(KEYWORDS), *SIGNS.split(), "\n", '"message"', '"']


@given(st.lists(st.sampled_from(TOKENS), max_size=40).map(" ".join))
def test_any_sequence_of_words_is_a_scheme_or_is_rejected(text: str) -> None:
    compile_or_reject("scheme a(D = 4, N = 4) pipe p { stages s in 0..D on s micros m in 0..N F(m, s) @ m\n" + text)
    compile_or_reject("scheme a(D = 4)\n" + text)


@examples(300)
@given(st.sampled_from(TEXTS), st.data())
def test_a_damaged_scheme_is_a_scheme_or_is_rejected(text: str, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 8))
        text = text[:start] + data.draw(st.sampled_from(TOKENS) | st.text(max_size=2)) + text[start + length :]
    compile_or_reject(text)
