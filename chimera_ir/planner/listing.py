"""A ranking as a terminal table and as JSON."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.box import SIMPLE_HEAD
from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from chimera_ir.cost.number_text import rounded
from chimera_ir.planner.command_lines import Files, compile_line, order_file, scheme_argument
from chimera_ir.planner.judge import Judged
from chimera_ir.planner.rank import Ranking, grouped
from chimera_ir.planner.recommendation import Recommendation, percent
from chimera_ir.planner.roles import Roles
from chimera_ir.planner.space import LeftOut
from chimera_ir.plural import counted
from chimera_ir.predict.prediction_table import size
from chimera_ir.profile.cluster import torchrun
from chimera_ir.request import EqualTimes

_COLUMNS = ("", "scheme", "W", "D", "B", "N", "more", "items/s", "time", "memory")
_LEFT = ("scheme", "more")
_FOLDED = "more"
"""The column whose words go over several lines on a narrow terminal; figures stay whole."""


@dataclass(frozen=True, slots=True)
class View:
    """Options of the table.

    The table shows the first ``top`` configurations. With ``everything`` they are the first of all, else the first of
    the best of each name. With ``why`` a second table counts the configurations that were left out, by scheme and
    reason.
    """

    top: int
    everything: bool
    why: bool


def table(ranking: Ranking, answer: Recommendation, notes: Sequence[str], view: View) -> RenderableType:
    """All that ``chimera plan`` prints above its command lines, for a console.

    It is the recommendation (``answer``), the table of the first choices, the notes, and what was left out.
    """
    return Group(
        Text(_sentence(answer.answer), "bold"),
        *map(Text, map(_sentence, answer.reasons)),
        Text(),
        _heading(ranking),
        _choices(ranking, view),
        *map(Text, map(_sentence, notes)),
        *_left_out(ranking, view.why),
        Text(),
    )


def lines(judged: Judged, ranking: Ranking, files: Files) -> str:
    """The command lines that compile and start a configuration."""
    files = replace(files, sharded_optimizer=files.sharded_optimizer and not judged.asynchronous)
    judge, choice = ranking.judge, judged.choice
    ranks, script = choice.workers * choice.copies, f"{judged.scheme}.out/train.py"
    where = ranks, judge.cluster.per_node, script, choice.micro_batch_size, files.replica_layout
    started = torchrun(*where, choice.split, files.sharded_optimizer, judge.profile.file)
    order = order_file(choice, judged.scheme) if judged.order else ""
    return f"{compile_line(choice, files, order)}\n{started}\n"


def _heading(ranking: Ranking) -> Text:
    question, judge = ranking.question, ranking.judge
    name = judge.profile.name or "the model"
    workers, batches = counted(question.workers, "worker"), f"mini-batches of {question.mini_batch:,}"
    said = f": {workers} with {size(judge.available)}, {batches}"
    return Text.assemble((f"{name} on {judge.cluster.name}", "bold"), said)


def _choices(ranking: Ranking, view: View) -> RenderableType:
    if not ranking.choices:
        return Text()
    rows = ranking.rows(view.everything)
    shown = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in _COLUMNS:
        justify: JustifyMethod = "left" if column in _LEFT else "right"
        shown.add_column(column, justify=justify, overflow="fold", no_wrap=column != _FOLDED)
    for place, judged in enumerate(rows[: view.top], 1):
        shown.add_row(*_row(place, judged, ranking))
    return Group(shown, *_hidden(ranking, rows, view))


def _hidden(ranking: Ranking, rows: Sequence[Judged], view: View) -> Iterator[Text]:
    """Yields a line with the number of configurations that are not shown, and the options that show them."""
    shown = rows[: view.top]
    below = len(rows) - len(shown)
    hidden = len(ranking.choices) - len(rows)
    words = [f"and {below} more: --top {len(rows)} shows them"] if below else []
    words += [f"{counted(hidden, 'other configuration')} of the same schemes: --all shows them"] if hidden else []
    if words:
        yield Text(f"{'; '.join(words)}\n")


def _row(place: int, judged: Judged, ranking: Ranking) -> Iterator[str]:
    choice, first = judged.choice, ranking.choices[0]
    counts = choice.copies, choice.stages, choice.micro_batch_size, choice.micro_batches
    yield from (str(place), judged.name, *map(str, counts), _more(judged, ranking))
    yield f"{judged.throughput:.4g}" + ("*" if judged.replayed is None else "")
    yield "" if judged is first else f"+{percent(max(0.0, first.over(judged) - 1))}"
    yield size(max(judged.memory)) if judged.memory else "fits"


def _more(judged: Judged, ranking: Ranking) -> str:
    """Text of the column ``more``: parameters, equal times, recomputation, moves, sums, idle workers, found order."""
    choice, change = judged.choice, judged.choice.change
    roles, idle = ranking.roles[choice.source], choice.idle(ranking.question.workers)
    settings = roles.without_micro_batches(choice.settings)
    words = [f"as {judged.scheme}"] if judged.is_alone else []
    words += [f"{name}={value}" for name, value in settings if roles.sizes != (name,) or value != choice.stages]
    words += [EqualTimes.EQUAL_TIMES.value] if choice.lengths else []
    words += ["recompute"] if judged.recomputes else []
    words += ["--offload auto"] if choice.offload else []
    words += [change.sync.value] if change.sync else []
    words += ["no flush"] if judged.asynchronous else []
    words += [f"{idle} idle"] if idle else []
    words += [f"found order: -{percent(1 - judged.seconds / judged.order.before)}"] if judged.order else []
    return ", ".join(words)


def _sentence(said: str) -> str:
    return f"{said[0].upper()}{said[1:]}."


def _left_out(ranking: Ranking, why: bool) -> Iterator[RenderableType]:
    """Yields how many configurations were left out for each reason.

    An example for each reason is added if no configuration remains; with ``why`` there is one per scheme and reason.
    """

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
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("left out", "why", "how many", "for example")[not why :]:
        is_count = column == "how many"
        shown.add_column(column, justify="right" if is_count else "left", overflow="fold", no_wrap=is_count)
    for members in sorted(groups, key=lambda members: key(members[0])):
        nearest = min(members, key=lambda left_out: left_out.needed)
        scheme, reason, count = scheme_argument(nearest.source), nearest.reason.value, str(len(members))
        example = f"{', '.join(_attempted(nearest, ranking.roles[nearest.source]))}: {nearest.detail}"
        shown.add_row(*((scheme, reason, count, example) if why else (reason, count, f"{scheme} {example}")))
    yield from (Text(), shown)


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
    answer: Recommendation,
    notes: Sequence[str],
    warnings: Sequence[str],
    chosen: Judged | None,
    files: Files,
) -> dict[str, object]:
    """The whole ranking as plain data for JSON, with the command lines of the ``chosen`` configuration."""
    question, judge = ranking.question, ranking.judge
    reasons = Counter(left_out.reason.value for left_out in ranking.left_out)
    return {
        "model": judge.profile.name,
        "cluster": judge.cluster.name,
        "workers": question.workers,
        "mini_batch": question.mini_batch,
        "memory_available": judge.available,
        "recommendation": [answer.answer, *answer.reasons],
        "choices": [as_values(judged, question.workers) for judged in ranking.choices],
        "baseline": as_values(ranking.reference, question.workers) if ranking.reference else None,
        "notes": list(notes),
        "warnings": list(warnings),
        "left_out_by_reason": dict(sorted(reasons.items())),
        "left_out": [_reason(left_out) for left_out in ranking.left_out],
        "commands": lines(chosen, ranking, files).splitlines() if chosen else [],
    }


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
        "memory": list(judged.memory) or None,
        **({} if choice.split is None else {"split": list(choice.split)}),
        **({"slice_lengths": list(choice.known_lengths)} if choice.known_lengths else {}),
        **({} if judged.order is None else {"search": judged.order.as_json()}),
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
