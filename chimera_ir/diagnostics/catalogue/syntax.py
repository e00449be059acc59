"""CH112 and on: mistakes of syntax. ``chimera_ir.syntax.mistakes`` decides which one a text has."""

from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.source import Span

# CH115 to CH118, CH138, CH141 and CH142: brackets, and the values between them.


class Unclosed(Diagnostic, code="CH115"):
    meaning = "An opening bracket whose partner is missing."
    title = "this `{opener}` is never closed"
    label = "opened here"
    help = "close it with `{closer}` before {token}"
    related = ("token_at", "found {token} where `{closer}` could stand")
    opener: str
    closer: str
    token: str
    token_at: Span


UnclosedLine = Unclosed.worded("UnclosedLine", help="close it with `{closer}` at the end of the line")
UnclosedPipe = Unclosed.worded("UnclosedPipe", help="close it with `{closer}` behind the last line of the pipe")


class StrayCloser(Diagnostic, code="CH116"):
    meaning = "A closing bracket whose partner is missing."
    title = "this `{closer}` closes nothing"
    label = "no `{opener}` is open here"
    help = "remove it, or add the `{opener}` it belongs to"
    closer: str
    opener: str


class WrongCloser(Diagnostic, code="CH117"):
    meaning = "A closing bracket of another shape than the opening one."
    title = "`{opener}` is closed by `{closer}`"
    label = "expected `{expected}`"
    help = "write `{expected}` here"
    related = ("opened", "this `{opener}` is still open")
    opener: str
    closer: str
    expected: str
    opened: Span


class MissingComma(Diagnostic, code="CH118"):
    meaning = "A comma is missing in a list."
    title = "a comma is missing before {token}"
    label = "expected `,`"
    help = "separate what stands in the brackets: `{before}, {after}`"
    token: str
    before: str
    after: str


class WrongArguments(Diagnostic, code="CH138"):
    meaning = "An operation whose arguments are not a micro-batch and a stage in round brackets, as in `F(m, s)`."
    title = "the operation `{letter}` takes a micro-batch and a stage in round brackets"
    label = "found one argument"
    help = "write `{letter}(m, s) @ formula`"
    letter: str


WithoutWhen = WrongArguments.worded(
    "WithoutWhen", help="write `recompute when condition`, or `{letter}(m, s) @ formula` for a clock"
)

FourthArgument = WrongArguments.worded(
    "FourthArgument",
    label="found a fourth argument",
    help="write `{letter}(m, s) @ formula`, or `{letter}(m, s, q) @ formula` in a pipe with slices",
)


class WrongBrackets(WrongArguments):
    label = "found {token}"
    token: str


class MissingBrackets(Diagnostic, code="CH141"):
    meaning = "A scheme or function whose parameters are not in brackets."
    title = "the parameters of `{name}` stand in brackets"
    label = "expected `(` before {token}"
    help = "write `fn {name}(m) = formula`; a value without parameters is `let {name} = formula`"
    name: str
    token: str


class SchemeWithoutBrackets(MissingBrackets):
    help = "write `scheme {name}({parameter} = 4)`"
    parameter: str


class SeveralValues(Diagnostic, code="CH142"):
    meaning = "Several formulas, separated by commas, where one value belongs."
    title = "one value stands here, and this comma begins a second one"
    label = "unexpected"
    help = "keep one of the two; a clock that orders by a, and then by b, is `a*n + b` with n above every b"


# CH101 to CH110: characters and words that cannot be in a scheme, and texts that do not start as a scheme.


class NotText(Diagnostic, code="CH101"):
    meaning = "A character that no text holds: NUL, another control character, or a byte that is not UTF-8."
    title = "this is not a text: it holds {character}"
    label = "not a character of a text"
    help = "a scheme is plain text in UTF-8; is this the file you meant?"
    token: str

    @property
    def character(self) -> str:
        if self.token == "\0":
            return "a NUL character"
        if "\udc80" <= self.token <= "\udcff":
            return f"the byte 0x{ord(self.token) - 0xDC00:02x}, which is not UTF-8"
        if self.token == "\ufffd":
            return "a byte that is not UTF-8"
        return f"the control character U+{ord(self.token):04X}"


class TextTooLong(Diagnostic, code="CH102"):
    meaning = "More text than the compiler reads."
    title = "the text has more than {limit:,} characters"
    label = "the compiler reads up to here"
    help = "write repetition as a formula of m and s, or as an indexed pipe `pipe name[i in 0..n] {{ .. }}`"
    limit: int


