"""What the text says is what the tree says."""

from itertools import permutations, product

import pytest

from chimera_ir.diagnostics.catalogue.syntax import FOREIGN
from chimera_ir.diagnostics.model import Rejected
from chimera_ir.source import Source
from chimera_ir.syntax import ast
from chimera_ir.syntax.formatter import show, show_expression
from chimera_ir.syntax.parser import MAX_DEPTH, MAX_TOKENS, parse

LANGUAGE = """
scheme everything(D = 4, N = 2*D,)              # a comment
workers D except 1, D/2 ..D; update every N
frozen 0 ..D/4, (D - 1)
memory activations <= D
memory weights <= 2
memory bytes <= 16*(GiB)
memory host on w <= D-w
require D % (2*1) == 0, "D stages must split evenly"
let u = D / (2*1)
let warm = [D, 2 *1, u,]
fn t(m)      = 2*(m % u) + 2*D*(m / u)
fn fwd(m, s) = t(m)
             + s
pipe down[i in 0..f] {
  stages s in 0..D on (s + i*(D/f)) % D
  micros m in 0..N/2 halves by 2 as 2*m + 1 weigh (2)*m
  F(m..m+2, s) @ t(m/2) + 2*s when 0 <= m < N and not s == 0
  B(m,   s)    @ if m > 2 then 1 else max(2, s)
  I(m, s) @ 1  W(m, s) @ 2
  reads version max(0, m - (D-1-s))
  recompute
  recompute when s < 2
  sync eager_opt when s == 0
  let late = 2*m + warm[(s) % 3]
  let own=[i, D]
}
pipe up {
  stages s in 0..D on D-1-s
  micros m in 0..            # for ever
  F(m, s) @ m
}
"""

CANONICAL = """\
scheme everything(D = 4, N = 2*D)

workers D except 1, D/2..D
update every N
frozen 0..D/4, D - 1
memory activations <= D
memory weights <= 2
memory bytes <= 16*GiB
memory host on w <= D - w
require D % (2*1) == 0, "D stages must split evenly"
let u = D/(2*1)
let warm = [D, 2*1, u]
fn t(m) = 2*(m % u) + 2*D*(m/u)
fn fwd(m, s) = t(m) + s

pipe down[i in 0..f] {
  stages s in 0..D on (s + i*(D/f)) % D
  micros m in 0..N/2 halves by 2 as 2*m + 1 weigh 2*m
  F(m..m + 2, s) @ t(m/2) + 2*s when 0 <= m < N and not s == 0
  B(m, s) @ if m > 2 then 1 else max(2, s)
  I(m, s) @ 1
  W(m, s) @ 2
  reads version max(0, m - (D - 1 - s))
  recompute
  recompute when s < 2
  sync eager_opt when s == 0
  let late = 2*m + warm[s % 3]
  let own = [i, D]
}

pipe up {
  stages s in 0..D on D - 1 - s
  micros m in 0..
  F(m, s) @ m
}
"""


def expression(text: str) -> ast.Expression:
    item = parse(Source("", f"scheme a let x = {text}")).items[0]
    assert isinstance(item, ast.Let)
    assert not isinstance(item.value, ast.NumberTable)
    return item.value


def test_the_whole_language_reads_and_prints() -> None:
    assert show(parse(Source("", LANGUAGE))) == CANONICAL


def test_lines_may_be_joined() -> None:
    assert parse(Source("", " ".join(CANONICAL.split("\n")).replace("0.. ", "0..;"))) == parse(Source("", CANONICAL))


def test_line_ends_of_other_systems_are_line_ends() -> None:
    assert parse(Source("", LANGUAGE.replace("\n", "\r\n"))) == parse(Source("", LANGUAGE))


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("1+2*3", "1 + 2*3"),
        ("(1+2)*3", "(1 + 2)*3"),
        ("1-(2-3)", "1 - (2 - 3)"),
        ("(1-2)-3", "1 - 2 - 3"),
        ("a/(b*c)", "a/(b*c)"),
        ("a/b*c", "a/b*c"),
        ("-a*b", "-a*b"),
        ("-(a*b)", "-(a*b)"),
        ("a- -b", "a - -b"),
        ("not a == b", "not a == b"),
        ("(not a) == b", "(not a) == b"),
        ("a or b and c", "a or b and c"),
        ("(a or b) and c", "(a or b) and c"),
        ("if a then b else if c then d else e", "if a then b else if c then d else e"),
        ("if (if a then b else c) then d else e", "if (if a then b else c) then d else e"),
        ("(if a then b else c) + 1", "(if a then b else c) + 1"),
        ("(a < b) == c", "(a < b) == c"),
        ("f((1))", "f(1)"),
        ("007", "7"),
    ],
)
def test_brackets_that_matter_are_kept_and_no_others(text: str, canonical: str) -> None:
    assert show_expression(expression(text)) == canonical
    assert expression(canonical) == expression(text)


