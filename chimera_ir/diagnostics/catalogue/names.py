"""CH201 and on: mistakes in names, types and clauses, which a scheme has whatever its numbers are."""

from typing import ClassVar

from chimera_ir.diagnostics.catalogue.values import InInstance
from chimera_ir.diagnostics.model import Diagnostic, Note, Severity
from chimera_ir.source import Span

# CH249 and CH280 and on: operations over several micro-batches, halves of them, pairs, pipes that do not agree.


class BadStep(InInstance, code="CH249"):
    meaning = "A number after `by` that is below 1."
    title = "a step is 1 or more, and this one is {step}"
    label = "a step of {step}"
    help = "write how many micro-batches one value of the variable stands for, as in `by 2`"
    step: int


class EmptyGroup(InInstance, code="CH250"):
    meaning = "An operation over an empty range of micro-batches."
    title = "the range {start}..{stop} holds no micro-batch"
    label = "{start}..{stop}"
    help = "a range a..b counts from a to b - 1: make it longer, or guard the line with `when`"
    start: int
    stop: int


class RangesOverlap(InInstance, code="CH296"):
    meaning = "Ranges of a line that together name more micro-batches than there are."
    title = "the ranges of this line name more than all of {micros:micro-batch} on {stages:stage}"
    label = "some are named twice"
    help = "a micro-batch is named once: let the variable count `by` the length of the range, or guard the line"
    micros: int
    stages: int


class HalvesDiffer(InInstance, code="CH251"):
    meaning = "A pipe that counts whole micro-batches, and another one that counts halves."
    title = "the pipe `{pipe}` counts whole micro-batches, and the pipe `{other}` counts halves"
    label = "whole ones"
    help = "write `halves` in every pipe or in none: all count the same micro-batches"
    related = ("other_span", "halves are counted here")
    pipe: str
    other: str
    other_span: Span


class OddHalves(InInstance, code="CH252"):
    meaning = "An odd number of half micro-batches, which do not make whole ones."
    title = "{count:half micro-batch} cannot be whole ones"
    label = "the first of the pipes"
    help = "with `halves` a range counts two for each micro-batch, as in `0..2*N`"
    count: int


class SyncDiffers(InInstance, code="CH253"):
    meaning = "Two pipes ask for different strategies, such as lazy and eager, for the gradients of one stage."
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
    meaning = "A pair of other kinds than a forward and a backward."
    title = "a pair joins an `F` and a `B`, and this line joins `{first}` and `{second}`"
    label = "not a pair"
    help = "give each of the two a line and a clock of its own"
    first: str
    second: str


class NoSuchPipe(InInstance, code="CH281"):
    meaning = "A pair with an operation of a pipe that the scheme does not have."
    title = "the scheme has no pipe `{name}`"
    label = "there is none"
    help = "name one of its pipes: {known}"
    name: str
    known: str


class PairApart(InInstance, code="CH282"):
    meaning = "A pair of operations that are on two different workers."
    title = "a pair runs on one worker: `{first}` is on worker {worker}, `{second}` on worker {other}"
    label = "on workers {worker} and {other}"
    help = "join two operations of one worker, or give each of the two a line and a clock of its own"
    first: str
    second: str
    worker: int
    other: int


class PairOfOne(InInstance, code="CH283"):
    meaning = "A pair of a forward and a backward of the same micro-batch."
    title = "`{first}` and `{second}` cannot run together: both are about {micro_batch}"
    label = "the same micro-batch"
    help = "join the forward with the backward of an earlier micro-batch, which needs nothing of it"
    first: str
    second: str
    micro_batch: str


class PairUneven(InInstance, code="CH284"):
    meaning = "A pair whose forward and backward are over different numbers of micro-batches."
    title = "a pair joins as many micro-batches on both sides: `{first}` has {size}, `{second}` has {other}"
    label = "{size} and {other}"
    help = "give both ranges the same length"
    first: str
    second: str
    size: int
    other: int


# CH285 and on: slices of micro-batches.


class SlicesDiffer(InInstance, code="CH285"):
    meaning = "Pipes that cut their micro-batches into different numbers of slices."
    title = "the pipe `{pipe}` has {count:slice} of a micro-batch, and the pipe `{other}` has {other_count}"
    label = "{count:slice}"
    help = "give every pipe the same number of slices: all train the same model"
    related = ("other_span", "{other_count} here")
    pipe: str
    count: int
    other: str
    other_count: int
    other_span: Span


