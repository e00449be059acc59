"""Words of the language, their spelling in other languages, and terminals of the grammar in words."""

from chimera_ir.diagnostics.catalogue.syntax import LIMITS

_KEYWORDS = """
scheme workers let fn require update every memory pipe in stages micros on by as halves reads version recompute sync
of when if then else and or not
"""
KEYWORDS = frozenset(_KEYWORDS.split())
"""The words that cannot be names."""

_ARROW = (
    "there are no arrows",
    "an operation's clock follows `@`, a function's body follows `=`; "
    f"a stage hands on to the next one, and no line says so; see {LIMITS}",
)

FOREIGN: dict[str, tuple[str, str]] = {
    "//": ("did you mean `/`?", "`/` rounds down already; a comment starts with `#`"),
    "->": _ARROW,
    "→": _ARROW,
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
    "||": ("did you mean `or`?", "at least one is written `or`"),
    "|": ("did you mean `or`?", "at least one is written `or`"),
    "!": ("did you mean `not`?", "the opposite is written `not`"),
    "**": ("there are no powers", "write a power of a fixed exponent as a product: `n*n`"),
    "^": ("there are no powers", "write a power of a fixed exponent as a product: `n*n`"),
    "===": ("did you mean `==`?", "equal is written `==`"),
    "!==": ("did you mean `!=`?", "unequal is written `!=`"),
    "=!": ("did you mean `!=`?", "unequal is written `!=`"),
    "¬": ("did you mean `not`?", "the opposite is written `not`"),
    "~": ("did you mean `not`?", "the opposite is written `not`"),
    "∧": ("did you mean `and`?", "both is written `and`"),
    "∨": ("did you mean `or`?", "at least one is written `or`"),
    "<<": ("there are no shifts", "multiply by a power of two: `n * 8`"),
    ">>": ("there are no shifts", "divide by a power of two: `n / 8` rounds down"),
    "+=": ("nothing changes its value", "write the whole formula, or name a part of it with `let` or `fn`"),
    "-=": ("nothing changes its value", "write the whole formula, or name a part of it with `let` or `fn`"),
    "*=": ("nothing changes its value", "write the whole formula, or name a part of it with `let` or `fn`"),
    "/=": ("did you mean `!=`?", "unequal is written `!=`; nothing changes its value"),
    "%=": ("nothing changes its value", "write the whole formula, or name a part of it with `let` or `fn`"),
    "++": ("nothing changes its value", "write `n + 1`; a plus alone stands before no value"),
    ":=": ("did you mean `=`?", "a value gets its name by `let name = value`"),
    "...": ("did you mean `..`?", "a range is written with two dots: `0..D`"),
    "..=": (
        "did you mean `..`?",
        "`0..D` counts from 0 to D - 1; write `0..D+1` for one more",
    ),
}
"""Signs of other languages: their meaning, and what to write instead."""

_REMAINDER = ("did you mean `%`?", "what a division leaves is written `%`")
_QUOTIENT = ("did you mean `/`?", "a quotient, rounded down, is written `/`")
_ELSE_IF = ("did you mean `else if`?", "a further case is another choice: `if a then 1 else if b then 2 else 3`")
FOREIGN_WORDS: dict[str, tuple[str, str]] = {
    "&": ("did you mean `and`?", "both is written `and`; `&` joins a pair, as in `F(m, s) & B(m - 2, s) @ 2*m + s`"),
    **dict.fromkeys(("mod", "modulo", "rem"), _REMAINDER),
    **dict.fromkeys(("div", "idiv"), _QUOTIENT),
    **dict.fromkeys(("elif", "elsif", "elseif"), _ELSE_IF),
    **dict.fromkeys(("shl", "shr"), FOREIGN["<<"]),
    "if": (
        "did you mean `when`?",
        "a guard is written `when condition`, a choice `if condition then value else value`",
    ),
    "where": ("did you mean `when`?", "a guard is written `when condition`"),
    "xor": (
        "did you mean `!=`?",
        "of numbers: unequal is written `!=`; conditions are joined by `and`, `or` and `not`",
    ),
    "is": ("did you mean `==`?", "equal is written `==`"),
    "eq": ("did you mean `==`?", "equal is written `==`"),
    "ne": FOREIGN["<>"],
    "le": FOREIGN["=<"],
    "ge": ("did you mean `>=`?", "at least is written `>=`"),
    "lt": ("did you mean `<`?", "less is written `<`"),
    "gt": ("did you mean `>`?", "more is written `>`"),
    "plus": ("did you mean `+`?", "a sum is written `+`"),
    "minus": ("did you mean `-`?", "a difference is written `-`"),
    "times": FOREIGN["×"],
}
"""Words of other languages, which are names in this one: their meaning, and what to write instead."""

