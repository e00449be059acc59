"""CH112 and on: mistakes of syntax. ``chimera_ir.syntax.mistakes`` decides which one a text has."""

from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.source import Span

LIMITS = '"What a scheme cannot say" in docs/reference/language.md'
"""Section of the docs on the limits of the language."""


class KeywordAsName(Diagnostic, code="CH112"):
    """A word of the language where a name is given or used."""

    title = "`{token}` is a word of the language and cannot be a name"
    label = "expected a name"
    help = "choose another name, such as `{token}_`"
    token: str


KeywordAsValue = KeywordAsName.worded("KeywordAsValue", label="expected a name or a value")


class MissingClock(Diagnostic, code="CH113"):
    """A formula behind an operation, without ``@``."""

    title = "a formula behind the operation `{operation}` needs a word before it"
    label = "expected `@` or `prefer`"
    help = "write `{operation} @ formula` for a clock; without one the compiler orders the operation"
    operation: str


ClockBehindEquals = MissingClock.worded("ClockBehindEquals", label="did you mean `@`?")


class ClockAndPreference(Diagnostic, code="CH164"):
    """A clock and a preference, or two of one of them, on one line."""

    title = "an operation has a clock or a preference, not both"
    label = "the line has one already"
    help = "keep one of the two: `@` for a place in the order, `prefer` if the compiler orders the operation"


class SingleEquals(Diagnostic, code="CH114"):
    """``=`` between two values, where only ``==`` compares."""

    title = "`=` gives a name to a value; it does not compare"
    label = "did you mean `==`?"
    help = "compare with `==`"


class MissingIn(Diagnostic, code="CH119"):
    """A variable without ``in`` and a range."""

    title = "`{variable}` needs a range: `in` is missing"
    label = "expected `in`"
    help = "write `{variable} in 0..n`, which counts from 0 to n - 1"
    variable: str


class UnknownLetter(Diagnostic, code="CH120"):
    """An operation letter that does not exist."""

    title = "no operation is called `{token}`"
    label = "expected {letters}"
    help = "the operations are {operations}"
    token: str
    letters: str
    operations: str


class OutsidePipe(Diagnostic, code="CH121"):
    """A line of a pipe outside of every pipe."""

    title = "{token} belongs in a pipe"
    label = "no pipe is open here"
    help = "put it between the braces of `pipe name {{ .. }}`"
    related = ("closed", "the pipe above ends here")
    token: str
    closed: Span | None


class InsidePipe(Diagnostic, code="CH122"):
    """A line inside a pipe that belongs outside of all pipes."""

    title = "{token} cannot stand inside a pipe"
    label = "inside a pipe"
    help = "put it above the pipe, or close the pipe with `}}` first"
    related = ("opened", "the pipe begins here")
    token: str
    opened: Span


FunctionInsidePipe = InsidePipe.worded(
    "FunctionInsidePipe", help="put it above the pipe; in a pipe, `let` gives a formula of its variables a name"
)


class UnnamedTable(Diagnostic, code="CH144"):
    """A table in the middle of a formula, or as something else than the value of a name."""

    title = "a table stands behind `let NAME =` alone"
    label = "a formula takes a number"
    help = "name the table, as in `let warm = [4, 3, 2, 1]`, and write `warm[s]` here for its entry number s"


class MissingEquals(Diagnostic, code="CH123"):
    """A definition without ``=``."""

    title = "`{name}` is given no value: `=` is missing"
    label = "expected `=`"
    help = "write `{word} {name} = formula`"
    word: str
    name: str


DefinedByComparison = MissingEquals.worded("DefinedByComparison", label="did you mean `=`?")


class MissingDefault(Diagnostic, code="CH124"):
    """A parameter without a default."""

    title = "the parameter `{name}` has no default"
    label = "expected `=` and a value"
    help = "write `{name} = 4` or another value; `{name}=..` on the command line overrides it"
    name: str


class MissingValue(Diagnostic, code="CH125"):
    """An expression is missing."""

    title = "a value is missing after {before}"
    label = "found {token} instead of a value"
    help = "write a number, a name, or a formula after {before}"
    before: str
    token: str


ValueOnNextLine = MissingValue.worded("ValueOnNextLine", label="found {token} on the next line instead of a value")


class MissingOperator(Diagnostic, code="CH126"):
    """Two values without an operator between them."""

    title = "nothing joins `{left}` and `{right}`"
    label = "expected an operator before this"
    help = "for a product write `{left}*{right}`"
    left: str
    right: str


