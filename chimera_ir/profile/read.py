"""The reader of profiles and cluster files: text to values, or all errors in it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from fractions import Fraction
from itertools import pairwise

from chimera_ir.diagnostics.catalogue import profiles as say
from chimera_ir.profile import quantity as units
from chimera_ir.profile.cluster import FREE, Cluster, HostLink, Link
from chimera_ir.profile.costs import (
    ENTRIES,
    NO_OVERHEAD,
    RECOMPUTING,
    Device,
    ModelProfile,
    StageCosts,
    Times,
    Timing,
    WorkProfile,
)
from chimera_ir.profile.document import Document, Table, load
from chimera_ir.source import Source
from chimera_runtime.program.kept_bytes import MicroBatchBytes

HALVES = (ENTRIES["I"], ENTRIES["W"])
"""The entries with the times of the two halves of a split backward; a profile has both or none."""

BACKWARD = 2
"""Factor from a forward's time to a backward's, if a profile lacks the latter (section 3.4); 3 if it recomputes."""


def read_profile(source: Source) -> ModelProfile | WorkProfile:
    """The profile in a text, in seconds or, if it counts work, in FLOP; raises `Rejected` with all errors."""
    top = load(source)
    model = top.table("model", "[model]", "[model]")
    name, note, length = "", "", 1
    if model:
        name = model.text("name", None, 'name = "bert48"')
        note = model.text("note", "", 'note = "one P100, float32"')
        file = model.text("file", "", 'file = "model.py"')
        length = model.integer("length", 1, "length = 128")
        model.close()
    # Costs of operations, then of layers or of the stages of each depth; mistakes are collected on the way.
    costs = _CostEntries()
    overhead = _overhead(top, costs)
    splits: dict[int, tuple[int, ...]] = {}
    layers = _layers(top, costs)
    in_layers = top.has("layer") and not top.has("depth")
    depths: dict[str, dict[int, tuple[StageCosts, ...]]] = {}
    for group, tables in _grouped([] if in_layers else top.tables("depth", "[[depth]]", "[[depth]]"), "depth").items():
        first, of_group = dict[int, Table](), depths.setdefault(group, {})
        for table in tables:
            errors = len(top.document.diagnostics)
            depth = table.integer("stages", None, "stages = 4")
            known = errors == len(top.document.diagnostics)
            if table.has("split") and not group:
                splits[depth] = _split(table, depth)
            stages = table.tables("stage", "[[depth.stage]]", f"stage {{}} of {depth}")
            of_group[depth] = _parts(stages, "stage", "[[depth.stage.at]]", costs, group)
            if known:
                _once(table, "stages", depth, first)
            if known and of_group[depth] and len(of_group[depth]) != depth:
                table.report(say.StagesMissing(table.place("stages"), depth, len(of_group[depth])))
            table.close()
    # All mistakes are raised together: unknown entries, mixed units, and those from above.
    top.close()
    costs.settle(top.document)
    top.document.settle()
    chain_of_layers, chain_of_stages = layers.pop("", ()), depths.pop("", {})
    groups = {group: ModelProfile(group, of_group) for group, of_group in depths.items()}
    groups |= {group: ModelProfile(group, {}, layers=of_group) for group, of_group in layers.items()}
    profile = ModelProfile(name, chain_of_stages, note, length, chain_of_layers, splits, file, groups)
    profile = profile.with_overhead(overhead)
    return WorkProfile(profile) if costs.work else profile


def _grouped(tables: list[Table], kind: str) -> dict[str, list[Table]]:
    """Depths or layers (``kind``) by their group, ``""`` for those of a chain; adds errors if only some have one."""
    by_group: dict[str, list[Table]] = {}
    for table in tables:
        by_group.setdefault(table.text("group", "", 'group = "image"'), []).append(table)
    if grouped := [group for group in by_group if group] if "" in by_group else []:
        alone, example = by_group[""][0], by_group[grouped[0]][0]
        alone.report(say.GroupOfSome(alone.heading(), kind, f'"{grouped[0]}"', example.place("group")))
    return by_group


class _CostEntries:
    """Records the places where a file gives a time, where it counts work, and where it has a step."""

    def __init__(self) -> None:
        self.times: list[tuple[Table, str]] = []
        self.work: list[tuple[Table, str]] = []
        self.steps: list[Table] = []

    def read(self, table: Table, name: str, default: Fraction | None) -> Fraction:
        """Reads a cost in seconds or in FLOP, and records its place; for a layer or half a backward it may be 0."""
        least = Fraction(0) if table.path[0] == "layer" or name in HALVES else units.POSITIVE
        cost, dimension = table.quantity(name, (units.TIME, units.WORK), default, least)
        if table.has(name):
            (self.times if dimension is units.TIME else self.work).append((table, name))
        return cost

    def overhead(self, table: Table, name: str, default: Fraction | None) -> Fraction:
        seconds, _ = table.quantity(name, (units.TIME,), default, Fraction(0))
        if table.has(name):
            self.times.append((table, name))
        return seconds

    def step(self, table: Table) -> float:
        seconds, _ = table.quantity("step", (units.TIME,), Fraction(0), Fraction(0))
        if table.has("step"):
            self.steps.append(table)
        return float(seconds)

    def settle(self, document: Document) -> None:
        """Adds errors for work in a file that also has times, and for steps in a file that has only work."""
        for table, name in self.work if self.times else ():
            document.diagnostics.append(
                say.TimesAndWork(table.place(name), name, self.times[0][0].place(self.times[0][1]))
            )
        for table in self.steps if self.work and not self.times else ():
            document.diagnostics.append(say.StepOfWork(table.place("step")))


def _split(table: Table, depth: int) -> tuple[int, ...]:
    example = 'split = "0,9,17,25"'
    words = table.text("split", None, example).split(",")
    split = tuple(int(word) for word in words if word.isascii() and word.isdecimal() and len(word) < 10)
    if (len(split), split[:1], split) != (len(words), (0,), tuple(sorted({*split}))) or len(split) != depth:
        table.report(say.WrongSplit(table.place("split"), "split", example, depth))
    return split


def _overhead(top: Table, costs: _CostEntries) -> Times:
    table = top.table("operation", "", "[operation]")
    if table is None:
        return NO_OVERHEAD
    overhead = _times(table, costs.overhead, 1)
    table.close()
    return overhead


def _once(table: Table, name: str, value: int, first: dict[int, Table]) -> None:
    if value in first:
        table.report(say.DescribedTwice(table.place(name), name, value, first[value].place(name)))
    first.setdefault(value, table)


def _layers(top: Table, costs: _CostEntries) -> dict[str, tuple[StageCosts, ...]]:
    """Reads the layers, if any, by group; adds errors if the file also has depths, or layers differ in their sizes B,
    or those of a group lie apart.
    """
    if not top.has("layer"):
        return {}
    if top.has("depth"):
        places = top.document.places
        top.report(say.StagesAndLayers(places.key(("layer", 0)), places.key(("depth", 0))))
    tables = top.tables("layer", "[[layer]]", "layer {}")
    grouped = _grouped(tables, "layer")
    for group, of_group in grouped.items():
        apart = next((b for a, b in pairwise(of_group) if tables.index(b) != tables.index(a) + 1), None)
        if apart is not None and group:
            apart.report(say.GroupApart(apart.heading(), group, of_group[0].heading()))
    by_group = {group: _parts(of_group, "layer", "[[layer.at]]", costs, group) for group, of_group in grouped.items()}
    layers = [layer for of_group in by_group.values() for layer in of_group]
    tables = [table for of_group in grouped.values() for table in of_group]
    for number, (table, layer) in enumerate(zip(tables, layers, strict=True)):
        for size in sorted({*layers[0].at} ^ {*layer.at}):
            there, missing = (0, number) if size in layers[0].at else (number, 0)
            table.report(say.SizeOfSomeLayers(table.heading(), missing, size, there))
    return by_group


def _parts(tables: list[Table], kind: str, sizes: str, costs: _CostEntries, group: str) -> tuple[StageCosts, ...]:
    """Reads stages or layers (``kind``, in errors) of a ``group``, ``""`` for a chain; the last one of a chain sends
    nothing. ``sizes`` is the heading of their tables of micro-batch sizes.
    """
    parts: list[StageCosts] = []
    for number, entry in enumerate(tables):
        sent = parts[-1].at if parts else {}
        first = parts[0].at if parts else {}
        name = f"{kind} {group}[{number}]" if group else f"{kind} {number}"
        ends = (_Ends.GROUP if group else _Ends.CHAIN) if number == len(tables) - 1 else _Ends.NOTHING
        parts.append(_part(entry, name, sizes, ends, sent, costs))
        for size in sorted(first.keys() & parts[-1].at.keys()):
            counts = len(parts[-1].at[size].slices), len(first[size].slices)
            if counts[0] != counts[1]:
                say_which = name, counts[0], size, f"{kind} {group}[0]" if group else f"{kind} 0", counts[1]
                entry.report(say.SlicesOfSomeParts(entry.heading(), *say_which))
    return tuple(parts)


def _part(
    table: Table, part: str, sizes: str, ends: "_Ends", before: Mapping[int, Timing], costs: _CostEntries
) -> StageCosts:
    weights = _size(table, "weights")
    gradients = _size(table, "gradients", weights)
    optimizer = _size(table, "optimizer", 0)
    step, noise = costs.step(table), _noise(table, "step_noise")
    at: dict[int, Timing] = {}
    first: dict[int, Table] = {}
    for entry in table.tables("at", sizes, f"{sizes} of {part}"):
        size = entry.integer("micro_batch_size", None, "micro_batch_size = 8")
        if entry.has("micro_batch_size"):
            _once(entry, "micro_batch_size", size, first)
        at[size] = _with_slices(entry, part, ends, before.get(size), costs)
        entry.close()
    table.close()
    return StageCosts(weights, gradients, optimizer, at, step, noise)


class _Ends(Enum):
    """What a stage or a layer is the last one of: that of a chain sends nothing, that of a group may send something."""

    NOTHING = "nothing"
    CHAIN = "a chain"
    GROUP = "a group"


def _timing(table: Table, part: str, ends: _Ends, before: Timing | None, costs: _CostEntries) -> Timing:
    """Costs of a micro-batch or a slice; ``before`` are those of the stage before."""
    times = _times(table, costs.read, BACKWARD)
    # A stage receives the output of the stage before, and gradients are as large as outputs.
    activations = _size(table, "activations")
    inputs = _size(table, "input", before.output if before else 0)
    output = _size(table, "output", None if ends is _Ends.NOTHING else 0)
    gradient = _size(table, "gradient_output", output)
    released, operands = _size(table, "released", 0), _size(table, "operands", 0)
    resident, resident_operands = _size(table, "resident", 0), _size(table, "resident_operands", 0)
    limits = (
        ("released", released, activations, say.ReleasesTooMuch),
        ("resident", resident, activations, say.LeavesTooMuch),
        ("resident_operands", resident_operands, activations - released + operands, say.LeavesTooMuchHalfway),
    )
    for name, size, most, message in limits:
        if size > max(0, most):
            shown = units.show_size(max(0, most))
            table.report(message(table.place(name), name, f'{name} = "{shown}"', shown))
    for name in ("output", "gradient_output") if ends is _Ends.CHAIN else ():
        if table.has(name):
            table.report(say.LastStageSends(table.place(name), part, name))
    kept = MicroBatchBytes(
        activations, inputs, released, operands, resident=resident, resident_operands=resident_operands
    )
    return Timing(times, kept, output, gradient, _noise(table, "noise"))


def _with_slices(table: Table, part: str, ends: _Ends, before: Timing | None, costs: _CostEntries) -> Timing:
    timing = _timing(table, part, ends, before, costs)
    slices: list[Timing] = []
    for number, entry in enumerate(table.tables("slice", "", "slice {}") if table.has("slice") else ()):
        slice_before = before.slices[number] if before and number < len(before.slices) else None
        of_slice = _timing(entry, part, ends, slice_before, costs)
        carry, gradients = _size(entry, "carry", 0), _size(entry, "carry_gradient", 0)
        slices.append(replace(of_slice, kept=of_slice.kept._replace(carry=carry, carry_gradients=gradients)))
        entry.close()
    return replace(timing, slices=tuple(slices))


def _times(table: Table, read: Callable[[Table, str, Fraction | None], Fraction], factor: int) -> Times:
    """The times in a table, keyed as in `time_of`; a backward takes ``factor`` times its forward by default."""
    forward = read(table, ENTRIES["F"], None)
    backward = read(table, ENTRIES["B"], factor * forward)
    times = {"F": forward, "B": backward, RECOMPUTING: read(table, RECOMPUTING, forward + backward)}
    splits = any(map(table.has, HALVES))
    for key, entry in ENTRIES.items():
        if key not in times and (table.has(entry) or (splits and entry in HALVES)):
            times[key] = read(table, entry, None)
    return {key: float(time) for key, time in times.items()}


def _noise(table: Table, name: str) -> float | None:
    noise, _ = table.quantity(name, (units.SHARE,), Fraction(0), Fraction(0))
    return float(noise) if table.has(name) else None


def _size(table: Table, name: str, default: int | None = None) -> int:
    size, _ = table.quantity(name, (units.SIZE,), None if default is None else Fraction(default), Fraction(0))
    return round(size)


def read_cluster(source: Source) -> Cluster:
    """The cluster that a text describes; raises `Rejected` with all errors in the text."""
    top = load(source)
    name, workers, per_node, memory, reserved = "", 1, 1, 1, 0
    if table := top.table("cluster", "[cluster]", "[cluster]"):
        name = table.text("name", None, 'name = "Piz Daint"')
        workers = table.integer("workers", None, "workers = 16")
        per_node = table.integer("per_node", 1, "per_node = 1")
        memory = max(round(table.quantity("memory", (units.SIZE,))[0]), 1)
        reserved = _size(table, "reserved", 0)
        if reserved >= memory and table.has("reserved"):
            table.report(say.NothingLeft(table.place("reserved"), units.show_size(memory), units.show_size(reserved)))
        table.close()
    between, within = _links(top, workers, per_node)
    sums = _link(top, "sum", replace(between, shared=False))
    device, host = _device(top), _host(top)
    top.close()
    top.document.settle()
    return Cluster(name, workers, per_node, memory, reserved, between, within, sums, device, host)


def _links(top: Table, workers: int, per_node: int) -> tuple[Link, Link]:
    """Links between and within nodes: a missing one equals the other; ``within`` alone is enough for a single node."""
    name = "within" if workers <= per_node else "between"
    links = top.table("links", "", "[links]")
    if links is None:
        if not top.has("links"):
            top.report(say.LinkMissing(top.heading(), name, workers, per_node))
        return FREE, FREE
    entries = [entry for entry in ("latency", "bandwidth", "overhead", "shared") if links.withdrawn(entry)]
    if entries:
        links.report(say.LinkUnnamed(links.key(entries[0]), name, entries[0]))
    elif not links.has("between") and not links.has(name):
        links.report(say.LinkMissing(links.heading(), name, workers, per_node))
    between = _link(links, "between", FREE)
    within = _link(links, "within", between)
    links.close()
    return between if links.has("between") else within, within


def _link(table: Table, name: str, default: Link) -> Link:
    """The link in the table ``name``, else ``default``; only links of messages, not of sums, can be shared."""
    where = f"[links.{name}]" if table.path else f"[{name}]"
    inner = table.table(name, "", where)
    if inner is None:
        return default
    link = _figures(inner)
    if table.path:
        link = replace(link, shared=inner.flag("shared", "shared = true"))
        if inner.withdrawn("short"):
            inner.report(say.ShortMessages(inner.key("short"), where))
    inner.close()
    return link


def _figures(inner: Table) -> Link:
    alpha, _ = inner.quantity("latency", (units.TIME,), least=Fraction(0))
    bandwidth, _ = inner.quantity(
        "bandwidth", (units.BANDWIDTH,), least=Fraction(1), words={units.UNLIMITED: Fraction(0)}
    )
    overhead, _ = inner.quantity("overhead", (units.TIME,), least=Fraction(0), default=Fraction(0))
    return Link(float(alpha), units.inverse(bandwidth) if bandwidth else 0.0, float(overhead))


def _host(top: Table) -> HostLink | None:
    table = top.table("host", "", "[host]")
    if table is None:
        return None
    link, workers = _figures(table), table.integer("workers", 1, "workers = 2")
    memory = max(_size(table, "memory"), 1) if table.has("memory") else None
    table.close()
    return HostLink(link, workers, memory)


def _device(top: Table) -> Device | None:
    table = top.table("device", "", "[device]")
    if table is None:
        return None
    peak, _ = table.quantity("peak", (units.RATE,), least=Fraction(1))
    device = Device(
        float(peak),
        table.number("efficiency", 0.001, 1, "efficiency = 0.6"),
        table.number("half_at", 0, 1_000_000, "half_at = 2.0"),
        float(table.quantity("operation", (units.TIME,), Fraction(0), Fraction(0))[0]),
    )
    table.close()
    return device
