"""CH201 and on: mistakes in names, types and clauses, which a scheme has whatever its numbers are."""

from chimera_ir.diagnostics.model import Diagnostic, Severity
from chimera_ir.source import Span


class UnknownName(Diagnostic, code="CH201"):
    """A name that nothing defines."""

    title = "nothing is called `{name}`"
    label = "{closest:else not defined}"
    help = "known here: {known}"
    name: str
    closest: str | None
    known: str


class UnnamedNumber(UnknownName):
    """A name that nothing defines in a memory bound that names no worker."""

    help = "known here: {known}; if `{name}` is the number of the worker, write `memory {quantity} on {name} <= ..`"
    quantity: str


class OperationInFormula(Diagnostic, code="CH295"):
    """An operation where a formula should be: the line before it ends with `@`, `prefer` or `when`."""

    title = "`{name}(..)` is an operation, and has no value"
    label = "read as a part of the formula before it"
    help = "write a formula behind the `@`, `prefer` or `when` that stands before it, as in `@ 2*m + s`"
    name: str


class UsedTooEarly(Diagnostic, code="CH202"):
    """A name that is defined only further down."""

    title = "`{name}` is used before it is defined"
    label = "not known yet"
    help = "move the definition of `{name}` above this line"
    related = ("defined", "`{name}` is defined here")
    name: str
    defined: Span


class DefinedByItself(Diagnostic, code="CH203"):
    """A definition that uses what it defines."""

    title = "`{name}` is defined by itself{way}"
    label = "leads back to the `{name}` that is being defined"
    help = "nothing is computed by recursion: write `{name}` as a formula of names that are known before"
    name: str
    through: tuple[str, ...]

    @property
    def way(self) -> str:
        """The words `` by way of `` and the names through which the definition leads back to itself, if any."""
        names = [f"`{name}`" for name in self.through]
        if len(names) > 6:
            names[3:-2] = [f"{len(names) - 5} more"]
        return f" by way of {', '.join(names)}" if names else ""


class DefinedTwice(Diagnostic, code="CH204"):
    """Two definitions of one name."""

    title = "`{name}` is defined twice"
    label = "defined again"
    help = "choose another name, such as `{name}2`"
    related = ("first", "`{name}` is defined first here")
    name: str
    first: Span


class Shadows(Diagnostic, code="CH205"):
    """A variable of a pipe or function that has the name of something else in the scheme."""

    title = "the variable `{name}` hides another `{name}`"
    label = "means something else from here on"
    help = "choose another name for the variable, such as `{name}2`"
    related = ("hidden", "the other `{name}` is defined here")
    name: str
    hidden: Span


class RedefinesBuiltin(Diagnostic, code="CH206"):
    """A definition of a name that is a function of the language."""

    title = "`{name}` is a function of the language"
    label = "cannot be defined again"
    help = "choose another name, such as `{name}2`"
    name: str


class WrongArity(Diagnostic, code="CH207"):
    """A call with too many or too few arguments."""

    title = "`{signature}` takes {least:argument}{or_more}, and here gets {count:argument}"
    label = "gets {count:argument}"
    help = "call it as `{signature}`"
    signature: str
    least: int
    most: int | None
    count: int

    @property
    def or_more(self) -> str:
        """The words `` or more`` after the smallest number of arguments, if the function takes any larger number."""
        return " or more" if self.most is None else ""


class NotAFunction(Diagnostic, code="CH208"):
    """A value that is called like a function."""

    title = "`{name}` is a value, not a function"
    label = "called like a function"
    help = "for a product write `{name}*(..)`"
    name: str


class FunctionAsValue(Diagnostic, code="CH209"):
    """A function without its arguments."""

    title = "`{name}` is a function and has no value by itself"
    label = "arguments are missing"
    help = "call it as `{signature}`"
    name: str
    signature: str


class NotATable(Diagnostic, code="CH219"):
    """An entry of something that is not a table."""

    title = "`{name}` is a number, not a table"
    label = "has no entries"
    help = "define it as a table, as in `let {name} = [4, 3, 2, 1]`"
    name: str


FunctionIndexed = NotATable.worded(
    "FunctionIndexed",
    title="`{name}` is a function, not a table",
    help="the arguments of a function stand in round brackets: `{name}(..)`",
)