def test_a_node_knows_its_place() -> None:
    source = Source("", "scheme a(D = 4)\nlet x = (D + 1)*2")
    item = parse(source).items[0]
    assert isinstance(item, ast.Let)
    assert isinstance(item.value, ast.Binary)
    spans = (item.span, item.name.span, item.value.span, item.value.left.span)
    assert [source.text[span.start : span.end] for span in spans] == ["let x = (D + 1)*2", "x", "(D + 1)*2", "(D + 1)"]


def test_several_mistakes_are_reported_together() -> None:
    pipe = "pipe p {\n  stages s 0..D on s\n  micros m in 0..4\n  F(m s) @ 1.5\n  B(m, s) m\n}"
    text = f"scheme a(D = 4)\nlet x 3\nlet y = 2 $ 3\n{pipe}"
    with pytest.raises(Rejected) as rejected:
        parse(Source("", text))
    assert [type(diagnostic).__name__ for diagnostic in rejected.value.diagnostics] == [
        "MissingEquals",
        "StrayCharacter",
        "MissingIn",
        "NotAnInteger",
        "MissingClock",
    ]


@pytest.mark.full
@pytest.mark.parametrize(
    "formula",
    [
        "-" * 50_000 + "1",
        "1" + "+1" * 40_000,
        "(" * 50_000 + "1" + ")" * 40_000,
        "f(" * 20_000,
        "not " * 50_000 + "1",
        "if 1 < 2 then 1 else " * 10_000 + "1",
        "1 < 2" + " or 1 < 2" * 20_000,
    ],
    ids=lambda formula: formula[:12],
)
def test_a_formula_that_is_nested_too_deeply_is_rejected_without_recursion(formula: str) -> None:
    with pytest.raises(Rejected) as rejected:
        parse(Source("", f"scheme a let x = {formula}"))
    assert [diagnostic.code for diagnostic in rejected.value.diagnostics] == ["CH103"]


def test_the_deepest_formula_passes() -> None:
    deepest = "+".join("1" * MAX_DEPTH)
    assert show_expression(expression(deepest)).replace(" ", "") == deepest


def test_a_text_of_too_many_words_is_rejected() -> None:
    with pytest.raises(Rejected) as rejected:
        parse(Source("", "scheme a\n" + "let x = 1\n" * MAX_TOKENS))
    assert [diagnostic.code for diagnostic in rejected.value.diagnostics] == ["CH102"]


def messages(text: str) -> list[tuple[str, int]]:
    """What is wrong with a text: the codes, and the lines."""
    source = Source("", text)
    with pytest.raises(Rejected) as rejected:
        parse(source)
    return [(each.code, source.position(each.span.start).line) for each in rejected.value.diagnostics]


PLACES = (
    "let x = {}",
    "fn f(a, b) = ({})",
    "let x = max({}, 1)",
    'require {} > 1, "so it is"',
    "workers {}",
    "pipe p {{ stages s in 0..2 on {}\nmicros m in 0..2 F(m, s) @ 0 }}",
    "pipe p {{ stages s in 0..2 on 0 micros m in 0..{}\nF(m, s) @ 0 }}",
    "pipe p {{ stages s in 0..2 on 0 micros m in 0..2\nF(m, s) @ {}\nB(m, s) @ 1 }}",
    "pipe p {{ stages s in 0..2 on 0 micros m in 0..2\nF(m, s) @ 1 when {}\nB(m, s) @ 1 }}",
)
"""Where a formula stands."""

SIGNS = sorted(token for token in FOREIGN if not token.isalpha() and token != "&")
WORDS = sorted({*FOREIGN, "AND", "Or", "THEN"} - {*SIGNS, "if"})


@pytest.mark.parametrize("sign", SIGNS)
def test_a_sign_of_another_language_is_called_by_its_name_wherever_it_stands(sign: str) -> None:
    for place in PLACES:
        assert "CH111" in [code for code, _ in messages("scheme a\n" + place.format(f"a {sign} b"))], place


@pytest.mark.full
@pytest.mark.parametrize("word", WORDS)
def test_a_word_of_another_language_is_called_by_its_name_wherever_it_stands(word: str) -> None:
    for place, operands in product(PLACES, ("a {} b", "(a) {} 2", "2 {} (b)", "f(a) {} (b + 1)")):
        assert "CH111" in [code for code, _ in messages("scheme a\n" + place.format(operands.format(word)))], place


@pytest.mark.full
def test_each_line_with_a_mistake_is_told_whatever_is_wrong_with_the_others() -> None:
    """Two mistakes on a line do not take the line above with them."""
    wrong = [
        "let a = 1 mod 2",
        "let b = 1 // 2 ** 3",
        "let c = (1, 2)",
        "let d = 2D ++ 1",
        "let e == 1",
        "fn f(x) = 3 3",
    ]
    for order in permutations(wrong, 4):
        text = "scheme a\n" + "\nlet z = 1\n".join(order) + "\nlet y = 2\n"
        assert {line for _, line in messages(text)} == {2, 4, 6, 8}
