"""Notes below a ranking, on how far it can be trusted."""

from collections.abc import Iterator, Sequence

from chimera_ir.planner.command_lines import scheme_argument
from chimera_ir.planner.rank import CONTENDING_OPERATIONS, Ranking, contenders, grouped
from chimera_ir.planner.recommendation import percent
from chimera_ir.planner.space import Reason
from chimera_ir.plural import counted, listed
from chimera_ir.profile.warnings import WARNING, shown


def notes(ranking: Ranking, error: float, warnings: Sequence[str]) -> tuple[str, ...]:
    """The notes below a ranking, a sentence each: warnings, how close the choices are, and what differs in training.

    They also compare the first choice with plain 1F1B. ``error`` is how far predictions may be off, as a share;
    ``warnings`` are those of the profile and the cluster file.
    """
    return (
        *(f"{WARNING}{warning}" for warning in shown(warnings)),
        *_close(ranking, error),
        *_baseline(ranking),
        *(f"for {scheme_argument(out.source)} {out.detail}" for out in ranking.left_out if out.reason is Reason.SPACE),
        *_stale(ranking),
        *_uneven(ranking),
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
    """Yields how the baseline compares with the first choice, unless the table has a row of the baseline's name."""
    reference, first = ranking.reference, next(iter(ranking.choices), None)
    if reference is None or first is None or reference.name in {judged.name for judged in ranking.rows()}:
        return
    ratio, plain = reference.over(first) - 1, f"plain 1F1B with a flush ({reference.scheme})"
    if ratio > 0:
        yield f"{plain} is {percent(ratio)} faster than {first.name} here"
    elif ratio < 0:
        yield f"{plain} is beaten by {first.name} by {percent(first.over(reference) - 1)}"


def _stale(ranking: Ranking) -> Iterator[str]:
    """Yields a warning if the first choice has no flush: it may need more updates to learn as much."""
    first = next(iter(ranking.choices), None)
    if first is None or not first.asynchronous:
        return
    remark = f"{first.scheme} has no flush: its gradients are of older weights, so that it may need more updates"
    flushed = [(place, judged) for place, judged in enumerate(ranking.choices, 1) if not judged.asynchronous]
    if flushed:
        place, other = flushed[0]
        remark += f"; the first with a flush is number {place}, {other.scheme}"
    yield remark


def _uneven(ranking: Ranking) -> Iterator[str]:
    """Yields what slices of unequal lengths ask of the model, if the first choice has such slices."""
    first = next(iter(ranking.choices), None)
    if first and first.choice.lengths:
        yield f"the slices of {first.scheme} have unequal lengths: `loss` must return a sum and a count, not a mean"


def _smaller(ranking: Ranking) -> Iterator[str]:
    """Yields a remark if updates have fewer items than asked for, because schemes fix their number of micro-batches."""
    asked = ranking.question.mini_batch
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
