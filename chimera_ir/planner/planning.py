"""Ranks schemes for a model and a cluster, as ``chimera plan`` does, for calls from Python."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from operator import sub
from os import PathLike
from typing import Literal

from chimera_ir import library as schemes_of_library
from chimera_ir.compilation import Compilation
from chimera_ir.cost.durations import positive
from chimera_ir.diagnostics.model import closest
from chimera_ir.elaborate.elaborate import parameter_names
from chimera_ir.errors import CompileError, OptionError
from chimera_ir.escapes import visible
from chimera_ir.ir.levels import Strategy
from chimera_ir.options import WHOLE, Cost, Options, Spell, integer, read_inputs
from chimera_ir.orders.cp_sat import require_solver
from chimera_ir.orders.search import Ended, SearchBudget, improvement
from chimera_ir.planner.judge import Judge, Judged
from chimera_ir.planner.listing import as_values, options_of, percent, scheme_argument
from chimera_ir.planner.rank import Progress, Ranking, by_throughput, rank
from chimera_ir.planner.space import MAX_OPERATIONS, Configuration, Question, Recomputation
from chimera_ir.plural import counted
from chimera_ir.predict.memory_need import bounded
from chimera_ir.predict.setting import Measured
from chimera_ir.profile.choose import Inputs
from chimera_ir.request import Request
from chimera_ir.source import Source
from chimera_ir.syntax.ast import Scheme

SYNCS = [strategy.value for strategy in Strategy]
"""The strategies of gradient sums that a plan may consider."""

_RECOMPUTATION = {None: Recomputation.WHERE_NEEDED, True: Recomputation.ALWAYS, False: Recomputation.NEVER}


@dataclass(frozen=True, slots=True, repr=False)
class RankedSchemes:
    """Configurations that fit a cluster, best first; `compilation` compiles one as it was predicted.

    If updates have different numbers of items, that is the program for the largest one.
    """

    ranking: Ranking
    warnings: tuple[str, ...]

    @property
    def choices(self) -> tuple[Judged, ...]:
        """The configurations that fit, best first, with their predictions."""
        return self.ranking.choices

    @property
    def rows(self) -> list[dict[str, object]]:
        """The configurations as plain values, for a table of pandas or polars: `choices` of ``chimera plan --json``."""
        return [as_values(judged, self.ranking.judge.question.workers) for judged in self.choices]

    def compilation(self, place: int = 0) -> Compilation:
        """The compilation of entry ``place`` of `choices`, in the order that a search found for it, if one did."""
        judged = self.choices[place]
        options = options_of(judged, self.ranking.judge.options)
        if judged.order:
            return Compilation.of(judged.order.schedule, options)
        return Compilation(options.request(judged.choice.source, dict(judged.choice.settings)))

    def __repr__(self) -> str:
        return f"<RankedSchemes: {counted(len(self.choices), 'configuration')}>"


def rank_schemes(
    *schemes: str | PathLike[str] | Source,
    profile: str | PathLike[str],
    cluster: str | PathLike[str],
    mini_batch: int | Mapping[int, Cost],
    workers: int | None = None,
    settings: Mapping[str, int] | None = None,
    asynchronous: bool | None = None,
    greedy: bool = False,
    recompute: bool | None = None,
    syncs: Sequence[str] = (Strategy.EAGER_OPT.value,),
    tied: Sequence[Sequence[int | str]] = (),
    layout: Literal["pipeline", "replica"] = "pipeline",
    shard_optimizer: bool = False,
    search: float | None = None,
    seed: int = 0,
    max_operations: int = MAX_OPERATIONS,
    library: Sequence[str | PathLike[str]] = (),
    spell: Spell = str,
    warn: Callable[[str], None] = lambda _: None,
    tell: Progress = lambda _: None,
) -> RankedSchemes:
    """Ranks every way to train a model on a cluster that fits its memory, as ``chimera plan`` does.

    Parameters
    ----------
    schemes
        Each as in `compile`; without any, the library.
    profile, cluster
        Paths of the files that say what the model's stages cost and what the model runs on.
    mini_batch
        Items of an update; or for each of several numbers of items the share of updates that has it, of any sum:
        ``{64: 1, 96: 3}``. Times are then means, and items per second those of all updates together.
    workers
        How many to use; by default all of the cluster.
    settings
        Fixed parameters of the schemes.
    asynchronous
        Whether to consider schemes without a flush; by default those that are named.
    greedy
        Whether only the largest B that fits counts, for each W and D.
    recompute
        Whether activations are always or never recomputed; by default where they do not fit otherwise.
    syncs
        Strategies for gradient sums to consider.
    tied, layout, shard_optimizer, max_operations, library
        As in `Options`.
    search, seed
        Seconds that a search for a better order may take for each of the first rows, and the seed of its chance.
    spell
        Returns the name of an argument as messages show it.
    warn
        Called with a sentence for each scheme that is left out.
    tell
        Called with a few words before each step.

    Raises `CompileError` if an argument has a value that it cannot have, or a text cannot be read.
    """
    # What compilations of the result share; Options refuses what they cannot have.
    shared = Options(
        profile=profile,
        cluster=cluster,
        tied=tied,
        layout=None if layout == "pipeline" else layout,
        shard_optimizer=shard_optimizer,
        max_operations=max_operations,
        search=search,
        seed=seed,
        library=library,
    )
    largest, *others = _mini_batches(mini_batch, spell)
    if unknown := [sync for sync in syncs if sync not in SYNCS]:
        raise OptionError(f"{spell('syncs')}: {unknown[0]!r:.60}: it is one of {', '.join(SYNCS)}")
    if recompute not in (None, True, False):
        raise OptionError(f"{spell('recompute')} is {recompute!r:.60}: it is True, False or None")
    budget = shared.budget(spell)
    if budget is not None and others:
        raise OptionError(f"{spell('search')}: it finds an order for one number of micro-batches; give one mini-batch")
    if budget is not None:
        require_solver("a search")
    # Files and schemes first: their mistakes end the call before any work.
    fixed = {name: integer(name, value) for name, value in (settings or {}).items()}
    named = tuple(schemes_of_library.named(scheme, library) for scheme in schemes)
    if other := next((source for source in named if not source.is_scheme), None):
        raise OptionError(f"{spell('scheme')} {other.name}: it has no parameters to choose; name its scheme")
    sources = named or _library(library, spell, warn)
    inputs = read_inputs(profile, cluster, spell)
    model = inputs.model()
    number = _workers(inputs, workers, spell)
    parsed = _parsed(sources, fixed, spell)
    # The question says which configurations there are, the judge what is known of model and cluster.
    question = Question(
        workers=number,
        mini_batch=largest[0],
        others=tuple(others),
        settings=fixed,
        recomputation=_RECOMPUTATION[recompute],
        syncs=tuple(dict.fromkeys(map(Strategy, syncs))),
        asynchronous=bool(schemes) if asynchronous is None else asynchronous,
        max_operations=max_operations,
        sliced=bool(schemes),
        hosted=inputs.cluster.host is not None,
    )
    trusted = frozenset(map(schemes_of_library.source, schemes_of_library.names()))
    judge = Judge(parsed, model, inputs.cluster, question, replace(shared, search=None, seed=0), trusted)
    ranking = rank(sources, judge, greedy, tell)
    if budget is not None:
        ranking = searched(ranking, budget, tell)
    return RankedSchemes(ranking, tuple(inputs.warnings))


def _mini_batches(mini_batch: int | Mapping[int, Cost], spell: Spell) -> list[tuple[int, Fraction]]:
    """The numbers of items of an update with their shares of all updates, which add up to 1; the largest first."""
    weights = dict[int, Fraction]()
    for items, share in (mini_batch if isinstance(mini_batch, Mapping) else {mini_batch: 1}).items():
        WHOLE.require(spell("mini_batch"), items)
        try:
            weights[items] = positive("a share", str(share), "leave out a number that does not occur")
        except ValueError as error:
            raise OptionError(f"{spell('mini_batch')} {items}:{share}: {error}") from error
    if not weights:
        raise OptionError(f"{spell('mini_batch')}: there is no number of items")
    total = sum(weights.values())
    return [(items, weights[items] / total) for items in sorted(weights, reverse=True)]


def _library(
    directories: Sequence[str | PathLike[str]], spell: Spell, warn: Callable[[str], None]
) -> tuple[Source, ...]:
    """Every scheme of the library; a file of a further directory that is not a scheme is skipped with a warning."""
    further = schemes_of_library.further(directories, spell("library"))
    shipped, sources = schemes_of_library.names(), []
    for name in schemes_of_library.names(further):
        try:
            source = schemes_of_library.source(name, further)
            if name not in shipped:
                _ = Compilation(Request(source)).scheme
        except CompileError as error:
            reason = visible(str(error).splitlines()[0])
            warn(f"{name} is left out of the plan: {reason}")
        else:
            sources.append(source)
    return tuple(sources)


def _parsed(sources: tuple[Source, ...], settings: dict[str, int], spell: Spell) -> dict[Source, Scheme]:
    parsed = {source: Compilation(Request(source)).scheme for source in sources}
    parameters = dict.fromkeys(name for scheme in parsed.values() for name in parameter_names(scheme))
    for name in settings:
        if name not in parameters:
            guess = closest(name, parameters)
            advice = f"did you mean {guess}?" if guess else f"there are {', '.join(parameters)}"
            raise OptionError(f"{spell('settings')} {name}: no scheme has such a parameter; {advice}")
    baseline, _ = schemes_of_library.baseline(1, 1)
    return parsed if baseline in parsed else {**parsed, baseline: Compilation(Request(baseline)).scheme}


def _workers(inputs: Inputs, asked: int | None, spell: Spell) -> int:
    """P: ``asked``, which must fit into one node or fill whole nodes; if it is None, all workers of the cluster."""
    cluster = inputs.cluster
    if asked is None:
        return cluster.workers
    WHOLE.require(spell("workers"), asked)
    if asked > cluster.workers:
        raise OptionError(f"{spell('workers')} {asked}: the cluster {cluster.name} has {cluster.workers}")
    if asked > cluster.per_node and asked % cluster.per_node:
        reason = f"a node has {cluster.per_node}, and torchrun starts equally many on each"
        raise OptionError(f"{spell('workers')} {asked}: {reason}")
    return asked


# Better orders of the first choices of a ranking. A search counts measured costs, messages and the memory of workers;
# an order is kept if its bytes fit and its replay, which also counts shared links and sums, is shorter.

SEARCHED = 3
"""The most configurations whose orders are searched: the first of each name."""

LEAST_GAIN = 0.005
"""The least share of the time that an order must gain: with less, the scheme's own order stays."""


