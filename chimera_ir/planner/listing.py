"""A ranking as a terminal table and as JSON."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from pathlib import PurePath

from rich.console import Group, RenderableType
from rich.text import Text

from chimera_ir import library
from chimera_ir.cost.durations import number, rounded, seconds
from chimera_ir.cost.durations import percent as ratio
from chimera_ir.escapes import as_argument, command_line
from chimera_ir.options import Options
from chimera_ir.planner.judge import ALONE, Judged
from chimera_ir.planner.rank import CONTENDING_OPERATIONS, Ranking, contenders, grouped, nearest, plain_need
from chimera_ir.planner.space import MAX_OPERATIONS, Configuration, LeftOut, Reason, Recomputation, Roles
from chimera_ir.plural import counted, listed
from chimera_ir.predict.screen import size
from chimera_ir.profile.cluster import torchrun
from chimera_ir.profile.document import WARNING, shown
from chimera_ir.request import EqualTimes
from chimera_ir.source import Source
from chimera_ir.tables import Column, Table

# Command lines that compile and start a configuration.

_IN_COMMAND = (
    *("slice_lengths", "recompute", "sync", "tied", "profile", "cluster", "offload", "copies", "micro_batch_size"),
    *("split", "layout", "shard_optimizer"),
)
"""The options in a ``chimera compile`` line, in their order."""


def options_of(judged: Judged, shared: Options) -> Options:
    """The options with which a compilation is as it was predicted; ``shared`` are those that all compilations have.

    A schedule that a search found has its scheme's clauses already. The limit on operations may be raised, because the
    baseline of the report may have more.
    """
    choice = judged.choice
    options = replace(
        shared,
        copies=choice.copies,
        micro_batch_size=choice.micro_batch_size,
        split=choice.split,
        offload="auto" if choice.offload else None,
        shard_optimizer=shared.shard_optimizer and not judged.asynchronous,
        max_operations=max(shared.max_operations, 2 * choice.workers * choice.micro_batches),
    )
    if judged.order:
        return replace(options, tied=())
    change, lengths = choice.change, choice.known_lengths
    return replace(options, recompute=change.recompute, sync=change.sync, slice_lengths=lengths)


def scheme_argument(source: Source) -> str:
    """The argument that names a scheme: its name in the library, or its file, written so that it is no option."""
    stem = PurePath(source.name).stem
    if stem in library.names() and library.source(stem) == source:
        return stem
    return f"./{source.name}" if source.name.startswith("-") else source.name


def compile_line(judged: Judged, shared: Options) -> str:
    """The ``chimera compile`` line that compiles this configuration and predicts its time."""
    choice, options = judged.choice, options_of(judged, shared)
    if judged.order:
        words = [as_argument(order_file(judged))]
    else:
        words = [as_argument(scheme_argument(choice.source)), *_settings(choice)]
    if choice.others:
        shares = ",".join(f"{sized.micro_batches}:{share}" for sized, share in reversed(choice.sizes))
        words += ["--out", as_argument(f"{judged.scheme}.out"), "--numbers", shares]
    words += options.words(*_IN_COMMAND)
    words += ["--max-operations", str(options.max_operations)] if options.max_operations > MAX_OPERATIONS else []
    return f"chimera compile {command_line(words)}"


def _settings(choice: Configuration) -> Iterator[str]:
    """The words that set the parameters, each to its values for all numbers of micro-batches."""
    each = [sized.settings for sized, _ in reversed(choice.sizes)]
    for settings in zip(*each, strict=True):
        name, values = settings[0][0], dict.fromkeys(value for _, value in settings)
        yield f"{name}={','.join(map(str, values))}"


def order_file(judged: Judged) -> str:
    """The name of the file for the order that a search found."""
    return "-".join((judged.scheme, *(f"{name}{value}" for name, value in judged.choice.settings))) + ".sir"


# The answer of a plan in words: which configuration to run, and why it and no other.

_WORDS = ("computing", "recomputation", "bubbles", "optimizer steps", "messages", "gradient sums")
"""Names of the parts of an update, in the order of `TimeParts`."""

_WORTH_SAYING = 0.005
"""The least difference, as a share of the fastest time, that is named as a reason."""


def recommendation(ranking: Ranking) -> tuple[str, ...]:
    """The advice to run the first choice, then the reasons: whether the model fits one worker, what slows others."""
    return (_answer(ranking.choices[0]), *_reasons(ranking)) if ranking.choices else _nothing(ranking)


def _nothing(ranking: Ranking) -> tuple[str, ...]:
    nothing, need = "no configuration is left", nearest(ranking)
    items, profile = ranking.judge.question.mini_batch, ranking.judge.profile
    sizes = sorted({number for part in profile.parts for number in part.at})
    if need:
        choice, again = need.choice, ", recompute" if need.choice.change.recompute else ""
        words = " ".join((scheme_argument(choice.source), *(f"{name}={value}" for name, value in choice.settings)))
        nearest_one = f"{size(need.size)} on its fullest worker ({words}, B={choice.micro_batch_size}{again})"
        lacks = f"the nearest to fitting needs {nearest_one}, and there are {size(ranking.judge.available)}"
        return f"{nothing}: {lacks}", "more workers, smaller micro-batches or --shard-optimizer may help"
    if sizes and all(items % number for number in sizes):
        multiples = listed(sizes, "or")
        return (f"{nothing}: the mini-batch of {items} is no multiple of {multiples} (B in the profile)",)
    return (nothing,)


def _answer(first: Judged) -> str:
    choice = first.choice
    where = f" on {counted(choice.workers, 'worker')}" if choice.stages != choice.workers else ""
    groups = ", ".join(f"{name} {stop - start}" for name, start, stop in choice.named) or "D"
    stages = f"{counted(choice.stages, 'stage')} ({groups})"
    pieces = "" if choice.stages == 1 else f" in {stages}"
    model = f"the whole model{pieces}" if first.is_alone else f"{stages}{where}"
    name = f"{first.name} (as {first.scheme})" if first.is_alone else first.name
    fewer = [number for _, number, _ in reversed(choice.others)]
    micros = listed([*fewer, counted(choice.micro_batches, "micro-batch")], "or")
    batches = f"{micros} (N) of {counted(choice.micro_batch_size, 'item')} (B)"
    return f"run {name}: {counted(choice.copies, 'copy')} (W) of {model}, {batches} in each"


def _reasons(ranking: Ranking) -> Iterator[str]:
    first, *others = ranking.rows()
    of_mean = " on average" if first.choice.others else ""
    speed = f"{first.throughput:.4g} items/s, {seconds(first.seconds)} for an update{of_mean}"
    yield f"predicted: {speed}; the fullest worker needs {size(max(first.memory))} of {size(ranking.judge.available)}"
    if idle := first.choice.idle(ranking.judge.question.workers):
        stay = f"{idle} of {counted(ranking.judge.question.workers, 'worker')} {'stays' if idle == 1 else 'stay'} idle"
        yield f"{stay}: a copy takes {first.choice.workers}, and none that uses all is predicted to be faster"
    alone = next((judged for judged in others if judged.is_alone), None)
    runner_up = next((judged for judged in others if judged is not alone), None)
    if first.is_alone:
        yield f"your model fits one worker, which needs no pipeline: {_parallelism(first)} is fastest"
    elif alone:
        yield f"your model fits one worker, but {_parallelism(alone)} {_longer(ranking, first, alone)}"
    if not any(judged.is_plain for judged in ranking.choices):
        yield from _without_plain(ranking)
    if first.choice.change.recompute and ranking.judge.question.recomputation is Recomputation.WHERE_NEEDED:
        yield "it recomputes activations, because it does not fit without"
    if first.choice.offload:
        yield "it moves activations to the host, because it does not fit without"
    if runner_up:
        called = f"the best pipeline, {runner_up.name}," if first.is_alone else f"the next best, {runner_up.name},"
        yield f"{called} {_longer(ranking, first, runner_up)}"


def _parallelism(alone: Judged) -> str:
    """The name of a configuration of data parallelism, such as "data parallelism that recomputes its activations"."""
    stages = alone.choice.stages
    if alone.is_plain:
        return f"plain {alone.name}"
    pieces = "" if stages == 1 else f" in {counted(stages, 'piece')}"
    return f"{alone.name} that {'recomputes its activations' if alone.recomputes else 'runs the model'}{pieces}"


def _without_plain(ranking: Ranking) -> Iterator[str]:
    """Yields a reason why plain data parallelism is not among the choices, if one is known."""
    depths, available, need = ranking.judge.profile.depths, size(ranking.judge.available), plain_need(ranking)
    is_missing = depths and 1 not in depths
    if need:
        stages = f"the profile's {counted(min(depths), 'stage')} as one" if is_missing else "D=1"
        least = f"at least {size(need.size)} ({stages}, B={need.choice.micro_batch_size})"
        if need.size > ranking.judge.available:
            yield f"plain {ALONE} does not fit a worker: it needs {least}, and there are {available}"
            return
        if not is_missing:
            yield f"plain {ALONE} was not considered; it needs {least} and would fit"
    if is_missing:
        yield f"the profile has no depth of 1, so that {ALONE} was not considered"


def _longer(ranking: Ranking, first: Judged, other: Judged) -> str:
    """How much longer an update of ``other`` takes than one of ``first``, and on which of its parts."""
    behind = first.over(other) - 1
    if behind <= 0:
        return "is as fast"
    replays = first.replayed is not None and other.replayed is not None
    spent, by_first = (ranking.judge.time_parts(judged, replays) for judged in (other, first))
    unit = sum(by_first) / float(first.choice.items)
    shares = {
        name: (seconds / other.choice.items - before / first.choice.items) / unit
        for name, seconds, before in zip(_WORDS, spent, by_first, strict=True)
    }
    ordered = sorted(shares.items(), key=lambda item: -abs(item[1]))
    longer = [f"{percent(share)} on {name}" for name, share in ordered if share >= _WORTH_SAYING]
    shorter = [f"{percent(-share)} on {name}" for name, share in ordered if -share >= _WORTH_SAYING]
    spends = [f"{kind} {listed(parts)}" for kind, parts in (("more:", longer), ("less:", shorter)) if parts]
    return f"takes {percent(behind)} longer" + (f" ({'; '.join(spends)})" if spends else "")


def percent(share: float) -> str:
    """A share in percent with three digits."""
    return f"{round(100 * share, 2):.3g} %"


# Notes below a ranking, on how far it can be trusted.


def notes(ranking: Ranking, error: float, warnings: Sequence[str]) -> tuple[str, ...]:
    """The notes below a ranking, a sentence each.

    ``error`` is how far predictions may be off, as a share; ``warnings`` are those of the profile and the cluster file.
    """
    return (
        *(f"{WARNING}{warning}" for warning in shown(warnings)),
        *_close(ranking, error),
        *_baseline(ranking),
        *(f"for {scheme_argument(out.source)} {out.detail}" for out in ranking.left_out if out.reason is Reason.SPACE),
        *_in_training(ranking),
        *_smaller(ranking),
        *_replays(ranking),
        *ranking.searched,
    )


def _close(ranking: Ranking, error: float) -> Iterator[str]:
    choices = ranking.rows()
    if not choices:
        return
    behind = [choices[0].over(judged) - 1 for judged in choices]
    close = [share for share in behind if share <= error]
    if len(ranking.choices) == 1:
        yield "it is the only one that fits"
    elif len(choices) == 1:
        return
    elif len(close) == 1:
        yield f"the first is {percent(behind[1])} faster than the second; the model's error is {percent(error)}"
    else:
        apart = f"within {percent(max(close))}, less than the model's error of {percent(error)}"
        yield f"the first {len(close)} rows are {apart if max(close) else 'equally fast'}: measure them"


def _baseline(ranking: Ranking) -> Iterator[str]:
    reference, first = ranking.reference, next(iter(ranking.choices), None)
    if reference is None or first is None or reference.name in {judged.name for judged in ranking.rows()}:
        return
    ratio, plain = reference.over(first) - 1, f"plain 1F1B with a flush ({reference.scheme})"
    if ratio > 0:
        yield f"{plain} is {percent(ratio)} faster than {first.name} here"
    elif ratio < 0:
        yield f"{plain} is beaten by {first.name} by {percent(first.over(reference) - 1)}"


def _in_training(ranking: Ranking) -> Iterator[str]:
    """Yields what differs in training with the first choice: older weights, and slices of unequal lengths."""
    for first in ranking.choices[:1]:
        if first.asynchronous:
            remark = (
                f"{first.scheme} has no flush: its gradients are of older weights, so that it may need more updates"
            )
            flushed = ((place, judged) for place, judged in enumerate(ranking.choices, 1) if not judged.asynchronous)
            for place, other in islice(flushed, 1):
                remark += f"; the first with a flush is number {place}, {other.scheme}"
            yield remark
        if first.choice.lengths:
            yield f"the slices of {first.scheme} have unequal lengths: `loss` must return a sum and a count, not a mean"


def _smaller(ranking: Ranking) -> Iterator[str]:
    asked = ranking.judge.question.mini_batch
    best = (same[0] for same in grouped(ranking.choices, lambda judged: judged.scheme))
    items = {judged.scheme: judged.choice.mini_batch for judged in best}
    smaller = [f"{name} ({count:,})" for name, count in items.items() if count < asked]
    if smaller:
        whose = "that scheme" if len(smaller) == 1 else "these schemes"
        updates = f"updates have fewer than {counted(asked, 'item')} with {listed(smaller)}"
        yield f"{updates}: no parameter of {whose} is the number of micro-batches"


def _replays(ranking: Ranking) -> Iterator[str]:
    replayed = sum(judged.replayed is not None for judged in ranking.choices)
    if replayed == len(ranking.choices):
        return
    done, others = f"{replayed} of {len(ranking.choices)} were replayed event by event", contenders(ranking.choices)
    if others:
        which = f"{len(others)} of them may be faster, beyond {counted(CONTENDING_OPERATIONS, 'operation')} to replay"
        yield f"{done}; the others (*) go by equation 1, and {which}"
    else:
        yield f"{done}; none of the others (*) can be faster than the first"


_COLUMNS = (
    *(Column("", "right", whole=True), Column("scheme", whole=True)),
    *(Column(name, "right", whole=True) for name in ("W", "D", "B", "N")),
    *(Column("more"), *(Column(name, "right", whole=True) for name in ("items/s", "time", "memory"))),
)


@dataclass(frozen=True, slots=True)
class View:
    """The first ``top`` rows, of ``everything`` or of the best of each name; ``why`` counts what was left out."""

    top: int
    everything: bool
    why: bool


def table(ranking: Ranking, answer: Sequence[str], notes: Sequence[str], view: View) -> RenderableType:
    """All that ``chimera plan`` prints above its command lines, for a console."""
    return Group(
        Text(_sentence(answer[0]), "bold"),
        *map(Text, map(_sentence, answer[1:])),
        Text(),
        _heading(ranking),
        _choices(ranking, view),
        *map(Text, map(_sentence, notes)),
        *_left_out(ranking, view.why),
        Text(),
    )


def lines(judged: Judged, ranking: Ranking) -> str:
    """The command lines that compile and start a configuration."""
    judge, choice, options = ranking.judge, judged.choice, options_of(judged, ranking.judge.options)
    ranks, script = choice.workers * choice.copies, f"{judged.scheme}.out/train.py"
    where = ranks, judge.cluster.per_node, script, choice.micro_batch_size, options.layout == "replica"
    started = torchrun(*where, choice.split, options.shard_optimizer, judge.profile.file)
    return f"{compile_line(judged, judge.options)}\n{started}\n"


def _heading(ranking: Ranking) -> Text:
    question, judge = ranking.judge.question, ranking.judge
    name = judge.profile.name or "the model"
    sizes = [f"{items:,} ({ratio(share)})" for items, share in reversed(question.mini_batches)]
    workers = counted(question.workers, "worker")
    batches = f"mini-batches of {listed(sizes) if question.others else format(question.mini_batch, ',')}"
    said = f": {workers} with {size(judge.available)}, {batches}"
    return Text.assemble((f"{name} on {judge.cluster.name}", "bold"), said)


def _choices(ranking: Ranking, view: View) -> RenderableType:
    if not ranking.choices:
        return Text()
    rows = ranking.rows(view.everything)
    cells = [[*_row(place, judged, ranking)] for place, judged in enumerate(rows[: view.top], 1)]
    return Group(Table(_COLUMNS, cells).for_terminal(gap=1), *_hidden(ranking, rows, view))


def _hidden(ranking: Ranking, rows: Sequence[Judged], view: View) -> Iterator[Text]:
    shown = rows[: view.top]
    below = len(rows) - len(shown)
    hidden = len(ranking.choices) - len(rows)
    words = [f"and {below} more: --top {len(rows)} shows them"] if below else []
    words += [f"{counted(hidden, 'other configuration')} of the same schemes: --all shows them"] if hidden else []
    if words:
        yield Text(f"{'; '.join(words)}\n")


def _row(place: int, judged: Judged, ranking: Ranking) -> Iterator[str]:
    choice, first = judged.choice, ranking.choices[0]
    numbers = ", ".join(str(sized.micro_batches) for sized, _ in reversed(choice.sizes))
    counts = choice.copies, choice.stages, choice.micro_batch_size, numbers
    yield from (str(place), judged.name, *map(str, counts), _more(judged, ranking))
    yield f"{judged.throughput:.4g}" + ("*" if judged.replayed is None else "")
    yield "" if judged is first else f"+{percent(max(0.0, first.over(judged) - 1))}"
    yield size(max(judged.memory))


def _more(judged: Judged, ranking: Ranking) -> str:
    choice, change = judged.choice, judged.choice.change
    roles, idle = ranking.roles[choice.source], choice.idle(ranking.judge.question.workers)
    settings = roles.without_micro_batches(choice.settings)
    words = [f"as {judged.scheme}"] if judged.is_alone else []
    words += [f"{name}={value}" for name, value in settings if roles.sizes != (name,) or value != choice.stages]
    words += [EqualTimes.EQUAL_TIMES.value] if choice.lengths else []
    words += ["recompute"] if judged.recomputes else []
    words += ["--offload auto"] if choice.offload else []
    words += [change.sync.value] if change.sync else []
    words += ["no flush"] if judged.asynchronous else []
    words += [f"{idle} idle"] if idle else []
    words += [f"found order: -{percent(1 - judged.seconds / judged.before)}"] if judged.order else []
    return ", ".join(words)


def _sentence(said: str) -> str:
    return f"{said[0].upper()}{said[1:]}."


def _left_out(ranking: Ranking, why: bool) -> Iterator[RenderableType]:
    """The number of configurations left out by reason; an example of each if none is left or ``why`` asks for it."""

    def key(left_out: LeftOut) -> tuple[str, str]:
        return scheme_argument(left_out.source) if why else "", left_out.reason.value

    groups = grouped(ranking.left_out, key)
    if not groups:
        return
    if ranking.choices and not why:
        largest_first = sorted(groups, key=lambda members: -len(members))
        counts = ", ".join(f"{len(members)} {members[0].reason.value}" for members in largest_first)
        yield Text(f"Left out: {counts}; --why says which and why.")
        return
    rows = []
    for members in sorted(groups, key=lambda members: key(members[0])):
        nearest = min(members, key=lambda left_out: left_out.needed)
        scheme, reason, count = scheme_argument(nearest.source), nearest.reason.value, str(len(members))
        attempted = ", ".join(_attempted(nearest, ranking.roles[nearest.source]))
        example = f"{attempted}: {nearest.detail}" if attempted else nearest.detail
        rows.append((scheme, reason, count, example) if why else (reason, count, f"{scheme} {example}"))
    columns = Column("left out"), Column("why"), Column("how many", "right", whole=True), Column("for example")
    yield from (Text(), Table(columns[not why :], rows).for_terminal())


def _attempted(left_out: LeftOut, roles: Roles) -> Iterator[str]:
    for name, value in left_out.settings:
        if not (name == roles.micro_batches and left_out.micro_batch_size):
            yield f"{name}={value}"
    if left_out.micro_batch_size:
        yield f"B={left_out.micro_batch_size}"
    if left_out.choice and left_out.choice.lengths:
        yield EqualTimes.EQUAL_TIMES.value
    if left_out.recompute:
        yield "recompute"


def as_json(
    ranking: Ranking,
    answer: Sequence[str],
    notes: Sequence[str],
    warnings: Sequence[str],
    chosen: Judged | None,
) -> dict[str, object]:
    """The whole ranking as plain data for JSON, with the command lines of the ``chosen`` configuration."""
    question, judge = ranking.judge.question, ranking.judge
    reasons = Counter(left_out.reason.value for left_out in ranking.left_out)
    return {
        "model": judge.profile.name,
        "cluster": judge.cluster.name,
        "workers": question.workers,
        "mini_batch": question.mini_batch,
        **_shares("mini_batches", question.mini_batches),
        "memory_available": judge.available,
        "recommendation": list(answer),
        "choices": [as_values(judged, question.workers) for judged in ranking.choices],
        "baseline": as_values(ranking.reference, question.workers) if ranking.reference else None,
        "notes": list(notes),
        "warnings": list(warnings),
        "left_out_by_reason": dict(sorted(reasons.items())),
        "left_out": [_reason(left_out) for left_out in ranking.left_out],
        "commands": lines(chosen, ranking).splitlines() if chosen else [],
    }


def _shares(name: str, shares: Sequence[tuple[int, Fraction]]) -> dict[str, object]:
    """An entry with the share of updates that has each number, ascending; none if all have the same one."""
    return {name: {str(count): number(share) for count, share in reversed(shares)}} if len(shares) > 1 else {}


def as_values(judged: Judged, workers: int) -> dict[str, object]:
    """A configuration with its predictions as plain data; it is for a cluster of ``workers`` workers."""
    choice = judged.choice
    return {
        "scheme": scheme_argument(choice.source),
        "settings": dict(choice.settings),
        "name": judged.name,
        "equal": [{"scheme": scheme_argument(of.source), "settings": dict(of.settings)} for of in judged.equal],
        "W": choice.copies,
        "D": choice.stages,
        "B": choice.micro_batch_size,
        "N": choice.micro_batches,
        **_shares("numbers", [(sized.micro_batches, share) for sized, share in choice.sizes]),
        "workers": choice.workers,
        "idle": choice.idle(workers),
        "mini_batch": choice.mini_batch,
        "recompute": judged.recomputes,
        **({"offload": "auto"} if choice.offload else {}),
        "sync": choice.change.sync.value if choice.change.sync else None,
        "asynchronous": judged.asynchronous,
        "T": rounded(judged.equation),
        "T_replay": rounded(judged.replayed),
        "throughput": rounded(judged.throughput),
        "memory": list(judged.memory),
        **({} if choice.split is None else {"split": list(choice.split)}),
        **({"slice_lengths": list(choice.known_lengths)} if choice.known_lengths else {}),
        **({"search": {**judged.order.as_json(), "T_replay_before": rounded(judged.before)}} if judged.order else {}),
    }


def _reason(left_out: LeftOut) -> dict[str, object]:
    return {
        "scheme": scheme_argument(left_out.source),
        "settings": dict(left_out.settings),
        "B": left_out.micro_batch_size,
        "recompute": left_out.recompute,
        "reason": left_out.reason.value,
        "detail": left_out.detail,
    }
