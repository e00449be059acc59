"""The report: the figures of a schedule next to those of a baseline of the same size, with remarks for the user."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from chimera_ir.cost.durations import Durations, Unit, decimal, exact, number, percent, sharing, weighing
from chimera_ir.cost.simulate import (
    Launched,
    Timeline,
    Transfers,
    Unmoved,
    idle,
    mean,
    simulate,
    staleness,
    transfers,
    unmoved,
    warning,
)
from chimera_ir.flow import live
from chimera_ir.ir.kinds import PAIR, Counted
from chimera_ir.ir.levels import Header, Program, Schedule
from chimera_ir.ir.ops import Operation, WeightGroup, singles
from chimera_ir.ir.text.printer import group_name
from chimera_ir.plural import counted
from chimera_ir.tables import Column, Table

_Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Figures:
    """Times and memory of a schedule in one iteration or, without a flush, in one update of the steady state.

    ``path`` is the critical path, and ``counts`` has C_f and C_b by the letters of the kinds. ``clock_span`` is the
    makespan if every operation takes 1. ``work`` is how long each worker computes. ``spans`` are the workers' own
    spans, from the start of the first operation to the end of the last; none for a stream. ``steady_period`` is the
    time of an iteration where many follow one another without a barrier.

    The other figures have a number for each worker, the most that it keeps at a time: ``weights`` in M_theta;
    ``activations`` in M_a; ``between_halves``, the part of these that waits for the second half of a backward;
    ``stashed_inputs``, the micro-batches whose input is kept for recomputation; ``carries`` in slices; ``host``, the
    activations in host memory, in M_a. ``host_links`` has the times of moves.
    """

    header: Header
    durations: Durations
    path: tuple[Operation, ...]
    makespan: Fraction
    work: tuple[Fraction, ...]
    spans: tuple[Fraction, ...]
    steady_period: Fraction
    counts: Mapping[str, Fraction]
    clock_span: Fraction
    weights: tuple[Fraction, ...]
    activations: tuple[Fraction, ...]
    between_halves: tuple[Fraction, ...]
    stashed_inputs: tuple[Fraction, ...]
    carries: tuple[Fraction, ...]
    host: tuple[Fraction, ...]
    host_links: tuple[Transfers, ...]

    @property
    def scheme(self) -> str:
        """The name of the scheme."""
        return self.header.scheme

    @property
    def parameters(self) -> Mapping[str, int]:
        """The values of the scheme's parameters."""
        return dict(self.header.parameters)

    @property
    def workers(self) -> int:
        """The number of workers of one copy of the pipelines."""
        return self.header.workers

    @property
    def stages(self) -> int:
        """D, the number of stages of each pipe."""
        return self.header.stages

    @property
    def micro_batches(self) -> int:
        """N, the number of whole micro-batches of an update."""
        return self.header.whole_micro_batches

    @property
    def pipelines(self) -> int:
        """The number of pipes."""
        return len(self.header.pipes)

    @property
    def asynchronous(self) -> bool:
        """Whether there is no flush between updates."""
        return self.header.asynchronous

    @property
    def critical_path(self) -> Mapping[str, Fraction]:
        """The number of operations of each kind on the critical path, as in ``{"C_f": 4, "C_b": 6}``."""
        counts = {"F": Fraction(0), "B": Fraction(0), **self.counts}
        return {f"C_{letter.lower()}": count for letter, count in counts.items()}

    @property
    def costs(self) -> Mapping[str, Fraction]:
        """Maps a kind's letter to its cost or, if stages or slices cost unequally, to the mean on the critical path."""
        costs = self.durations.report_costs(self.header, self.path)
        return {kind: cost for kind, cost in costs if kind != PAIR.letter or kind in self.counts}

    @property
    def cost_unit(self) -> str | None:
        """The unit of all times: seconds (``"s"``), or None for the unit of the costs."""
        unit: str | None = self.durations.unit.value
        return unit

    @property
    def transfers(self) -> tuple[Fraction, ...]:
        """The time of each worker's moves to its host and back."""
        return tuple(link.time for link in self.host_links)

    @property
    def hidden_transfers(self) -> tuple[Fraction, ...]:
        """The part of each worker's `transfers` in which it computes."""
        return tuple(link.hidden for link in self.host_links)

    @property
    def bubble_ratio(self) -> Fraction:
        """The share of the makespan, over all workers, in which they idle."""
        return idle(mean(self.work), self.makespan)

    @property
    def span_bubble_ratio(self) -> Fraction:
        """The share of the workers' own spans, added up, in which they idle."""
        return idle(sum(self.work, Fraction(0)), sum(self.spans, Fraction(0)))

    @property
    def steady_bubble_ratio(self) -> Fraction:
        """The share of the steady period, over all workers, in which they idle."""
        return idle(mean(self.work), self.steady_period)


