"""The words of the language, how other languages write them, and how to say what could stand somewhere."""

_KEYWORDS = """
scheme workers let fn require update every memory pipe in stages micros on by as halves reads version recompute sync
when if then else and or not
"""
KEYWORDS = frozenset(_KEYWORDS.split())
"""The words that cannot be names."""

FOREIGN: dict[str, tuple[str, str]] = {
    "//": ("did you mean `/`?", "`/` rounds down already; a comment starts with `#`"),
    "->": ("did you mean `@`?", "an operation's clock follows `@`, a function's body follows `=`"),
    "→": ("did you mean `@`?", "an operation's clock follows `@`, a function's body follows `=`"),
    "=>": ("did you mean `>=`?", "at least is written `>=`; a function's body follows `=`"),
    "=<": ("did you mean `<=`?", "at most is written `<=`"),
    "<>": ("did you mean `!=`?", "unequal is written `!=`"),
    "≤": ("did you mean `<=`?", "at most is written `<=`"),
    "≥": ("did you mean `>=`?", "at least is written `>=`"),
    "≠": ("did you mean `!=`?", "unequal is written `!=`"),
    "×": ("did you mean `*`?", "a product is written `*`"),
    "·": ("did you mean `*`?", "a product is written `*`"),
    "÷": ("did you mean `/`?", "a quotient, rounded down, is written `/`"),
    "−": ("did you mean `-`?", "this is a typographic minus; write the one of the keyboard"),
    "&&": ("did you mean `and`?", "both is written `and`"),
    "&": ("did you mean `and`?", "both is written `and`"),
    "||": ("did you mean `or`?", "at least one is written `or`"),
    "|": ("did you mean `or`?", "at least one is written `or`"),
    "!": ("did you mean `not`?", "the opposite is written `not`"),
    "**": ("there are no powers", "write a power of a fixed exponent as a product: `n*n`"),
    "^": ("there are no powers", "write a power of a fixed exponent as a product: `n*n`"),
    ":=": ("did you mean `=`?", "a value gets its name by `let name = value`"),
    "...": ("did you mean `..`?", "a range is written with two dots: `0..D`"),
    "..=": (
        "did you mean `..`?",
        "`0..D` counts from 0 to D - 1; write `0..D+1` for one more",
    ),
}
"""What other languages write: what is meant by it, and how it is said here."""

NAME_HINTS = {
    "scheme": "as in `scheme mine(D = 4, N = 8)`",
    "pipe": "as in `pipe down { .. }`",
    "memory": "say what is bounded: `memory activations <= 4` or `memory weights <= 2`",
    "sync": "say how: `sync lazy`, `sync eager` or `sync eager_opt`",
    "[": "give the pipes an index, as in `[i in 0..2]`",
}
"""What name to give behind a word of the language."""

_VALUE = frozenset({"INTEGER", "LPAR", "MINUS", "NAME", "NOT", "IF"})
_ARITHMETIC = frozenset({"PLUS", "MINUS", "STAR", "SLASH", "PERCENT"})
_COMPARISON = frozenset({"LESSTHAN", "MORETHAN", "EQUALS", "DIFFERS", "ATMOST", "ATLEAST"})
_OPERATORS = _ARITHMETIC | _COMPARISON | {"AND", "OR"}
_LINES_OF_SCHEME = frozenset({"WORKERS", "LET", "FN", "REQUIRE", "UPDATE", "MEMORY", "PIPE"})
_LINES_OF_PIPE = frozenset({"STAGES", "MICROS", "READS", "RECOMPUTE", "SYNC", "NAME"})
_SYMBOLS = {
    "LPAR": "`(`",
    "RPAR": "`)`",
    "LSQB": "`[`",
    "RSQB": "`]`",
    "LBRACE": "`{`",
    "RBRACE": "`}`",
    "COMMA": "`,`",
    "EQUAL": "`=`",
    "AT": "`@`",
    "DOTS": "`..`",
    "NAME": "a name",
    "STRING": 'a "message"',
    "INTEGER": "a number",
}
_UNSAID = frozenset({"$END", "SEMICOLON", "ENDLESS"})


def expected_words(accepted: frozenset[str]) -> str:
    """What could stand somewhere, as one says it, given the names of the grammar's terminals."""
    words: list[str] = []
    rest = accepted - _UNSAID
    if rest >= _VALUE - {"NOT", "IF"}:
        words.append("a value")
        rest -= _VALUE
    if rest >= {"PLUS", "STAR"}:
        words.append("an operator")
        rest -= _OPERATORS
    if rest >= {"LET", "PIPE"} or rest >= {"STAGES", "MICROS"}:
        words.append("the next line of the scheme" if "PIPE" in rest else "the next line of the pipe")
        rest -= _LINES_OF_SCHEME | _LINES_OF_PIPE
    words += sorted(_SYMBOLS.get(name, f"`{name.lower()}`") for name in rest)
    if not words:
        return "nothing more"
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]
