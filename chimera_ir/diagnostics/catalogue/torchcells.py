"""CH801 and on: mistakes in the cells of a schedule of torch.distributed.pipelining."""

from chimera_ir.diagnostics.catalogue.irtext import NumberOutOfRange
from chimera_ir.diagnostics.catalogue.syntax import LIMITS
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.source import Span

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
        "feed feeds edge edges link links connect graph send sends recv receive receives to from": (
            "the data between stages",
            "a stage takes what the stage before it returned, and returns with it what later stages need",
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


class NoCells(Diagnostic, code="CH801"):
    meaning = "A file without an action, or a rank without one."
    title = "this file has no actions"
    label = "a row for each rank is expected here"
    help = "write a row for each rank and in it a cell for each action, as in `0F0,0F1,0B0,0B1`"


class EmptyRow(NoCells):
    title = "rank {rank} computes nothing"
    label = "a row of a rank"
    help = "remove the row, or give the rank a stage; rows are ranks, from 0 on"
    rank: int


class MalformedCell(Diagnostic, code="CH802"):
    meaning = "A cell that is no action."
    title = "`{cell}` is not an action of torch.distributed.pipelining"
    label = "expected a stage, a kind and a micro-batch"
    help = "write `2F0`, `1SEND_B3`, `1UNSHARD` or `(0F7;7B3)OVERLAP_F_B`, or leave the cell empty"
    cell: str


MicroUnsaid = MalformedCell.worded("MicroUnsaid", title="`{cell}` names no micro-batch")
PairOfOthers = MalformedCell.worded(
    "PairOfOthers", title="`{cell}` is not a pair of a forward and a backward", label="expected an F and a B"
)


class TrailingText(MalformedCell):
    title = "`{cell}` goes on after `{action}`"
    label = "torch reads `{action}` and drops the rest"
    help = "write `{action}`, or separate two actions by a comma"
    action: str


NumberTooHigh = NumberOutOfRange.worded("NumberTooHigh", help="keep within {first} to {last}")


class NotationsMixed(Diagnostic, code="CH803"):
    meaning = "A cell in the notation of before 2025 in a file with a cell in today's notation."
    title = "`BW` is of the notation before 2025, `I` of today's"
    label = "a backward in full, in the older notation"
    help = "write I, W and B for the two halves and a whole backward; before 2025 these were B, W and BW"
    related = ("today", "an input gradient, in today's notation")
    today: Span


class StageTwice(Diagnostic, code="CH804"):
    meaning = "A stage that two ranks compute."
    title = "stage {stage} is on rank {rank} and on rank {first_rank}"
    label = "on rank {rank}"
    help = "let one rank compute all micro-batches of stage {stage}"
    related = ("first", "on rank {first_rank}")
    stage: int
    rank: int
    first: Span
    first_rank: int


class StageNowhere(Diagnostic, code="CH805"):
    meaning = "A stage that no rank computes, though a later one is there."
    title = "no rank computes stage {stage}"
    label = "there is a stage {last}"
    help = "add the operations of stage {stage}, or number the stages from 0 without a gap"
    stage: int
    last: int


class NothingBeyond(Diagnostic, code="CH806"):
    meaning = "A message that would leave or reach the pipeline."
    title = "`{cell}`: no stage is at the other end"
    label = "the stages are 0 to {last}"
    help = "remove the cell"
    cell: str
    last: int


NothingSent = NothingBeyond.worded(
    "NothingSent",
    title="`{cell}` waits for a send that is not on its way",
    label="never sent, or waited for already",
    help="put it after the send, once",
)
NeverWaitedFor = NothingBeyond.worded(
    "NeverWaitedFor",
    title="nothing waits for `{cell}`",
    label="other sends of this rank are waited for",
    help="add a `WAIT_SEND_F` or `WAIT_SEND_B` after it",
)


class ReceivedTooLate(Diagnostic, code="CH808"):
    meaning = "A receive after the operation that reads the message."
    title = "`{operation}` computes before `{cell}`"
    label = "the message is received only here"
    help = "put `{cell}` before `{operation}`"
    related = ("operation_span", "`{operation}` reads it here")
    cell: str
    operation: str
    operation_span: Span


class WrongUpkeep(Diagnostic, code="CH807"):
    meaning = "An action on the weights of a stage at a place where FSDP fails or loses gradients."
    title = "`{cell}` comes where the weights are sharded already"
    label = "not unsharded here"
    help = "remove the cell, or put `{stage}UNSHARD` before it"
    cell: str
    stage: int


UnshardedTwice = WrongUpkeep.worded(
    "UnshardedTwice",
    title="`{cell}` comes where the weights are unsharded already",
    label="unsharded already",
    help="remove the cell, or put `{stage}RESHARD` before it",
)
ComputedSharded = WrongUpkeep.worded("ComputedSharded", title="`{cell}` computes with weights that are sharded")
StrangersWeights = WrongUpkeep.worded(
    "StrangersWeights",
    title="`{cell}` is about a stage of another rank",
    label="not computed in this row",
    help="remove the cell",
)
WrongReduction = WrongUpkeep.worded(
    "WrongReduction",
    title="`{cell}` is not the one sum after the last gradients of stage {stage}",
    label="too early, or a second time",
    help="put it once, after the last B or W of stage {stage}",
)
ReductionOutOfTurn = WrongUpkeep.worded(
    "ReductionOutOfTurn",
    title="`{cell}` is not in turn: a rank has one reduction at a time",
    label="not a `REDUCE_GRAD` and its wait in turn",
    help="put `{stage}WAIT_REDUCE_GRAD` after `{stage}REDUCE_GRAD`, and before the next reduction",
)
