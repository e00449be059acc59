"""Comparison of the results of the ranks with those of one process, stage by stage."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.check.reference import Gradients, History, Training, differences, size
from chimera_runtime.errors import FAILED
from chimera_runtime.errors.tools import steps_are_not_updates
from chimera_runtime.program.job import Job, Place
from chimera_runtime.program.rank_facts import Group, group_name, group_text
from chimera_runtime.ranks.agreement import ControlGroup, Enquiry
from chimera_runtime.values.losses import Tally
from chimera_runtime.values.nested import digest

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
    """Largest error that rounding explains in a sum of gradients of ``summands`` micro-batches, relative to the
    largest.

    Rounding errors of both signs add up like a random walk; the largest of many such sums is off by a few times as much
    (Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019).
    """
    return min(max(TOLERANCES[dtype], 4 * math.sqrt(summands) * torch.finfo(dtype).eps), LARGEST_TOLERANCE)


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype with the largest tolerance."""
    return max({*dtypes} & TOLERANCES.keys(), key=TOLERANCES.__getitem__, default=torch.float64)


def bound_of(dtypes: Iterable[torch.dtype], autocast: torch.dtype | None, summands: int) -> float:
    """The `tolerance` of parameters of some dtypes, under ``autocast`` if that is given."""
    return tolerance(coarsest({*dtypes, *([] if autocast is None else [autocast])}), summands)


@dataclass(frozen=True)
class RankResult:
    """Results of a rank: for each weight group the gradients of its steps, and its weights after the last step.

    ``losses`` has for each update the losses that this rank has computed, ``outputs`` a `sample` of each tensor that
    its stages have handed on in the first update, by stage and micro-batch.
    """

    gradients: Mapping[Group, Sequence[Gradients]]
    weights: Mapping[Group, Sequence[torch.Tensor]]
    losses: Sequence[Tally]
    outputs: Mapping[tuple[int, int], Sequence[torch.Tensor]] = field(default_factory=dict)

    def part(self, number: int, group: Sequence[int]) -> Gradients:
        """Result ``number`` of a weight group: the gradients of that update or, after these, the final weights."""
        return (*self.gradients[*group,], self.weights[*group,])[number]