class SlicesNotFromZero(InInstance, code="CH286"):
    meaning = "Slices that are not numbered from 0."
    title = "slices are numbered from 0, and these begin with {start}"
    label = "from {start}"
    help = "write `slices q in 0..k`, and the offset in the formulas that use q"
    start: int


NoSlices = SlicesNotFromZero.worded(
    "NoSlices",
    title="a micro-batch has at least one slice",
    label="an empty range",
    help="make the range longer, or leave the line out",
)
"""An empty range of slices."""


class SliceNotNamed(Diagnostic, code="CH287"):
    meaning = "An operation that names no slice in a pipe with slices."
    title = "this operation does not say which slice it is about"
    label = "of which slice?"
    help = "name the slice as the third argument, as in `{letter}(m, s, {variable})`"
    letter: str
    variable: str


class SliceNamed(Diagnostic, code="CH288"):
    meaning = "An operation that names a slice in a pipe whose micro-batches are not cut into slices."
    title = "this operation names a slice, and the pipe `{pipe}` has none"
    label = "a third argument"
    help = "add the line `slices q in 0..k` to the pipe, or remove the third argument"
    pipe: str


class SlicesAlone(Diagnostic, code="CH289"):
    meaning = "Slices together with halves, or with operations over several micro-batches."
    title = "micro-batches that are cut into slices cannot be counted in halves"
    label = "halves"
    help = "remove `halves`, or the line `slices`"
    related = ("slices_span", "the pipe has slices")
    slices_span: Span


SlicesUngrouped = SlicesAlone.worded(
    "SlicesUngrouped",
    title="an operation on a slice is about one micro-batch, and this one takes a range",
    label="several micro-batches",
    help="write one micro-batch, as in `F(m, s, q)`, or remove the line `slices`",
)


class NoSuchSlice(InInstance, code="CH290"):
    meaning = "An operation on a slice that micro-batches do not have."
    title = "there is no slice {slice}"
    label = "slice {slice}"
    help = "the slices are 0 to {last}: guard the line with `when`, or mend the formula"
    slice: int
    last: int


class UnknownName(Diagnostic, code="CH201"):
    meaning = "A name that nothing defines."
    title = "nothing is called `{name}`"
    label = "{closest:else not defined}"
    help = "known here: {known}"
    name: str
    closest: str | None
    known: str


class UnnamedNumber(UnknownName):
    help = "known here: {known}; if `{name}` is the number of the worker, write `memory {quantity} on {name} <= ..`"
    quantity: str


class OperationInFormula(Diagnostic, code="CH295"):
    meaning = "An operation where a formula should be: the line before it ends with `@`, `prefer` or `when`."
    title = "`{name}(..)` is an operation, and has no value"
    label = "read as a part of the formula before it"
    help = "write a formula behind the `@`, `prefer` or `when` that stands before it, as in `@ 2*m + s`"
    name: str


class UsedTooEarly(Diagnostic, code="CH202"):
    meaning = "A name that is defined only further down."
    title = "`{name}` is used before it is defined"
    label = "not known yet"
    help = "move the definition of `{name}` above this line"
    related = ("defined", "`{name}` is defined here")
    name: str
    defined: Span


class DefinedByItself(Diagnostic, code="CH203"):
    meaning = "A definition that uses what it defines."
    title = "`{name}` is defined by itself{way}"
    label = "leads back to the `{name}` that is being defined"
    help = "nothing is computed by recursion: write `{name}` as a formula of names that are known before"
    name: str
    through: tuple[str, ...]

    @property
    def way(self) -> str:
        names = [f"`{name}`" for name in self.through]
        if len(names) > 6:
            names[3:-2] = [f"{len(names) - 5} more"]
        return f" by way of {', '.join(names)}" if names else ""


class DefinedTwice(Diagnostic, code="CH204"):
    meaning = "Two definitions of one name."
    title = "`{name}` is defined twice"
    label = "defined again"
    help = "choose another name, such as `{name}2`"
    related = ("first", "`{name}` is defined first here")
    name: str
    first: Span


