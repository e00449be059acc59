"""The scheme language as a tree of names and formulas, as written; spans do not count where trees are compared."""

from collections.abc import Iterator
from dataclasses import field
from enum import Enum
from itertools import chain
from typing import TypeVar, assert_never

from chimera_ir.ir.kinds import Kind
from chimera_ir.ir.levels import Quantity, Strategy
from chimera_ir.records import LazyDataclass
from chimera_ir.source import Span


class SyntaxNode(LazyDataclass):
    """A part of a tree, with its place in the text; a subclass is a frozen dataclass."""

    span: Span = field(compare=False, repr=False, kw_only=True)


class Word(SyntaxNode):
    """A name with its place in the text, outside of a formula."""

    text: str


class Arithmetic(Enum):
    """Operators that make an integer of two: ``/`` rounds down, ``%`` is the remainder, and divisors are 1 or more."""

    ADD = "+"
    SUBTRACT = "-"
    MULTIPLY = "*"
    DIVIDE = "/"
    REMAINDER = "%"


class Comparator(Enum):
    """Operators that compare two integers."""

    EQUAL = "=="
    UNEQUAL = "!="
    AT_MOST = "<="
    LESS = "<"
    AT_LEAST = ">="
    GREATER = ">"


class Logic(Enum):
    """Operators that join two truths; the right side is evaluated only if the left side does not decide."""

    AND = "and"
    OR = "or"


class Integer(SyntaxNode):
    """A number as it is written, never negative."""

    value: int


class Name(SyntaxNode):
    """A name in a formula."""

    text: str


class Call(SyntaxNode):
    """A call of a function in a formula."""

    function: Word
    arguments: tuple["Expression", ...]


class Lookup(SyntaxNode):
    """An entry of a table in a formula, ``table[position]``, counted from 0."""

    table: Word
    position: "Expression"


class Minus(SyntaxNode):
    """The negative of an operand, as in ``-m``."""

    operand: "Expression"


class Binary(SyntaxNode):
    """``left operator right``, of integers."""

    operator: Arithmetic
    left: "Expression"
    right: "Expression"


class Comparison(SyntaxNode):
    """A chain of comparisons, as in ``a < b <= c``, with one operand more than comparators."""

    operands: tuple["Expression", ...]
    comparators: tuple[Comparator, ...]


class Not(SyntaxNode):
    """``not operand``."""

    operand: "Expression"


class Logical(SyntaxNode):
    """``left operator right``, of truths."""

    operator: Logic
    left: "Expression"
    right: "Expression"


class Choice(SyntaxNode):
    """``if condition then .. else ..``."""

    condition: "Expression"
    then: "Expression"
    otherwise: "Expression"


Expression = Integer | Name | Call | Lookup | Minus | Binary | Comparison | Not | Logical | Choice


class NumberTable(SyntaxNode):
    """``[a, b, ..]``, the numbers of a table."""

    entries: tuple[Expression, ...]


class Let(SyntaxNode):
    """The line ``let name = value``, of the scheme or of a pipe: a value, a formula or a table with a name."""

    name: Word
    value: Expression | NumberTable

    @property
    def formulas(self) -> tuple[Expression, ...]:
        """The formulas that make the value: of a table, one for each entry."""
        return self.value.entries if isinstance(self.value, NumberTable) else (self.value,)


class Range(SyntaxNode):
    """The integers from ``start`` to ``stop - 1``."""

    start: Expression
    stop: Expression

    @property
    def ends(self) -> tuple[Expression, ...]:
        """The formulas of the range."""
        return self.start, self.stop


class Endless(SyntaxNode):
    """The integers from ``start`` on."""

    start: Expression

    @property
    def ends(self) -> tuple[Expression, ...]:
        """The formula of the range, as a tuple of one."""
        return (self.start,)


class Index(SyntaxNode):
    """``[i in range]`` after a name: of a pipe, which makes one pipe for each i, or of a group of stages."""

    variable: Word
    range: Range


class Several(SyntaxNode):
    """``group[s in range]``, or ``group[range]``, whose variable is empty: some stages of a group."""

    group: Word
    index: Index


class Stages(SyntaxNode):
    """The line ``stages s in 0..D on [worker =] place``: the stages of a pipe and the worker of each.

    In ``stages group[s in 0..D] on ..`` they have a name; a pipe may have several such lines.
    """

    group: Word | None
    variable: Word
    range: Range
    worker: Word | None
    place: Expression


class Halves(SyntaxNode):
    """The word ``halves`` in a ``micros`` line, by which its variable counts half micro-batches."""


class Micros(SyntaxNode):
    """The line ``micros m in range [halves] [by step] [as number] [weigh weight]``: the micro-batches of a pipe."""

    variable: Word
    range: Range | Endless
    halves: Halves | None
    step: Expression | None
    number: Expression | None
    weight: Expression | None


class Slices(SyntaxNode):
    """The line ``slices q in range``: the slices into which every micro-batch is cut, in causal order."""

    variable: Word
    range: Range


class PipeName(SyntaxNode):
    """``of name[index]`` after an operation, for another pipe than the one in which the line stands."""

    name: Word
    index: Expression | None