class CommunicatorChoice(NamedTuple):
    """A way to divide the messages among communicators, and the ``number`` of them that it takes.

    ``blocked`` names the operations at which the program would hang with it; empty if it is proven to finish.
    """

    name: str
    number: int
    blocked: str


@dataclass(frozen=True, slots=True, repr=False)
class Report(Figures):
    """The figures of a schedule, and those of its baseline in the same units, with launches, proven rules and remarks.

    Every name in report.json is an attribute, except those of `Compilation`, and numbers are exact. ``staleness`` and
    ``stale_micro_batches`` are those of `Staleness`, ``synchronisation`` the launches of gradient sums, ``verified``
    the proven rules. ``is_baseline`` is whether the schedule is the baseline itself. ``communicators`` are the choices,
    from the most to the fewest; none in a report on a schedule. A notebook shows a report as its table.

    Examples
    --------
    >>> import chimera_ir
    >>> report = chimera_ir.compile("chimera", D=4, N=4).report
    >>> report
    <Report of chimera(D=4, N=4, f=1): makespan 16, bubble ratio 25.0%>
    >>> list(map(int, report.activations)), report.micro_batches
    ([3, 4, 4, 3], 4)
    """

    baseline: Figures
    without_offload: "Unmoved | None"
    staleness: tuple[int, ...]
    stale_micro_batches: int
    synchronisation: tuple[Launched, ...]
    verified: tuple[str, ...]
    remarks: tuple[str, ...]
    is_baseline: bool
    communicators: tuple[CommunicatorChoice, ...] = ()

    @property
    def updates_shown(self) -> int:
        """The number of updates that the timeline shows; 1 with a flush."""
        return self.header.updates

    def __repr__(self) -> str:
        makespan = self.durations.unit.show(self.makespan)
        return f"<Report of {self.header.title}: makespan {makespan}, bubble ratio {percent(self.bubble_ratio)}>"

    def _repr_html_(self) -> str:
        """The table that a notebook shows."""

        return html(self)

    def as_json(self) -> _Json:
        """The content of ``report.json``: integers where a number is integral, else floats."""
        ages = {
            "updates_shown": self.updates_shown,
            "staleness": list(self.staleness),
            "stale_micro_batches": self.stale_micro_batches,
        }
        return {
            "scheme": self.scheme,
            "parameters": self.parameters,
            "workers": self.workers,
            "stages": self.stages,
            "micro_batches": self.micro_batches,
            "pipelines": self.pipelines,
            "critical_path": _numbers(self.critical_path),
            "makespan": number(self.makespan),
            "bubble_ratio": number(self.bubble_ratio),
            "clock_span": number(self.clock_span),
            **_memory(self),
            "baseline": {
                "makespan": number(self.baseline.makespan),
                "bubble_ratio": number(self.baseline.bubble_ratio),
                "scheme": self.baseline.scheme,
                "critical_path": _numbers(self.baseline.critical_path),
                **_memory(self.baseline),
                **_repeated(self.baseline),
                **_further(self.baseline),
            },
            "verified": {rule.replace("-", "_"): True for rule in self.verified},
            "communicators": {choice.name: _communicators(choice) for choice in self.communicators},
            "synchronisation": [_launch(launched) for launched in self.synchronisation],
            "costs": _numbers(self.costs),
            "cost_unit": self.cost_unit,
            "remarks": list(self.remarks),
            **_repeated(self),
            **_further(self),
            **({"weights": list(map(number, map(Fraction, self.header.weights)))} if self.header.weights else {}),
            **({"frozen": list(self.header.frozen)} if self.header.frozen else {}),
            **_graph(self.header),
            **({"keep": list(map(number, self.header.shares))} if self.header.shares else {}),
            **({} if self.without_offload is None else {"without_offload": self.without_offload.as_json()}),
            "asynchronous": self.asynchronous,
            **(ages if self.asynchronous else {}),
        }