class Shadows(Diagnostic, code="CH205"):
    meaning = "A variable of a pipe or function that has the name of something else in the scheme."
    title = "the variable `{name}` hides another `{name}`"
    label = "means something else from here on"
    help = "choose another name for the variable, such as `{name}2`"
    related = ("hidden", "the other `{name}` is defined here")
    name: str
    hidden: Span


class RedefinesBuiltin(Diagnostic, code="CH206"):
    meaning = "A definition of a name that is a function of the language."
    title = "`{name}` is a function of the language"
    label = "cannot be defined again"
    help = "choose another name, such as `{name}2`"
    name: str


class WrongArity(Diagnostic, code="CH207"):
    meaning = "A call with too many or too few arguments."
    title = "`{signature}` takes {least:argument}{or_more}, and here gets {count:argument}"
    label = "gets {count:argument}"
    help = "call it as `{signature}`"
    signature: str
    least: int
    most: int | None
    count: int

    @property
    def or_more(self) -> str:
        return " or more" if self.most is None else ""


class NotAFunction(Diagnostic, code="CH208"):
    meaning = "A value that is called like a function."
    title = "`{name}` is a value, not a function"
    label = "called like a function"
    help = "for a product write `{name}*(..)`"
    name: str


class FunctionAsValue(Diagnostic, code="CH209"):
    meaning = "A function without its arguments."
    title = "`{name}` is a function and has no value by itself"
    label = "arguments are missing"
    help = "call it as `{signature}`"
    name: str
    signature: str


class NotATable(Diagnostic, code="CH219"):
    meaning = "An entry of something that is not a table."
    title = "`{name}` is a number, not a table"
    label = "has no entries"
    help = "define it as a table, as in `let {name} = [4, 3, 2, 1]`"
    name: str


FunctionIndexed = NotATable.worded(
    "FunctionIndexed",
    title="`{name}` is a function, not a table",
    help="the arguments of a function stand in round brackets: `{name}(..)`",
)


class TableAsValue(Diagnostic, code="CH220"):
    meaning = "A table without the position of an entry."
    title = "`{name}` is a table, and a formula takes one of its numbers"
    label = "which entry is missing"
    help = "write the position in square brackets, as in `{name}[s]`; the first entry is `{name}[0]`"
    name: str


TableCalled = TableAsValue.worded(
    "TableCalled", title="`{name}` is a table, not a function", label="called like a function"
)


class VariableLacking(Diagnostic, code="CH221"):
    meaning = "A name whose formula depends on a variable that is not known where the name is used."
    title = "`{name}` depends on `{variable}`, which has no value here"
    label = "needs `{variable}`"
    help = "write a formula without `{variable}` here"
    related = ("defined", "`{name}` is defined here")
    name: str
    variable: str
    defined: Span


class WrongType(Diagnostic, code="CH210"):
    meaning = "A condition where a number belongs, or a number where a condition belongs."
    title = "{place} takes {expected}, and this is {actual}"
    label = "this is {actual}"
    help = "turn it into a number with `if condition then 1 else 0`"
    place: str
    expected: str
    actual: str


NumberAsCondition = WrongType.worded("NumberAsCondition", help="compare it with something, as in `x > 0`")


class BranchesDiffer(Diagnostic, code="CH211"):
    meaning = "An `if` whose two values have different types."
    title = "the two values of this `if` are not of one type"
    label = "{then} if it holds, {otherwise} if not"
    help = "give both values one type: two numbers, or two conditions"
    then: str
    otherwise: str


class SecondClause(Diagnostic, code="CH212"):
    meaning = "A second line with a first word that may begin only one line, such as `workers`."
    title = "{owner} has two `{clause}` lines"
    label = "the second one"
    help = "keep one of them{advice}"
    related = ("first", "the first one is here")
    owner: str
    clause: str
    first: Span

    @property
    def advice(self) -> str:
        of_clause = {
            "micros": "; micro-batches of another kind go into a pipe of their own",
            "stages": ", or give each group of stages a name: `stages image[i in 0..2] on ..`",
        }
        return of_clause.get(self.clause, "")


