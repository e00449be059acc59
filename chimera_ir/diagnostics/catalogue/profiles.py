"""CH7xx: what can be wrong with a profile of a model or a cluster file, and with both together."""

from typing import ClassVar

from chimera_ir.diagnostics.model import Diagnostic, Note
from chimera_ir.plural import and_more
from chimera_ir.source import Span


class NotToml(Diagnostic):
    """The text breaks the rules of TOML."""

    code: ClassVar[str] = "CH701"
    title: ClassVar[str] = "this is not TOML: {what}"
    label: ClassVar[str] = "here"
    help: ClassVar[str] = "the format is that of toml.io; docs/explanation/performance.md has a whole file of each kind"

    what: str


class QuotesForgotten(Diagnostic):
    """A quantity with its unit, but without quotes."""

    code: ClassVar[str] = "CH702"
    title: ClassVar[str] = "a number with a unit stands in quotes"
    label: ClassVar[str] = "no quotes"
    help: ClassVar[str] = 'write `{name} = "{text}"`'

    name: str
    text: str


class FileTooLarge(Diagnostic):
    """A text that is too large or too deeply nested."""

    code: ClassVar[str] = "CH703"
    title: ClassVar[str] = "the file {what}"
    label: ClassVar[str] = "not read any further"
    help: ClassVar[str] = "keep the depths and the micro-batch sizes that you want to compare; a file holds one model"

    what: str


class UnknownEntry(Diagnostic):
    """An unknown name."""

    code: ClassVar[str] = "CH704"
    title: ClassVar[str] = "{where} has no entry `{name}`"
    label: ClassVar[str] = "{guess}"
    help: ClassVar[str] = "there are {known}"

    where: str
    name: str
    guess: str
    known: str


class EntryMissing(Diagnostic):
    """An entry without a default is missing."""

    code: ClassVar[str] = "CH705"
    title: ClassVar[str] = "{where} lacks `{name}`"
    label: ClassVar[str] = "without `{name}`"
    help: ClassVar[str] = "add `{example}`"

    where: str
    name: str
    example: str


class WrongKind(Diagnostic):
    """A value of the wrong kind."""

    code: ClassVar[str] = "CH706"
    title: ClassVar[str] = "`{name}` is {found}; it should be {wanted}"
    label: ClassVar[str] = "{found}"
    help: ClassVar[str] = "write it like `{example}`"

    name: str
    found: str
    wanted: str
    example: str


class UnitForgotten(Diagnostic):
    """A quantity without a unit."""

    code: ClassVar[str] = "CH707"
    title: ClassVar[str] = "`{name}` has no unit"
    label: ClassVar[str] = "{number} of what?"
    help: ClassVar[str] = 'the units of a {dimension} are {units}, as in `{name} = "{example}"`'

    name: str
    number: str
    dimension: str
    units: str
    example: str


class UnknownUnit(Diagnostic):
    """A unit that does not exist, or measures something else."""

    code: ClassVar[str] = "CH708"
    title: ClassVar[str] = "`{unit}` is no unit of a {dimension}"
    label: ClassVar[str] = "{guess}"
    help: ClassVar[str] = 'the units of a {dimension} are {units}, as in `{name} = "{example}"`'

    name: str
    unit: str
    guess: str
    dimension: str
    units: str
    example: str


class NotAQuantity(Diagnostic):
    """No number, or not a finite one, where a number belongs."""

    code: ClassVar[str] = "CH709"
    title: ClassVar[str] = "`{name}` does not begin with a number"
    label: ClassVar[str] = "not a number"
    help: ClassVar[str] = "write a decimal number of at most 64 characters, as in `{example}`"

    name: str
    example: str


class OutOfRange(Diagnostic):
    """A number out of range: negative, 0, or absurdly large or small."""

    code: ClassVar[str] = "CH710"
    title: ClassVar[str] = "`{name}` is out of range"
    label: ClassVar[str] = "{limit}"
    help: ClassVar[str] = "keep within that, as in `{example}`"

    name: str
    limit: str
    example: str