def _graph(header: Header) -> Mapping[str, object]:
    """The groups of stages, the edges between them, and the micro-batches that groups do not have."""
    listed = {
        "groups": {name: [*range(start, stop)] for name, start, stop in header.named},
        "feeds": [[feed.source, feed.target] for feed in header.feeds],
        "absent": {absence.group: [*absence.micros] for absence in header.absent},
    }
    return {name: value for name, value in listed.items() if value}


Grow = Callable[[Figures, Timeline], Figures]
"""Returns the figures of a whole from those of its window, with the timeline of the window."""


def unchanged(figures: Figures, _: Timeline) -> Figures:
    """The figures of a schedule that is a whole itself."""
    return figures


def report(
    schedule: Schedule,
    costs: Durations,
    baseline: Schedule,
    weights: Sequence[int],
    launches: tuple[Launched, ...] = (),
    verified: tuple[str, ...] = (),
    timeline: Timeline | None = None,
    baseline_weights: Sequence[int] | None = None,
    before: Timeline | None = None,
    program: Program | None = None,
    grow: "Grow" = unchanged,
    grow_baseline: "Grow" = unchanged,
) -> Report:
    """Makes the report on a verified schedule and a verified baseline for the same workers and micro-batches.

    If the schedule has x times as many stages as the baseline, each stage of the baseline counts x times: its
    durations, weights and activations. ``weights`` are the copies of weights that each worker keeps,
    ``baseline_weights`` those of the baseline, by default one of each stage. ``timeline`` is that of the schedule, if
    known already; ``before`` is the timeline before moves were added. If memory moves, the lines of ``program`` say
    what workers keep and when they wait. ``grow`` and ``grow_baseline`` turn the figures of the two schedules, which
    may be windows, into those of the whole.
    """
    # The baseline's costs: for as many stages as it has, and for backwards that are split or whole as its are.
    timeline = timeline or simulate(schedule, costs)
    size = Fraction(schedule.header.stages, baseline.header.stages)
    headers = schedule.header, baseline.header
    plain = not any(header.recomputing for header in headers)
    same = plain and size == 1 and baseline.lanes == schedule.lanes
    splits, base_splits = _splits(schedule), _splits(baseline)
    comparable = costs.for_baseline(splits).recut(schedule.header.stages, baseline.header.stages)
    base_timeline = timeline if same else simulate(baseline, comparable)
    base = _figures(baseline, base_timeline, baseline_weights or stages_held(baseline.header), size, base_splits)
    base = grow_baseline(base, base_timeline)
    keeps = program if program is not None and schedule.header.moves else schedule
    figures = grow(_figures(keeps, timeline, weights, Fraction(1), splits), timeline)
    stale = staleness(schedule)
    remarks = (*_remarks(schedule), *warning(stale, schedule.header.per_update), *costs.remarks(schedule))
    return Report(
        **{field.name: getattr(figures, field.name) for field in fields(figures)},
        baseline=base,
        without_offload=None if before is None else unmoved(schedule, before),
        staleness=stale.updates,
        stale_micro_batches=stale.micro_batches,
        synchronisation=launches,
        verified=verified,
        remarks=remarks,
        is_baseline=schedule == baseline,
    )


def activations(level: Schedule | Program) -> tuple[Fraction, ...]:
    """The most activations that each worker keeps at a time, in M_a.

    Where a stage recomputes, its activations count from the recomputation on, not from the forward.
    """
    return live.whole(level.header, live.activations(level))


def stages_held(header: Header) -> tuple[int, ...]:
    """The number of stages that each worker holds; a stage that two pipes place on it counts once."""
    return tuple(len(stages) for stages in header.stages_of)


