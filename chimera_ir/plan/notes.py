"""What one should know before one trusts a ranking."""

from collections.abc import Iterator

from chimera_ir.plan.judge import Judged
from chimera_ir.plan.rank import Ranking


def notes(ranking: Ranking, error: float) -> tuple[str, ...]:
    """How sure the first choice is, whether plain 1F1B would do, and whether all train alike; each a sentence."""
    return (*_close(ranking, error), *_baseline(ranking), *_asynchronous(ranking), *_replays(ranking))


def _close(ranking: Ranking, error: float) -> Iterator[str]:
    choices = ranking.choices
    if not choices:
        return
    best = choices[0].throughput
    close = [each for each in choices if each.throughput >= best * (1 - error)]
    if len(choices) == 1:
        yield "it is the only one that fits"
    elif len(close) == 1:
        ahead = best / choices[1].throughput - 1
        yield f"the first is {_percent(ahead)} faster than the second; the model's error is {_percent(error)}"
    else:
        apart = 1 - close[-1].throughput / best
        yield (
            f"the first {len(close)} are within {_percent(apart)}, less than the model's error of {_percent(error)}: "
            "measure them"
        )


def _baseline(ranking: Ranking) -> Iterator[str]:
    """How the baseline does beside the best of every other scheme."""
    reference = ranking.reference
    if reference is None:
        return
    best: dict[str, Judged] = {}
    for each in ranking.choices:
        if each.scheme != reference.scheme:
            best.setdefault(each.scheme, each)
    slower = [
        f"{_percent(reference.throughput / each.throughput - 1)} faster than {name}"
        for name, each in best.items()
        if each.throughput < reference.throughput
    ]
    if slower:
        yield f"plain 1F1B with a flush ({reference.scheme}) is {_listed(slower)} here"
    faster = [
        f"{name} by {_percent(each.throughput / reference.throughput - 1)}"
        for name, each in best.items()
        if each.throughput > reference.throughput
    ]
    if faster:
        yield f"plain 1F1B with a flush ({reference.scheme}) is beaten by {_listed(faster)}"


def _asynchronous(ranking: Ranking) -> Iterator[str]:
    """Asynchronous schemes train otherwise: a faster one need not learn sooner."""
    first = next(iter(ranking.choices), None)
    if first is None or not first.asynchronous:
        return
    place, other = next(
        ((place, each) for place, each in enumerate(ranking.choices, 1) if not each.asynchronous), (0, None)
    )
    said = f"{first.scheme} has no flush: its gradients are of older weights, so that it may need more updates"
    yield f"{said}; the first with a flush is number {place}, {other.scheme}" if other else said


def _replays(ranking: Ranking) -> Iterator[str]:
    replayed = sum(each.replayed is not None for each in ranking.choices)
    if replayed < len(ranking.choices):
        yield f"{replayed} of {len(ranking.choices)} were replayed event by event; the others go by equation 1"


def _percent(share: float) -> str:
    return f"{round(100 * share, 2):.3g} %"


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