class Subject(SyntaxNode):
    """An operation without its clock, ``F(micro, stage [, slice]) [of pipe]``; a pair has two."""

    kind: Kind
    micro: Expression | Range
    stage: Expression
    slice: Expression | None
    pipe: PipeName | None

    @property
    def ends(self) -> tuple[Expression, ...]:
        """The formula of the micro-batch, or those of the range of micro-batches."""
        return self.micro.ends if isinstance(self.micro, Range) else (self.micro,)


class Operation(SyntaxNode):
    """The line ``subject [& subject] [@ clock | prefer preference] [when guard]``; a pair has two subjects.

    The compiler orders operations without a clock: of those that are ready, the one with the smallest preference first.
    """

    subjects: tuple[Subject, ...]
    clock: Expression | None
    preference: Expression | None
    guard: Expression | None

    @property
    def formulas(self) -> tuple[Expression, ...]:
        """All formulas of the line, but for the index of another pipe."""
        of_subjects = ((*subject.ends, subject.stage, subject.slice) for subject in self.subjects)
        listed = (*chain.from_iterable(of_subjects), self.clock, self.preference, self.guard)
        return tuple(formula for formula in listed if formula is not None)


class Reads(SyntaxNode):
    """The line ``reads version expression``: the version of the weights that a micro-batch reads."""

    version: Expression


class Recompute(SyntaxNode):
    """The line ``recompute [when guard]``: the stages that run their forward again before the backward."""

    guard: Expression | None


class Sync(SyntaxNode):
    """The line ``sync mode [when guard]``: when the gradients of the stages are summed."""

    mode: Strategy
    guard: Expression | None


Clause = Stages | Micros | Slices | Let | Operation | Reads | Recompute | Sync
Line = TypeVar("Line", bound=Clause)


class Parameter(SyntaxNode):
    """A parameter and the value it has unless the user sets another."""

    name: Word
    default: Expression


class Workers(SyntaxNode):
    """The line ``workers count [except left_out, ..]``: the number of workers, and those that have no stage."""

    count: Expression
    left_out: tuple[Expression | Range, ...]


class Frozen(SyntaxNode):
    """The line ``frozen stages, ..``: the stages whose weights are not trained."""

    stages: tuple[Expression | Range | Several, ...]


class Feeds(SyntaxNode):
    """The line ``feeds source -> target [as keyword]``: the stage ``target`` gets the output of the stage ``source``.

    One of the two may be several stages; the other may then use their variable.
    """

    source: Expression | Several
    target: Expression | Several
    keyword: Word | None


class Function(SyntaxNode):
    """The line ``fn name(parameters) = body``: a function for formulas."""

    name: Word
    parameters: tuple[Word, ...]
    body: Expression


class Require(SyntaxNode):
    """The line ``require condition, "message"``: a condition on the parameters."""

    condition: Expression
    message: str


class Update(SyntaxNode):
    """The line ``update every count``: the number of micro-batches of an update without a flush."""

    count: Expression


class Memory(SyntaxNode):
    """The line ``memory quantity [on worker] <= limit``: a bound that the schedule promises to keep on each worker."""

    quantity: Quantity
    worker: Word | None
    limit: Expression


class PipeBlock(SyntaxNode):
    """The block ``pipe name[index] { clauses }``, which describes one pipe, or one for each value of the index."""

    name: Word
    index: Index | None
    clauses: tuple[Clause, ...]

    def lines(self, kind: type[Line]) -> tuple[Line, ...]:
        """The lines of one kind, in the order of the text."""
        return tuple(clause for clause in self.clauses if isinstance(clause, kind))


Item = Workers | Frozen | Feeds | Let | Function | Require | Update | Memory | PipeBlock


class Scheme(SyntaxNode):
    """A whole scheme. A name is known only below its definition, so the order of the items matters."""

    name: Word
    parameters: tuple[Parameter, ...]
    items: tuple[Item, ...]

    @property
    def pipes(self) -> tuple[PipeBlock, ...]:
        """The blocks ``pipe``, in the order of the text."""
        return tuple(item for item in self.items if isinstance(item, PipeBlock))

    def __repr__(self) -> str:
        return f"<Scheme {self.name.text}({', '.join(parameter.name.text for parameter in self.parameters)})>"


def is_clocked(scheme: Scheme) -> bool:
    """Whether every operation of a scheme has a clock, so that its order does not depend on costs."""
    return all(line.clock is not None for pipe in scheme.pipes for line in pipe.lines(Operation))


def operands(expression: Expression) -> tuple[Expression, ...]:
    """The direct parts of an expression, from left to right."""
    match expression:
        case Integer() | Name():
            return ()
        case Call():
            return expression.arguments
        case Lookup():
            return (expression.position,)
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


def names_in(expression: Expression) -> Iterator[str]:
    """Yields the names of values, functions and tables in an expression, as often as they occur."""
    for node in walk(expression):
        match node:
            case Name(text) | Call(function=Word(text)) | Lookup(table=Word(text)):
                yield text
            case _:
                pass


def walk(expression: Expression) -> Iterator[Expression]:
    """Yields an expression and all its parts, from left to right, each before its own parts."""
    pending = [expression]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(reversed(operands(node)))