_SAMPLE = 256


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Copies up to 256 numbers of a tensor, evenly spread over it, to the host's memory."""
    numbers = tensor.detach().reshape(-1)
    return numbers[:: -(-max(1, len(numbers)) // _SAMPLE)].to("cpu", copy=True)


@dataclass(frozen=True)
class ResultsOfRanks:
    """The results of all ranks in short form.

    ``digests`` has for each rank, by the text of a weight group, the number of its steps and a digest of its gradients
    and weights. ``tallies`` has the losses of each update over all ranks.
    """

    place: Place
    digests: Sequence[Mapping[str, tuple[int, str]]]
    tallies: Sequence[Tally]

    @classmethod
    def gather(
        cls, control_group: ControlGroup, job: Job, result: RankResult, names: Sequence[str], key: str
    ) -> "ResultsOfRanks":
        """Gathers the results of all ranks, which all call it. ``names`` are those of the auxiliary losses, ``key`` is
        a prefix of keys in the store.
        """
        digests = {
            group_text(group): (len(gradients), digest(t for part in (*gradients, result.weights[group]) for t in part))
            for group, gradients in result.gradients.items()
        }
        of_ranks = control_group.collect(f"{key}/replicas", digests, "for the digests of its replicas")
        summed = torch.tensor([tally.numbers(names) for tally in result.losses], dtype=torch.float64)
        control_group.reduce(summed, "for the sum of the losses")
        return cls(control_group.place, of_ranks, [Tally.of(numbers, names) for numbers in summed.tolist()])

    def unequal(self, job: Job) -> Iterator[str]:
        """Yields a line for each weight group whose replicas differ; errors as of `gather`."""
        for group in job.groups:
            name = group_name(group)
            ranks_by_digest: dict[str, list[int]] = {}
            for rank in self.place.ranks_of(job.members(group)):
                steps, bits = self.digests[rank][group_text(group)]
                if steps != len(self.tallies):
                    raise steps_are_not_updates(group=name, rank=rank, steps=steps, updates=len(self.tallies))
                ranks_by_digest.setdefault(bits, []).append(rank)
            if len(ranks_by_digest) > 1:
                groups = " | ".join(", ".join(map(str, ranks)) for ranks in ranks_by_digest.values())
                yield f"replicas of {name}: NOT bitwise equal; ranks that agree: {groups}"


@dataclass(frozen=True)
class Deviation:
    """Largest error of a weight group, relative to its largest gradient or step: of ``what``, most in ``parameter``."""

    group: Group
    what: str
    error: float
    parameter: str

    def __str__(self) -> str:
        parameter = self.parameter.removeprefix(".")
        return f"{group_name(self.group)}: {self.what} differ by {self.error:.2e}, most in {parameter}"


@dataclass(frozen=True)
class Verdict:
    """Errors of the ranks compared with one process, and tolerances.

    ``unequal`` has lines on replicas that differ; ``differing`` and ``told`` on state with which the ranks begin
    otherwise, by mistake or since it was changed. ``first`` names the first tensor that differs, if any.
    """

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
    differing: Sequence[str] = ()
    told: Sequence[str] = ()
    first: str = ""

    @property
    def passed(self) -> bool:
        """Whether all errors are within the tolerances, all replicas equal, and the ranks begin as one process does."""
        agrees = not self.wrong and self.loss_error <= self.gradient_tolerance
        return agrees and not self.unequal and not self.differing

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
            *filter(None, [self.first]),
            *self.differing,
            *self.told,
            *([] if all(map(math.isfinite, self.reference_losses)) else [_DIVERGED]),
        ]
        return "\n  ".join(lines)


_DIVERGED = "one process comes to no finite loss either: there is nothing to compare with; see to the model first"


def _worst(deviations: Sequence[Deviation]) -> float:
    return max((deviation.error for deviation in deviations), default=0.0)


def _short(bound: float) -> str:
    return f"{bound:.1e}".replace(".0e", "e")


def compare(
    enquiry: Enquiry,
    job: Job,
    results: ResultsOfRanks,
    begin: Callable[[], Training],
    outputs: Mapping[tuple[int, int, int], Sequence[torch.Tensor]],
) -> Verdict:
    """Compares the results of all ranks with training in one process; rank 0 alone calls it.

    The other ranks answer ``enquiry`` meanwhile: ``part`` and ``outputs`` of their `RankResult`. ``begin`` starts
    the training in one process. ``outputs`` has then samples of what its stages have handed on in the first
    update, by stage, micro-batch and copy.

    Raises `CheckFailed` if a stage has made more or fewer steps than there are updates.
    """
    unequal = list(results.unequal(job))
    updates, place = len(results.tallies), results.place
    training, gradients, weights = _train_in_one_process(enquiry, job, place, updates, begin)
    dtype = coarsest(training.dtypes)
    adaptive = any(history.is_adaptive for history in training.histories.values())
    losses = [tally.mean for tally in results.tallies]
    errors = [abs(loss - wanted) for loss, wanted in zip(losses, training.losses, strict=True)]
    auxiliary = [
        share_of(abs(tally.auxiliary_means.get(name, math.nan) - wanted), scale)
        for tally, of_update in zip(results.tallies, training.auxiliary, strict=True)
        for name, (wanted, scale) in of_update.items()
    ]
    shares = [*map(share_of, errors, training.loss_sizes)]
    verdict = Verdict(
        updates=updates,
        dtype=str(dtype).removeprefix("torch."),
        gradients=gradients,
        gradient_tolerance=tolerance(dtype, job.passes * place.copies),
        weights=weights,
        weight_tolerance=(ADAPTIVE_TOLERANCES if adaptive else TOLERANCES)[dtype],
        losses=losses,
        reference_losses=training.losses,
        loss_error=max([*shares, *auxiliary]),
        unequal=unequal,
    )
    if verdict.passed:
        return verdict
    first = _first_output(enquiry, place, outputs, verdict.gradient_tolerance) or _first_of(verdict, shares[0])
    return replace(verdict, first=first)


def _train_in_one_process(
    enquiry: Enquiry, job: Job, place: Place, updates: int, begin: Callable[[], Training]
) -> tuple[Training, list[Deviation], list[Deviation]]:
    """Returns the training in one process, the errors of the ranks' gradients, and the errors of their weights."""
    gradients: list[Deviation] = []
    weights: list[Deviation] = []
    alone = UserCode("training in one process, to compare with", FAILED)

    def received(group: Group, part: int) -> Gradients:
        of_rank: Gradients = enquiry.ask(place.ranks_of(job.members(group))[0], "part", part, group)
        return of_rank

    training = begin()
    for update in range(updates):
        with alone:
            wanted = training.gradients()
        of_ranks = {group: received(group, update) for group in wanted}
        what = f"gradients of update {update + 1}"
        for group, theirs in wanted.items():
            errors = differences(of_ranks[group], theirs)
            gradients += _deviation(training.histories[group], group, what, errors, size(theirs))
        with alone:
            training.step(of_ranks)
    for group, history in training.histories.items():
        beyond = differences(received(group, updates), history.newest, roundings=updates)
        weights += _deviation(history, group, f"weights after {updates} updates", beyond, history.largest_step)
    return training, gradients, weights


def _first_output(
    enquiry: Enquiry,
    place: Place,
    outputs: Mapping[tuple[int, int, int], Sequence[torch.Tensor]],
    bound: float,
) -> str:
    of_ranks = {
        (stage, micro, copy): tensors
        for copy in range(place.copies)
        for worker in range(place.workers)
        for (stage, micro), tensors in enquiry.ask(place.rank_of(copy, worker), "outputs").items()
    }
    for stage, micro, copy in sorted(of_ranks):
        for mine, theirs in zip(of_ranks[stage, micro, copy], outputs[stage, micro, copy], strict=False):
            error = math.inf
            if mine.shape == theirs.shape:
                error = share_of(next(differences([mine], [theirs])), size([theirs]))
            if error > bound:
                where = f"micro-batch {micro}{f' of copy {copy}' if place.copies > 1 else ''} of update 1"
                return f"{_FIRST} what stage {stage} hands on for {where}, by {error:.2e} of its largest number"
    return ""


def _first_of(verdict: Verdict, loss_error: float) -> str:
    """Words for the first tensor that differs, if all that stages hand on agrees; backwards begin with the last."""
    if loss_error > verdict.gradient_tolerance:
        return f"{_FIRST} the loss, in update 1, as all that stages hand on agrees"
    beyond = [gradient for gradient in verdict.gradients if gradient.error > verdict.gradient_tolerance]
    if not beyond:
        return ""
    first = max((g for g in beyond if g.what == beyond[0].what), key=lambda gradient: gradient.group)
    return f"{_FIRST} the gradient of {first.parameter} of {group_name(first.group)}, among the {first.what}"


_FIRST = "the first tensor that differs:"


def share_of(error: float, scale: float) -> float:
    """Returns ``error`` divided by ``scale``: infinity if that is no number, and 0 if there is no error."""
    if error == 0:
        return 0.0
    relative = error / scale if scale else math.inf
    return relative if relative == relative else math.inf


def _deviation(history: History, group: Group, what: str, errors: Iterable[float], scale: float) -> Iterator[Deviation]:
    """Yields the largest error of a weight group, relative to ``scale``; nothing if the group has no parameters."""
    shares = [share_of(error, scale) for error in errors]
    if shares:
        worst = max(range(len(shares)), key=shares.__getitem__)
        yield Deviation(group, what, shares[worst], history.names[worst])
