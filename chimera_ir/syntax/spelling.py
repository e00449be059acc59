"""Words of the language, functions of other languages, and terminals of the grammar in words."""

from chimera_ir.plural import listed
from chimera_ir.syntax.stop import PIPE_LINES, SCHEME_LINES

_KEYWORDS = """
scheme workers except let fn require update every memory pipe in stages micros slices on by as halves weigh reads
version recompute sync of prefer when if then else and or not
"""
KEYWORDS = frozenset(_KEYWORDS.split())
"""The words that cannot be names."""

FOREIGN_NAMES = {
    **dict.fromkeys(("mod", "modulo", "rem"), "a % b"),
    **dict.fromkeys(("div", "idiv", "floor", "int", "trunc"), "a / b"),
    "ceil": "(a + b - 1) / b",
    "pow": "n*n",
    "true": "0 == 0",
    "false": "0 != 0",
}
"""Maps names that other languages define to the formula that a scheme has in their place."""

_VALUE = frozenset({"INTEGER", "LPAR", "MINUS", "NAME", "NOT", "IF"})
_COMPARISON = frozenset({"LESSTHAN", "MORETHAN", "EQUALS", "DIFFERS", "ATMOST", "ATLEAST"})
_OPERATORS = _COMPARISON | {"PLUS", "MINUS", "STAR", "SLASH", "PERCENT", "AND", "OR"}
_FIRST_WORDS = {"NAME", *(word.upper() for word in SCHEME_LINES | PIPE_LINES)}
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
    "JOIN": "`&`",
    "ATMOST": "`<=`",
    "NAME": "a name",
    "STRING": 'a "message"',
    "INTEGER": "a number",
}


def expected_words(accepted: frozenset[str]) -> str:
    """The words for what could follow, from the names of the terminals that the parser accepts."""
    words: list[str] = []
    rest = accepted - {"$END", "SEMICOLON", "ENDLESS"}
    if rest >= _VALUE - {"NOT", "IF"}:
        words.append("a value")
        rest -= _VALUE
    if rest >= {"PLUS", "STAR"}:
        words.append("an operator")
        rest -= _OPERATORS
    if rest >= {"LET", "PIPE"} or rest >= {"STAGES", "MICROS"}:
        words.append("the next line of the scheme" if "PIPE" in rest else "the next line of the pipe")
        rest -= _FIRST_WORDS
    words += sorted(_SYMBOLS.get(name, f"`{name.lower()}`") for name in rest)
    return listed(words, "or") if words else "nothing more"
