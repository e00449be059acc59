"""Two runs of the tests try the same: no test draws what no seed fixes."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.repeatable import FACTOR, PROFILE, examples

TESTS = Path(__file__).resolve().parent
FILES = [path for path in sorted(TESTS.rglob("*.py")) if path.name != "broken.py"]
"""All but the model file that is no Python."""

TORCH = {"rand", "randn", "randint", "randperm"}


def drawn(profile: str) -> list[list[int]]:
    """What two runs of a property see under a profile."""
    seen: list[list[int]] = []

    @settings(settings.get_profile(profile), max_examples=20, database=None)
    @given(st.integers(0, 10**9))
    def holds(number: int) -> None:
        seen[-1].append(number)

    for _ in range(2):
        seen.append([])
        holds()
    return seen


def test_two_runs_try_the_same_examples_and_a_search_tries_others() -> None:
    first, second = drawn(PROFILE)
    assert first == second
    assert first not in drawn("search")


def test_a_search_tries_more_examples() -> None:
    usual, search = settings.get_profile(PROFILE), settings.get_profile("search")
    assert search.max_examples == FACTOR * usual.max_examples
    assert examples(7).max_examples == (7 if settings().derandomize else 7 * FACTOR)


def modules(tree: ast.Module) -> set[str]:
    """What a file imports as a whole."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


SEEDED_BY_THE_RUNTIME = {
    *(
        "unit/runtime/datasets.py",
        "unit/runtime/data/test_mini_batch.py",
        "unit/runtime/check/test_reference_data.py",
    ),
    *("unit/runtime/evaluate/test_inference.py", "unit/runtime/start/test_stage_probe.py"),
    *("unit/runtime/stage/test_recomputation.py",),
    "e2e/loops/twice.py",
}
"""They draw where the runtime has set the seed, which is what their tests are about."""


def draws(tree: ast.Module) -> Iterator[str]:
    """Calls of what draws without a seed in sight."""
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args}
    seeds = any(name.endswith("manual_seed") for name in called)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            module, _, name = ast.unparse(node.func).rpartition(".")
            drawn = module == "random" and module in modules(tree) and name != "Random" and "random.seed" not in called
            if drawn or (name == "Random" and not node.args):
                yield f"line {node.lineno}: {module}.{name}"
            if module == "torch" and name in TORCH and not seeds:
                yield f"line {node.lineno}: {module}.{name}"


def test_nothing_is_drawn_without_a_seed() -> None:
    texts = {path.relative_to(TESTS).as_posix(): path.read_text(encoding="utf-8") for path in FILES}
    drawing = re.compile("|".join(("Random", "random", *(rf"torch\.{name}" for name in TORCH))))
    found = {name for name, text in texts.items() if drawing.search(text) and [*draws(ast.parse(text))]}
    assert found == SEEDED_BY_THE_RUNTIME


def test_a_draw_without_a_seed_is_seen() -> None:
    unseeded = "import random, torch; random.random(); random.Random(); torch.rand(2)"
    seeded = "import random, torch; random.Random(3).random(); torch.manual_seed(0); torch.rand(2)"
    globally = "import random; random.seed(1); random.random()"
    assert [len([*draws(ast.parse(text))]) for text in (unseeded, seeded, globally)] == [3, 0, 0]


def test_how_examples_are_chosen_is_decided_in_one_place() -> None:
    """A test may say how many there are: `examples`."""
    for path in FILES:
        if path.name not in ("repeatable.py", Path(__file__).name):
            text = path.read_text(encoding="utf-8")
            assert "derandomize" not in text, path
            assert "database=" not in text, path
