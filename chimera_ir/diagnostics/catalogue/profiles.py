"""CH7xx: mistakes in a profile of a model or in a cluster file, and mismatches of both with a schedule."""

from chimera_ir.diagnostics.model import Diagnostic, Note
from chimera_ir.source import Span


class NotToml(Diagnostic, code="CH701"):
    meaning = "The text breaks the rules of TOML."
    title = "this is not TOML: {what}"
    label = "here"
    help = "the format is that of toml.io; docs/explanation/performance.md has a whole file of each kind"
    what: str


class QuotesForgotten(Diagnostic, code="CH702"):
    meaning = "A quantity with its unit, but without quotes."
    title = "a number with a unit stands in quotes"
    label = "no quotes"
    help = 'write `{name} = "{text}"`'
    name: str
    text: str


class FileTooLarge(Diagnostic, code="CH703"):
    meaning = "A text that is too large or too deeply nested."
    title = "the file has more than {most:,} characters"
    label = "not read any further"
    help = "keep the depths and the micro-batch sizes that you want to compare; a file holds one model"
    most: int


LineTooLong = FileTooLarge.worded("LineTooLong", title="the file has a line of over {most:,} characters")
NestedTooDeeply = FileTooLarge.worded("NestedTooDeeply", title="the file is nested too deeply")


class UnknownEntry(Diagnostic, code="CH704"):
    meaning = "An entry whose name the format of the file does not have."
    title = "{where} has no entry `{name}`"
    label = "{closest:else unknown}"
    help = "there are {known}"
    where: str
    name: str
    closest: str | None
    known: str


class EntryMissing(Diagnostic, code="CH705"):
    meaning = "A missing entry that has no default."
    title = "{where} lacks `{name}`"
    label = "without `{name}`"
    help = "add `{example}`"
    where: str
    name: str
    example: str


class WrongKind(Diagnostic, code="CH706"):
    meaning = "A value of the wrong kind, such as a text where a number belongs."
    title = "`{name}` is {actual}; it should be {wanted}"
    label = "this is {actual}"
    help = "write it like `{example}`"
    name: str
    actual: str
    wanted: str
    example: str


class UnitForgotten(Diagnostic, code="CH707"):
    meaning = "A quantity without a unit."
    title = "`{name}` has no unit"
    label = "{number} of what?"
    help = 'the units of a {dimension} are {units}, as in `{name} = "{example}"`'
    name: str
    number: str
    dimension: str
    units: str
    example: str


class UnknownUnit(Diagnostic, code="CH708"):
    meaning = "A unit that does not exist, or measures something else."
    title = "`{unit}` is no unit of a {dimension}"
    label = "{closest:else unknown}"
    help = 'the units of a {dimension} are {units}, as in `{name} = "{example}"`'
    name: str
    unit: str
    closest: str | None
    dimension: str
    units: str
    example: str


class NotAQuantity(Diagnostic, code="CH709"):
    meaning = "A value that does not begin with a finite number."
    title = "`{name}` does not begin with a number"
    label = "not a number"
    help = "write a decimal number of at most 64 characters, as in `{example}`"
    name: str
    example: str


class OutOfRange(Diagnostic, code="CH710"):
    meaning = "A number out of range: negative, 0, or absurdly large or small."
    title = "`{name}` is out of range"
    help = "keep within that, as in `{example}`"
    name: str
    example: str


class BeyondLimits(OutOfRange):
    label = "it is {least} to {most}"
    least: str
    most: str


class QuantityBeyondLimits(BeyondLimits):
    label = "a {dimension} is {least} to {most} {unit} here"
    dimension: str
    unit: str


class ReleasesTooMuch(OutOfRange):
    label = "the first half of a backward lets go of the activations at most, {activations}"
    activations: str


LeavesTooMuch = ReleasesTooMuch.worded(
    "LeavesTooMuch", label="an off-load leaves the activations on the worker at most, {activations}"
)
"""More memory left on the worker by an off-load than there are activations."""

LeavesTooMuchHalfway = ReleasesTooMuch.worded(
    "LeavesTooMuchHalfway",
    label="an off-load of operands leaves what is kept between the halves on the worker at most, {activations}",
)
"""More memory left on the worker by an off-load of operands than is kept between the halves of a backward."""


class WrongSplit(OutOfRange):
    label = "it lists the first layer of each of the {stages:stage}, from 0 upwards"
    stages: int


