"""CH201 and on: names, types and clauses of a scheme that is well written, whatever its numbers are."""

from chimera_ir.diagnostics.model import Diagnostic, Note, Severity
from chimera_ir.plural import counted
from chimera_ir.source import Span


class UnknownName(Diagnostic):
    """A name that nothing defines."""

    code = "CH201"
    title = "nothing is called `{name}`"
    label = "{guess}"
    help = "known here: {known}"
    name: str
    closest: str | None
    known: str

    @property
    def guess(self) -> str:
        """What may be meant."""
        return f"did you mean `{self.closest}`?" if self.closest else "not defined"


class UsedTooEarly(Diagnostic):
    """A name that is defined only further down."""

    code = "CH202"
    title = "`{name}` is used before it is defined"
    label = "not known yet"
    help = "move the definition of `{name}` above this line"
    name: str
    defined: Span

    def notes(self) -> tuple[Note, ...]:
        """Where the definition is."""
        return (Note(f"`{self.name}` is defined here", self.defined),)


class DefinedByItself(Diagnostic):
    """A definition that uses what it defines."""

    code = "CH203"
    title = "`{name}` is defined by itself{way}"
    label = "leads back to the `{name}` that is being defined"
    help = "nothing is computed by recursion: write `{name}` as a formula of names that are known before"
    name: str
    through: tuple[str, ...]

    @property
    def way(self) -> str:
        """The names in between."""
        names = [f"`{name}`" for name in self.through]
        if len(names) > 6:
            names[3:-2] = [f"{len(names) - 5} more"]
        return f" by way of {', '.join(names)}" if names else ""


class DefinedTwice(Diagnostic):
    """Two definitions of one name."""

    code = "CH204"
    title = "`{name}` is defined twice"
    label = "defined again"
    help = "choose another name, such as `{name}2`"
    name: str
    first: Span

    def notes(self) -> tuple[Note, ...]:
        """Where it was defined first."""
        return (Note(f"`{self.name}` is defined first here", self.first),)


class Shadows(Diagnostic):
    """A variable of a pipe or function with the name of something of the scheme."""

    code = "CH205"
    title = "the variable `{name}` hides another `{name}`"
    label = "means something else from here on"
    help = "choose another name for the variable, such as `{name}2`"
    name: str
    hidden: Span

    def notes(self) -> tuple[Note, ...]:
        """What is hidden."""
        return (Note(f"the other `{self.name}` is defined here", self.hidden),)


class RedefinesBuiltin(Diagnostic):
    """A name that is a function of the language."""

    code = "CH206"
    title = "`{name}` is a function of the language"
    label = "cannot be defined again"
    help = "choose another name, such as `{name}2`"
    name: str


class WrongArity(Diagnostic):
    """A call with too many or too few arguments."""

    code = "CH207"
    title = "`{signature}` takes {expected}, and here {given}"
    label = "{given}"
    help = "call it as `{signature}`"
    signature: str
    expected: str
    count: int

    @property
    def given(self) -> str:
        """How many there are."""
        return f"gets {counted(self.count, 'argument')}"


class NotAFunction(Diagnostic):
    """A number that is called."""

    code = "CH208"
    title = "`{name}` is a value, not a function"
    label = "called like a function"
    help = "for a product write `{name}*(..)`"
    name: str


class FunctionAsValue(Diagnostic):
    """A function without its arguments."""

    code = "CH209"
    title = "`{name}` is a function and has no value by itself"
    label = "arguments are missing"
    help = "call it as `{signature}`"
    name: str
    signature: str


class WrongType(Diagnostic):
    """A condition where a number belongs, or a number where a condition belongs."""

    code = "CH210"
    title = "{place} takes {expected}, and this is {found}"
    label = "this is {found}"
    help = "{hint}"
    place: str
    expected: str
    found: str

    @property
    def hint(self) -> str:
        """How to make the one from the other."""
        if self.found == "a number":
            return "compare it with something, as in `x > 0`"
        return "turn it into a number with `if condition then 1 else 0`"


class BranchesDiffer(Diagnostic):
    """An ``if`` whose two values have different types."""

    code = "CH211"
    title = "the two values of this `if` are not of one type"
    label = "{one} if it holds, {other} if not"
    help = "give both values one type: two numbers, or two conditions"
    one: str
    other: str


class SecondClause(Diagnostic):
    """A second line of a kind that may stand once."""

    code = "CH212"
    title = "{owner} has two `{clause}` lines"
    label = "the second one"
    help = "keep one of them{advice}"
    owner: str
    clause: str
    first: Span

    @property
    def advice(self) -> str:
        """What the second one may have been meant for."""
        return "; micro-batches of another kind go into a pipe of their own" if self.clause == "micros" else ""

    def notes(self) -> tuple[Note, ...]:
        """Where the first one is."""
        return (Note("the first one is here", self.first),)


class MissingClause(Diagnostic):
    """A pipe without one of the lines it needs."""

    code = "CH213"
    title = "the pipe `{pipe}` has no {clause}"
    label = "no {clause}"
    help = "add a line like `{example}`"
    pipe: str
    clause: str
    example: str


class NoPipes(Diagnostic):
    """A scheme that runs nothing."""

    code = "CH214"
    title = "the scheme `{scheme}` has no pipe"
    label = "runs nothing"
    help = "add a `pipe name {{ .. }}` with its stages, micro-batches and operations"
    scheme: str


class NotSupported(Diagnostic):
    """A clause of the language that the compiler does not compile yet."""

    code = "CH215"
    title = "{feature} cannot be compiled yet"
    label = "not supported yet"
    help = "{instead}"
    feature: str
    instead: str


class FormulaTooLarge(Diagnostic):
    """A formula that is too long once its functions are written out."""

    code = "CH216"
    title = "this formula has more than {limit:,} {unit} once its functions are written out"
    label = "too large"
    help = "{remedy}"
    limit: int
    unit: str

    @property
    def remedy(self) -> str:
        """How the formula becomes smaller, or how it gets fewer levels."""
        if self.unit == "levels":
            return "each call adds the levels of what it calls: write one formula in place of a chain of functions"
        return (
            "functions that call others several times multiply: hand on a repeated value as an argument, which is "
            "computed once, as `h(g(s))` does with `fn h(v) = v + v*v` above the pipe"
        )


class Unused(Diagnostic):
    """A definition that changes nothing."""

    severity = Severity.WARNING
    code = "CH217"
    title = "nothing uses {kind} `{name}`"
    label = "has no effect"
    help = "use it or remove it"
    kind: str
    name: str