def _splits(schedule: Schedule) -> bool:
    """Whether the schedule has split backwards: operations that are the first half of one."""
    kinds = {operation.kind for lane in schedule.lanes for operation in singles(lane)}
    return any(kind.splits for kind in kinds)


def _figures(
    level: Schedule | Program, timeline: Timeline, weights: Sequence[int], size: Fraction, splits: bool
) -> Figures:
    """``level``, the schedule or its program, says what workers keep. One stage counts ``size`` M_theta and M_a."""
    header = level.header
    halves = live.whole(header, live.between_halves(level)) if splits else (Fraction(0),) * len(level.lanes)
    return Figures(
        header=header,
        durations=timeline.costs,
        path=timeline.critical_path.operations,
        makespan=timeline.makespan,
        work=tuple(work * timeline.tick for work in timeline.work),
        spans=() if header.asynchronous else tuple(span * timeline.tick for span in timeline.spans),
        steady_period=timeline.steady_period * timeline.tick,
        counts=timeline.critical_path.counts,
        clock_span=timeline.clock_span,
        weights=tuple(size * copies for copies in weights),
        activations=tuple(size * peak for peak in activations(level)),
        between_halves=tuple(size * peak for peak in halves),
        stashed_inputs=tuple(size * peak for peak in live.whole(header, live.inputs(level))),
        carries=tuple(peak * header.slices for peak in live.whole(header, live.peaks(level, Counted.CARRIES))),
        host=tuple(size * peak for peak in live.whole(header, live.on_host(level))),
        host_links=transfers(timeline),
    )


def _remarks(schedule: Schedule) -> tuple[str, ...]:
    remarks = []
    header = schedule.header
    for tie in header.ties:
        members = header.members(tie)
        local = ", one worker: local unless there are copies" if len(members) == 1 else ""
        where = f"worker{'s' if len(members) > 1 else ''} {', '.join(map(str, members))}"
        stages = " and ".join(map(str, tie))
        remarks.append(f"stages {stages} share parameters, whose gradients are one more sum over {where}{local}")
    idle = [f"P{worker}" for worker, lane in enumerate(schedule.lanes) if not lane]
    if idle:
        remarks.append(f"nothing is scheduled on {', '.join(idle)}")
    return tuple(remarks)


def _numbers(values: Mapping[str, Fraction]) -> _Json:
    return {name: number(value) for name, value in values.items()}


def _memory(figures: Figures) -> _Json:
    return {
        "weights": [number(copies) for copies in figures.weights],
        "activations": [number(live) for live in figures.activations],
        "stashed_inputs": [number(kept) for kept in figures.stashed_inputs],
    }


def _further(figures: Figures) -> _Json:
    """Entries of report.json with a figure for each worker that are left out where all are 0."""
    by_name = {
        "between_halves": figures.between_halves,
        "carries": figures.carries,
        "host": figures.host,
        "transfers": figures.transfers,
        "hidden_transfers": figures.hidden_transfers,
    }
    return {name: list(map(number, by_worker)) for name, by_worker in by_name.items() if any(by_worker)}


def _repeated(figures: Figures) -> _Json:
    spans = {"spans": list(map(number, figures.spans)), "span_bubble_ratio": number(figures.span_bubble_ratio)}
    return {
        **(spans if figures.spans else {}),
        "steady_period": number(figures.steady_period),
        "steady_bubble_ratio": number(figures.steady_bubble_ratio),
    }


def _launch(launched: Launched) -> _Json:
    return {
        "worker": launched.worker,
        **group_entries(launched.group),
        "strategy": launched.strategy.value,
        "launched": number(launched.at),
        "free": number(launched.free),
        "flush": number(launched.flush),
    }


def group_entries(group: WeightGroup) -> dict[str, object]:
    """The entries that name a weight group in a JSON object: its first stage and, for a tie, all of its stages."""
    return {"stage": group[0], **({"tied": list(group)} if len(group) > 1 else {})}


def _communicators(choice: CommunicatorChoice) -> _Json:
    blocked = {"blocked": choice.blocked} if choice.blocked else {}
    return {"count": choice.number, "proven": not choice.blocked, **blocked}