class RecomputesTwice(Diagnostic, code="CH218"):
    meaning = "A line `recompute` in a pipe that has an operation `recompute` with a clock, too."
    title = "the pipe `{pipe}` has recomputations with a clock and without"
    label = "recomputes at this clock"
    help = "remove the line `recompute`: the stages of these operations are those that recompute"
    related = ("clause", "recomputes right before the backward")
    pipe: str
    clause: Span


class MissingClause(Diagnostic, code="CH213"):
    meaning = "A pipe without a line that it needs, such as `stages`."
    title = "the pipe `{pipe}` has no {clause} line"
    label = "no {clause} line"
    help = "add a line like `{example}`"
    pipe: str
    clause: str
    example: str


class NoPipes(Diagnostic, code="CH214"):
    meaning = "A scheme that runs nothing."
    title = "the scheme `{scheme}` has no pipe"
    label = "runs nothing"
    help = "add a `pipe name {{ .. }}` with its stages, micro-batches and operations"
    scheme: str


class NotSupported(Diagnostic, code="CH215"):
    meaning = "A clause of the language that the compiler does not compile yet."
    title = "a pair where micro-batches go on for ever cannot be compiled yet"
    label = "not supported yet"
    help = "give each of the two a line and a clock of its own"
    reason: ClassVar[str] = ""

    def notes(self) -> tuple[Note, ...]:
        return (Note(self.reason),) if self.reason else ()


FrozenNotSupported = NotSupported.worded(
    "FrozenNotSupported",
    title="frozen stages where micro-batches go on for ever cannot be compiled yet",
    reason="turns, and versions of the weights, are derived and proven for a chain of stages that are all trained",
    help="give the scheme a flush: no `update every`, and a number of micro-batches",
)

GraphNotSupported = NotSupported.worded(
    "GraphNotSupported",
    title="groups of stages with names where micro-batches go on for ever cannot be compiled yet",
    reason=FrozenNotSupported.reason,
    help=FrozenNotSupported.help,
)

PlaceNotSupported = NotSupported.worded(
    "PlaceNotSupported",
    title="`on` that names the micro-batch where micro-batches go on for ever cannot be compiled yet",
    reason="each pipe without end has a rhythm of its own, and `on` makes pipes of one",
    help="place each stage by its number, or write a pipe for each placement",
)

HalvesNotSupported = NotSupported.worded(
    "HalvesNotSupported",
    title="a count of halves where micro-batches go on for ever cannot be compiled yet",
    help="count whole micro-batches",
)


class FormulaTooLarge(Diagnostic, code="CH216"):
    meaning = "A formula that is too long once its functions are written out."
    title = "this formula has more than {limit:,} {unit} once its functions are written out"
    label = "too large"
    help = (
        "functions that call others several times multiply: hand on a repeated value as an argument, which is "
        "computed once, as `h(g(s))` does with `fn h(v) = v + v*v` above the pipe"
    )
    limit: int
    unit: str


FormulaTooDeep = FormulaTooLarge.worded(
    "FormulaTooDeep",
    help="each call adds the levels of what it calls: write one formula in place of a chain of functions",
)


class TwoGroups(Diagnostic, code="CH222"):
    meaning = "A line of a pipe that speaks of two groups of stages at once."
    title = "this line uses `{variable}` of `{group}` and `{other_variable}` of `{other_group}`"
    label = "uses both"
    help = "write a line for each group: a line stands for the stages of one"
    variable: str
    group: str
    other_variable: str
    other_group: str


class PlacedTwice(InInstance, code="CH224"):
    meaning = "A pipe with an index whose stages are placed by the micro-batch."
    title = "the pipe `{instance.pipe}` is one of several, and `on` would make further ones by `{variable}`"
    label = "by the micro-batch"
    help = "place the stages by the index of the pipe, or write one pipe without an index"
    variable: str


class SeveralBoth(Diagnostic, code="CH223"):
    meaning = "A line `feeds` with several stages on both sides of the arrow."
    title = "both sides of this line name several stages"
    label = "a variable on both sides"
    help = (
        "name several on one side, and write the other with their variable: `feeds net[s in 0..P-1] -> net[2*P-1 - s]`"
    )


class Unused(Diagnostic, code="CH217"):
    meaning = "A definition that changes nothing."
    severity = Severity.WARNING
    title = "nothing uses {kind} `{name}`"
    label = "has no effect"
    help = "use it or remove it"
    kind: str
    name: str
