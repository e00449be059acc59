"""Facts of an update that must be equal on several ranks: data, settings of optimizers, steps, weights."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch

from chimera_runtime.data.feed import Feed
from chimera_runtime.optimizer.optimizer_facts import OptimizerFacts
from chimera_runtime.program.rank_facts import Group
from chimera_runtime.ranks.agreement import STEPS, TERMS, Fact, Key, fact_of, weights_of
from chimera_runtime.stage.gradient_sums import Replicas, is_due
from chimera_runtime.update.stage_optimizer import StageOptimizers
from chimera_runtime.update.updates import FlushedUpdates, Outcomes, Updates


class SharedFacts:
    """Gathers the facts of this rank for each update. They are sent together with the losses, and then compared.

    ``groups`` has the parameters of this rank by weight group; forwards write ``written``. ``steps`` has the optimizers
    that step inside a schedule without a flush; it is None if the caller steps.
    """

    def __init__(
        self,
        feed: Feed,
        outcomes: Outcomes,
        updates: Updates,
        *,
        groups: Mapping[Group, Sequence[torch.nn.Parameter]],
        names: Mapping[torch.Tensor, str],
        written: Set[torch.Tensor],
        steps: StageOptimizers | None,
    ) -> None:
        self._outcomes = outcomes
        shared = outcomes.agreement.shared
        compared: Mapping[Group, Sequence[torch.Tensor]] = groups
        stepped: Mapping[Group, Sequence[torch.Tensor]]
        if steps is None:
            stepped = {group: [p for p in parameters if p.requires_grad] for group, parameters in groups.items()}
        else:
            stepped = compared = steps.parameters
        self._optimizers = OptimizerFacts(stepped, shared, names)
        words = {p: f"{name}, which the forward writes," if p in written else name for p, name in names.items()}
        in_replicas = {group: compared[group] for group in shared if group in compared}
        self._replicas = Replicas(in_replicas, words, outcomes.read)
        if steps is None:
            assert isinstance(updates, FlushedUpdates)
            updates.accumulation.last_steps = self._optimizers.last_steps
            outcomes.facts_of = FlushFacts(feed, self._optimizers, self._replicas, lambda: updates.terms)
        else:
            stream_facts = outcomes.facts_of = StreamFacts(feed, self._optimizers, self._replicas)
            steps.watch(stream_facts.note_step)

    def compare_weights(self, update: int) -> None:
        """Raises `RanksDiffer` unless the replicas of each stage are equal, bit by bit; every rank calls it."""
        self._outcomes.settle()
        facts = {weights_of(group): fact() for group, fact in self._replicas.begin(update).items()}
        self._outcomes.compare(facts, f"after update {update}")

    def close(self) -> None:
        """Stops watching the optimizers of the process."""
        self._optimizers.close()


@dataclass
class FlushFacts:
    """Gathers the facts of an update with a flush, at the moment when the sum of its losses is launched.

    Digests of weights are read without waiting for the device, so they are sent with the facts of the next update.
    """

    feed: Feed
    optimizers: OptimizerFacts
    replicas: Replicas
    terms: Callable[[], Mapping[str, float]]
    _weights: dict[Group, Callable[[], Fact]] = field(default_factory=dict)

    def __call__(self, update: int) -> dict[Key, Fact]:
        """Returns the facts of an update on this rank."""
        facts = self.feed.facts(update)
        facts[TERMS] = fact_of({"update": update + 1, **self.terms()})
        if self.optimizers.has_parameters:
            facts[STEPS] = fact_of({"steps since the last update": self.optimizers.steps})
        facts.update(self.optimizers.take())
        facts.update({weights_of(group): fact() for group, fact in self._weights.items()})
        self._weights = self.replicas.begin(update) if is_due(update) else {}
        return facts


@dataclass
class StreamFacts:
    """Gathers what ranks must agree on in an update of a stream, in which stages step at different times."""

    feed: Feed
    optimizers: OptimizerFacts
    replicas: Replicas
    _noted: defaultdict[int, dict[Key, Callable[[], Fact]]] = field(default_factory=lambda: defaultdict(dict))

    def note_step(self, group: Group, update: int) -> None:
        """Notes settings and weights of a weight group, after its step in ``update``, which is counted from 0."""
        for key, settings in self.optimizers.take([group]).items():
            self._noted[update][key] = lambda settings=settings: settings  # type: ignore[misc]
        if is_due(update + 1):
            for fact in self.replicas.begin(update, [group]).values():
                self._noted[update][weights_of(group)] = fact

    def __call__(self, update: int) -> dict[Key, Fact]:
        """Returns the facts of an update for which all stages have stepped, and forgets the facts of earlier ones."""
        noted = {key: read() for key, read in self._noted.pop(update, {}).items()}
        for earlier in [number for number in self._noted if number < update]:
            del self._noted[earlier]
        return self.feed.facts(update) | noted | {TERMS: fact_of({"update": update + 1})}
