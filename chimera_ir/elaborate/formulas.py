"""The one walk over a formula, which serves everything that a formula is turned into; a domain says what that is.

A domain gives each operation its meaning: closures that give integers (``evaluate``), columns of values (``grid``) or
quasi-affine laws (``affine``). The walk decides the order, and which parts are walked at all:

- operands come before their operation, from left to right; of a chain of comparisons, all of them;
- a condition with a fixed value decides: only the chosen branch of a choice is walked, and the right side of an ``and``
  or ``or`` only if the left side leaves it open;
- any other condition leaves both sides to the domain: closures compute the side that is needed, whenever it is needed;
  columns and laws need both sides to have a value everywhere.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Protocol, TypeVar, assert_never

from chimera_ir.elaborate.builtins import BUILTINS, DECISIVE
from chimera_ir.syntax import ast

Part = TypeVar("Part")
"""The type of what a formula, and each part of it, is turned into."""


class Domain(Protocol[Part]):
    """Says what each kind of expression is turned into, its part: a closure, a column, a law.

    A method gets the parts of the operands and returns the part of the whole expression, ``node``, which tells where it
    stands in the text.
    """

    def constant(self, value: int) -> Part:
        """The part for a number."""

    def name(self, text: str) -> Part:
        """The part for a variable or another name."""

    def fixed(self, part: Part) -> int | None:
        """The value of a part that depends on no variable; None if it depends on any."""

    def minus(self, operand: Part) -> Part:
        """The negative of an operand."""

    def negation(self, operand: Part) -> Part:
        """``not operand``."""

    def arithmetic(self, node: ast.Binary, left: Part, right: Part) -> Part:
        """``left + right`` and the like."""

    def comparison(self, node: ast.Comparison, comparator: ast.Comparator, left: Part, right: Part) -> Part:
        """``left < right`` and the like, by itself or as a link of a chain."""

    def logical(self, node: ast.Expression, logic: ast.Logic, left: Part, right: Part) -> Part:
        """``left and right`` or ``left or right``."""

    def choice(self, node: ast.Choice, condition: Part, then: Part, otherwise: Part) -> Part:
        """``if condition then .. else ..``, if the condition has no fixed value."""

    def builtin(self, node: ast.Call, arguments: Sequence[Part]) -> Part:
        """A call of a builtin function."""

    def lookup(self, node: ast.Lookup, position: Part) -> Part:
        """The entry of a table at a position."""

    def call(self, node: ast.Call, arguments: Sequence[Part]) -> Part:
        """A call of a function of the scheme; a fault in the function names the call."""


def walk(node: ast.Expression, domain: Domain[Part]) -> Part:
    """Turns a checked formula (see ``checker.check``) into what a domain makes of it."""
    match node:
        case ast.Integer(value):
            return domain.constant(value)
        case ast.Name(text):
            return domain.name(text)
        case ast.Binary():
            return domain.arithmetic(node, walk(node.left, domain), walk(node.right, domain))
        case ast.Minus(operand):
            return domain.minus(walk(operand, domain))
        case ast.Not(operand):
            return domain.negation(walk(operand, domain))
        case ast.Comparison():
            return _chain(node, domain, [walk(operand, domain) for operand in node.operands])
        case ast.Logical():
            return _logical(node, domain, walk(node.left, domain))
        case ast.Choice():
            return _choice(node, domain, walk(node.condition, domain))
        case ast.Call():
            arguments = [walk(argument, domain) for argument in node.arguments]
            return (domain.builtin if node.function.text in BUILTINS else domain.call)(node, arguments)
        case ast.Lookup():
            return domain.lookup(node, walk(node.position, domain))
        case _:
            assert_never(node)


def _chain(node: ast.Comparison, domain: Domain[Part], parts: Sequence[Part]) -> Part:
    """Turns ``a < b <= c`` into ``a < b and b <= c``; ``parts`` are what a, b, c have been turned into."""
    links = (
        domain.comparison(node, comparator, left, right)
        for comparator, left, right in zip(node.comparators, parts, parts[1:], strict=False)
    )
    return reduce(lambda holds, link: domain.logical(node, ast.Logic.AND, holds, link), links)


def _logical(node: ast.Logical, domain: Domain[Part], left: Part) -> Part:
    fixed = domain.fixed(left)
    if fixed is None:
        return domain.logical(node, node.operator, left, walk(node.right, domain))
    return left if bool(fixed) is DECISIVE[node.operator] else walk(node.right, domain)


def _choice(node: ast.Choice, domain: Domain[Part], condition: Part) -> Part:
    fixed = domain.fixed(condition)
    if fixed is None:
        return domain.choice(node, condition, walk(node.then, domain), walk(node.otherwise, domain))
    return walk(node.then if fixed else node.otherwise, domain)
