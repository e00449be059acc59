"""CH111 and CH143: words and signs of other languages, and what a scheme has in their place."""

from chimera_ir.diagnostics.catalogue.syntax import LIMITS
from chimera_ir.diagnostics.model import Diagnostic

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
    "..=": ("did you mean `..`?", "`0..D` counts from 0 to D - 1; write `0..D+1` for one more"),
}
"""Signs of other languages, each with the operator that is meant and the way to write it in a scheme."""

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
"""Words of other languages, which are names in a scheme; the values are those of `FOREIGN`."""

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
_SKIPS = ("skipped stages", "every pipe has all stages; a stage of the model may return its input as it is")
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
    **dict.fromkeys(("skip", "skips", "omit", "without", "except"), _SKIPS),
    **dict.fromkeys(("offload", "reload", "prefetch", "move", "moves", "evict", "swap"), _MOVES),
}
"""Words that the language lacks, each with its topic and the line or option to use instead."""


class ForeignSpelling(Diagnostic, code="CH111"):
    """An operator as other languages write it."""

    title = "`{token}` is not an operator here"
    label = "{meaning}"
    help = "{advice}"
    token: str

    @property
    def meaning(self) -> str:
        """The operator that is meant, or the reason why there is none."""
        return _spelling(self.token)[0]

    @property
    def advice(self) -> str:
        """The way to write in a scheme what the operator means."""
        return _spelling(self.token)[1]


def _spelling(token: str) -> tuple[str, str]:
    return FOREIGN.get(token) or FOREIGN_WORDS[token.lower()]


class UpperCase(ForeignSpelling):
    """An operator that is a word of the language, in upper case."""

    label = "did you mean `{word}`?"
    help = "the words of the language are written in lower case"

    @property
    def word(self) -> str:
        """The operator in lower case."""
        return self.token.lower()


class CannotSay(Diagnostic, code="CH143"):
    """A word for something that a scheme cannot express, such as costs or skipped stages."""

    title = "a scheme says nothing about {topic}"
    label = "cannot be said"
    help = "{instead}; see " + LIMITS
    word: str

    @property
    def topic(self) -> str:
        """The things about which a scheme says nothing."""
        return UNSAYABLE[self.word][0]

    @property
    def instead(self) -> str:
        """The line or option to use instead of the word."""
        return UNSAYABLE[self.word][1]
