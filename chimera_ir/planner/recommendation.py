"""The answer of a plan in words: which configuration to run, and why it and no other."""

from collections.abc import Iterator
from dataclasses import dataclass

from chimera_ir.cost.number_text import seconds
from chimera_ir.planner.command_lines import scheme_argument
from chimera_ir.planner.judge import ALONE, Judged
from chimera_ir.planner.rank import Ranking
from chimera_ir.planner.space import Configuration, Recomputation
from chimera_ir.planner.unfit_needs import nearest, plain_need
from chimera_ir.plural import counted, listed
from chimera_ir.predict.prediction_table import size

_WORDS = ("computing", "recomputation", "bubbles", "optimizer steps", "messages", "gradient sums")
"""Names of the parts of an update, in the order of `TimeParts`."""

_WORTH_SAYING = 0.005
"""The least difference, as a share of the fastest time, that is named as a reason."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The advice to run the first choice, in one sentence, and the reasons, in one sentence each."""

    answer: str
    reasons: tuple[str, ...] = ()


def recommendation(ranking: Ranking) -> Recommendation:
    """The answer of a ranking: the first choice in words, with reasons.

    The reasons say whether the model fits one worker, and for the fastest configuration of another name what makes it
    slower; both are computed from the predictions.
    """
    if not ranking.choices:
        return _nothing(ranking)
    return Recommendation(_answer(ranking.choices[0]), tuple(_reasons(ranking)))


def _nothing(ranking: Ranking) -> Recommendation:
    """The answer where no configuration is left.

    It names the cause if that is known: workers lack memory, or no B of the profile divides the mini-batch.
    """
    nothing, need = "no configuration is left", nearest(ranking)
    items, profile = ranking.question.mini_batch, ranking.judge.profile
    sizes = sorted(
        {number for parts in (profile.layers, *profile.depths.values()) for part in parts for number in part.at}
    )
    if need:
        lacks = f"the nearest to fitting needs {size(need.size)} on its fullest worker ({_written(need.choice)})"
        remedy = "more workers, smaller micro-batches or --shard-optimizer may help"
        return Recommendation(f"{nothing}: {lacks}, and there are {size(ranking.judge.available)}", (remedy,))
    if sizes and all(items % number for number in sizes):
        multiples = listed(sizes, "or")
        return Recommendation(f"{nothing}: the mini-batch of {items} is no multiple of {multiples} (B in the profile)")
    return Recommendation(nothing)


def _written(choice: Configuration) -> str:
    """A configuration as text: the scheme with its parameters, B, and recomputation."""
    words = [scheme_argument(choice.source), *(f"{name}={value}" for name, value in choice.settings)]
    again = ", recompute" if choice.change.recompute else ""
    return f"{' '.join(words)}, B={choice.micro_batch_size}{again}"


def _answer(first: Judged) -> str:
    choice = first.choice
    where = f" on {counted(choice.workers, 'worker')}" if choice.stages != choice.workers else ""
    pieces = "" if choice.stages == 1 else f" in {counted(choice.stages, 'stage')} (D)"
    model = f"the whole model{pieces}" if first.is_alone else f"{counted(choice.stages, 'stage')} (D){where}"
    name = f"{first.name} (as {first.scheme})" if first.is_alone else first.name
    batches = f"{counted(choice.micro_batches, 'micro-batch')} (N) of {counted(choice.micro_batch_size, 'item')} (B)"
    return f"run {name}: {counted(choice.copies, 'copy')} (W) of {model}, {batches} in each"


def _reasons(ranking: Ranking) -> Iterator[str]:
    first, *others = ranking.rows()
    memory = f"{size(max(first.memory))} of" if first.memory else "at most"
    speed = f"{first.throughput:.4g} items/s, {seconds(first.seconds)} for an update"
    yield f"predicted: {speed}; the fullest worker needs {memory} {size(ranking.judge.available)}"
    if idle := first.choice.idle(ranking.question.workers):
        stay = f"{idle} of {counted(ranking.question.workers, 'worker')} {'stays' if idle == 1 else 'stay'} idle"
        yield f"{stay}: a copy takes {first.choice.workers}, and none that uses all is predicted to be faster"
    alone = next((judged for judged in others if judged.is_alone), None)
    runner_up = next((judged for judged in others if judged is not alone), None)
    if first.is_alone:
        yield f"your model fits one worker, which needs no pipeline: {_parallelism(first)} is fastest"
    elif alone:
        yield f"your model fits one worker, but {_parallelism(alone)} {_longer(ranking, first, alone)}"
    if not any(judged.is_plain for judged in ranking.choices):
        yield from _without_plain(ranking)
    if first.choice.change.recompute and ranking.judge.recomputation is Recomputation.WHERE_NEEDED:
        yield "it recomputes activations, because it does not fit without"
    if first.choice.offload:
        yield "it moves activations to the host, because it does not fit without"
    if runner_up:
        called = f"the best pipeline, {runner_up.name}," if first.is_alone else f"the next best, {runner_up.name},"
        yield f"{called} {_longer(ranking, first, runner_up)}"


def _parallelism(alone: Judged) -> str:
    """The name of a configuration of data parallelism, such as "data parallelism that recomputes its activations".

    Plain data parallelism runs the model as one stage and recomputes nothing; the words after the name say what
    differs.
    """
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
    """Words for how much longer an update of ``other`` takes than one of ``first``, such as "takes 3 % longer".

    Behind them stand the parts of an update, such as bubbles, on which it spends more or less.
    """
    behind = first.over(other) - 1
    if behind <= 0:
        return "is as fast"
    replays = first.replayed is not None and other.replayed is not None
    spent, by_first = (ranking.judge.time_parts(judged, replays) for judged in (other, first))
    unit = sum(by_first) / first.choice.mini_batch
    shares = {
        name: (seconds / other.choice.mini_batch - before / first.choice.mini_batch) / unit
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