def searched(ranking: Ranking, budget: SearchBudget, progress: Progress) -> Ranking:
    """The ranking with better orders for its first choices, where a search with this budget finds them.

    Not searched are schedules without a flush, those that move activations, and single workers.
    """
    judge, (baseline, _) = ranking.judge, schemes_of_library.baseline(1, 1)
    judged_of: dict[Configuration, Judged] = {}
    sentences = []
    candidates = (judged for judged in ranking.rows() if _is_searchable(judge, judged))
    for number, judged in zip(range(1, 1 + SEARCHED), candidates, strict=False):

        def tell(words: str, name: str = f"searching {judged.name} ({number} of {SEARCHED})") -> None:
            progress(f"{name}: {words}")

        best, ended = _best_order(judge, judged, budget, tell)
        judged_of[best.choice] = best
        sentences.append(_sentence(best, ended))
        if ended is Ended.INTERRUPTED:
            break
    choices = by_throughput((judged_of.get(judged.choice, judged) for judged in ranking.choices), baseline)
    reference = ranking.reference and judged_of.get(ranking.reference.choice, ranking.reference)
    return replace(ranking, choices=tuple(choices), reference=reference, searched=tuple(sentences))


def _is_searchable(judge: Judge, judged: Judged) -> bool:
    if judged.asynchronous or judged.replayed is None or judged.choice.workers == 1:
        return False
    return not judge.variant(judged.choice).header.moves


