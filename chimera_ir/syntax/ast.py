"""The scheme language as a tree, before names are resolved or formulas evaluated.

Spans do not count when two trees are compared.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import assert_never

from chimera_ir.source import Span


@dataclass(frozen=True, slots=True)
class Word:
    """A name at its definition."""

    text: str
    span: Span = field(compare=False, repr=False)


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
class Integer:
    """A number as it is written, never negative."""

    value: int
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Name:
    """A name in a formula."""

    text: str
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function in a formula."""

    function: Word
    arguments: tuple["Expression", ...]
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Minus:
    """The negative of an operand, as in ``-m``."""

    operand: "Expression"
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Binary:
    """``left operator right``, of integers."""

    operator: Arithmetic
    left: "Expression"
    right: "Expression"
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A chain ``a < b <= c``: one more operand than comparators."""

    operands: tuple["Expression", ...]
    comparators: tuple[Comparator, ...]
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Not:
    """``not operand``."""

    operand: "Expression"
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Logical:
    """``left operator right``, of truths."""

    operator: Logic
    left: "Expression"
    right: "Expression"
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Choice:
    """``if condition then .. else ..``."""

    condition: "Expression"
    then: "Expression"
    otherwise: "Expression"
    span: Span = field(compare=False, repr=False)


Expression = Integer | Name | Call | Minus | Binary | Comparison | Not | Logical | Choice


@dataclass(frozen=True, slots=True)
class Range:
    """The integers from ``start`` to before ``stop``."""

    start: Expression
    stop: Expression
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Endless:
    """The integers from ``start`` on."""

    start: Expression
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Stages:
    """``stages s in 0..D on [worker =] place``."""

    variable: Word
    range: Range
    worker: Word | None
    place: Expression
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Halves:
    """``halves``: m counts half micro-batches."""

    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Micros:
    """``micros m in range [halves] [by step] [as number]``."""

    variable: Word
    range: Range | Endless
    halves: Halves | None
    step: Expression | None
    number: Expression | None
    span: Span = field(compare=False, repr=False)


class Letter(Enum):
    """The kind of an operation."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


@dataclass(frozen=True, slots=True)
class PipeName:
    """``of name[index]``: another pipe than the one in which the line stands."""

    name: Word
    index: Expression | None
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Subject:
    """``F(micro, stage) [of pipe]``."""

    letter: Letter
    micro: Expression | Range
    stage: Expression
    pipe: PipeName | None
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Operation:
    """``subject [& subject] @ clock [when guard]``: two subjects are a pair."""

    subjects: tuple[Subject, ...]
    clock: Expression
    guard: Expression | None
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Reads:
    """``reads version expression``."""

    version: Expression
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Recompute:
    """``recompute [when guard]``."""

    guard: Expression | None
    span: Span = field(compare=False, repr=False)


class SyncMode(Enum):
    """The choice of when the gradients of a stage are summed over its replicas."""

    LAZY = "lazy"
    EAGER = "eager"
    EAGER_OPT = "eager_opt"


@dataclass(frozen=True, slots=True)
class Sync:
    """``sync mode [when guard]``."""

    mode: SyncMode
    guard: Expression | None
    span: Span = field(compare=False, repr=False)


Clause = Stages | Micros | Operation | Reads | Recompute | Sync


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter and the value it has unless the user sets another."""

    name: Word
    default: Expression
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Workers:
    """``workers count``."""

    count: Expression
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Let:
    """``let name = value``."""

    name: Word
    value: Expression
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Function:
    """``fn name(parameters) = body``."""

    name: Word
    parameters: tuple[Word, ...]
    body: Expression
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Require:
    """``require condition, "message"``."""

    condition: Expression
    message: str
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Update:
    """``update every count``."""

    count: Expression
    span: Span = field(compare=False, repr=False)


class MemoryQuantity(Enum):
    """The quantity that a memory bound limits."""

    ACTIVATIONS = "activations"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Memory:
    """``memory quantity <= limit``."""

    quantity: MemoryQuantity
    limit: Expression
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Index:
    """``[i in range]`` after the name of a pipe: one pipe for each i."""

    variable: Word
    range: Range
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class PipeBlock:
    """``pipe name[index] { clauses }``."""

    name: Word
    index: Index | None
    clauses: tuple[Clause, ...]
    span: Span = field(compare=False, repr=False)


Item = Workers | Let | Function | Require | Update | Memory | PipeBlock


@dataclass(frozen=True, slots=True)
class Scheme:
    """A whole text. A name is defined from its definition on, so the order of the items matters."""

    name: Word
    parameters: tuple[Parameter, ...]
    items: tuple[Item, ...]
    span: Span = field(compare=False, repr=False)


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
