"""The first screen of a compilation: a line for each of the answers that a user looks for first."""

import textwrap
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import assert_never

from rich.console import Group, RenderableType
from rich.text import Text

from chimera_ir.cost.durations import decimal, percent, seconds
from chimera_ir.cost.report import IN_FULL, Figures, Report
from chimera_ir.cost.simulate import Unmoved
from chimera_ir.ir.levels import Quantity
from chimera_ir.ir.ops import WeightGroup
from chimera_ir.ir.text.printer import group_name, group_text
from chimera_ir.plural import counted, listed, plural
from chimera_ir.predict.prediction import (
    Bytes,
    Copies,
    Limit,
    Prediction,
    Speed,
    Summary,
    TimePart,
    exposed,
    hiding_time,
)
from chimera_ir.tables import Column, Table

# A prediction as a table for a terminal: the terms of equation 1, the replay, the memory of the fullest worker.

_SIZES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def table(prediction: Prediction) -> RenderableType:
    """All terms of the prediction, for a console of any width."""
    columns = Column("equation 1"), Column("predicted", style="bold")
    return Group(heading(prediction), Table(columns, [*_rows(prediction)]).for_terminal())


def size(value: float) -> str:
    """A number of bytes as text, with four digits and a fitting unit.

    Examples
    --------
    >>> size(9881943040)
    '9.203 GiB'
    """
    if not value:
        return "0"
    factor, unit = next(((factor, unit) for factor, unit in _SIZES if value >= factor), _SIZES[-1])
    return f"{value / factor:.4g} {unit}"


def heading(prediction: Prediction) -> Text:
    """The cluster, the copies of the pipelines and the size of a micro-batch."""
    setting = prediction.setting
    copies = counted(setting.copies, "copy")
    return Text.assemble((setting.cluster.name, "bold"), f": {copies}, micro-batches of {setting.micro_batch_size}")


def _rows(prediction: Prediction) -> Iterator[tuple[str, str]]:
    terms = prediction.equation
    yield "F_t, B_t", f"{seconds(terms.forward)}, {seconds(terms.backward)}"
    for term in terms.further:
        yield f"{term.kind}_t", seconds(term.seconds)
    yield "Comm_p2p", seconds(terms.p2p)
    further = {f"C_{term.kind.lower()}": term.count for term in terms.further}
    counts = {"C_f": terms.forwards, "C_b": terms.backwards, **further}
    yield ", ".join(counts), ", ".join(map(decimal, counts.values()))
    yield "critical path", seconds(terms.compute)
    yield "Comm_allreduce, by stage", _listed(terms.all_reduce)
    yield "free regions, by worker", _regions(prediction)
    yield "Comm_unoverlapped, by worker", _listed(terms.unoverlapped)
    yield "T", f"{seconds(terms.seconds)}, {prediction.throughput:.4g} items/s"
    replayed = f"{seconds(prediction.replay.seconds)}, {prediction.replayed_throughput:.4g} items/s"
    yield "T by replay of the program", replayed
    if prediction.expected is not None:
        throughput = prediction.items / prediction.expected
        yield "T with the profile's noise", f"{seconds(prediction.expected)}, {throughput:.4g} items/s"
    fullest = max(prediction.memory, key=lambda memory: memory.total)
    yield "memory, fullest worker", f"{size(fullest.total)} of {size(prediction.available)}"
    yield from ((f"  {name}", size(count)) for name, count in fullest.parts.items() if count)


def _listed(values: tuple[float, ...]) -> str:
    if len(set(values)) == 1:
        return f"{seconds(values[0])} each" if len(values) > 1 else seconds(values[0])
    if len(values) <= IN_FULL:
        return " ".join(map(_joined, values))
    return f"{seconds(min(values))} to {seconds(max(values))}"


def _joined(value: float) -> str:
    return seconds(value).replace(" ", "")


def _regions(prediction: Prediction) -> str:
    workers = prediction.equation.regions
    if len(workers) > IN_FULL:
        times = [region.seconds for regions in workers for region in regions]
        return f"{seconds(min(times, default=0.0))} to {seconds(max(times, default=0.0))}"
    return "; ".join(
        " ".join(f"{group_text(region.group)}:{_joined(region.seconds)}" for region in regions) for regions in workers
    )


NAMED = 4
"""The most sums of gradients that a line names."""

_LISTED = 8
"""The most workers whose memory a line lists one by one."""

_LEAST = Fraction(1, 1000)
"""The smallest share that a list of shares names."""