_COSTS = (
    "costs",
    "durations are given when it is compiled: `--cost F=1 --cost B=2`, or `--profile FILE` for those of each stage",
)
_SLICES = ("parts of a micro-batch", "cut the batch into more micro-batches, or each of them into two `halves`")
_EDGES = (
    "the data between stages",
    "a stage takes what the stage before it returned, and returns with it what later stages need",
)
_WAITS = (
    "what an operation waits for",
    "that follows from the stages; the clock behind `@` orders the operations of a worker",
)
SKIPS = ("skipped stages", "every pipe has all stages; a stage of the model may return its input as it is")
_MOVES = (
    "where activations are kept",
    "they stay on their worker until the backward; `recompute when condition` keeps fewer of them",
)
UNSAYABLE: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("cost", "costs", "duration", "durations", "time", "takes", "weight", "weights"), _COSTS),
    **dict.fromkeys(("slice", "slices", "sequence", "tokens", "chunks", "quarters", "thirds", "parts"), _SLICES),
    **dict.fromkeys(("feed", "feeds", "edge", "edges", "link", "links", "connect", "graph"), _EDGES),
    **dict.fromkeys(("send", "sends", "recv", "receive", "receives", "to", "from"), _EDGES),
    **dict.fromkeys(("after", "before", "wait", "waits", "needs", "depends"), _WAITS),
    **dict.fromkeys(("skip", "skips", "omit", "without", "except"), SKIPS),
    **dict.fromkeys(("offload", "reload", "prefetch", "move", "moves", "evict", "swap"), _MOVES),
}
"""Words for things that the language cannot say: the topic, and what to do instead."""

FOREIGN_NAMES = {
    **dict.fromkeys(("mod", "modulo", "rem"), "a % b"),
    **dict.fromkeys(("div", "idiv", "floor", "int", "trunc"), "a / b"),
    "ceil": "(a + b - 1) / b",
    "pow": "n*n",
    "true": "0 == 0",
    "false": "0 != 0",
}
"""Names that are known in other languages, and what to write instead."""

NAME_HINTS = {
    "scheme": "as in `scheme mine(D = 4, N = 8)`",
    "pipe": "as in `pipe down { .. }`",
    "memory": "say what is bounded: `memory activations <= 4` or `memory weights <= 2`",
    "sync": "say how: `sync lazy`, `sync eager` or `sync eager_opt`",
    "[": "give the pipes an index, as in `[i in 0..2]`",
}
"""An example of the name that follows a word of the language."""

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
    "JOIN": "`&`",
    "NAME": "a name",
    "STRING": 'a "message"',
    "INTEGER": "a number",
}
_UNSAID = frozenset({"$END", "SEMICOLON", "ENDLESS"})


def foreign_word(word: str) -> tuple[str, str] | None:
    """The meaning of a word between values, and what to write instead; None for a word that is only a name."""
    lower = word.lower()
    if lower in KEYWORDS and lower != word:
        return f"did you mean `{lower}`?", "the words of the language are written in lower case"
    return FOREIGN_WORDS.get(lower)


def expected_words(accepted: frozenset[str]) -> str:
    """The words for what could follow, from the names of the terminals that the parser accepts."""
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
