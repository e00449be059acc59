"""CH285 and on: slices of micro-batches."""

from chimera_ir.diagnostics.catalogue.values import InInstance
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.source import Span


class SlicesDiffer(InInstance, code="CH285"):
    """Pipes that cut their micro-batches into different numbers of slices."""

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
    """Slices that are not numbered from 0."""

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
    """An operation that names no slice in a pipe with slices."""

    title = "this operation does not say which slice it is about"
    label = "of which slice?"
    help = "name the slice as the third argument, as in `{letter}(m, s, {variable})`"
    letter: str
    variable: str


class SliceNamed(Diagnostic, code="CH288"):
    """An operation that names a slice in a pipe whose micro-batches are not cut into slices."""

    title = "this operation names a slice, and the pipe `{pipe}` has none"
    label = "a third argument"
    help = "add the line `slices q in 0..k` to the pipe, or remove the third argument"
    pipe: str


class SlicesAlone(Diagnostic, code="CH289"):
    """Slices together with halves, or with operations over several micro-batches."""

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
    """An operation on a slice that micro-batches do not have."""

    title = "there is no slice {slice}"
    label = "slice {slice}"
    help = "the slices are 0 to {last}: guard the line with `when`, or mend the formula"
    slice: int
    last: int
