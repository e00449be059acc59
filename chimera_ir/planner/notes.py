"""Notes below a ranking: how far it can be trusted."""

from collections.abc import Iterator, Sequence

from chimera_ir.planner.judge import Judged
from chimera_ir.planner.rank import Ranking
from chimera_ir.plural import counted
from chimera_ir.profile.warnings import WARNING, shown


def notes(ranking: Ranking, error: float, warnings: Sequence[str]) -> tuple[str, ...]:
    """One sentence each: how far ahead the first choice is, how plain 1F1B compares, what differs in training.

    ``warnings`` are those of the profile and the cluster file.
    """
    return (
        *(f"{WARNING}{warning}" for warning in shown(warnings)),
        *_close(ranking, error),
        *_alone(ranking),
        *_baseline(ranking),
        *_asynchronous(ranking),
        *_smaller(ranking),
        *_replays(ranking),
    )


def _close(ranking: Ranking, error: float) -> Iterator[str]:
    choices = ranking.choices
    if not choices:
        return
    shares = [judged.over(choices[0]) for judged in choices]
    close = [share for share in shares if share >= 1 - error]
    if len(choices) == 1:
        yield "it is the only one that fits"
    elif len(close) == 1:
        ahead = choices[0].over(choices[1]) - 1
        yield f"the first is {_percent(ahead)} faster than the second; the model's error is {_percent(error)}"
    else:
        apart = max(close) - min(close)
        within = (
            f"within {_percent(apart)}, less than the model's error of {_percent(error)}" if apart else "equally fast"
        )
        yield f"the first {len(close)} are {within}: measure them"


def _alone(ranking: Ranking) -> Iterator[str]:
    """A remark if the first is no pipeline."""
    first = next(iter(ranking.choices), None)
    if first is not None and first.choice.stages == 1:
        yield "no pipeline: the whole model fits a worker, and data parallelism over all of them is fastest"


def _baseline(ranking: Ranking) -> Iterator[str]:
    """The baseline against the best configuration of every other scheme."""
    reference = ranking.reference
    if reference is None:
        return
    best: dict[str, Judged] = {}
    for judged in ranking.choices:
        if judged.scheme != reference.scheme:
            best.setdefault(judged.scheme, judged)
    slower = [
        f"{_percent(reference.over(judged) - 1)} faster than {name}"
        for name, judged in best.items()
        if reference.over(judged) > 1
    ]
    if slower:
        yield f"plain 1F1B with a flush ({reference.scheme}) is {_listed(slower)} here"
    faster = [
        f"{name} by {_percent(judged.over(reference) - 1)}"
        for name, judged in best.items()
        if judged.over(reference) > 1
    ]
    if faster:
        yield f"plain 1F1B with a flush ({reference.scheme}) is beaten by {_listed(faster)}"


def _asynchronous(ranking: Ranking) -> Iterator[str]:
    """A warning if the first has no flush: it may need more updates than a slower one to learn as much."""
    first = next(iter(ranking.choices), None)
    if first is None or not first.asynchronous:
        return
    place, other = next(
        ((place, judged) for place, judged in enumerate(ranking.choices, 1) if not judged.asynchronous), (0, None)
    )
    said = f"{first.scheme} has no flush: its gradients are of older weights, so that it may need more updates"
    yield f"{said}; the first with a flush is number {place}, {other.scheme}" if other else said


def _smaller(ranking: Ranking) -> Iterator[str]:
    """A remark if schemes fix the micro-batches of an update, and so update more often than asked."""
    asked = ranking.question.mini_batch
    best: dict[str, Judged] = {}
    for judged in ranking.choices:
        best.setdefault(judged.scheme, judged)
    smaller = [
        f"{name} ({judged.choice.mini_batch:,})" for name, judged in best.items() if judged.choice.mini_batch < asked
    ]
    if smaller:
        whose = "that scheme" if len(smaller) == 1 else "these schemes"
        updates = f"updates have fewer than {counted(asked, 'item')} with {_listed(smaller)}"
        yield f"{updates}: no parameter of {whose} is the number of micro-batches"


def _replays(ranking: Ranking) -> Iterator[str]:
    replayed = sum(judged.replayed is not None for judged in ranking.choices)
    if replayed < len(ranking.choices):
        yield f"{replayed} of {len(ranking.choices)} were replayed event by event; the others go by equation 1"


def _percent(share: float) -> str:
    return f"{round(100 * share, 2):.3g} %"


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