_INDENT = 8
"""Width in columns of the name of an answer, and of the indent of its further lines."""


def show(
    report: Report, summary: Summary, prediction: Prediction | None, width: int, baseline: str, searched: str = ""
) -> list[Text]:
    """The paragraphs of the screen, in lines up to ``width``: one for each answer, remark and warning.

    ``baseline`` is the name under which readers know the baseline. ``searched`` says what a search found, if there was
    one.
    """
    ratio = summary.speed.times_as_fast
    lines = [
        ("speed", _speed(summary.speed, baseline), "green" if ratio > 1 else "bold red" if ratio < 1 else ""),
        ("memory", _memory(summary, report, prediction), "" if summary.fits else "bold red"),
        ("limit", _limit(summary.limit, report, prediction), ""),
    ]
    if moves := _moves(report):
        lines.append(("host", moves, ""))
    if searched:
        lines.insert(0, ("search", searched, ""))
    if prediction is not None:
        lines.append(("times", _times(prediction), ""))
    if sums := _sums(report, prediction):
        lines.append(("sums", sums, ""))
    lines += [("remark", remark, "yellow") for remark in report.remarks]
    answers = [_line(f"{name}:", words, style, width) for name, words, style in lines]
    return answers if prediction is None else [*answers, *_warnings(prediction)]


def _warnings(prediction: Prediction) -> Iterator[Text]:
    from chimera_ir.profile.document import WARNING, shown  # what reads files of profiles

    return (Text.assemble((WARNING, "yellow"), warning) for warning in shown(prediction.warnings))


def _line(name: str, words: str, style: str, width: int) -> Text:
    wrapped = textwrap.wrap(words, max(width - _INDENT, 20), break_long_words=False, break_on_hyphens=False)
    return Text.assemble((name.ljust(_INDENT), style or "cyan"), ("\n" + " " * _INDENT).join(wrapped))


def _speed(speed: Speed, baseline: str) -> str:
    show = speed.unit.show
    rate = "" if speed.throughput is None else f", {speed.throughput:.4g} items/s"
    conditions = "messages, sums and steps counted" if speed.messages_counted else "messages cost nothing"
    if speed.is_baseline:
        return f"{show(speed.time)} an update{rate} ({conditions}); it is the baseline itself, --against names another"
    both = f"{show(speed.time)} against {show(speed.baseline_time)}"
    words = f"{_compared(speed.times_as_fast, baseline)}: {both}{rate if speed.messages_counted else ''} ({conditions})"
    return words if speed.baseline_fits is not False else f"{words}; {speed.baseline} does not fit the memory"


def _compared(ratio: Fraction, other: str) -> str:
    if ratio == 1:
        return f"as fast as {other}"
    times = f"{float(ratio):.3g}"
    if times == "1":
        return f"about as fast as {other}"
    if ratio < 1:
        return f"slower than {other}, {times} times as fast"
    return f"{times} times as fast as {other}"


def _memory(summary: Summary, report: Report, prediction: Prediction | None) -> str:
    memory, compared = summary.memory, "" if summary.speed.is_baseline else _baseline_memory(summary, report)
    match memory:
        case Copies():
            return f"{_copies(memory, report)}{compared} (fits? --profile, --cluster)"
        case Bytes():
            needed, available = size(memory.needed), size(memory.available)
            if memory.fits:
                share = percent(Fraction(memory.needed, memory.available))
                on_host = f"; a worker needs {_on_host(memory)} of its host" if memory.host else ""
                fullest = f"the fullest worker, P{memory.worker}, needs {needed} of {available}, {share}"
                return f"fits: {fullest}{on_host}{compared}"
            if memory.too_full == 0:
                return f"does not fit: a worker needs {_on_host(memory)} of its host's memory{compared}"
            workers = f"{counted(memory.too_full, 'worker')} {'needs' if memory.too_full == 1 else 'need'}"
            advice = _advice(memory, report, prediction)
            return f"does not fit: {workers} up to {needed}, and there are {available}{compared}; {advice}"
        case _:
            assert_never(memory)


def _on_host(memory: Bytes) -> str:
    limit = "" if memory.host_available is None else f" of {size(memory.host_available)}"
    return f"{size(memory.host)}{limit}"


