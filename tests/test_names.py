"""Names say what they stand for: variables are nouns, and a class name has one meaning in both packages.

What is left of other names is counted in the tables below. A count may go down, never up: whoever lowers one lowers the
table with it, and a line that reaches 0 (or, for modules, 1) leaves its table.
"""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.syntax_trees import python, tree
from tests.test_architecture import PACKAGE, ROOT, RUNTIME

BOTH = (*python(PACKAGE), *python(RUNTIME))
"""The files of both packages."""

VAGUE = {
    *(
        "alike",
        "each",
        "found",
        "given",
        "heard",
        "its",
        "kept",
        "known",
        "moved",
        "one",
        "own",
        "said",
        "seen",
        "taken",
    ),
    "told",
}
"""Names that say nothing about what a variable holds."""

CEILINGS = {
    "cache": 3,
    "chimera_runtime": 7,
    "codegen": 1,
    "commands": 13,
    "comparison": 1,
    "cost": 1,
    "diagnostics": 1,
    "diagnostics/catalogue": 4,
    "elaborate": 6,
    "flow": 1,
    "ir": 1,
    "library": 4,
    "options": 4,
    "planner": 6,
    "predict": 3,
    "profile": 4,
    "syntax": 1,
}
"""Variables with a vague name, by part of the package; a part that is not listed has none."""

SHARED_MODULES = {
    "groups.py": 2,
    "model.py": 2,
}
"""Names of several modules of the compiler, with their number."""


def part(path: Path) -> str:
    """The folder or file at the top of the package that a file belongs to; the catalogue of messages by itself.

    The runtime is one part.
    """
    if path.is_relative_to(RUNTIME):
        return "chimera_runtime"
    parts = path.relative_to(PACKAGE).parts
    return "/".join(parts[:2]) if "catalogue" in parts else parts[0].removesuffix(".py")


def variables(module: ast.Module) -> Iterator[tuple[str, int]]:
    """Each name that a module binds to a value, with its line: variables, parameters, fields, attributes, captures."""
    for node in ast.walk(module):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name, node.lineno
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.ExceptHandler(name=str(name)):
                yield name, node.lineno
            case _:
                pass


def vague() -> list[tuple[str, str]]:
    """The part and the place of every variable with a vague name."""
    return [
        (part(path), f"{path.relative_to(ROOT)}:{line}: {name}")
        for path in BOTH
        for name, line in variables(tree(path))
        if name in VAGUE
    ]


def test_a_variable_is_the_noun_of_what_it_holds() -> None:
    counts = Counter(name for name, _ in vague())
    too_many = {name for name, count in counts.items() if count > CEILINGS.get(name, 0)}
    assert [place for name, place in vague() if name in too_many] == []


def test_no_ceiling_is_higher_than_what_is_left() -> None:
    """The right side is the table as it should be."""
    assert dict(sorted(Counter(name for name, _ in vague()).items())) == CEILINGS


def shared(named: Iterable[tuple[str, Path]]) -> dict[str, list[str]]:
    """The names that stand in several places, with these."""
    places: dict[str, list[str]] = {}
    for name, path in named:
        places.setdefault(name, []).append(path.relative_to(ROOT).as_posix())
    return {name: paths for name, paths in sorted(places.items()) if len(paths) > 1}


def assert_named_apart(named: Iterable[tuple[str, Path]], known: dict[str, int]) -> None:
    """Passes if only these names are shared, each as often as the table says."""
    places = shared(named)
    taken = {name: paths for name, paths in places.items() if len(paths) > known.get(name, 1)}
    assert taken == {}, "these names are taken: choose another for the new one"
    assert {name: len(paths) for name, paths in places.items()} == known, "lower the table"


def test_no_two_modules_share_a_name() -> None:
    assert_named_apart(((path.name, path) for path in python(PACKAGE) if path.name != "__init__.py"), SHARED_MODULES)


def test_a_class_name_has_one_meaning() -> None:
    """In both packages together; a leading underscore makes no other name of it. Forms of messages are classes, too."""
    names: list[tuple[str, Path]] = []
    for path in BOTH:
        for node in ast.walk(tree(path)):
            match node:
                case ast.ClassDef(name=name) | ast.Call(func=ast.Attribute(attr="worded"), args=[ast.Constant(name)]):
                    names.append((name.lstrip("_"), path))
                case _:
                    pass
    assert shared(names) == {}, "these names are taken: choose another for the new one"


def test_no_two_types_of_the_runtime_share_a_name() -> None:
    """Neither classes nor names of types, as in ``Group = tuple[int, ...]``; what has an underscore is read in its own
    module alone.
    """
    counts: Counter[str] = Counter()
    for path in python(RUNTIME):
        for node in tree(path).body:
            match node:
                case ast.ClassDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
                    counts[name] += name[0].isupper() and not name.isupper()
    assert [name for name, count in counts.items() if count > 1] == []


def test_vague_names_are_seen_wherever_a_value_is_bound() -> None:
    text = """
def f(each, *, own=1, given=2, heard=3, kept=4, known=5, moved=6, said=7, seen=8):
    for found in each:
        told: int = 2
        self.taken = [its for its in found]
    match each:
        case [alike, *one]:
            pass
"""
    assert {name for name, _ in variables(ast.parse(text))} & VAGUE == VAGUE