TooManyTokens = TextTooLong.worded("TooManyTokens", title="the text has more than {limit:,} words and signs")
NameTooLong = TextTooLong.worded(
    "NameTooLong",
    title="this name has more than {limit:,} characters",
    label="a name",
    help="choose a shorter name: messages, pages and files show it",
)


class TooDeep(Diagnostic, code="CH103"):
    meaning = "An expression nested deeper than the compiler follows."
    title = "this formula is nested deeper than {limit:level}"
    label = "level {limit} is passed here"
    help = "name parts of the formula with `let` or `fn`"
    limit: int


class NumberTooLarge(Diagnostic, code="CH104"):
    meaning = "A literal beyond 64 bits."
    title = "this number is too large"
    label = "beyond 9223372036854775807"
    help = "numbers have 64 bits: the largest is 2**63 - 1"


class NothingHere(Diagnostic, code="CH105"):
    meaning = "An empty text."
    title = "there is no scheme in this text"
    label = "expected `scheme name(parameters)`"
    help = "start with a header like `scheme mine(D = 4, N = 8)`; `chimera compile --list` shows complete schemes"


class NoHeader(Diagnostic, code="CH106"):
    meaning = "The first word is not `scheme`."
    title = "a scheme starts with `scheme name(parameters)`, not with {token}"
    label = "expected `scheme`"
    help = "put a header like `scheme mine(D = 4, N = 8)` above everything but comments"
    token: str


class StrayCharacter(Diagnostic, code="CH107"):
    meaning = "A character that has no meaning here."
    title = "{token} has no meaning in a scheme"
    label = "unexpected"
    help = 'names are made of a-z, A-Z, 0-9 and _; other words belong in a `# comment` or a "message"'
    token: str


StrayBlank = StrayCharacter.worded(
    "StrayBlank", help="this is not an ordinary blank, though it looks like one; write it anew"
)
StrayQuote = StrayCharacter.worded("StrayQuote", help='messages stand between double quotes: "like this"')
StrayColon = StrayCharacter.worded(
    "StrayColon",
    help="no colon is needed: a pipe's lines stand between `{{` and `}}`, a range is `a..b`, a choice `if a then b`",
)
StrayDot = StrayCharacter.worded("StrayDot", help="a range is written with two dots: `0..D`")
StrayQuestion = StrayCharacter.worded("StrayQuestion", help="a choice is written `if condition then value else value`")


class NotAnInteger(Diagnostic, code="CH108"):
    meaning = "A decimal fraction where only integers can stand."
    title = "numbers are integers; `{token}` is not"
    label = "not an integer"
    help = "clocks are an order, not a time: scale all of them to integers (durations are set with `--cost`)"
    token: str


class GluedNumber(Diagnostic, code="CH109"):
    meaning = "A number with letters right behind it."
    title = "`{token}` is neither a number nor a name"
    label = "a number runs into a name"
    help = "for a product write `{number}*{name}`; a name starts with a letter"
    token: str
    number: str
    name: str


ForeignNumber = GluedNumber.worded("ForeignNumber", help="a number is written in decimal digits and nothing else")


class OpenString(Diagnostic, code="CH110"):
    meaning = "A quoted text, the message of a requirement, without its closing quote."
    title = "this message has no closing quote"
    label = "starts here and runs past the end of the line"
    help = 'close it with `"` on the same line'


LIMITS = '"What a scheme cannot say" in docs/reference/language.md'
"""Section of the docs on the limits of the language."""


class KeywordAsName(Diagnostic, code="CH112"):
    meaning = "A word of the language where a name is given or used."
    title = "`{token}` is a word of the language and cannot be a name"
    label = "expected a name"
    help = "choose another name, such as `{token}_`"
    token: str


KeywordAsValue = KeywordAsName.worded("KeywordAsValue", label="expected a name or a value")


class MissingClock(Diagnostic, code="CH113"):
    meaning = "A formula behind an operation, without `@`."
    title = "a formula behind the operation `{operation}` needs a word before it"
    label = "expected `@` or `prefer`"
    help = "write `{operation} @ formula` for a clock; without one the compiler orders the operation"
    operation: str


ClockBehindEquals = MissingClock.worded("ClockBehindEquals", label="did you mean `@`?")


