"""The answer of a plan in words: which configuration to run, and why it and no other."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from chimera_ir.cost.numbers import seconds
from chimera_ir.planner.judge import Judged
from chimera_ir.planner.lines import scheme_argument
from chimera_ir.planner.rank import Ranking
from chimera_ir.planner.space import LeftOut, Recomputation
from chimera_ir.plural import counted
from chimera_ir.predict.show import size

_WORDS = ("computing", "recomputation", "bubbles", "optimizer steps", "messages", "gradient sums")
"""What the time of an update is spent on, in the order of `Spent`."""

_WORTH_SAYING = 0.005
"""The least share of the fastest time that is named as a reason."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to do in a sentence, and one sentence for each reason."""

    answer: str
    reasons: tuple[str, ...]


def recommendation(ranking: Ranking) -> Recommendation:
    """The first choice in words.

    The reasons say whether the model fits one worker, and for the fastest configuration of another name what makes it
    slower; both are computed from the predictions.
    """
    if not ranking.choices:
        return Recommendation("no configuration is left", tuple(_nothing_fits(ranking)))
    return Recommendation(_answer(ranking.choices[0]), tuple(_reasons(ranking)))


def _nothing_fits(ranking: Ranking) -> Iterator[str]:
    """What the workers lack, where memory is the reason."""
    least = _least(ranking.left_out)
    if least:
        yield (
            f"the fullest worker needs at least {size(least.needed)}, with {scheme_argument(least.source)} and "
            f"micro-batches of {least.micro_batch_size}, and there are {size(ranking.judge.available)}; more workers, "
            "smaller micro-batches or --shard-optimizer may help"
        )


def _least(left_out: Iterable[LeftOut]) -> LeftOut | None:
    """Of what does not fit into memory, what needs least."""
    return min((other for other in left_out if other.needed), key=lambda other: other.needed, default=None)


def _answer(first: Judged) -> str:
    choice = first.choice
    where = f" on {counted(choice.workers, 'worker')}" if choice.stages != choice.workers else ""
    model = "the whole model" if first.is_alone else f"{counted(choice.stages, 'stage')} (D){where}"
    name = f"{first.name} (as {first.scheme})" if first.is_alone else first.name
    batches = f"{counted(choice.micro_batches, 'micro-batch')} (N) of {counted(choice.micro_batch_size, 'item')} (B)"
    return f"run {name}: {counted(choice.copies, 'copy')} (W) of {model}, {batches} in each"


def _figures(ranking: Ranking) -> str:
    first, available = ranking.choices[0], size(ranking.judge.available)
    memory = f"{size(max(first.memory))} of" if first.memory else "at most"
    speed = f"{first.throughput:.4g} items/s, {seconds(first.seconds)} for an update"
    return f"predicted: {speed}; the fullest worker needs {memory} {available}"


def _reasons(ranking: Ranking) -> Iterator[str]:
    yield _figures(ranking)
    first, *others = ranking.rows()
    alone = next((judged for judged in others if judged.is_alone), None)
    runner_up = next((judged for judged in others if judged is not alone), None)
    if first.is_alone:
        yield "your model fits one worker, which needs no pipeline: plain data parallelism is fastest"
    elif alone:
        yield f"your model fits one worker, but {alone.name} {_longer(ranking, first, alone)}"
    else:
        yield from _needs_a_pipeline(ranking)
    if first.choice.change.recompute and ranking.judge.recomputation is Recomputation.WHERE_NEEDED:
        yield "it recomputes activations, because it does not fit without"
    if runner_up:
        called = f"the best pipeline, {runner_up.name}," if first.is_alone else f"the next best, {runner_up.name},"
        yield f"{called} {_longer(ranking, first, runner_up)}"


def _needs_a_pipeline(ranking: Ranking) -> Iterator[str]:
    depths = ranking.judge.profile.depths
    least = _least(left_out for left_out in ranking.left_out if left_out.workers == 1)
    if least:
        even = ", even with recomputation" if least.recompute else ""
        yield (
            f"your model does not fit one worker without a pipeline: it needs at least {size(least.needed)}{even}, and "
            f"there are {size(ranking.judge.available)}"
        )
    elif depths and 1 not in depths:
        yield "the profile has no depth of 1, so that data parallelism was not considered"


def _longer(ranking: Ranking, first: Judged, other: Judged) -> str:
    """By how much another configuration is slower than the first, and what costs and what saves this time."""
    behind = first.over(other) - 1
    if behind <= 0:
        return "is as fast"
    replays = first.replayed is not None and other.replayed is not None
    spent, by_first = (ranking.judge.spent(judged, replays) for judged in (other, first))
    unit = sum(by_first) / first.choice.mini_batch
    shares = {
        name: (seconds / other.choice.mini_batch - before / first.choice.mini_batch) / unit
        for name, seconds, before in zip(_WORDS, spent, by_first, strict=True)
    }
    ordered = sorted(shares.items(), key=lambda item: -abs(item[1]))
    more = [f"{percent(share)} on {name}" for name, share in ordered if share >= _WORTH_SAYING]
    less = [f"{percent(-share)} on {name}" for name, share in ordered if -share >= _WORTH_SAYING]
    spends = [f"{kind} {listed(parts)}" for kind, parts in (("more:", more), ("less:", less)) if parts]
    return f"takes {percent(behind)} longer" + (f" ({'; '.join(spends)})" if spends else "")


def percent(share: float) -> str:
    """A share in percent with three digits."""
    return f"{round(100 * share, 2):.3g} %"


def listed(parts: list[str]) -> str:
    """Parts in a sentence."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
