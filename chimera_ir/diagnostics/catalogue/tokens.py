"""CH101 to CH110: characters and words that cannot be in a scheme, and texts that do not start as a scheme."""

from chimera_ir.diagnostics.model import Diagnostic


class NotText(Diagnostic, code="CH101"):
    """A character that no text holds: NUL, another control character, or a byte that is not UTF-8."""

    title = "this is not a text: it holds {character}"
    label = "not a character of a text"
    help = "a scheme is plain text in UTF-8; is this the file you meant?"
    token: str

    @property
    def character(self) -> str:
        """The character in words, as it cannot be shown."""
        if self.token == "\0":
            return "a NUL character"
        if "\udc80" <= self.token <= "\udcff":
            return f"the byte 0x{ord(self.token) - 0xDC00:02x}, which is not UTF-8"
        if self.token == "\ufffd":
            return "a byte that is not UTF-8"
        return f"the control character U+{ord(self.token):04X}"


class TextTooLong(Diagnostic, code="CH102"):
    """More text than the compiler reads."""

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
    """An expression nested deeper than the compiler follows."""

    title = "this formula is nested deeper than {limit:level}"
    label = "level {limit} is passed here"
    help = "name parts of the formula with `let` or `fn`"
    limit: int


class NumberTooLarge(Diagnostic, code="CH104"):
    """A literal beyond 64 bits."""

    title = "this number is too large"
    label = "beyond 9223372036854775807"
    help = "numbers have 64 bits: the largest is 2**63 - 1"


class NothingHere(Diagnostic, code="CH105"):
    """An empty text."""

    title = "there is no scheme in this text"
    label = "expected `scheme name(parameters)`"
    help = "start with a header like `scheme mine(D = 4, N = 8)`; `chimera compile --list` shows complete schemes"


class NoHeader(Diagnostic, code="CH106"):
    """The first word is not ``scheme``."""

    title = "a scheme starts with `scheme name(parameters)`, not with {token}"
    label = "expected `scheme`"
    help = "put a header like `scheme mine(D = 4, N = 8)` above everything but comments"
    token: str


class StrayCharacter(Diagnostic, code="CH107"):
    """A character that has no meaning here."""

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
    """A decimal fraction where only integers can stand."""

    title = "numbers are integers; `{token}` is not"
    label = "not an integer"
    help = "clocks are an order, not a time: scale all of them to integers (durations are set with `--cost`)"
    token: str


class GluedNumber(Diagnostic, code="CH109"):
    """A number with letters right behind it."""

    title = "`{token}` is neither a number nor a name"
    label = "a number runs into a name"
    help = "for a product write `{number}*{name}`; a name starts with a letter"
    token: str
    number: str
    name: str


ForeignNumber = GluedNumber.worded("ForeignNumber", help="a number is written in decimal digits and nothing else")


class OpenString(Diagnostic, code="CH110"):
    """A quoted text, the message of a requirement, without its closing quote."""

    title = "this message has no closing quote"
    label = "starts here and runs past the end of the line"
    help = 'close it with `"` on the same line'