def _baseline_memory(summary: Summary, report: Report) -> str:
    match summary.baseline_memory:
        case None:
            return ""
        case int() as needed:
            return f"; {summary.speed.baseline}: {size(needed)}"
        case Copies() as copies:
            kept = [count for count in (copies.activations, copies.stashed_inputs) if count]
            same_size = report.header.stages == report.baseline.header.stages
            scale = "" if same_size else " of that size"
            return f"; {summary.speed.baseline}: {' and '.join(map(decimal, [copies.weights, *kept]))}{scale}"
        case _:
            assert_never(summary.baseline_memory)


def _copies(memory: Copies, report: Report) -> str:
    copies = "" if memory.weights == memory.stages else f" ({counted(int(memory.weights), 'copy')} in all)"
    weights = f"weights of {counted(memory.stages, 'stage')}{copies}"
    most = f"{decimal(memory.activations)} M_a" if report.header.shares else _forwards(memory.activations)
    kept = [f"activations of up to {most}"] if memory.activations else []
    kept += [f"inputs of up to {_forwards(memory.stashed_inputs)}"] if memory.stashed_inputs else []
    on_host = f", those of {decimal(memory.host)} on its host" if memory.host else ""
    return f"{', '.join([weights, *kept])} on a worker{on_host}"


def _forwards(count: Fraction) -> str:
    return f"{decimal(count)} {'forward' if count == 1 else plural('forward')}"


def _advice(memory: Bytes, report: Report, prediction: Prediction | None) -> str:
    header = report.header
    sharded = prediction is None or prediction.setting.sharded_optimizer or header.steps_inside
    fewer = {
        "weights": "more stages",
        "gradients": "more stages",
        "optimizer": "more stages" if sharded else "--shard-optimizer",
        "messages": "a smaller --micro-batch-size",
        "activations": "a smaller --micro-batch-size" if header.recomputing else "--recompute",
    }
    return f"most are {memory.largest_part}, try {fewer[memory.largest_part]}"


def _limit(limit: Limit, figures: Figures, prediction: Prediction | None) -> str:
    # The largest part in a sentence, the other parts by name, and the critical path, which explains computing.
    largest = limit.largest
    share, worker = percent(limit.shares[largest]), f"P{limit.worker}"
    who = "every worker" if limit.evenly and prediction is None else f"{worker}, the busiest worker,"
    match largest:
        case TimePart.COMPUTE:
            who = "no worker" if limit.evenly else f"{worker}, the busiest worker, never"
            words = f"the work itself: {who} waits"
        case TimePart.UNEVEN:
            words = f"uneven work: {worker} works {share} of the time more than a worker does on average"
        case TimePart.BUBBLES | TimePart.WAITING:
            words = f"{largest.value}: {who} idles {share} of the time"
        case TimePart.MESSAGES | TimePart.SUMS | TimePart.MOVES:
            words = f"{largest.value}: {who} waits for them {share} of the time"
        case TimePart.STEPS:
            words = f"{largest.value}: {who} spends {share} of the time on them"
        case _:
            assert_never(largest)
    others = sorted(
        (
            (value, part.value)
            for part, value in limit.shares.items()
            if value >= _LEAST and part not in (largest, TimePart.COMPUTE)
        ),
        reverse=True,
    )
    further = ", ".join(f"{name} {percent(value)}" for value, name in others)
    return "; ".join([words, *([f"also {further}"] if further else []), _path(figures, prediction)])


def _path(figures: Figures, prediction: Prediction | None) -> str:
    terms = " + ".join(f"{decimal(count)} {kind}" for kind, count in figures.counts.items() if count)
    free = "" if prediction is None else " without messages"
    costs = dict(figures.durations.report_costs(figures.header, ()))
    means = [
        f"{kind} = {decimal(mean)}"
        for kind, mean in figures.costs.items()
        if figures.counts.get(kind) and costs.get(kind, mean) != mean
    ]
    parts = "slices" if figures.header.slices > 1 else "stages"
    of_parts = f", where the {parts} on it make {' and '.join(means)}" if means else ""
    return f"critical path{free}: {terms or 'empty'} = {figures.durations.unit.show(figures.makespan)}{of_parts}"


def _moves(report: Report) -> str:
    words = [] if report.without_offload is None else [_offload(report, report.without_offload)]
    return "; ".join([*words, *([_transfers(report)] if any(report.host) else [])])


def _transfers(figures: Figures) -> str:
    worker = max(range(figures.workers), key=lambda worker: figures.transfers[worker])
    time, hidden = figures.host_links[worker]
    share = Fraction(time, figures.makespan) if figures.makespan else Fraction(0)
    beside = Fraction(hidden, time) if time else Fraction(1)
    busy = f"{figures.durations.unit.show(time)}, {percent(share)} of the time"
    return f"the busiest link, of P{worker}, moves activations for {busy}, {percent(beside)} of that beside computing"


