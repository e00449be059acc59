"""What ranks must have the same: a digest of each such fact travels with the loss of an update.

A fact is known to some ranks; each of them adds 1, its digest d and d*d to three numbers of the sum. If n ranks add
something, the digests are equal exactly where n * sum(d*d) == sum(d)**2. All ranks see the same sum, so all of them
find a difference at the same update; only then they tell each other the values, by way of the store.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from zlib import crc32

from chimera_runtime.errors import PeerLost, RanksDiffer
from chimera_runtime.program.weight_groups import Group, group_name
from chimera_runtime.ranks.world import World

Text = dict[str, str]
"""A value in words, by the names of its parts."""

Fact = tuple[int, Callable[[], Text]]
"""The digest of a value, and the value in words."""

Key = tuple[str, int | Group, int]
"""A fact: its kind; the copy or the weight group that it is about, if it is about one; of data, which part."""

Facts = Mapping[Key, Fact]

TERMS: Key = ("terms", 0, 0)
STEPS: Key = ("steps", 0, 0)
POSITION: Key = ("position", 0, 0)
PARTS = ("inputs", "targets", "keyword arguments")

_BITS = 20
_PATIENCE = 5.0
"""Seconds that a rank waits for the values of others, which may be stuck in the next update."""

_TITLES = {
    "terms": "ranks differ in what they give step",
    "steps": "ranks differ in the steps of their optimizers",
    "position": "ranks are given different mini-batches of their loaders",
    "data": "ranks of copy {of} are given different {part}",
    "settings": "optimizers of different ranks step {of} in different ways",
    "weights": "the replicas of {of} have drifted apart",
}
_ADVICE = {
    "terms": "let every rank make the same updates with the same arguments",
    "steps": "call the optimizer's step() on every rank after the same updates, with a GradScaler after "
    "pipe.unscale_(scaler, optimizer); to leave a stage as it is, set its learning rate to 0",
    "position": "make the loaders alike, and let every rank take each of their mini-batches",
    "data": "every rank of a copy gives the same mini-batch, drawn with the same seeds, or None for what it does not "
    "use; pipe.loader does that",
    "settings": "give what several ranks hold the same optimizer with the same settings on all of them, and step "
    "schedulers on every rank",
    "weights": "go on from the last checkpoint, and change weights, by hand or by an optimizer, on all ranks that hold "
    "them alike; a rank that computes otherwise may have faulty hardware",
}
_SCALE_ADVICE = "call pipe.unscale_(scaler, optimizer) on every rank before scaler.step(optimizer)"
SCALE = "scale of the GradScaler"


def digest_of(text: str) -> int:
    """A digest of a text, the same in every process."""
    return short(crc32(text.encode()))


def short(number: int) -> int:
    """A digest that is short enough for sums to be exact."""
    return number & ((1 << _BITS) - 1)


def settings_of(group: Group) -> Key:
    """The fact how optimizers step a weight group."""
    return ("settings", group, 0)


def weights_of(group: Group) -> Key:
    """The fact which weights a weight group has."""
    return ("weights", group, 0)


class Comparison:
    """The facts that the ranks of a world compare; all ranks list the same.

    Attributes
    ----------
    shared
        The weight groups that several ranks hold.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.shared = tuple(group for group in world.job.groups if len(world.ranks_of(*group)) > 1)
        keys = [TERMS, STEPS, POSITION]
        keys += [("data", copy, part) for copy in range(world.place.copies) for part in range(len(PARTS))]
        keys += [of(group) for of in (settings_of, weights_of) for group in self.shared]
        holders, workers = world.job.holders, world.place.workers
        self._users = len(holders[0]), len(holders[-1]), workers  # of each part of the data, in a copy
        self._places = {key: 3 * number for number, key in enumerate(keys)}
        self._zeros = [0.0] * (3 * len(keys)) if len(world.members) > 1 else []
        self._comparisons = 0

    @property
    def size(self) -> int:
        """How many numbers `numbers` returns: none on a single rank, which has nobody to differ from."""
        return len(self._zeros)

    def numbers(self, facts: Facts) -> list[float]:
        """What this rank adds to the sum."""
        numbers = self._zeros.copy()
        if numbers:
            for key, (digest, _) in facts.items():
                place = self._places[key]
                numbers[place : place + 3] = (1.0, digest, digest * digest)
        return numbers

    def number(self) -> int:
        """The number of the next comparison, the same on all ranks."""
        self._comparisons += 1
        return self._comparisons

    def differing(self, sums: Sequence[float]) -> list[Key]:
        """The facts in which ranks differ, by the sums over all ranks; harmless differences are left out."""
        remaining = iter(sums)
        if all(n * squares == total * total for n, total, squares in zip(remaining, remaining, remaining, strict=True)):
            return []
        keys = [key for key, i in self._places.items() if sums[i] * sums[i + 2] != sums[i + 1] * sums[i + 1]]
        parts = {copy: {part for kind, of, part in keys if (kind, of) == ("data", copy)} for _, copy, _ in keys}
        return [key for key in keys if key[0] != "data" or self._is_harmful(parts[key[1]])]

    def _is_harmful(self, parts: Set[int]) -> bool:
        """Whether it matters that ranks of a copy differ in these parts of the data.

        It does for a part that several of them use. Of inputs that only one of them uses each rank may draw a variant
        of its own, and of targets; if both differ, inputs of one mini-batch meet the targets of another.
        """
        return len(parts) > 1 or any(self._users[part] > 1 for part in parts)

    def error(self, number: int, where: str, keys: Sequence[Key], facts: Facts) -> RanksDiffer:
        """Tells the other ranks the values of this one and describes all that are known in a few seconds.

        ``number`` is that of the comparison, ``where`` what begins the message.
        """
        place = {str(self._places[key]): text() for key, (_, text) in facts.items() if key in keys}
        values = self._exchanged(number, place, {rank for key in keys for rank in self._ranks(key)})
        complaints = [self._complaint(key, values) for key in keys]
        advice = dict.fromkeys(advice for _, advice in complaints)
        return RanksDiffer(f"{where}: {'; '.join(what for what, _ in complaints)}: {'; '.join(advice)}")

    def _exchanged(self, number: int, mine: Mapping[str, Text], ranks: Iterable[int]) -> dict[int, dict[str, Text]]:
        """What each rank says, by rank; those that do not answer are left out."""
        world = self._world
        deadline = time.monotonic() + min(_PATIENCE, world.timeout)
        said: dict[int, dict[str, Text]] = {world.place.rank: dict(mine)}
        with suppress(RuntimeError):  # the store is gone
            world.store.set(f"differ/{number}/{world.place.rank}", json.dumps(mine))
            for rank in sorted({*ranks} - {world.place.rank}):
                with suppress(PeerLost):
                    left = max(0.0, deadline - time.monotonic())
                    said[rank] = json.loads(world.learn(f"differ/{number}/{rank}", rank, "for a value", left))
        return dict(sorted(said.items()))

    def _ranks(self, key: Key) -> Sequence[int]:
        """The ranks that may know a fact."""
        kind, of, _ = key
        place = self._world.place
        if isinstance(of, tuple):
            return self._world.ranks_of(*of)
        return [place.rank_of(of, worker) for worker in range(place.workers)] if kind == "data" else place.ranks

    def _complaint(self, key: Key, values: Mapping[int, Mapping[str, Text]]) -> tuple[str, str]:
        """What differs and where, and what to do."""
        kind, of, part = key
        known = {rank: said[str(self._places[key])] for rank, said in values.items() if str(self._places[key]) in said}
        names = list(dict.fromkeys(name for text in known.values() for name in text))
        differences = [words for name in names if (words := _compared(name, known))]
        silent = [rank for rank in self._ranks(key) if rank not in values]
        if not differences:
            differences = [
                f"{name} is {text[name]} on {_in_words([rank])}" for rank, text in known.items() for name in text
            ]
        if silent:
            differences.append(f"no answer from {_in_words(silent)}")
        title = _TITLES[kind].format(of=group_name(of) if isinstance(of, tuple) else of, part=PARTS[part])
        advice = _SCALE_ADVICE if kind == "terms" and SCALE in " ".join(differences) else _ADVICE[kind]
        return f"{title} ({', '.join(differences)})", advice


def _compared(name: str, known: Mapping[int, Text]) -> str | None:
    """A part of a value with the ranks that have each of its values; None if all have one."""
    holders: dict[str, list[int]] = defaultdict(list)
    for rank, text in known.items():
        holders[text.get(name, "not there")].append(rank)
    if len(holders) == 1:
        return None
    return f"{name} is " + " and ".join(f"{value} on {_in_words(ranks)}" for value, ranks in holders.items())


def _in_words(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    *most, last = ranks
    return f"ranks {', '.join(map(str, most))} and {last}"