class StagesMissing(Diagnostic, code="CH711"):
    meaning = "A depth that describes another number of stages than its `stages` says."
    title = "the model is cut into {stages:stage}, and {described:stage} {described:is or are} described"
    label = "needs {stages:stage}"
    help = "give each stage its own `[[depth.stage]]`, in order, or correct `stages`"
    stages: int
    described: int


class DescribedTwice(Diagnostic, code="CH712"):
    meaning = "Two descriptions of the same thing, such as one depth or one micro-batch size."
    title = "`{name} = {value}` is described twice"
    label = "the second"
    help = "remove one of the two"
    related = ("first", "the first is here")
    name: str
    value: int
    first: Span


class TimesAndWork(Diagnostic, code="CH713"):
    meaning = "A file in which some costs are times and others count work."
    title = "`{name}` counts work, and other costs of the file are times"
    label = "in FLOP"
    help = "give all costs as times, or all of them as work, which the cluster's [device] turns into time"
    related = ("first", "this is a time")
    name: str
    first: Span


class LastStageSends(Diagnostic, code="CH714"):
    meaning = "The last stage or layer has an output to pass on."
    title = "{part} is the last, and hands nothing on"
    label = "to whom?"
    help = "remove `{name}`; what the last one ends in is the loss"
    part: str
    name: str


class NothingLeft(Diagnostic, code="CH715"):
    meaning = "All memory of a worker is reserved, so that none is left for the model."
    title = "all of the {memory} are reserved, which leaves nothing for the model"
    label = "{reserved} reserved"
    help = "`reserved` is what a worker needs beside the model: less than `memory`"
    memory: str
    reserved: str


class NoDevice(Diagnostic, code="CH716"):
    meaning = "A profile that counts work, with a cluster that does not say how fast a device works."
    title = "the profile counts work, and the cluster has no [device] to tell how long that takes"
    label = "without [device]"
    help = (
        'add `[device]` with `peak = "9.3 TFLOP/s"`, `efficiency = 0.6`, `half_at = 2.0`, or use a profile with times'
    )


class NotThatDeep(Diagnostic, code="CH717"):
    meaning = "A profile without a depth that has as many stages as the schedule."
    title = "the schedule has {stages:stage}, and the profile has no such depth"
    label = "depths: {depths}"
    help = "choose a schedule of one of these depths: {depths} (D=..), or add a [[depth]] with `stages = {stages}`"
    stages: int
    depths: str


class NotThatSize(Diagnostic, code="CH718"):
    meaning = "Stages that were not measured with this micro-batch size."
    title = "stage {stage} of {stages} has no costs for micro-batches of size {size}{count:and more}"
    label = "sizes: {sizes}"
    help = "choose another --micro-batch-size, or add a [[depth.stage.at]] with `micro_batch_size = {size}`"
    stage: str
    stages: int
    size: int
    sizes: str
    count: int


class OtherGroups(Diagnostic, code="CH731"):
    meaning = "A profile of other groups of stages than those of the schedule, or in another order."
    title = "the profile is of {groups}, and the schedule is {schedule}"
    label = "a group of the profile"
    help = "measure with the same groups: chimera profile .. --scheme, with this scheme"
    schedule: str
    groups: str


class GroupNotThatDeep(Diagnostic, code="CH732"):
    meaning = "A profile without a group of as many stages as in the schedule."
    title = "the schedule has {name} in {stages:stage}, and the profile has no such depth of it"
    label = "depths of {name}: {depths}"
    help = "choose parameters that give {name} one of these depths, or measure it with {stages:stage}"
    name: str
    stages: int
    depths: str


class GroupTooDeep(Diagnostic, code="CH733"):
    meaning = "A group of stages that has more of them than layers in the profile."
    title = "the schedule has {name} in {stages:stage}, and the profile has {layers:layer} of it"
    label = "a group of the profile"
    help = "choose parameters that give {name} {layers:stage} at most"
    name: str
    stages: int
    layers: int


class GroupOfSome(Diagnostic, code="CH734"):
    meaning = "Some depths or layers of a profile belong to a group, others to none."
    title = "each {kind} of a profile belongs to a group, or none does"
    label = "this one has no `group`"
    help = "add `group = {example}`, or leave all out"
    related = ("grouped", "this one has")
    kind: str
    example: str
    grouped: Span


class GroupApart(Diagnostic, code="CH735"):
    meaning = "Layers of one group that do not stand together in a profile."
    title = "the layers of group {group} do not stand together"
    label = "others lie between this one and the first"
    help = "put all layers of {group} next to each other, in the order of the model"
    related = ("first", "the first is here")
    group: str
    first: Span


