"""CH112 and on: the text is not a scheme. ``chimera_ir.syntax.mistakes`` decides which mistake it is."""

from chimera_ir.diagnostics.model import Diagnostic, Note
from chimera_ir.source import Span

LIMITS = '"What a scheme cannot say" in docs/reference/language.md'
"""The section about what the language has no words for."""


class KeywordAsName(Diagnostic):
    """A word of the language where a name is given or used."""

    code = "CH112"
    title = "`{found}` is a word of the language and cannot be a name"
    label = "expected a name{or_value}"
    help = "choose another name, such as `{found}_`"
    found: str
    or_value: str


class MissingClock(Diagnostic):
    """An operation without ``@``."""

    code = "CH113"
    title = "the operation `{operation}` has no clock"
    label = "{label_text}"
    help = "write `{operation} @ formula`: worker by worker, operations run in the order of this formula"
    operation: str
    label_text: str


class SingleEquals(Diagnostic):
    """``=`` between two values."""

    code = "CH114"
    title = "`=` gives a name to a value; it does not compare"
    label = "did you mean `==`?"
    help = "compare with `==`"


class Unclosed(Diagnostic):
    """An opening bracket whose partner is missing."""

    code = "CH115"
    title = "this `{opener}` is never closed"
    label = "opened here"
    help = "close it with `{closer}` {where}"
    opener: str
    closer: str
    where: str
    found: str
    found_at: Span

    def notes(self) -> tuple[Note, ...]:
        """Where the text goes on as if it were closed."""
        return (Note(f"found {self.found} where `{self.closer}` could stand", self.found_at),)


class StrayCloser(Diagnostic):
    """A closing bracket whose partner is missing."""

    code = "CH116"
    title = "this `{closer}` closes nothing"
    label = "no `{opener}` is open here"
    help = "remove it, or add the `{opener}` it belongs to"
    closer: str
    opener: str


class WrongCloser(Diagnostic):
    """A closing bracket of another shape than the opening one."""

    code = "CH117"
    title = "`{opener}` is closed by `{closer}`"
    label = "expected `{expected}`"
    help = "write `{expected}` here"
    opener: str
    closer: str
    expected: str
    opened: Span

    def notes(self) -> tuple[Note, ...]:
        """Where the opening bracket is."""
        return (Note(f"this `{self.opener}` is still open", self.opened),)


class MissingComma(Diagnostic):
    """A comma is missing in a list."""

    code = "CH118"
    title = "a comma is missing before {found}"
    label = "expected `,`"
    help = "separate what stands in the brackets: `{before}, {after}`"
    found: str
    before: str
    after: str


class MissingIn(Diagnostic):
    """A variable without its range."""

    code = "CH119"
    title = "`{variable}` needs a range: `in` is missing"
    label = "expected `in`"
    help = "write `{variable} in 0..n`, which counts from 0 to n - 1"
    variable: str


class UnknownOperation(Diagnostic):
    """An operation letter that does not exist."""

    code = "CH120"
    title = "no operation is called `{found}`"
    label = "expected F, B, I or W"
    help = "F is a forward pass, B a full backward pass, I and W its input-gradient and weight-gradient halves"
    found: str


class OutsidePipe(Diagnostic):
    """A line of a pipe outside of every pipe."""

    code = "CH121"
    title = "{found} belongs in a pipe"
    label = "no pipe is open here"
    help = "put it between the braces of `pipe name {{ .. }}`"
    found: str
    closed: Span | None

    def notes(self) -> tuple[Note, ...]:
        """Where the pipe above was closed, if there is one."""
        return () if self.closed is None else (Note("the pipe above ends here", self.closed),)


class InsidePipe(Diagnostic):
    """A line of the scheme within a pipe."""

    code = "CH122"
    title = "{found} cannot stand inside a pipe"
    label = "inside a pipe"
    help = "{hint}"
    found: str
    hint: str
    opened: Span

    def notes(self) -> tuple[Note, ...]:
        """Where the pipe begins."""
        return (Note("the pipe begins here", self.opened),)


class MissingEquals(Diagnostic):
    """A definition without ``=``."""

    code = "CH123"
    title = "`{name}` is given no value: `=` is missing"
    label = "{label_text}"
    help = "write `{example}`"
    name: str
    label_text: str
    example: str


class MissingDefault(Diagnostic):
    """A parameter without a default."""

    code = "CH124"
    title = "the parameter `{name}` has no default"
    label = "expected `=` and a value"
    help = "write `{name} = 4` or another value; `{name}=..` on the command line overrides it"
    name: str


class MissingValue(Diagnostic):
    """An expression is missing."""

    code = "CH125"
    title = "a value is missing after {before}"
    label = "found {found} instead of a value"
    help = "write a number, a name, or a formula after {before}"
    before: str
    found: str