class ClockAndPreference(Diagnostic, code="CH164"):
    meaning = "A clock and a preference, or two of one of them, on one line."
    title = "an operation has a clock or a preference, not both"
    label = "the line has one already"
    help = "keep one of the two: `@` for a place in the order, `prefer` if the compiler orders the operation"


class SingleEquals(Diagnostic, code="CH114"):
    meaning = "`=` between two values, where only `==` compares."
    title = "`=` gives a name to a value; it does not compare"
    label = "did you mean `==`?"
    help = "compare with `==`"


class MissingIn(Diagnostic, code="CH119"):
    meaning = "A variable without `in` and a range."
    title = "`{variable}` needs a range: `in` is missing"
    label = "expected `in`"
    help = "write `{variable} in 0..n`, which counts from 0 to n - 1"
    variable: str


class UnknownLetter(Diagnostic, code="CH120"):
    meaning = "An operation letter that does not exist."
    title = "no operation is called `{token}`"
    label = "expected {letters}"
    help = "the operations are {operations}"
    token: str
    letters: str
    operations: str


class OutsidePipe(Diagnostic, code="CH121"):
    meaning = "A line of a pipe outside of every pipe."
    title = "{token} belongs in a pipe"
    label = "no pipe is open here"
    help = "put it between the braces of `pipe name {{ .. }}`"
    related = ("closed", "the pipe above ends here")
    token: str
    closed: Span | None


class InsidePipe(Diagnostic, code="CH122"):
    meaning = "A line inside a pipe that belongs outside of all pipes."
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
    meaning = "A table in the middle of a formula, or as something else than the value of a name."
    title = "a table stands behind `let NAME =` alone"
    label = "a formula takes a number"
    help = "name the table, as in `let warm = [4, 3, 2, 1]`, and write `warm[s]` here for its entry number s"


class MissingEquals(Diagnostic, code="CH123"):
    meaning = "A definition without `=`."
    title = "`{name}` is given no value: `=` is missing"
    label = "expected `=`"
    help = "write `{word} {name} = formula`"
    word: str
    name: str


DefinedByComparison = MissingEquals.worded("DefinedByComparison", label="did you mean `=`?")


class MissingDefault(Diagnostic, code="CH124"):
    meaning = "A parameter without a default."
    title = "the parameter `{name}` has no default"
    label = "expected `=` and a value"
    help = "write `{name} = 4` or another value; `{name}=..` on the command line overrides it"
    name: str


class MissingValue(Diagnostic, code="CH125"):
    meaning = "An expression is missing."
    title = "a value is missing after {before}"
    label = "found {token} instead of a value"
    help = "write a number, a name, or a formula after {before}"
    before: str
    token: str


ValueOnNextLine = MissingValue.worded("ValueOnNextLine", label="found {token} on the next line instead of a value")


class MissingOperator(Diagnostic, code="CH126"):
    meaning = "Two values without an operator between them."
    title = "nothing joins `{left}` and `{right}`"
    label = "expected an operator before this"
    help = "for a product write `{left}*{right}`"
    left: str
    right: str


class IncompleteChoice(Diagnostic, code="CH127"):
    meaning = "`if` without `then` or `else`."
    title = "this `if` has no `{missing}`"
    label = "expected `{missing}` before {token}"
    help = "every `if` is a value: `if condition then value else value`"
    missing: str
    token: str


class BareChoice(Diagnostic, code="CH128"):
    meaning = "`if` as an operand without brackets."
    title = "an `if` inside a formula needs brackets"
    label = "where it ends would not be clear"
    help = "write `(if condition then value else value)`"


class MissingMessage(Diagnostic, code="CH129"):
    meaning = "A `require` line without the message for the user."
    title = "this `require` has no message"
    label = 'expected `, "message"` after the condition'
    help = 'say what a user should do, as in `require N >= 1, "at least one micro-batch"`'


class MissingRange(Diagnostic, code="CH130"):
    meaning = "A single value where a range belongs."
    title = "`{variable}` needs a range, and this is a single value"
    label = "expected `..` before {token}"
    help = "write `0..{value}`, which counts from 0 and stops before `{value}`"
    variable: str
    value: str
    token: str


class MissingPlace(Diagnostic, code="CH131"):
    meaning = "A `stages` line without `on` and the worker of a stage."
    title = "these stages have no place: `on` is missing"
    label = "expected `on` before {token}"
    help = "say which worker runs stage `{variable}`, as in `on {variable}`"
    variable: str
    token: str


