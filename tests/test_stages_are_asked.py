"""A rule for the source text: the header, and at run time the job, says which stages read what a stage makes.

So a module that computes the stage before or after another one, or asks whether a stage is the first or the last, is
wrong as soon as stages are not a chain.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import chimera_ir
import chimera_runtime

PACKAGES = {
    package.__name__: Path(package.__file__).parent for package in (chimera_ir, chimera_runtime) if package.__file__
}

STAGES = {"stage", "source", "target"}
"""The names of variables and attributes that hold the number of a stage."""


def named(node: ast.expr) -> str:
    """The name of a variable or an attribute, or of the value that is cast to a type, as in ``Stage(stage)``."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=ast.Name(id="Stage" | "int"), args=[argument]):
            return named(argument)
    return ""


def neighbours(node: ast.AST) -> bool:
    """Whether an expression is a stage plus or minus 1, a comparison with the first or the last stage, or of both ends.

    ``stages - 1`` in a message about the range of stages is not a comparison.
    """
    match node:
        case ast.BinOp(left=stage, op=ast.Add() | ast.Sub(), right=ast.Constant(value=1)):
            return named(stage) in STAGES
        case ast.Compare(left=left, comparators=[right]):
            names = {named(left), named(right)}
            end = any(isinstance(side, ast.Constant) and side.value == 0 for side in (left, right))
            last = any(isinstance(side, ast.BinOp) and named(side.left) == "stages" for side in (left, right))
            return (names == {"source", "target"} and _orders(node)) or (bool(names & {"stage"}) and (end or last))
        case ast.IfExp(test=test) | ast.If(test=test):
            return named(test) == "stage"
    return False


def _orders(node: ast.Compare) -> bool:
    return isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)


def places(package: str) -> Iterator[str]:
    folder = PACKAGES[package]
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if neighbours(node):
                yield f"{package}/{path.relative_to(folder)}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    "text",
    [
        "stage + 1",
        "operation.stage - 1",
        "Stage(stage) + 1",
        "stage == 0",
        "stage < header.stages - 1",
        "message.source < message.target",
        "before if stage else None",
    ],
)
def test_the_rule_notices_a_stage_next_to_another(text: str) -> None:
    assert any(map(neighbours, ast.walk(ast.parse(text))))


@pytest.mark.parametrize(
    "text", ["turn + 1", "range(stages - 1)", "stage in header.fed[source]", "source == target", "stage is None"]
)
def test_the_rule_passes_other_arithmetic(text: str) -> None:
    assert not any(map(neighbours, ast.walk(ast.parse(text))))


def test_no_module_computes_a_neighbouring_stage() -> None:
    """The chain itself is made without such arithmetic, in ``Header.fed`` and in ``stage_graph.fed``."""
    assert [place for package in PACKAGES for place in places(package)] == []
