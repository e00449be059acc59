"""How large a formula is with the formulas behind its names written out: what is computed for every operation."""

from collections.abc import Mapping
from typing import NamedTuple

from chimera_ir.syntax import ast

MAX_SIZE = 2_000
"""The most operators and operands of a formula with its functions written out."""

MAX_DEPTH = 200
"""The most levels of a formula with its functions written out."""


class FormulaSize(NamedTuple):
    """The number of operators and operands of a formula, and its levels."""

    operands: int
    levels: int


def size_of(expression: ast.Expression, known: Mapping[str, FormulaSize]) -> FormulaSize:
    """The size of a formula; ``known`` has those of functions, and of other names that stand for formulas."""
    nodes = list(ast.walk(expression))
    return FormulaSize(len(nodes) + sum(_behind(node, known).operands for node in nodes), _levels(expression, known))


def _levels(expression: ast.Expression, known: Mapping[str, FormulaSize]) -> int:
    within = max((_levels(operand, known) for operand in ast.operands(expression)), default=0)
    return 1 + max(within, _behind(expression, known).levels)


def _behind(node: ast.Expression, known: Mapping[str, FormulaSize]) -> FormulaSize:
    """The size of what the name of a node stands for; 0 if it is not known."""
    if isinstance(node, ast.Call):
        return known.get(node.function.text, _NOTHING)
    return known.get(node.text, _NOTHING) if isinstance(node, ast.Name) else _NOTHING


_NOTHING = FormulaSize(0, 0)