class UnknownStatement(Diagnostic, code="CH132"):
    meaning = "A line whose first word begins no line of the language."
    title = "no line begins with `{token}`"
    label = "{closest:else not the beginning of a line}"
    help = "outside a pipe, lines begin with {words}"
    token: str
    closest: str | None
    words: str


UnknownClause = UnknownStatement.worded("UnknownClause", help="in a pipe, lines begin with {words}")


class UnknownMode(Diagnostic, code="CH133"):
    meaning = "A word that cannot follow the first word of its line, such as an unknown strategy after `sync`."
    title = "`{clause}` knows no `{token}`"
    label = "expected {choices}"
    help = "write {choices} here"
    clause: str
    token: str
    choices: str


class SecondScheme(Diagnostic, code="CH134"):
    meaning = "Two `scheme` headers in one text."
    title = "a text holds one scheme, and this is a second"
    label = "the scheme above would end here"
    help = "move it into a file of its own"


class EndlessRange(Diagnostic, code="CH135"):
    meaning = "A range without end where only micro-batches may go on for ever."
    title = "only `micros` may go on for ever"
    label = "a range that ends here has no end"
    help = "say where it stops, as in `0..D`"


class Unfinished(Diagnostic, code="CH136"):
    meaning = "The text ends where more must follow."
    title = "the text ends in the middle of {unfinished}"
    label = "expected {expected}"
    help = "complete it: {expected} could stand here"
    unfinished: str
    expected: str


class Unexpected(Diagnostic, code="CH137"):
    meaning = "A word or sign where another one belongs, if no other code describes the mistake."
    title = "{token} cannot stand here"
    label = "unexpected"
    help = "here could stand {expected}"
    token: str
    expected: str


WorkerBehindLimit = Unexpected.worded(
    "WorkerBehindLimit", label="a worker is named before its limit", help="write {expected}"
)


class MissingName(Diagnostic, code="CH139"):
    meaning = "A missing name after a word that a name must follow."
    title = "a name is missing after `{before}`"
    label = "found {token} instead of a name"
    help = "names are made of a-z, A-Z, 0-9 and _, and do not start with a digit"
    before: str
    token: str


class UnnamedPart(MissingName):
    help = "as in `{example}`"
    example: str


UnnamedQuantity = MissingName.worded(
    "UnnamedQuantity", help="say what is bounded: `memory activations <= 4` or `memory weights <= 2`"
)
UnnamedWorker = MissingName.worded("UnnamedWorker", help="name the worker, as in `memory activations on w <= D - w`")
UnnamedStrategy = MissingName.worded("UnnamedStrategy", help="say how: `sync lazy`, `sync eager` or `sync eager_opt`")
UnnamedIndex = MissingName.worded("UnnamedIndex", help="give the pipes an index, as in `[i in 0..2]`")


class NeedlessEquals(Diagnostic, code="CH140"):
    meaning = "`=` after a word that takes its value as it is."
    title = "`{before}` takes its value without `=`"
    label = "not needed"
    help = "remove the `=`"
    before: str


# CH111 and CH143: words and signs of other languages, and what a scheme has in their place.

_Entry = tuple[str, str]


def _by_token(table: dict[str, _Entry]) -> dict[str, _Entry]:
    return {token: entry for tokens, entry in table.items() for token in tokens.split()}


