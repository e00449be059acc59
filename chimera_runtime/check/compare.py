"""Comparison of the results of the ranks with those of one process, stage by stage."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.check.reference import Gradients, History, Training, differences, size
from chimera_runtime.errors import FAILED
from chimera_runtime.errors.check import steps_are_not_updates
from chimera_runtime.program.job import Job, Place
from chimera_runtime.program.weight_groups import Group, group_name, group_text
from chimera_runtime.ranks.control_group import ControlGroup
from chimera_runtime.values.losses import Tally
from chimera_runtime.values.tensors import digest

TOLERANCES = {
    torch.float64: 1e-12,
    torch.complex128: 1e-12,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
}
"""Largest error of gradients, relative to the largest gradient of their stage: kernels round differently for several
micro-batches at once. Also the largest error of weights after `torch.optim.SGD`, relative to the largest step of the
stage."""

ADAPTIVE_TOLERANCES = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-3,
    torch.complex64: 1e-3,
    torch.float16: 1e-1,
    torch.bfloat16: 1e-1,
}
"""Largest error of weights after other optimizers, which may divide by numbers as small as a rounding error."""

LARGEST_TOLERANCE = 0.5
"""Upper bound of all tolerances; with a larger one a gradient without half of its summands would pass."""


def tolerance(dtype: torch.dtype, summands: int) -> float:
    """Largest error that rounding explains in a sum of gradients of ``summands`` micro-batches.

    It is relative to the largest gradient. Rounding errors of both signs add up like a random walk, over the sums of
    the ranks and those of one process; the largest of many such sums is off by a few times as much (Higham and Mary, "A
    New Approach to Probabilistic Rounding Error Analysis", 2019).
    """
    return min(max(TOLERANCES[dtype], 4 * math.sqrt(summands) * torch.finfo(dtype).eps), LARGEST_TOLERANCE)


@dataclass(frozen=True)
class RankResult:
    """Results of a rank: for each weight group the gradients of its steps, and its weights after the last step.

    ``losses`` has for each update the losses that this rank has computed.
    """

    gradients: Mapping[Group, Sequence[Gradients]]
    weights: Mapping[Group, Sequence[torch.Tensor]]
    losses: Sequence[Tally]


@dataclass(frozen=True)
class Deviation:
    """Largest error of a weight group, of gradients or of weights.

    ``error`` is relative to the largest gradient, or the largest step, of the group. ``what`` says which gradients or
    weights differ, of which update; ``parameter`` is the parameter with the largest error.
    """

    group: Group
    what: str
    error: float
    parameter: str

    def __str__(self) -> str:
        return f"{group_name(self.group)}: {self.what} differ by {self.error:.2e}, most in {self.parameter}"


@dataclass(frozen=True)
class Verdict:
    """Errors of the ranks compared with one process, and tolerances; ``unequal`` has lines on replicas that differ."""

    updates: int
    dtype: str
    gradients: Sequence[Deviation]
    gradient_tolerance: float
    weights: Sequence[Deviation]
    weight_tolerance: float
    losses: Sequence[float]
    reference_losses: Sequence[float]
    loss_error: float
    unequal: Sequence[str]

    @property
    def passed(self) -> bool:
        """Whether all errors are within the tolerances, and all replicas equal."""
        return not self.wrong and not self.unequal and self.loss_error <= self.gradient_tolerance

    @property
    def wrong(self) -> list[Deviation]:
        """The first error beyond the tolerance, for each weight group that has one."""
        beyond = [gradient for gradient in self.gradients if gradient.error > self.gradient_tolerance]
        beyond += [weight for weight in self.weights if weight.error > self.weight_tolerance]
        firsts: dict[Group, Deviation] = {}
        for deviation in beyond:
            firsts.setdefault(deviation.group, deviation)
        return list(firsts.values())

    def __str__(self) -> str:
        lines = [
            f"check: {'passed' if self.passed else 'FAILED'}",
            f"gradients of {self.updates} updates: max |difference| / max |gradient| of a stage = "
            f"{_worst(self.gradients):.2e}, at most {_short(self.gradient_tolerance)} in {self.dtype}",
            f"weights after {self.updates} updates: max |difference| / max |step| of a stage = "
            f"{_worst(self.weights):.2e}, at most {_short(self.weight_tolerance)}",
            f"losses: max |difference| / mean |loss| = {self.loss_error:.2e}; the last {self.losses[-1]:.9f}, "
            f"in one process {self.reference_losses[-1]:.9f}",
            *(self.unequal or ["replicas of every stage: bitwise equal"]),
            *map(str, self.wrong),
            *([] if all(map(math.isfinite, self.reference_losses)) else [_DIVERGED]),
        ]
        return "\n  ".join(lines)


_DIVERGED = "one process comes to no finite loss either: there is nothing to compare with; see to the model first"


def _worst(deviations: Sequence[Deviation]) -> float:
    return max((deviation.error for deviation in deviations), default=0.0)


def _short(bound: float) -> str:
    return f"{bound:.1e}".replace(".0e", "e")


def compare(
    control_group: ControlGroup,
    job: Job,
    result: RankResult,
    names: Sequence[str],
    updates: int,
    begin: Callable[[], Training],
    inspect: Callable[[Sequence[torch.nn.Module]], None] = lambda _modules: None,
) -> Verdict | None:
    """Compares the results of all ranks with training in one process, on rank 0; returns None on the other ranks.

    Every rank calls it, with its own ``result``. ``names`` are the names of the auxiliary losses, ``updates`` is the
    number of updates. ``begin`` starts the training in one process. ``inspect`` is called with the stages of that
    training before the first update, and may raise an error.

    Raises `CheckFailed` on rank 0, if a stage has made more or fewer steps than there are updates.
    """
    digests = {
        group_text(group): (len(gradients), digest(t for part in (*gradients, result.weights[group]) for t in part))
        for group, gradients in result.gradients.items()
    }
    digests_of_ranks = control_group.collect("check/replicas", digests, "for the digests of its replicas")
    summed = torch.tensor([tally.numbers(names) for tally in result.losses], dtype=torch.float64)
    control_group.reduce(summed, "for the sum of the losses")
    if control_group.place.rank:
        _send_parts(control_group, job, result, updates)
        return None
    unequal = list(_unequal(job, updates, control_group.place, digests_of_ranks))
    training, gradients, weights = _train_in_one_process(control_group, job, result, updates, begin, inspect)
    dtype = max(training.dtypes & TOLERANCES.keys(), key=TOLERANCES.__getitem__, default=torch.float64)
    adaptive = any(history.is_adaptive for history in training.histories)
    tallies = [Tally.of(numbers, names) for numbers in summed.tolist()]
    losses = [tally.mean for tally in tallies]
    errors = [abs(loss - wanted) for loss, wanted in zip(losses, training.losses, strict=True)]
    auxiliary = [
        share_of(abs(tally.auxiliary_means.get(name, math.nan) - wanted), scale)
        for tally, of_update in zip(tallies, training.auxiliary, strict=True)
        for name, (wanted, scale) in of_update.items()
    ]
    return Verdict(
        updates=updates,
        dtype=str(dtype).removeprefix("torch."),
        gradients=gradients,
        gradient_tolerance=tolerance(dtype, job.passes * control_group.place.copies),
        weights=weights,
        weight_tolerance=(ADAPTIVE_TOLERANCES if adaptive else TOLERANCES)[dtype],
        losses=losses,
        reference_losses=training.losses,
        loss_error=max([*map(share_of, errors, training.loss_sizes), *auxiliary]),
        unequal=unequal,
    )


def _train_in_one_process(
    control_group: ControlGroup,
    job: Job,
    result: RankResult,
    updates: int,
    begin: Callable[[], Training],
    inspect: Callable[[Sequence[torch.nn.Module]], None],
) -> tuple[Training, list[Deviation], list[Deviation]]:
    """Trains in one process, stepping with the gradients of the ranks.

    Returns the training, the errors of the ranks' gradients, and the errors of their weights. Arguments are those of
    `compare`.
    """
    gradients: list[Deviation] = []
    weights: list[Deviation] = []
    alone = UserCode("training in one process, to compare with", FAILED)
    with alone:
        training = begin()
    inspect(training.modules)
    for update in range(updates):
        with alone:
            wanted = training.gradients()
        histories = dict(zip(training.groups, training.histories, strict=True))
        received = [_received(control_group, job, result, g, update, h.newest) for g, h in histories.items()]
        what = f"gradients of update {update + 1}"
        for (group, history), mine, theirs in zip(histories.items(), received, wanted, strict=True):
            gradients += _deviation(history, group, what, differences(mine, theirs), size(theirs))
        with alone:
            training.step(received)
    for group, history in zip(training.groups, training.histories, strict=True):
        mine = _received(control_group, job, result, group, updates, history.newest)
        beyond = differences(mine, history.newest, roundings=updates)
        weights += _deviation(history, group, f"weights after {updates} updates", beyond, history.largest_step)
    return training, gradients, weights


def share_of(error: float, scale: float) -> float:
    """Returns ``error`` divided by ``scale``: infinity if that is no number, and 0 if there is no error."""
    if error == 0:
        return 0.0
    relative = error / scale if scale else math.inf
    return relative if relative == relative else math.inf


def _deviation(history: History, group: Group, what: str, errors: Iterable[float], scale: float) -> Iterator[Deviation]:
    """Yields one `Deviation`, with the largest error of a weight group; none if the group has no parameters.

    ``errors`` has the absolute error of each parameter, in the order of ``history.names``. They are divided by
    ``scale``, the largest gradient or the largest step of the group.
    """
    shares = [share_of(error, scale) for error in errors]
    if shares:
        worst = max(range(len(shares)), key=shares.__getitem__)
        yield Deviation(group, what, shares[worst], history.names[worst])


def _part(result: RankResult, group: Group, part: int) -> Gradients:
    """Result number ``part`` of a weight group: the gradients of that update or, after all these, the final weights."""
    return (*result.gradients[group], result.weights[group])[part]


def _received(
    control_group: ControlGroup, job: Job, result: RankResult, group: Group, part: int, like: Sequence[torch.Tensor]
) -> Gradients:
    """Receives on rank 0 a part of the results, see `_part`, from the first rank that holds a weight group.

    ``like`` are tensors of the same shapes; a parameter without a gradient gives None.
    """
    rank, what = control_group.place.ranks_of(job.members(group))[0], f"for what {group_name(group)} has computed"
    if rank == 0:
        return _part(result, group, part)
    key = group_text(group)
    control_group.store.set(f"check/turn/{part}/{key}", "1")
    present = json.loads(control_group.wait_for_key(f"check/present/{part}/{key}", rank, what))
    room = [torch.empty_like(t, device="cpu") if there else None for t, there in zip(like, present, strict=True)]
    for tensor in room:
        if tensor is not None:
            control_group.recv(tensor, rank, what)
    return room


def _send_parts(control_group: ControlGroup, job: Job, result: RankResult, updates: int) -> None:
    """Sends the results of each weight group that this rank is the first to hold, when rank 0 asks (`_received`)."""
    mine = [
        g
        for g in job.groups
        if g in result.weights and control_group.place.ranks_of(job.members(g))[0] == control_group.place.rank
    ]
    for part in range(updates + 1):
        for group in mine:
            key = group_text(group)
            # The reference may take any time. If rank 0 dies meanwhile, torchrun ends this rank.
            control_group.wait_for_key(f"check/turn/{part}/{key}", 0, "for the one-process reference", math.inf)
            tensors = _part(result, group, part)
            control_group.store.set(f"check/present/{part}/{key}", json.dumps([t is not None for t in tensors]))
            for tensor in tensors:
                if tensor is not None:
                    control_group.send(tensor, 0, f"for the comparison of {group_name(group)}")


def _unequal(
    job: Job, updates: int, place: Place, digests_of_ranks: Sequence[Mapping[str, tuple[int, str]]]
) -> Iterator[str]:
    for group in job.groups:
        name = group_name(group)
        ranks_by_digest: dict[str, list[int]] = {}
        for rank in place.ranks_of(job.members(group)):
            steps, bits = digests_of_ranks[rank][group_text(group)]
            if steps != updates:
                raise steps_are_not_updates(name, rank, steps, updates)
            ranks_by_digest.setdefault(bits, []).append(rank)
        if len(ranks_by_digest) > 1:
            groups = " | ".join(", ".join(map(str, ranks)) for ranks in ranks_by_digest.values())
            yield f"replicas of {name}: NOT bitwise equal; ranks that agree: {groups}"