# The details of a report for a terminal: the schedule next to the baseline, and the launches of sums.

IN_FULL = 16
"""The most workers, stages or launches that are listed one by one; of more, runs or the extremes are listed."""

Show = Callable[[Fraction], str]


def show(report: Report) -> RenderableType:
    """All figures of a report, for a console of any width; colours add no information to the words."""
    return Group(_table(report, _both(report)).for_terminal(), *_launches(report), *_communicator_lines(report))


def heading(report: Report) -> Text:
    """The scheme with its parameters, sizes and costs, and how the baseline differs."""
    header = report.header
    parameters = " ".join(f"{name}={value}" for name, value in header.parameters)
    costs = _costs(report)
    groups = [f"{group.name} {group.stop - group.start}" for group in header.named]
    groups = [(", " if header.feeds else " -> ").join(groups)] if groups else []  # without edges a chain of groups
    groups += [f"{len(header.frozen)} frozen"] if header.frozen else []
    sizes = ", ".join(
        (
            counted(header.workers, "worker"),
            counted(header.stages, "stage") + (f" ({', '.join(groups)})" if groups else ""),
            counted(header.whole_micro_batches, "micro-batch"),
            counted(len(header.pipes), "pipe"),
        )
    )
    units = ["one update in the steady state"] if header.asynchronous else []
    if differences := ", ".join(_differences(report)):
        units.append(f"the baseline: {differences}")
    lines = f"{sizes}; {costs}{weighing(header)}{sharing(header)}", *(["; ".join(units)] if units else [])
    return Text.assemble((header.scheme, "bold"), f" {parameters}: " if parameters else ": ", "\n".join(lines))


def _differences(report: Report) -> Iterator[str]:
    header, base = report.header, report.baseline.header
    if header.asynchronous != base.asynchronous:
        yield "with its flush" if header.asynchronous else "one update in the steady state, without a flush"
    if header.stages != base.stages:
        larger = exact(Fraction(header.stages, base.stages))
        yield f"{counted(base.stages, 'stage')}, each as large as {larger} of these"
    if header.feeds and not base.feeds:
        yield "its stages are one chain"
    if header.absent and not base.absent:
        yield "all micro-batches on all stages"
    if header.frozen and not base.frozen:
        yield "all of its stages are trained"
    costs = _costs(report.baseline)
    if costs != _costs(report):
        yield costs


def _costs(figures: Figures) -> str:
    return figures.durations.summary(figures.header, figures.counts)


def html(report: Report) -> str:
    """The figures of a report beside those of its baseline, as an HTML table."""
    rows, parent = [], ""
    for name, value, base in _both(report):
        parent = parent if name.startswith(" ") else name
        rows.append((name if name == parent else f"{parent}: {name.strip()}", value, base))
    return _table(report, rows, "figure").html(str(heading(report)))


def _table(report: Report, rows: Sequence[tuple[str, str, str]], corner: str = "") -> Table:
    names = report.scheme, f"baseline: {report.baseline.scheme}"
    return Table([Column(corner), Column(names[0], style="bold"), Column(names[1])], rows)


def _both(report: Report) -> list[tuple[str, str, str]]:
    """Rows with the name of a figure, its value, and the value of the baseline."""
    rows = zip(_rows(report), _rows(report.baseline), strict=True)
    return [(name, own, base) for (name, own, needed), (_, base, base_needs) in rows if needed or base_needs]


