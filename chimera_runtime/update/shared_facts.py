"""The facts of an update that a rank compares with others: see `agreement`."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial

from chimera_runtime.data.feed import Feed
from chimera_runtime.optimizer.optimizer_facts import OptimizerFacts
from chimera_runtime.program.weight_groups import Group
from chimera_runtime.ranks.agreement import STEPS, TERMS, Fact, Key, short, weights_of
from chimera_runtime.ranks.readout import Numbers
from chimera_runtime.stage.replicas import Replicas, digest, is_due


class FlushFacts:
    """Gathers facts when the sum of an update's loss is launched: settings and weights as they are by then.

    Weights are read without waiting: their digests come with the next update. ``terms`` returns what the newest step
    was given, by names for messages.
    """

    def __init__(
        self, feed: Feed, optimizers: OptimizerFacts, replicas: Replicas, terms: Callable[[], Mapping[str, float]]
    ) -> None:
        self._terms = terms
        self._feed = feed
        self._optimizers = optimizers
        self._replicas = replicas
        self._weights: dict[Group, Numbers] = {}

    def __call__(self, update: int) -> dict[Key, Fact]:
        """The facts of an update that this rank knows."""
        facts = self._feed.facts(update)
        facts[TERMS] = _fact({"update": update + 1, **self._terms()})
        if self._optimizers.has_parameters:
            facts[STEPS] = _steps(self._optimizers.steps)
        facts.update(self._optimizers.take())
        for group, numbers in self._weights.items():
            facts[weights_of(group)] = digest(numbers)
        self._weights = self._replicas.begin() if is_due(update) else {}
        return facts


class StreamFacts:
    """Gathers the facts of a stream, whose stages make an update at different times: each notes them when it steps."""

    def __init__(self, feed: Feed, optimizers: OptimizerFacts, replicas: Replicas) -> None:
        self._feed = feed
        self._optimizers = optimizers
        self._replicas = replicas
        self._noted: defaultdict[int, dict[Key, Callable[[], Fact]]] = defaultdict(dict)

    def stepped(self, group: Group, update: int) -> None:
        """A weight group has made its step of an update, from 0."""
        for key, settings in self._optimizers.take([group]).items():
            self._noted[update][key] = partial(_same, settings)
        if is_due(update + 1):
            for numbers in self._replicas.begin([group]).values():
                self._noted[update][weights_of(group)] = partial(digest, numbers)

    def __call__(self, update: int) -> dict[Key, Fact]:
        """The facts of an update that all stages have made; those of earlier ones are forgotten."""
        noted = {key: read() for key, read in self._noted.pop(update, {}).items()}
        for earlier in [number for number in self._noted if number < update]:
            del self._noted[earlier]
        return self._feed.facts(update) | noted | {TERMS: _fact({"update": update + 1})}


def _steps(steps: int) -> Fact:
    return short(steps), lambda: {"steps since the last update": f"{steps}"}


def _same(fact: Fact) -> Fact:
    return fact


def _fact(terms: Mapping[str, float]) -> Fact:
    return short(hash((*terms.values(),))), lambda: {name: f"{value}" for name, value in terms.items()}