def _offload(report: Report, unmoved: Unmoved) -> str:
    if not unmoved.offloads:
        is_bounded = any(bound.quantity is Quantity.ACTIVATIONS for bound in report.header.bounds)
        reason = "the declared bound holds without" if is_bounded else "no worker would keep less in the same time"
        return f"--offload auto moves nothing: {reason}"
    now, before = max(report.activations), max(unmoved.activations)
    peak = f"a worker keeps up to {decimal(now)} M_a in place of {decimal(before)}{_unchanged(report, unmoved)}"
    longer, show = report.makespan - unmoved.makespan, report.durations.unit.show
    cost = f"an update takes {show(longer)} longer" if longer else "an update takes as long as without"
    forwards = f"{counted(unmoved.forwards, 'forward')}{' of a turn' if report.header.asynchronous else ''}"
    return f"activations of {unmoved.offloads} of {forwards} move: {peak}; {cost}"


def _unchanged(report: Report, unmoved: Unmoved) -> str:
    """Words on the memory of workers with and without moves that do not lower the peak; empty if they lower it."""
    now, before = report.activations, unmoved.activations
    fullest = [worker for worker, peak in enumerate(now) if peak == max(now)]
    if any(now[worker] != before[worker] for worker in fullest):
        return ""
    if len(now) <= _LISTED:
        text = f"by worker {listed(map(decimal, now))} in place of {listed(map(decimal, before))}"
    else:
        others = [worker for worker in range(len(now)) if worker not in fullest]
        most = (decimal(max((peaks[worker] for worker in others), default=Fraction(0))) for peaks in (now, before))
        text = f"the others up to {' in place of '.join(most)}"
    header = report.header
    last = {worker for stage, fed in enumerate(header.fed) if not fed for worker in header.holders[stage]}
    workers = listed(f"P{worker}" for worker in fullest)
    return f" ({text}{f'; the last stage, on {workers}, moves nothing' if last.issuperset(fullest) else ''})"


def _times(prediction: Prediction) -> str:
    """Says which of the two predicted times to trust, and why they differ."""
    replayed, computed = prediction.replay.seconds, prediction.equation.seconds
    difference = Fraction(computed / replayed - 1) if replayed else Fraction(0)
    if abs(difference) < _LEAST:
        return f"replay and equation 1 agree on {seconds(replayed)}"
    is_longer = difference > 0
    reason = (
        "it hides no message and takes every stage to be as slow as the slowest"
        if is_longer
        else "it leaves out optimizer steps, late receives and messages that share a link"
    )
    comparison = f"{percent(abs(difference))} {'more' if is_longer else 'less'}"
    return f"trust the replay, {seconds(replayed)}; equation 1 says {seconds(computed)}, {comparison}: {reason}"


def _sums(report: Report, prediction: Prediction | None) -> str:
    """How many gradient sums there are, how many computing hides, and which are exposed; empty without sums."""
    if prediction is not None:
        costs = exposed(prediction.replay)
        late = sorted((group for group in costs if costs[group] > 0), key=lambda group: -costs[group])
        shown = [f"{group_name(group, report.header)} by {seconds(costs[group])}" for group in late[:NAMED]]
        words = f"{len(costs) - len(late)} hidden entirely by computing"
        return f"{counted(len(costs), 'gradient sum')}, {words}{_exposed(shown, late)}" if costs else ""
    free_of = hiding_time(report)
    late = [group for group in free_of if not free_of[group]]
    hidden = [free_of[group] for group in free_of if free_of[group]]
    span = f" of {report.durations.unit.show_range(hidden)}" if hidden else ""
    words = f"{len(hidden) or 'none'} with idle time{span} to hide in"
    names = [group_name(group, report.header) for group in late[:NAMED]]
    return f"{counted(len(free_of), 'gradient sum')}, {words}{_exposed(names, late)}" if free_of else ""


def _exposed(names: Sequence[str], groups: Sequence[WeightGroup]) -> str:
    """Names the sums that computing does not hide; of more than the first ``names`` it has the number."""
    if not groups:
        return ""
    further = f" and {len(groups) - len(names)} more" if len(groups) > len(names) else ""
    return f"; exposed: {', '.join(names)}{further}"