class StagesMissing(Diagnostic):
    """A depth that describes another number of stages than its ``stages`` says."""

    code: ClassVar[str] = "CH711"
    title: ClassVar[str] = "the model is cut into {stages}, and {described} described"
    label: ClassVar[str] = "needs {stages}"
    help: ClassVar[str] = "give each stage its own `[[depth.stage]]`, in order, or correct `stages`"

    stages: str
    described: str


class DescribedTwice(Diagnostic):
    """Two descriptions of one thing."""

    code: ClassVar[str] = "CH712"
    title: ClassVar[str] = "`{name} = {value}` is described twice"
    label: ClassVar[str] = "the second"
    help: ClassVar[str] = "remove one of the two"

    name: str
    value: int
    first: Span

    def notes(self) -> tuple[Note, ...]:
        """Where the first is."""
        return (Note("the first is here", self.first),)


class TimesAndWork(Diagnostic):
    """One cost is a time, another one counts work."""

    code: ClassVar[str] = "CH713"
    title: ClassVar[str] = "`{name}` counts work, and other costs of the file are times"
    label: ClassVar[str] = "in FLOP"
    help: ClassVar[str] = (
        "give all costs as times, or all of them as work, which the cluster's [device] turns into time"
    )

    name: str
    first: Span

    def notes(self) -> tuple[Note, ...]:
        """Where a time is."""
        return (Note("this is a time", self.first),)


class LastStageSends(Diagnostic):
    """The last stage or layer has an output to pass on."""

    code: ClassVar[str] = "CH714"
    title: ClassVar[str] = "{part} is the last, and hands nothing on"
    label: ClassVar[str] = "to whom?"
    help: ClassVar[str] = "remove `{name}`; what the last one ends in is the loss"

    part: str
    name: str


class NothingLeft(Diagnostic):
    """All memory is reserved."""

    code: ClassVar[str] = "CH715"
    title: ClassVar[str] = "all of the {memory} are reserved, which leaves nothing for the model"
    label: ClassVar[str] = "{reserved}"
    help: ClassVar[str] = "`reserved` is what a worker needs beside the model: less than `memory`"

    memory: str
    reserved: str


class NoDevice(Diagnostic):
    """A profile that counts work meets a cluster that does not say how fast it works."""

    code: ClassVar[str] = "CH716"
    title: ClassVar[str] = "the profile counts work, and the cluster has no [device] to tell how long that takes"
    label: ClassVar[str] = "without [device]"
    help: ClassVar[str] = (
        'add `[device]` with `peak = "9.3 TFLOP/s"`, `efficiency = 0.6`, `half_at = 2.0`, or use a profile with times'
    )


class NotThatDeep(Diagnostic):
    """The profile does not cut the model as the schedule does."""

    code: ClassVar[str] = "CH717"
    title: ClassVar[str] = "the schedule has {stages}, and the profile has no such depth"
    label: ClassVar[str] = "depths: {depths}"
    help: ClassVar[str] = (
        "choose a schedule of one of these depths: {depths} (D=..), or add a [[depth]] with `stages = {number}`"
    )

    stages: str
    number: int
    depths: str


class NotThatSize(Diagnostic):
    """Stages that were not measured with this micro-batch size."""

    code: ClassVar[str] = "CH718"
    title: ClassVar[str] = "stage {stage} of {stages} has no costs for micro-batches of size {size}{others}"
    label: ClassVar[str] = "sizes: {sizes}"
    help: ClassVar[str] = (
        "choose another --micro-batch-size, or add a [[depth.stage.at]] with `micro_batch_size = {size}`"
    )

    stage: int
    stages: int
    size: int
    sizes: str
    count: int

    @property
    def others(self) -> str:
        """How many more stages were measured with these sizes."""
        return and_more(self.count)


class ClusterTooSmall(Diagnostic):
    """The schedule, replicated, needs more workers than there are."""

    code: ClassVar[str] = "CH719"
    title: ClassVar[str] = "the schedule needs {needed:worker}, {copies} of {each}, and the cluster has {workers}"
    label: ClassVar[str] = "too few"
    help: ClassVar[str] = "choose fewer --copies, or a schedule on fewer workers"

    copies: str
    each: str
    needed: int
    workers: int