def _best_order(judge: Judge, judged: Judged, budget: SearchBudget, tell: Progress) -> tuple[Judged, Ended]:
    """The configuration in a faster order that still fits or, without one, as it is; and how the search ended.

    First each worker may fill its free bytes with activations; if the order needs too many bytes nevertheless, each may
    keep only what it keeps in the scheme's order.
    """
    setting, variant = judge.setting(judged.choice), judge.in_order_found(judged)
    measured = Measured.of(setting)
    free = list(map(sub, judge.room(variant.header), judged.memory))
    for room in dict.fromkeys((tuple(free), (0,) * len(free))):
        better = improvement(bounded(variant.schedule, setting, room), measured, {}, {}, budget, tell)
        reordered = judge.reordered(judged, better)
        if reordered is not None or better.result.ended is Ended.INTERRUPTED:
            break
    if reordered is None or reordered.over(judged) < 1 + LEAST_GAIN:
        return judged, better.result.ended
    return reordered, better.result.ended


def _sentence(judged: Judged, ended: Ended) -> str:
    name = scheme_argument(judged.choice.source)
    why = {
        Ended.CLOCK: " (the clock ended the search; another one may find another order)",
        Ended.INTERRUPTED: " (the search was interrupted)",
    }.get(ended, "")
    if judged.order is None:
        return f"no order was found that makes {name} faster by {percent(LEAST_GAIN)}{why}"
    gain = percent(1 - judged.seconds / judged.before)
    return f"the order that was found for {name} takes {gain} less time than its own{why}"
