"""CH101 to CH111: the text holds what no scheme is made of, or does not start as one."""

import re

from chimera_ir.diagnostics.model import Diagnostic


class NotText(Diagnostic):
    """A character that no text holds: NUL, another control character, or a byte that is not UTF-8."""

    code = "CH101"
    title = "this is not a text: it holds {character}"
    label = "not a character of a text"
    help = "a scheme is plain text in UTF-8; is this the file you meant?"
    character: str


class TextTooLong(Diagnostic):
    """More text than the compiler reads."""

    code = "CH102"
    title = "the text has more than {limit:,} {unit}"
    label = "the compiler reads up to here"
    help = "write repetition as a formula of m and s, or as an indexed pipe `pipe name[i in 0..n] {{ .. }}`"
    limit: int
    unit: str


class TooDeep(Diagnostic):
    """An expression nested deeper than the compiler follows."""

    code = "CH103"
    title = "this formula is nested deeper than {limit:level}"
    label = "level {limit} is passed here"
    help = "name parts of the formula with `let` or `fn`"
    limit: int


class NumberTooLarge(Diagnostic):
    """A literal beyond 64 bits."""

    code = "CH104"
    title = "this number is too large"
    label = "beyond 9223372036854775807"
    help = "numbers have 64 bits: the largest is 2**63 - 1"


class NothingHere(Diagnostic):
    """An empty text."""

    code = "CH105"
    title = "there is no scheme in this text"
    label = "expected `scheme name(parameters)`"
    help = "start with a header like `scheme mine(D = 4, N = 8)`; `chimera compile --list` shows complete schemes"


class NoHeader(Diagnostic):
    """The first word is not ``scheme``."""

    code = "CH106"
    title = "a scheme starts with `scheme name(parameters)`, not with {found}"
    label = "expected `scheme`"
    help = "put a header like `scheme mine(D = 4, N = 8)` above everything but comments"
    found: str


class StrayCharacter(Diagnostic):
    """A character that has no meaning here."""

    code = "CH107"
    title = "{found} has no meaning in a scheme"
    label = "unexpected"
    help = "{hint}"
    found: str
    hint: str


class NotAnInteger(Diagnostic):
    """A decimal fraction."""

    code = "CH108"
    title = "numbers are integers; `{found}` is not"
    label = "not an integer"
    help = "clocks are an order, not a time: scale all of them to integers (durations are set with `--cost`)"
    found: str


class GluedNumber(Diagnostic):
    """A number with letters right behind it."""

    code = "CH109"
    title = "`{found}` is neither a number nor a name"
    label = "a number runs into a name"
    help = "{remedy}"
    found: str
    number: str
    name: str

    @property
    def remedy(self) -> str:
        """What to write instead: a product, unless it is a number as other languages write it."""
        if re.fullmatch(r"0[xXoObB]\w+|[0-9][0-9_]*|[0-9]+[eE][0-9]*", self.found):
            return "a number is written in decimal digits and nothing else"
        return f"for a product write `{self.number}*{self.name}`; a name starts with a letter"


class OpenString(Diagnostic):
    """A message without its closing quote."""

    code = "CH110"
    title = "this message has no closing quote"
    label = "starts here and runs past the end of the line"
    help = 'close it with `"` on the same line'


class ForeignSpelling(Diagnostic):
    """An operator as other languages write it."""

    code = "CH111"
    title = "`{found}` is not an operator here"
    label = "{meaning}"
    help = "{hint}"
    found: str
    meaning: str
    hint: str