class StepOfWork(Diagnostic):
    """The optimizer's step has a time, and the forwards and backwards have none."""

    code: ClassVar[str] = "CH720"
    title: ClassVar[str] = "`step` is a time, and the profile counts work"
    label: ClassVar[str] = "of which device?"
    help: ClassVar[str] = "remove `step`, which has no work to count, or give all other costs as times too"


class ShortMessages(Diagnostic):
    """A second set of costs for short messages, as in older cluster files."""

    code: ClassVar[str] = "CH721"
    title: ClassVar[str] = "{where} has `short`, and short messages no longer have costs of their own"
    label: ClassVar[str] = "written by an older version"
    help: ClassVar[str] = (
        "measure again with `chimera profile links`, or remove `short` and let {where} stand for all messages"
    )

    where: str


class StagesAndLayers(Diagnostic):
    """A profile describes both stages and layers."""

    code: ClassVar[str] = "CH722"
    title: ClassVar[str] = "a profile describes stages or layers, and this one has both"
    label: ClassVar[str] = "layers"
    help: ClassVar[str] = "keep every [[layer]], from which stages follow for any split, or every [[depth]]"

    stages: Span

    def notes(self) -> tuple[Note, ...]:
        """Where the stages are."""
        return (Note("the stages are here", self.stages),)


class SizeOfSomeLayers(Diagnostic):
    """One layer was measured with micro-batches of a size, and another was not."""

    code: ClassVar[str] = "CH723"
    title: ClassVar[str] = "layer {missing} has no costs for micro-batches of size {size}, which layer {there} has"
    label: ClassVar[str] = "the sizes differ"
    help: ClassVar[str] = "give all layers the same sizes: a stage takes the costs of all its layers"

    missing: int
    size: int
    there: int


class TooFewLayers(Diagnostic):
    """The schedule has more stages than the profile has layers."""

    code: ClassVar[str] = "CH724"
    title: ClassVar[str] = "the schedule has {stages}, and the profile has {layers}"
    label: ClassVar[str] = "{layers}"
    help: ClassVar[str] = "every stage has one layer at least: choose a schedule of fewer stages (D=..)"

    stages: str
    layers: str


class SizeOfNoLayer(Diagnostic):
    """The layers were not measured with micro-batches of that size."""

    code: ClassVar[str] = "CH725"
    title: ClassVar[str] = "the layers have no costs for micro-batches of size {size}"
    label: ClassVar[str] = "sizes: {sizes}"
    help: ClassVar[str] = "choose another --micro-batch-size, or measure the layers with that one as well"

    size: int
    sizes: str


class _Links(Diagnostic):
    """A cluster file lacks the table ``[links.{name}]``."""

    name: str

    @property
    def where(self) -> str:
        """Where the messages travel."""
        return {"within": "within a node", "between": "between nodes"}[self.name]

    def drawing(self) -> tuple[str, ...]:
        """The block to write."""
        return f"[links.{self.name}]", 'latency = "100 us"', 'bandwidth = "1 GB/s"'


class LinkMissing(_Links):
    """A cluster file does not say what a message costs."""

    code: ClassVar[str] = "CH726"
    title: ClassVar[str] = "the file lacks `[links.{name}]`, which says what a message {where} takes"
    label: ClassVar[str] = "{workers:worker}, {per_node} to a node"
    help: ClassVar[str] = "add, with figures of your own:"

    workers: int
    per_node: int

    def notes(self) -> tuple[Note, ...]:
        """Lines to write if all workers are in one node after all."""
        if self.workers <= self.per_node:
            return ()
        return (Note(f"with `per_node = {self.workers}` all workers are in one node: `[links.within]` is enough"),)


class LinkUnnamed(_Links):
    """A cluster file gives the cost of a message, but not of which links."""

    code: ClassVar[str] = "CH727"
    title: ClassVar[str] = "`{entry}` stands in `[links]`, which does not say for which links"
    label: ClassVar[str] = "within a node, or between nodes?"
    help: ClassVar[str] = "write `[links.{name}]`, for messages {where}, in place of `[links]`:"

    entry: str
