"""CH115 to CH118, CH138, CH141 and CH142: brackets, and the values between them."""

from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.source import Span


class Unclosed(Diagnostic, code="CH115"):
    """An opening bracket whose partner is missing."""

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
    """A closing bracket whose partner is missing."""

    title = "this `{closer}` closes nothing"
    label = "no `{opener}` is open here"
    help = "remove it, or add the `{opener}` it belongs to"
    closer: str
    opener: str


class WrongCloser(Diagnostic, code="CH117"):
    """A closing bracket of another shape than the opening one."""

    title = "`{opener}` is closed by `{closer}`"
    label = "expected `{expected}`"
    help = "write `{expected}` here"
    related = ("opened", "this `{opener}` is still open")
    opener: str
    closer: str
    expected: str
    opened: Span


class MissingComma(Diagnostic, code="CH118"):
    """A comma is missing in a list."""

    title = "a comma is missing before {token}"
    label = "expected `,`"
    help = "separate what stands in the brackets: `{before}, {after}`"
    token: str
    before: str
    after: str


class WrongArguments(Diagnostic, code="CH138"):
    """An operation whose arguments are not a micro-batch and a stage in round brackets, as in ``F(m, s)``."""

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
    """An operation whose arguments are not in round brackets."""

    label = "found {token}"
    token: str


class MissingBrackets(Diagnostic, code="CH141"):
    """A scheme or function whose parameters are not in brackets."""

    title = "the parameters of `{name}` stand in brackets"
    label = "expected `(` before {token}"
    help = "write `fn {name}(m) = formula`; a value without parameters is `let {name} = formula`"
    name: str
    token: str


class SchemeWithoutBrackets(MissingBrackets):
    """A scheme whose parameters are not in brackets."""

    help = "write `scheme {name}({parameter} = 4)`"
    parameter: str


class SeveralValues(Diagnostic, code="CH142"):
    """Several formulas, separated by commas, where one value belongs."""

    title = "one value stands here, and this comma begins a second one"
    label = "unexpected"
    help = "keep one of the two; a clock that orders by a, and then by b, is `a*n + b` with n above every b"