class MissingOperator(Diagnostic):
    """Two values without an operator between them."""

    code = "CH126"
    title = "nothing joins `{left}` and `{right}`"
    label = "expected an operator before this"
    help = "for a product write `{left}*{right}`"
    left: str
    right: str


class IncompleteChoice(Diagnostic):
    """``if`` without ``then`` or ``else``."""

    code = "CH127"
    title = "this `if` has no `{missing}`"
    label = "expected `{missing}` before {found}"
    help = "every `if` is a value: `if condition then value else value`"
    missing: str
    found: str


class BareChoice(Diagnostic):
    """``if`` as an operand without brackets."""

    code = "CH128"
    title = "an `if` inside a formula needs brackets"
    label = "where it ends would not be clear"
    help = "write `(if condition then value else value)`"


class MissingMessage(Diagnostic):
    """``require`` without the words to say."""

    code = "CH129"
    title = "this `require` has no message"
    label = 'expected `, "message"` after the condition'
    help = 'say what a user should do, as in `require N >= 1, "at least one micro-batch"`'


class MissingRange(Diagnostic):
    """One value where a range stands."""

    code = "CH130"
    title = "`{variable}` needs a range, and this is a single value"
    label = "expected `..` before {found}"
    help = "write `0..{value}`, which counts from 0 and stops before `{value}`"
    variable: str
    value: str
    found: str


class MissingPlace(Diagnostic):
    """``stages`` without ``on``."""

    code = "CH131"
    title = "these stages have no place: `on` is missing"
    label = "expected `on` before {found}"
    help = "say which worker runs stage `{variable}`, as in `on {variable}`"
    variable: str
    found: str


class UnknownStatement(Diagnostic):
    """A line that begins with a word that begins no line."""

    code = "CH132"
    title = "no line begins with `{found}`"
    label = "{guess}"
    help = "{hint}"
    found: str
    guess: str
    hint: str


class UnknownMode(Diagnostic):
    """A word that a clause does not know."""

    code = "CH133"
    title = "`{clause}` knows no `{found}`"
    label = "expected {choices}"
    help = "write {choices} here"
    clause: str
    found: str
    choices: str


class SecondScheme(Diagnostic):
    """Two headers in one text."""

    code = "CH134"
    title = "a text holds one scheme, and this is a second"
    label = "the scheme above would end here"
    help = "move it into a file of its own"


class EndlessRange(Diagnostic):
    """A range without end where only micro-batches may go on for ever."""

    code = "CH135"
    title = "only `micros` may go on for ever"
    label = "a range that ends here has no end"
    help = "say where it stops, as in `0..D`"


class Unfinished(Diagnostic):
    """The text ends in the middle of something."""

    code = "CH136"
    title = "the text ends in the middle of {unfinished}"
    label = "expected {expected}"
    help = "complete it: {expected} could stand here"
    unfinished: str
    expected: str


class Unexpected(Diagnostic):
    """A word or sign where another one belongs; none of the mistakes with a code of their own."""

    code = "CH137"
    title = "{found} cannot stand here"
    label = "unexpected"
    help = "here could stand {expected}"
    found: str
    expected: str


class WrongArguments(Diagnostic):
    """An operation that is not written ``F(m, s)``."""

    code = "CH138"
    title = "the operation `{letter}` takes a micro-batch and a stage in round brackets"
    label = "found {found}"
    help = "write `{letter}(m, s) @ formula`{hint}"
    letter: str
    found: str
    hint: str = ""


class MissingName(Diagnostic):
    """A name is missing."""

    code = "CH139"
    title = "a name is missing after `{before}`"
    label = "found {found} instead of a name"
    help = "{hint}"
    before: str
    found: str
    hint: str


class NeedlessEquals(Diagnostic):
    """``=`` after a word that takes its value as it is."""

    code = "CH140"
    title = "`{before}` takes its value without `=`"
    label = "not needed"
    help = "remove the `=`"
    before: str


class MissingBrackets(Diagnostic):
    """A scheme or function whose parameters are not in brackets."""

    code = "CH141"
    title = "the parameters of `{name}` stand in brackets"
    label = "expected `(` before {found}"
    help = "{hint}"
    name: str
    found: str
    hint: str


class SeveralValues(Diagnostic):
    """Several formulas where one belongs."""

    code = "CH142"
    title = "one value stands here, and this comma begins a second one"
    label = "unexpected"
    help = "keep one of the two; a clock that orders by a, and then by b, is `a*n + b` with n above every b"


class CannotSay(Diagnostic):
    """A word for what the language cannot say."""

    code = "CH143"
    title = "a scheme says nothing about {topic}"
    label = "cannot be said"
    help = "{instead}; see " + LIMITS
    topic: str
    instead: str
