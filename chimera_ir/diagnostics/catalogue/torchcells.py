"""CH801 and on: mistakes in the cells of a schedule of torch.distributed.pipelining."""

from chimera_ir.diagnostics.catalogue.irtext import NumberOutOfRange
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.source import Span


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