class TableAsValue(Diagnostic, code="CH220"):
    """A table without the position of an entry."""

    title = "`{name}` is a table, and a formula takes one of its numbers"
    label = "which entry is missing"
    help = "write the position in square brackets, as in `{name}[s]`; the first entry is `{name}[0]`"
    name: str


TableCalled = TableAsValue.worded(
    "TableCalled", title="`{name}` is a table, not a function", label="called like a function"
)


class VariableLacking(Diagnostic, code="CH221"):
    """A name whose formula depends on a variable that is not known where the name is used."""

    title = "`{name}` depends on `{variable}`, which has no value here"
    label = "needs `{variable}`"
    help = "write a formula without `{variable}` here"
    related = ("defined", "`{name}` is defined here")
    name: str
    variable: str
    defined: Span


class WrongType(Diagnostic, code="CH210"):
    """A condition where a number belongs, or a number where a condition belongs."""

    title = "{place} takes {expected}, and this is {actual}"
    label = "this is {actual}"
    help = "turn it into a number with `if condition then 1 else 0`"
    place: str
    expected: str
    actual: str


NumberAsCondition = WrongType.worded("NumberAsCondition", help="compare it with something, as in `x > 0`")


class BranchesDiffer(Diagnostic, code="CH211"):
    """An ``if`` whose two values have different types."""

    title = "the two values of this `if` are not of one type"
    label = "{then} if it holds, {otherwise} if not"
    help = "give both values one type: two numbers, or two conditions"
    then: str
    otherwise: str


class SecondClause(Diagnostic, code="CH212"):
    """A second line with a first word that may begin only one line, such as ``workers``."""

    title = "{owner} has two `{clause}` lines"
    label = "the second one"
    help = "keep one of them{advice}"
    related = ("first", "the first one is here")
    owner: str
    clause: str
    first: Span

    @property
    def advice(self) -> str:
        """Further advice for a second ``micros`` line, which may belong to another pipe."""
        return "; micro-batches of another kind go into a pipe of their own" if self.clause == "micros" else ""


class RecomputesTwice(Diagnostic, code="CH218"):
    """A line ``recompute`` in a pipe that has an operation ``recompute`` with a clock, too."""

    title = "the pipe `{pipe}` has recomputations with a clock and without"
    label = "recomputes at this clock"
    help = "remove the line `recompute`: the stages of these operations are those that recompute"
    related = ("clause", "recomputes right before the backward")
    pipe: str
    clause: Span


class MissingClause(Diagnostic, code="CH213"):
    """A pipe without a line that it needs, such as ``stages``."""

    title = "the pipe `{pipe}` has no {clause} line"
    label = "no {clause} line"
    help = "add a line like `{example}`"
    pipe: str
    clause: str
    example: str


class NoPipes(Diagnostic, code="CH214"):
    """A scheme that runs nothing."""

    title = "the scheme `{scheme}` has no pipe"
    label = "runs nothing"
    help = "add a `pipe name {{ .. }}` with its stages, micro-batches and operations"
    scheme: str


class NotSupported(Diagnostic, code="CH215"):
    """A clause of the language that the compiler does not compile yet."""

    title = "a pair where micro-batches go on for ever cannot be compiled yet"
    label = "not supported yet"
    help = "give each of the two a line and a clock of its own"


HalvesNotSupported = NotSupported.worded(
    "HalvesNotSupported",
    title="a count of halves where micro-batches go on for ever cannot be compiled yet",
    help="count whole micro-batches",
)


class FormulaTooLarge(Diagnostic, code="CH216"):
    """A formula that is too long once its functions are written out."""

    title = "this formula has more than {limit:,} {unit} once its functions are written out"
    label = "too large"
    help = (
        "functions that call others several times multiply: hand on a repeated value as an argument, which is "
        "computed once, as `h(g(s))` does with `fn h(v) = v + v*v` above the pipe"
    )
    limit: int
    unit: str


FormulaTooDeep = FormulaTooLarge.worded(
    "FormulaTooDeep",
    help="each call adds the levels of what it calls: write one formula in place of a chain of functions",
)


class Unused(Diagnostic, code="CH217"):
    """A definition that changes nothing."""

    severity = Severity.WARNING
    title = "nothing uses {kind} `{name}`"
    label = "has no effect"
    help = "use it or remove it"
    kind: str
    name: str
