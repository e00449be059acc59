"""What has a fixed set of members, enumerations, unions and kinds, is taken apart so that a new member is noticed."""

import ast

from tests.syntax_trees import python, tree
from tests.test_architecture import PACKAGE, ROOT


def enums() -> set[str]:
    """The enumerations of the compiler, by name."""
    return {
        node.name
        for path in python(PACKAGE)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) in ("Enum", "enum.Enum") for base in node.bases)
    }


def test_a_new_member_of_an_enumeration_is_not_silently_taken_for_another() -> None:
    """An ``else`` behind a test for one member takes all others for the same; `match` with `assert_never` does not."""
    known = enums()
    assert {"Quantity", "Strategy", "Severity"} <= known
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node.test)}"
        for path in python(PACKAGE)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.IfExp) or (isinstance(node, ast.If) and node.orelse)
        for side in ast.walk(node.test)
        if isinstance(side, ast.Attribute) and ast.unparse(side.value).split(".")[-1] in known
    ]
    assert wrong == []


def named(node: ast.expr) -> str:
    return ast.unparse(node).split(".")[-1]


def members(node: ast.expr) -> set[str]:
    """The classes of a union, by name; none of what is no union."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)):
        return set()
    return {named(side) for side in (node.left, node.right) if not isinstance(side, ast.BinOp)} | members(node.left)


def closed() -> set[str]:
    """The classes of the unions that the package has a name for, and its enumerations."""
    assigned = (node for path in python(PACKAGE) for node in tree(path).body if isinstance(node, ast.Assign))
    unions = set().union(*(members(node.value) for node in assigned))
    classes = {node.name for path in python(PACKAGE) for node in tree(path).body if isinstance(node, ast.ClassDef)}
    return (unions & classes) | enums()


def asked(case: ast.match_case) -> set[str]:
    """The classes and enumerations that a case asks for, at the top of its pattern."""
    parts = case.pattern.patterns if isinstance(case.pattern, ast.MatchOr) else [case.pattern]
    return {
        named(part.cls) if isinstance(part, ast.MatchClass) else named(part.value.value)
        for part in parts
        if isinstance(part, ast.MatchClass)
        or (isinstance(part, ast.MatchValue) and isinstance(part.value, ast.Attribute))
    }


def test_a_match_over_a_union_or_an_enumeration_names_all_members() -> None:
    """It ends in `assert_never`, so that the type checker finds each place that a new member concerns.

    Or it says what becomes of the rest: it is an error, or nothing is done with it.
    """
    known = closed()
    assert {"Compute", "Send", "Strategy", "Binary"} <= known
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node.subject)}"
        for path in python(PACKAGE)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Match) and known & set().union(*map(asked, node.cases))
        if ast.unparse(node.cases[-1].pattern) != "_"
        or not ast.unparse(node.cases[-1].body[0]).startswith(("assert_never(", "raise ", "pass"))
    ]
    assert wrong == []


ROWS = {"FORWARD", "BACKWARD"}
"""The names of the rows in the table of kinds."""


def test_only_what_writes_and_reads_scripts_asks_for_a_single_kind_of_operation() -> None:
    """Everything else asks what a kind reads, makes, frees and sums; so a new row needs no change elsewhere."""
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in python(PACKAGE)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ImportFrom) and node.module == "chimera_ir.ir.kinds"
        if ROWS & {alias.name for alias in node.names}
    }
    assert users == {"verify/recording.py"}
