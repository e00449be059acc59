"""The scheme language as a tree, before names are resolved or formulas evaluated.

Spans do not count when two trees are compared.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import assert_never

from chimera_ir.source import Span


@dataclass(frozen=True, slots=True)
class Node:
    """A part of a tree, with its place in the text."""

    span: Span = field(compare=False, repr=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Word(Node):
    """A name at its definition."""

    text: str


class Arithmetic(Enum):
    """Operators from two integers to one; ``/`` rounds down, ``%`` is the remainder, and divisors are 1 or more."""

    ADD = "+"
    SUBTRACT = "-"
    MULTIPLY = "*"
    DIVIDE = "/"
    REMAINDER = "%"


class Comparator(Enum):
    """Operators from two integers to a truth."""

    EQUAL = "=="
    UNEQUAL = "!="
    AT_MOST = "<="
    LESS = "<"
    AT_LEAST = ">="
    GREATER = ">"


class Logic(Enum):
    """Operators from two truths to one; the right side is evaluated only if the left side does not decide."""

    AND = "and"
    OR = "or"


@dataclass(frozen=True, slots=True)
class Integer(Node):
    """A number as it is written, never negative."""

    value: int


@dataclass(frozen=True, slots=True)
class Name(Node):
    """A name in a formula."""

    text: str


@dataclass(frozen=True, slots=True)
class Call(Node):
    """A call of a function in a formula."""

    function: Word
    arguments: tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class Minus(Node):
    """The negative of an operand, as in ``-m``."""

    operand: "Expression"


@dataclass(frozen=True, slots=True)
class Binary(Node):
    """``left operator right``, of integers."""

    operator: Arithmetic
    left: "Expression"
    right: "Expression"


@dataclass(frozen=True, slots=True)
class Comparison(Node):
    """A chain ``a < b <= c``: one more operand than comparators."""

    operands: tuple["Expression", ...]
    comparators: tuple[Comparator, ...]


@dataclass(frozen=True, slots=True)
class Not(Node):
    """``not operand``."""

    operand: "Expression"


@dataclass(frozen=True, slots=True)
class Logical(Node):
    """``left operator right``, of truths."""

    operator: Logic
    left: "Expression"
    right: "Expression"


@dataclass(frozen=True, slots=True)
class Choice(Node):
    """``if condition then .. else ..``."""

    condition: "Expression"
    then: "Expression"
    otherwise: "Expression"


Expression = Integer | Name | Call | Minus | Binary | Comparison | Not | Logical | Choice


@dataclass(frozen=True, slots=True)
class Range(Node):
    """The integers from ``start`` to before ``stop``."""

    start: Expression
    stop: Expression


@dataclass(frozen=True, slots=True)
class Endless(Node):
    """The integers from ``start`` on."""

    start: Expression


@dataclass(frozen=True, slots=True)
class Stages(Node):
    """``stages s in 0..D on [worker =] place``."""

    variable: Word
    range: Range
    worker: Word | None
    place: Expression


@dataclass(frozen=True, slots=True)
class Halves(Node):
    """``halves``: m counts half micro-batches."""


@dataclass(frozen=True, slots=True)
class Micros(Node):
    """``micros m in range [halves] [by step] [as number]``."""

    variable: Word
    range: Range | Endless
    halves: Halves | None
    step: Expression | None
    number: Expression | None


class Letter(Enum):
    """The kind of an operation."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


@dataclass(frozen=True, slots=True)
class PipeName(Node):
    """``of name[index]``: another pipe than the one in which the line stands."""

    name: Word
    index: Expression | None


@dataclass(frozen=True, slots=True)
class Subject(Node):
    """``F(micro, stage) [of pipe]``."""

    letter: Letter
    micro: Expression | Range
    stage: Expression
    pipe: PipeName | None


@dataclass(frozen=True, slots=True)
class Operation(Node):
    """``subject [& subject] @ clock [when guard]``: two subjects are a pair."""

    subjects: tuple[Subject, ...]
    clock: Expression
    guard: Expression | None


@dataclass(frozen=True, slots=True)
class Reads(Node):
    """``reads version expression``."""

    version: Expression


@dataclass(frozen=True, slots=True)
class Recompute(Node):
    """``recompute [when guard]``."""

    guard: Expression | None


class SyncMode(Enum):
    """The choice of when the gradients of a stage are summed over its replicas."""

    LAZY = "lazy"
    EAGER = "eager"
    EAGER_OPT = "eager_opt"


@dataclass(frozen=True, slots=True)
class Sync(Node):
    """``sync mode [when guard]``."""

    mode: SyncMode
    guard: Expression | None


Clause = Stages | Micros | Operation | Reads | Recompute | Sync


@dataclass(frozen=True, slots=True)
class Parameter(Node):
    """A parameter and the value it has unless the user sets another."""

    name: Word
    default: Expression


@dataclass(frozen=True, slots=True)
class Workers(Node):
    """``workers count``."""

    count: Expression


@dataclass(frozen=True, slots=True)
class Let(Node):
    """``let name = value``."""

    name: Word
    value: Expression


@dataclass(frozen=True, slots=True)
class Function(Node):
    """``fn name(parameters) = body``."""

    name: Word
    parameters: tuple[Word, ...]
    body: Expression


@dataclass(frozen=True, slots=True)
class Require(Node):
    """``require condition, "message"``."""

    condition: Expression
    message: str


@dataclass(frozen=True, slots=True)
class Update(Node):
    """``update every count``."""

    count: Expression


class MemoryQuantity(Enum):
    """The quantity that a memory bound limits."""

    ACTIVATIONS = "activations"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Memory(Node):
    """``memory quantity <= limit``."""

    quantity: MemoryQuantity
    limit: Expression


@dataclass(frozen=True, slots=True)
class Index(Node):
    """``[i in range]`` after the name of a pipe: one pipe for each i."""

    variable: Word
    range: Range


@dataclass(frozen=True, slots=True)
class PipeBlock(Node):
    """``pipe name[index] { clauses }``."""

    name: Word
    index: Index | None
    clauses: tuple[Clause, ...]


Item = Workers | Let | Function | Require | Update | Memory | PipeBlock


@dataclass(frozen=True, slots=True)
class Scheme(Node):
    """A whole text. A name is defined from its definition on, so the order of the items matters."""

    name: Word
    parameters: tuple[Parameter, ...]
    items: tuple[Item, ...]


def operands(expression: Expression) -> tuple[Expression, ...]:
    """The direct parts of an expression, from left to right."""
    match expression:
        case Integer() | Name():
            return ()
        case Call():
            return expression.arguments
        case Minus() | Not():
            return (expression.operand,)
        case Binary() | Logical():
            return (expression.left, expression.right)
        case Comparison():
            return expression.operands
        case Choice():
            return (expression.condition, expression.then, expression.otherwise)
        case _:
            assert_never(expression)


def walk(expression: Expression) -> Iterator[Expression]:
    """The expression and all its parts, from left to right; an expression comes before its parts."""
    pending = [expression]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(reversed(operands(node)))