class ClusterTooSmall(Diagnostic, code="CH719"):
    meaning = "A schedule whose copies together need more workers than the cluster has."
    title = "the schedule needs {needed:worker}, {copies:copy} of {per_copy:worker}, and the cluster has {workers}"
    label = "too few"
    help = "choose fewer --copies, or a schedule on fewer workers"
    copies: int
    per_copy: int
    needed: int
    workers: int


class StepOfWork(Diagnostic, code="CH720"):
    meaning = "A profile in which the optimizer's step is a time, while forwards and backwards count work."
    title = "`step` is a time, and the profile counts work"
    label = "of which device?"
    help = "remove `step`, which has no work to count, or give all other costs as times too"


class ShortMessages(Diagnostic, code="CH721"):
    meaning = "A second set of costs for short messages, as in older cluster files."
    title = "{where} has `short`, and short messages no longer have costs of their own"
    label = "written by an older version"
    help = "measure again with `chimera profile links`, or remove `short` and let {where} stand for all messages"
    where: str


class StagesAndLayers(Diagnostic, code="CH722"):
    meaning = "A profile describes both stages and layers."
    title = "a profile describes stages or layers, and this one has both"
    label = "layers"
    help = "keep every [[layer]], from which stages follow for any split, or every [[depth]]"
    related = ("stages", "the stages are here")
    stages: Span


class SizeOfSomeLayers(Diagnostic, code="CH723"):
    meaning = "One layer was measured with micro-batches of a size, and another was not."
    title = "layer {missing} has no costs for micro-batches of size {size}, which layer {there} has"
    label = "the sizes differ"
    help = "give all layers the same sizes: a stage takes the costs of all its layers"
    missing: int
    size: int
    there: int


class SlicesOfSomeParts(Diagnostic, code="CH730"):
    meaning = "One stage or layer was measured in another number of slices than another."
    title = "{part} has {count:slice} of a micro-batch of {size:item}, and {other} has {there}"
    label = "{count:slice}"
    help = "give all of them a table `slice` for each slice, in the order of the sequence, or none of them"
    part: str
    count: int
    size: int
    other: str
    there: int


class TooFewLayers(Diagnostic, code="CH724"):
    meaning = "The schedule has more stages than the profile has layers."
    title = "the schedule has {stages:stage}, and the profile has {layers:layer}"
    label = "{layers:layer} in all"
    help = "every stage has one layer at least: choose a schedule of fewer stages (D=..)"
    stages: int
    layers: int


class SizeOfNoLayer(Diagnostic, code="CH725"):
    meaning = "A micro-batch size with which the layers of a profile were not measured."
    title = "the layers have no costs for micro-batches of size {size}"
    label = "sizes: {sizes}"
    help = "choose another --micro-batch-size, or measure the layers with that one as well"
    size: int
    sizes: str


class _WithoutLink(Diagnostic):
    """A cluster file lacks the table ``[links.{name}]``."""

    name: str

    @property
    def where(self) -> str:
        return {"within": "within a node", "between": "between nodes"}[self.name]

    def drawing(self) -> tuple[str, ...]:
        return f"[links.{self.name}]", 'latency = "100 us"', 'bandwidth = "1 GB/s"'


class LinkMissing(_WithoutLink, code="CH726"):
    meaning = "A cluster file without the cost of messages."
    title = "the file lacks `[links.{name}]`, which says what a message {where} takes"
    label = "{workers:worker}, {per_node} to a node"
    help = "add, with figures of your own:"
    workers: int
    per_node: int

    def notes(self) -> tuple[Note, ...]:
        if self.workers <= self.per_node:
            return ()
        return (Note(f"with `per_node = {self.workers}` all workers are in one node: `[links.within]` is enough"),)


class LinkUnnamed(_WithoutLink, code="CH727"):
    meaning = "A cost of messages in `[links]` itself, which does not say for which links it is."
    title = "`{entry}` stands in `[links]`, which does not say for which links"
    label = "within a node, or between nodes?"
    help = "write `[links.{name}]`, for messages {where}, in place of `[links]`:"
    entry: str


class NoHostLink(Diagnostic, code="CH728"):
    meaning = "A schedule that moves activations to the host, with a cluster that does not say how long that takes."
    title = "the schedule moves activations to the host, and the cluster has no [host] to tell how long that takes"
    label = "without [host]"
    help = "add, with figures of your own:"

    def drawing(self) -> tuple[str, ...]:
        return "[host]", 'latency = "20 us"', 'bandwidth = "20 GB/s"'