_UNCHANGING = "nothing changes its value"
FOREIGN = _by_token(
    {
        "//": ("did you mean `/`?", "`/` rounds down already; a comment starts with `#`"),
        "-> →": (
            "there are no arrows",
            "an operation's clock follows `@`, a function's body follows `=`; "
            f"a stage hands on to the next one, and no line says so; see {LIMITS}",
        ),
        "=>": ("did you mean `>=`?", "at least is written `>=`; a function's body follows `=`"),
        "=< ≤ le": ("did you mean `<=`?", "at most is written `<=`"),
        "≥ ge": ("did you mean `>=`?", "at least is written `>=`"),
        "lt": ("did you mean `<`?", "less is written `<`"),
        "gt": ("did you mean `>`?", "more is written `>`"),
        "=== is eq": ("did you mean `==`?", "equal is written `==`"),
        "<> ≠ !== =! ne": ("did you mean `!=`?", "unequal is written `!=`"),
        "/=": ("did you mean `!=`?", f"unequal is written `!=`; {_UNCHANGING}"),
        "plus": ("did you mean `+`?", "a sum is written `+`"),
        "minus": ("did you mean `-`?", "a difference is written `-`"),
        "−": ("did you mean `-`?", "this is a typographic minus; write the one of the keyboard"),
        "× · times": ("did you mean `*`?", "a product is written `*`"),
        "÷ div idiv": ("did you mean `/`?", "a quotient, rounded down, is written `/`"),
        "mod modulo rem": ("did you mean `%`?", "what a division leaves is written `%`"),
        "** ^": ("there are no powers", "write a power of a fixed exponent as a product: `n*n`"),
        "<< shl shr": ("there are no shifts", "multiply by a power of two: `n * 8`"),
        ">>": ("there are no shifts", "divide by a power of two: `n / 8` rounds down"),
        "&& ∧": ("did you mean `and`?", "both is written `and`"),
        "&": (
            "did you mean `and`?",
            "both is written `and`; `&` joins a pair, as in `F(m, s) & B(m - 2, s) @ 2*m + s`",
        ),
        "|| | ∨": ("did you mean `or`?", "at least one is written `or`"),
        "! ¬ ~": ("did you mean `not`?", "the opposite is written `not`"),
        "xor": (
            "did you mean `!=`?",
            "of numbers: unequal is written `!=`; conditions are joined by `and`, `or` and `not`",
        ),
        "+= -= *= %=": (_UNCHANGING, "write the whole formula, or name a part of it with `let` or `fn`"),
        "++": (_UNCHANGING, "write `n + 1`; a plus alone stands before no value"),
        ":=": ("did you mean `=`?", "a value gets its name by `let name = value`"),
        "...": ("did you mean `..`?", "a range is written with two dots: `0..D`"),
        "..=": ("did you mean `..`?", "`0..D` counts from 0 to D - 1; write `0..D+1` for one more"),
        "if": (
            "did you mean `when`?",
            "a guard is written `when condition`, a choice `if condition then value else value`",
        ),
        "where": ("did you mean `when`?", "a guard is written `when condition`"),
        "elif elsif elseif": (
            "did you mean `else if`?",
            "a further case is another choice: `if a then 1 else if b then 2 else 3`",
        ),
    }
)
"""Signs and words of other languages, each with the operator that is meant and the way to write it in a scheme."""

UNSAYABLE = _by_token(
    {
        "cost costs duration durations time takes weight weights": (
            "costs",
            "durations are given when it is compiled: `--cost F=1 --cost B=2`, "
            "for each stage `--stage-cost F=4,4,5,6` or `--profile FILE`; "
            "micro-batches differ by `micros m in 0..N weigh 1 + m % 2`",
        ),
        "slice sequence tokens chunks quarters thirds parts": (
            "parts of a micro-batch",
            "cut the batch into more micro-batches, each of them into two `halves`, or into `slices q in 0..k` of the "
            "sequence",
        ),
        "feed edge edges link links connect graph send sends recv receive receives to from": (
            "the data between stages",
            "a stage takes what the stage before it returned; `feeds image[1] -> text[0]` above the pipes is one more",
        ),
        "after before wait waits needs depends": (
            "what an operation waits for",
            "that follows from the stages; the clock behind `@` orders the operations of a worker",
        ),
        "skip skips omit without": (
            "skipped stages",
            "every pipe has all stages; a stage of the model may return its input as it is",
        ),
        "prefetch move moves evict swap": (
            "where activations are kept",
            "they stay on their worker until the backward; `offload(m, s) @ clock` and `reload(m, s) @ clock` move "
            "them to the host and back, and `recompute when condition` keeps fewer of them",
        ),
    }
)
"""Words that the language lacks, each with its topic and the line or option to use instead."""


class ForeignSpelling(Diagnostic, code="CH111"):
    meaning = "An operator as other languages write it."
    title = "`{token}` is not an operator here"
    label = "{operator}"
    help = "{advice}"
    token: str

    @property
    def operator(self) -> str:
        return FOREIGN[self.token.lower()][0]

    @property
    def advice(self) -> str:
        return FOREIGN[self.token.lower()][1]


class UpperCase(ForeignSpelling):
    label = "did you mean `{word}`?"
    help = "the words of the language are written in lower case"

    @property
    def word(self) -> str:
        return self.token.lower()


class CannotSay(Diagnostic, code="CH143"):
    meaning = "A word for something that a scheme cannot express, such as costs or skipped stages."
    title = "a scheme says nothing about {topic}"
    label = "cannot be said"
    help = "{instead}; see " + LIMITS
    topic: str
    instead: str