class IncompleteChoice(Diagnostic, code="CH127"):
    """``if`` without ``then`` or ``else``."""

    title = "this `if` has no `{missing}`"
    label = "expected `{missing}` before {token}"
    help = "every `if` is a value: `if condition then value else value`"
    missing: str
    token: str


class BareChoice(Diagnostic, code="CH128"):
    """``if`` as an operand without brackets."""

    title = "an `if` inside a formula needs brackets"
    label = "where it ends would not be clear"
    help = "write `(if condition then value else value)`"


class MissingMessage(Diagnostic, code="CH129"):
    """A ``require`` line without the message for the user."""

    title = "this `require` has no message"
    label = 'expected `, "message"` after the condition'
    help = 'say what a user should do, as in `require N >= 1, "at least one micro-batch"`'


class MissingRange(Diagnostic, code="CH130"):
    """A single value where a range belongs."""

    title = "`{variable}` needs a range, and this is a single value"
    label = "expected `..` before {token}"
    help = "write `0..{value}`, which counts from 0 and stops before `{value}`"
    variable: str
    value: str
    token: str


class MissingPlace(Diagnostic, code="CH131"):
    """A ``stages`` line without ``on`` and the worker of a stage."""

    title = "these stages have no place: `on` is missing"
    label = "expected `on` before {token}"
    help = "say which worker runs stage `{variable}`, as in `on {variable}`"
    variable: str
    token: str


class UnknownStatement(Diagnostic, code="CH132"):
    """A line whose first word begins no line of the language."""

    title = "no line begins with `{token}`"
    label = "{closest:else not the beginning of a line}"
    help = "outside a pipe, lines begin with {words}"
    token: str
    closest: str | None
    words: str


UnknownClause = UnknownStatement.worded("UnknownClause", help="in a pipe, lines begin with {words}")


class UnknownMode(Diagnostic, code="CH133"):
    """A word that cannot follow the first word of its line, such as an unknown strategy after ``sync``."""

    title = "`{clause}` knows no `{token}`"
    label = "expected {choices}"
    help = "write {choices} here"
    clause: str
    token: str
    choices: str


class SecondScheme(Diagnostic, code="CH134"):
    """Two ``scheme`` headers in one text."""

    title = "a text holds one scheme, and this is a second"
    label = "the scheme above would end here"
    help = "move it into a file of its own"


class EndlessRange(Diagnostic, code="CH135"):
    """A range without end where only micro-batches may go on for ever."""

    title = "only `micros` may go on for ever"
    label = "a range that ends here has no end"
    help = "say where it stops, as in `0..D`"


class Unfinished(Diagnostic, code="CH136"):
    """The text ends where more must follow."""

    title = "the text ends in the middle of {unfinished}"
    label = "expected {expected}"
    help = "complete it: {expected} could stand here"
    unfinished: str
    expected: str


class Unexpected(Diagnostic, code="CH137"):
    """A word or sign where another one belongs, if no other code describes the mistake."""

    title = "{token} cannot stand here"
    label = "unexpected"
    help = "here could stand {expected}"
    token: str
    expected: str


WorkerBehindLimit = Unexpected.worded(
    "WorkerBehindLimit", label="a worker is named before its limit", help="write {expected}"
)


class MissingName(Diagnostic, code="CH139"):
    """A missing name after a word that a name must follow."""

    title = "a name is missing after `{before}`"
    label = "found {token} instead of a name"
    help = "names are made of a-z, A-Z, 0-9 and _, and do not start with a digit"
    before: str
    token: str


class UnnamedPart(MissingName):
    """A scheme, or a pipe, without a name."""

    help = "as in `{example}`"
    example: str


UnnamedQuantity = MissingName.worded(
    "UnnamedQuantity", help="say what is bounded: `memory activations <= 4` or `memory weights <= 2`"
)
UnnamedWorker = MissingName.worded("UnnamedWorker", help="name the worker, as in `memory activations on w <= D - w`")
UnnamedStrategy = MissingName.worded("UnnamedStrategy", help="say how: `sync lazy`, `sync eager` or `sync eager_opt`")
UnnamedIndex = MissingName.worded("UnnamedIndex", help="give the pipes an index, as in `[i in 0..2]`")


class NeedlessEquals(Diagnostic, code="CH140"):
    """``=`` after a word that takes its value as it is."""

    title = "`{before}` takes its value without `=`"
    label = "not needed"
    help = "remove the `=`"
    before: str
