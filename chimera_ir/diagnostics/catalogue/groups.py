"""CH249 and CH280 and on: operations over several micro-batches, halves of them, pairs, pipes that do not agree."""

from chimera_ir.diagnostics.catalogue.values import InInstance
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.source import Span


class BadStep(InInstance, code="CH249"):
    """A number after ``by`` that is below 1."""

    title = "a step is 1 or more, and this one is {step}"
    label = "a step of {step}"
    help = "write how many micro-batches one value of the variable stands for, as in `by 2`"
    step: int


class EmptyGroup(InInstance, code="CH250"):
    """An operation over an empty range of micro-batches."""

    title = "the range {start}..{stop} holds no micro-batch"
    label = "{start}..{stop}"
    help = "a range a..b counts from a to b - 1: make it longer, or guard the line with `when`"
    start: int
    stop: int


class RangesOverlap(InInstance, code="CH296"):
    """Ranges of a line that together name more micro-batches than there are."""

    title = "the ranges of this line name more than all of {micros:micro-batch} on {stages:stage}"
    label = "some are named twice"
    help = "a micro-batch is named once: let the variable count `by` the length of the range, or guard the line"
    micros: int
    stages: int


class HalvesDiffer(InInstance, code="CH251"):
    """A pipe that counts whole micro-batches, and another one that counts halves."""

    title = "the pipe `{pipe}` counts whole micro-batches, and the pipe `{other}` counts halves"
    label = "whole ones"
    help = "write `halves` in every pipe or in none: all count the same micro-batches"
    related = ("other_span", "halves are counted here")
    pipe: str
    other: str
    other_span: Span


class OddHalves(InInstance, code="CH252"):
    """An odd number of half micro-batches, which do not make whole ones."""

    title = "{count:half micro-batch} cannot be whole ones"
    label = "the first of the pipes"
    help = "with `halves` a range counts two for each micro-batch, as in `0..2*N`"
    count: int


class SyncDiffers(InInstance, code="CH253"):
    """Two pipes ask for different strategies, such as lazy and eager, for the gradients of one stage."""

    title = "stage {stage} is synchronised `{mode}` here and `{other_mode}` in the pipe `{other}`"
    label = "`{mode}` here"
    help = "the replicas of a stage are summed together: ask for one strategy, or leave one of the lines out"
    related = ("other_span", "`{other_mode}` there")
    stage: int
    mode: str
    other_mode: str
    other: str
    other_span: Span


class OtherKinds(Diagnostic, code="CH280"):
    """A pair of other kinds than a forward and a backward."""

    title = "a pair joins an `F` and a `B`, and this line joins `{first}` and `{second}`"
    label = "not a pair"
    help = "give each of the two a line and a clock of its own"
    first: str
    second: str


class NoSuchPipe(InInstance, code="CH281"):
    """A pair with an operation of a pipe that the scheme does not have."""

    title = "the scheme has no pipe `{name}`"
    label = "there is none"
    help = "name one of its pipes: {known}"
    name: str
    known: str


class PairApart(InInstance, code="CH282"):
    """A pair of operations that are on two different workers."""

    title = "a pair runs on one worker: `{first}` is on worker {worker}, `{second}` on worker {other}"
    label = "on workers {worker} and {other}"
    help = "join two operations of one worker, or give each of the two a line and a clock of its own"
    first: str
    second: str
    worker: int
    other: int


class PairOfOne(InInstance, code="CH283"):
    """A pair of a forward and a backward of the same micro-batch."""

    title = "`{first}` and `{second}` cannot run together: both are about {micro_batch}"
    label = "the same micro-batch"
    help = "join the forward with the backward of an earlier micro-batch, which needs nothing of it"
    first: str
    second: str
    micro_batch: str


class PairUneven(InInstance, code="CH284"):
    """A pair whose forward and backward are over different numbers of micro-batches."""

    title = "a pair joins as many micro-batches on both sides: `{first}` has {size}, `{second}` has {other}"
    label = "{size} and {other}"
    help = "give both ranges the same length"
    first: str
    second: str
    size: int
    other: int