def _rows(figures: Figures) -> Iterator[tuple[str, str, bool]]:
    """Yields the name of each figure, its value, and whether that is worth a row."""
    unit, flushes, moves = figures.durations.unit, bool(figures.spans), any(figures.host)
    counts = ", ".join(f"C_{kind.lower()} = {decimal(count)}" for kind, count in figures.counts.items())
    spans = per_worker(figures.spans, lambda span: unit.show(span).replace(" ", ""))
    yield "makespan", unit.show(figures.makespan), True
    yield "  bubble ratio", percent(figures.bubble_ratio), True
    yield "critical path", counts, True
    yield "workers' own spans", spans if flushes else "no flush", True
    yield "  bubble ratio", percent(figures.span_bubble_ratio) if flushes else "", True
    yield "steady period", unit.show(figures.steady_period), True
    yield "  bubble ratio", percent(figures.steady_bubble_ratio), True
    yield "clock span", decimal(figures.clock_span), True
    yield "weights, M_theta", per_worker(figures.weights), True
    yield "activations, M_a", per_worker(figures.activations), True
    yield "  between halves", per_worker(figures.between_halves), any(figures.between_halves)
    yield "stashed inputs", per_worker(figures.stashed_inputs), any(figures.stashed_inputs)
    yield "carries, in slices", per_worker(figures.carries), any(figures.carries)
    yield "host memory, M_a", per_worker(figures.host), moves
    yield "transfers", per_worker(figures.transfers, unit.show), moves
    yield "  while computing", per_worker(figures.hidden_transfers, unit.show), moves


def _launches(report: Report) -> list[Text]:
    """Lines on the launches of gradient sums after which their worker still idles.

    After `IN_FULL` of them a line says how many more there are, and another how many launches no bubble follows.
    """
    early = [launched for launched in report.synchronisation if launched.free]
    rest = len(report.synchronisation) - len(early)
    steady, unit = report.header.asynchronous, report.durations.unit
    lines = [
        f"{group_name(launch.group, report.header)} on worker {launch.worker}: {_launch_text(launch, steady, unit)}"
        for launch in early[:IN_FULL]
    ]
    if len(early) > IN_FULL:
        lines.append(f"and {counted(len(early) - IN_FULL, 'more such launch')} (report.json lists all)")
    if early and rest:
        bubble = "with no bubble before the step" if steady else "after the worker's last bubble"
        lines.append(f"{counted(rest, 'more sum')} launched {bubble}")
    return [Text.assemble(("gradients: ", "cyan"), line) for line in lines]


def _launch_text(launched: Launched, steady: bool, unit: Unit) -> str:
    if steady:
        return f"{unit.show(launched.free)} free between launch and step"
    return (
        f"launched at {unit.show(launched.at)}, {unit.show(launched.free)} free before the worker's last operation, "
        f"{unit.show(launched.flush)} after it"
    )


def proof(report: Report) -> Text:
    """A line with the names of the rules that are proven."""
    return Text("verified: " + ", ".join(report.verified))


def _communicator_lines(report: Report) -> list[Text]:
    fewer = [f"{choice.name} ({choice.number})" for choice in report.communicators[1:] if not choice.blocked]
    return [Text(f"finishes with fewer communicators, too: {', '.join(fewer)}")] if fewer else []


def per_worker(values: Sequence[Fraction], show: Show = decimal) -> str:
    """The values of all workers, from P0 on, as ``show`` writes them; many are joined to runs with a constant step.

    Examples
    --------
    >>> per_worker([Fraction(n) for n in (3, 4, 4, 3)])
    '3 4 4 3'
    >>> per_worker([Fraction(2)] * 64)
    '2 on each worker'
    """
    if len(set(values)) == 1:
        return f"{show(values[0])} on each worker" if len(values) > 1 else show(values[0])
    if len(values) <= IN_FULL:
        return " ".join(map(show, values))
    return ", ".join(_run(first, last, values, show) for first, last in _runs(values))


def _runs(values: Sequence[Fraction]) -> list[tuple[int, int]]:
    """The first and last index of each run with a constant step, from left to right."""
    runs = []
    first = 0
    while first < len(values):
        last = min(first + 1, len(values) - 1)
        while last + 1 < len(values) and values[last + 1] - values[last] == values[first + 1] - values[first]:
            last += 1
        runs.append((first, last))
        first = last + 1
    return runs


def _run(first: int, last: int, values: Sequence[Fraction], show: Show) -> str:
    if first == last:
        return f"P{first}: {show(values[first])}"
    joint = "," if last == first + 1 else ".."
    amounts = [show(values[first])] + ([] if values[first] == values[last] else [show(values[last])])
    return f"P{first}{joint}P{last}: {joint.join(amounts)}"
