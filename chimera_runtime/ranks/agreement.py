"""Agreement of ranks: finds facts that should be equal on all ranks and are not.

A fact is known to some ranks. Each of them adds three numbers to a sum over all ranks, which travels with the loss of
an update: 1, the digest d of the fact, and d*d. If n ranks have added something, their digests are equal exactly where
n * sum(d*d) == sum(d)**2. All ranks see the same sum, so all of them find a difference at the same update. Only then do
they exchange the facts' values, through the store.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from zlib import crc32

from chimera_runtime.errors import PeerLost, RanksDiffer
from chimera_runtime.errors import ranks as mistakes
from chimera_runtime.program.job import Job
from chimera_runtime.program.weight_groups import Group, group_name
from chimera_runtime.ranks.control_group import ControlGroup

Text = dict[str, str]
"""The value of a fact as text for messages: the text of each of its parts, by name."""

Fact = tuple[int, Callable[[], Text]]
"""The digest of a value, and a function that returns the value as text."""

Key = tuple[str, int | Group, int]
"""Key of a fact: its kind; the copy or weight group that it is about, else 0; for data the part of it, else 0."""

Facts = Mapping[Key, Fact]

TERMS: Key = ("terms", 0, 0)
STEPS: Key = ("steps", 0, 0)
POSITION: Key = ("position", 0, 0)
PARTS = ("inputs", "targets", "keyword arguments")

_BITS = 20
_PATIENCE = 5.0
"""Seconds that a rank waits for the values of other ranks, which may be stuck in the next update."""

_MOST = 4
"""Number of differences of a fact that a message lists."""

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
    "them alike; keep in a buffer (register_buffer) what a forward changes; a rank that computes otherwise may have "
    "faulty hardware",
}
_SCALE_ADVICE = "call pipe.unscale_(scaler, optimizer) on every rank before scaler.step(optimizer)"
SCALE = "scale of the GradScaler"


def digest_of(text: str) -> int:
    """A digest of a text, the same in every process."""
    return short(crc32(text.encode()))


def short(number: int) -> int:
    """Returns the last 20 bits of a digest: small enough for sums of squares to be exact in float64."""
    return number & ((1 << _BITS) - 1)


def settings_of(group: Group) -> Key:
    """Key of the settings with which optimizers step a weight group."""
    return ("settings", group, 0)


def weights_of(group: Group) -> Key:
    """Key of the weights of a weight group."""
    return ("weights", group, 0)


class FactComparison:
    """Finds out, by one sum over all ranks, whether they agree in facts (data, settings, weights).

    All ranks list the same keys of facts. ``shared`` are the weight groups that several ranks hold.
    """

    def __init__(self, control_group: ControlGroup, job: Job) -> None:
        self._control_group = control_group
        self._place = place = control_group.place
        self._job = job
        self.shared = tuple(group for group in job.groups if len(place.ranks_of(job.members(group))) > 1)
        # Each key has three places in the sum: the number of ranks that know the fact, the sum of their digests, and
        # the sum of the squares of these.
        keys = [TERMS, STEPS, POSITION]
        keys += [("data", copy, part) for copy in range(place.copies) for part in range(len(PARTS))]
        keys += [of(group) for of in (settings_of, weights_of) for group in self.shared]
        holders, workers = job.holders, place.workers
        self._users = len(holders[0]), len(holders[-1]), workers  # for each part of the data, in a copy
        self._places = {key: 3 * number for number, key in enumerate(keys)}
        self._zeros = [0.0] * (3 * len(keys)) if len(control_group.members) > 1 else []
        self._comparisons = 0

    def numbers(self, facts: Facts) -> list[float]:
        """Returns the numbers that this rank adds to the sum: 1, digest and its square for each fact, else zeros."""
        numbers = self._zeros.copy()
        if numbers:
            for key, (digest, _) in facts.items():
                place = self._places[key]
                numbers[place : place + 3] = (1.0, digest, digest * digest)
        return numbers

    def number(self) -> int:
        """Counts a comparison and returns its number, the same on all ranks."""
        self._comparisons += 1
        return self._comparisons

    def differing(self, sums: Sequence[float]) -> list[Key]:
        """Returns the keys of the facts that differ between the ranks that know them.

        ``sums`` are the `numbers` of all ranks, added up. A difference in the data counts only if `_is_harmful`.
        """
        remaining = iter(sums)
        if all(n * squares == total * total for n, total, squares in zip(remaining, remaining, remaining, strict=True)):
            return []
        keys = [key for key, i in self._places.items() if sums[i] * sums[i + 2] != sums[i + 1] * sums[i + 1]]
        parts = {copy: {part for kind, of, part in keys if (kind, of) == ("data", copy)} for _, copy, _ in keys}
        return [key for key in keys if key[0] != "data" or self._is_harmful(parts[key[1]])]

    def _is_harmful(self, parts: Set[int]) -> bool:
        """Whether ranks of a copy must not differ in ``parts``: inputs (0), targets (1), keyword arguments (2).

        They must not differ in a part that several ranks use. A part that only one rank uses may differ, as the others
        may draw another random variant of it. If two parts differ, the ranks have probably loaded different
        mini-batches, and inputs of one would meet targets of another.
        """
        return len(parts) > 1 or any(self._users[part] > 1 for part in parts)

    def error(self, number: int, where: str, keys: Sequence[Key], facts: Facts) -> RanksDiffer:
        """Exchanges values with the other ranks for a few seconds, and returns an error that describes them.

        ``number`` is the number of the comparison; the message begins with ``where``.
        """
        place = {str(self._places[key]): text() for key, (_, text) in facts.items() if key in keys}
        values = self._exchanged(number, place, {rank for key in keys for rank in self._ranks(key)})
        complaints = [self._complaint(key, values) for key in keys]
        advice = dict.fromkeys(advice for _, advice in complaints)
        return mistakes.facts_differ(where, [difference for difference, _ in complaints], advice)

    def _exchanged(self, number: int, mine: Mapping[str, Text], ranks: Iterable[int]) -> dict[int, dict[str, Text]]:
        """Returns the values of the ranks that answer, by rank."""
        control, me = self._control_group, self._place.rank
        deadline = time.monotonic() + min(_PATIENCE, control.timeout)
        values: dict[int, dict[str, Text]] = {me: dict(mine)}
        with suppress(RuntimeError):  # the store is gone
            control.store.set(f"differ/{number}/{me}", json.dumps(mine))
            for rank in sorted({*ranks} - {me}):
                with suppress(PeerLost):
                    left = max(0.0, deadline - time.monotonic())
                    text = control.wait_for_key(f"differ/{number}/{rank}", rank, "for a value", left)
                    values[rank] = json.loads(text)
        return dict(sorted(values.items()))

    def _ranks(self, key: Key) -> Sequence[int]:
        kind, of, _ = key
        place = self._place
        if isinstance(of, tuple):
            return place.ranks_of(self._job.members(of))
        return [place.rank_of(of, worker) for worker in range(place.workers)] if kind == "data" else place.ranks

    def _complaint(self, key: Key, values: Mapping[int, Mapping[str, Text]]) -> tuple[str, str]:
        """The text about a difference, with the value on each rank, and the advice."""
        kind, of, part = key
        index = str(self._places[key])
        texts = {rank: of_rank[index] for rank, of_rank in values.items() if index in of_rank}
        names = list(dict.fromkeys(name for text in texts.values() for name in text))
        differences = [words for name in names if (words := _compared(name, texts))]
        if len(differences) > _MOST:
            differences[_MOST:] = [f"and {len(differences) - _MOST} more"]
        silent = [rank for rank in self._ranks(key) if rank not in values]
        if not differences:
            differences = [
                f"{name} is {text[name]} on {_in_words([rank])}" for rank, text in texts.items() for name in text
            ]
        if silent:
            differences.append(f"no answer from {_in_words(silent)}")
        title = _TITLES[kind].format(of=group_name(of) if isinstance(of, tuple) else of, part=PARTS[part])
        advice = _SCALE_ADVICE if kind == "terms" and SCALE in " ".join(differences) else _ADVICE[kind]
        return f"{title} ({', '.join(differences)})", advice


def _compared(name: str, texts: Mapping[int, Text]) -> str | None:
    """Returns text that says on which ranks the part ``name`` has which value; None if it is equal on all ranks."""
    holders: dict[str, list[int]] = defaultdict(list)
    for rank, text in texts.items():
        holders[text.get(name, "not there")].append(rank)
    if len(holders) == 1:
        return None
    return f"{name} is " + " and ".join(f"{value} on {_in_words(ranks)}" for value, ranks in holders.items())


def _in_words(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    *most, last = ranks
    return f"ranks {', '.join(map(str, most))} and {last}"
