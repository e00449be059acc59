"""The gradients of a weight group, their sum over the ranks that hold it, and the norm of those of the whole model."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from chimera_runtime.errors import PeerLost
from chimera_runtime.errors.stage import norm_is_negative
from chimera_runtime.program.absence import Absence
from chimera_runtime.program.job import Job
from chimera_runtime.program.rank_facts import Group
from chimera_runtime.ranks.agreement import ControlGroup, Fact
from chimera_runtime.ranks.messages import Names, Numbers, Pending, Reader, Settle, Staging, unrecorded
from chimera_runtime.values.fingerprint import INTEGERS
from chimera_runtime.values.losses import Count
from chimera_runtime.values.mesh_tensors import laid_out_like, local, mesh_of, norms, reduce_over, spread_like
from chimera_runtime.values.nested import Tensors
from chimera_runtime.values.shared_memory import is_shared

# Digests of the weights of replicas, bit by bit, computed on the device of the weights.

_EVERY = 100
_PRIME = 1048573
"""The largest prime below 2**20, so that remainders fit into a fact."""


def is_due(update: int) -> bool:
    """Whether weights are compared after ``update`` updates: after 1, 2, 4, 8 .., and after every 100th."""
    return update > 0 and (update & (update - 1) == 0 or update % _EVERY == 0)


class Replicas:
    """Weights on this rank that other ranks hold as well, by weight group, and the ``names`` of parameters."""

    def __init__(
        self, parameters: Mapping[Group, Sequence[torch.Tensor]], names: Mapping[torch.Tensor, str], read: Reader
    ) -> None:
        self._parameters = {group: of_group for group, of_group in parameters.items() if of_group}
        self._names = names
        self._read = read

    def begin(self, update: int, groups: Iterable[Group] | None = None) -> dict[Group, Callable[[], Fact]]:
        """Begins to read digests of the newest weights, in an update; returns for each group a function that ends it
        with a fact to compare.
        """
        chosen = self._parameters if groups is None else [group for group in groups if group in self._parameters]
        sums = {group: _sums(self._parameters[group]) for group in chosen}
        return {group: partial(self._fact, group, self._read(update, digests)) for group, digests in sums.items()}

    def _fact(self, group: Group, numbers: Numbers) -> Fact:
        digests = [*map(int, numbers())]
        names = [f"a digest of {self._names[parameter]}" for parameter in self._parameters[group]]
        together = sum(digest * (2 * place + 1) for place, digest in enumerate(digests)) % _PRIME
        return together, lambda: {n: f"{number:x}" for n, number in zip(names, digests, strict=True)}


def bits(tensor: torch.Tensor) -> int:
    """A digest of the bits of a tensor: an integer below 2**20, computed on its device."""
    return int(*_sums([tensor]))


@torch.no_grad()
def _sums(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [_sum(local(tensor)) for tensor in tensors]


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bits as integers, which may overflow; less than 2**20."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    kind = INTEGERS[tensor.element_size()]
    return tensor.view(kind).sum(dtype=torch.int64).remainder(_PRIME)


@dataclass(eq=False)
class GradientSum:
    """The gradients of a weight group in flat buffers, and their sum over all ranks that hold any of its stages.

    ``name`` is the group's name in schedule.sir. There is a flat buffer for each dtype and device of the parameters,
    whose elements have that dtype, or ``dtype`` if it is given. The buffer ends with one number per parameter: how many
    ranks have a gradient for the parameter. If no rank has one, ``grad`` stays None. For a parameter that is spread
    over a mesh of other ranks, the buffer holds the local part, and ``grad`` is spread in the same way.

    Only ``grad`` holds the tensor that shows a part of the buffer. If the user holds one as well when the next update
    begins, the buffer moves to new memory, and what the user holds stays as it was.

    ``loss_count``, if given, is summed as well, and then the gradients are divided by the count of the whole update.
    FSDP averages gradients over the ranks of a mesh: such gradients are divided by the mean of the counts of these
    ranks, so that the result is the sum of all gradients divided by the sum of all counts. With tensor parallelism the
    ranks of a mesh have the same count. ``absence`` has the sum of all counts of an
    update in which micro-batches lack stages: also of losses that do not reach this group. ``staging``, if given,
    carries the sums through pinned memory, where the counts are read.
    """

    name: str
    parameters: Sequence[torch.nn.Parameter]
    group: dist.ProcessGroup | None
    members: Sequence[int]
    names: Names
    settle: Settle
    dtype: torch.dtype | None = None
    loss_count: Count | None = None
    staging: Staging | None = None
    absence: Absence | None = None

    def __post_init__(self) -> None:
        self._parameters = list(self.parameters)
        kinds: defaultdict[Any, list[torch.nn.Parameter]] = defaultdict(list)
        for parameter in sorted(self._parameters, key=lambda p: f"{p.dtype, p.device}"):
            kinds[parameter.dtype, parameter.device].append(parameter)
        self._kinds = [*kinds.values()]  # the parameters of each flat buffer
        self._flats = [torch.empty(0)] * len(kinds)
        self._all_counts = [torch.empty(0)] * len(kinds)
        self._views: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._views_of: dict[Any, list[torch.Tensor]] = {}  # by mesh
        self._places: dict[torch.nn.Parameter, tuple[int, int]] = {}
        self._lay_out(range(len(kinds)))
        self._absent = list(self._parameters)
        self._works: Sequence[Pending] = ()
        self._readable: list[torch.Tensor] = []

    def _lay_out(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            parameters = self._kinds[number]
            sizes = [local(p).numel() for p in parameters]
            dtype = self.dtype or parameters[0].dtype
            flat = torch.zeros(sum(sizes) + len(parameters), dtype=dtype, device=parameters[0].device)
            *pieces, counts = torch.split(flat, [*sizes, len(parameters)])
            self._flats[number], self._all_counts[number] = flat, counts.fill_(1)
            for i, (parameter, piece) in enumerate(zip(parameters, pieces, strict=True)):
                self._views[parameter] = piece.view_as(local(parameter))
                self._places[parameter] = number, i - len(parameters)
        self._views_of.clear()
        for parameter, view in self._views.items():
            self._views_of.setdefault(mesh_of(parameter), []).append(view)

    def _shown(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return spread_like(parameter, self._views[parameter].data)

    def count(self, counts: Tensors) -> None:
        """Adds the loss count of a micro-batch, if the loss has counts. Call it after the backward."""
        if self.loss_count is not None:
            self.loss_count.add(counts)

    def collect(self) -> None:
        """Moves gradients that are new in this update into the flat buffer, of which ``grad`` is a part from then on.
        Call it after each backward.
        """
        if not self._absent:
            return
        new = [p for p in self._absent if p.grad is not None]
        if not new:
            return
        views = [self._views[p] for p in new]
        with torch.no_grad():
            torch._foreach_copy_(views, [_dense(p) for p in new])
        for parameter in new:
            parameter.grad = self._shown(parameter)
        self._absent = [p for p in self._absent if p.grad is None]

    def launch(self) -> "GradientSum":
        """Posts the sum of the flat buffer over the members, if there are several; returns itself."""
        if self.group is None:
            return self
        # The sum needs a value from every rank: a parameter without a gradient gives zeros, and says so at the end.
        for parameter in self._absent:
            self._views[parameter].zero_()
            self._counted(parameter).zero_()
        summed = [*self._flats, *([] if self.loss_count is None else [self.loss_count.tensor])]
        try:
            if self.staging is None:
                posted = [unrecorded(dist.all_reduce, t, group=self.group, async_op=True) for t in summed]
                self._works = [work for work in posted if work is not None]
            else:
                staged = [self.staging.all_reduce(t, self.group) for t in summed]
                self._works, self._readable = staged, [work.content for work in staged]
        except RuntimeError as error:
            raise self._lost(error) from None
        return self

    def release(self) -> None:
        """Drops the communicator; no sum may follow."""
        self.group = None

    def _counted(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        flat, place = self._places[parameter]
        return self._flats[flat][place]

    def _with_gradient_elsewhere(self) -> list[torch.nn.Parameter]:
        """The parameters without a gradient here for which another rank had one. Call it after the sum."""
        if self.group is None:
            return []
        flats = self._readable or self._flats
        places = {parameter: self._places[parameter] for parameter in self._absent}
        # A read waits for the device: there is one of each buffer, however many parameters it has.
        numbers = {number for number, _ in places.values()}
        counts = {number: flats[number][-len(self._kinds[number]) :].tolist() for number in numbers}
        return [parameter for parameter, (number, place) in places.items() if counts[number][place]]

    def rehearse(self) -> None:
        """Makes all later sums add zeros, in the same size, and leave ``grad`` as it is: for a rehearsal."""
        for flat in self._flats:
            flat.zero_()
        self._parameters, self._absent, self._kinds, self._all_counts = [], [], [], []

    def _lost(self, error: Exception) -> PeerLost:
        others = [r for r in self.members if r != self.names.rank]
        return self.names.lost(f"all_reduce {self.name}", others, error)

    def wait(self) -> None:
        """Returns when ``grad`` of every parameter is the sum over all members, or None if no member had one. Raises
        `BadModel` if the count of an update is negative, `PeerLost` if the sum times out or a member has ended.
        """
        self._settle_all()
        for parameter in self._with_gradient_elsewhere():
            parameter.grad = self._shown(parameter)

    def _settle_all(self) -> None:
        try:
            for work in self._works:
                self.settle(work, self._lost)
        except RuntimeError as error:
            raise self._lost(error) from None
        self._works = ()
        # Now the buffers have the sums. If there are counts, they are divided by the count, which differs by mesh.
        if self.loss_count is not None and self._views:
            summed = self._readable[-1] if self._readable else self.loss_count.tensor
            if self.absence is not None and self.absence.is_felt:
                summed = torch.full_like(summed, self.absence.count)
            for mesh, views in self._views_of.items():
                count = summed if mesh is None else self._averaged(summed, mesh)
                torch._foreach_mul_(views, self.loss_count.correction(float(count)))

    def _averaged(self, count: torch.Tensor, mesh: Any) -> torch.Tensor:
        def lost(error: Exception) -> PeerLost:
            others = [rank for rank in mesh.mesh.flatten().tolist() if rank != dist.get_rank()]
            return self.names.lost(f"the count of {self.name} on the other ranks of its mesh", others, error)

        mean = count.clone()
        try:
            reduce_over(mesh, mean, lambda work: self.settle(work, lost))
        except RuntimeError as error:
            raise lost(error) from None
        return mean

    @property
    def disturbed(self) -> torch.nn.Parameter | None:
        """A parameter whose ``grad`` the user replaced or cleared after a backward of this update, or None."""
        absent = {*self._absent}
        present = (p for p in self._parameters if p not in absent)
        return next((p for p in present if p.grad is None or p.grad.data_ptr() != self._views[p].data_ptr()), None)

    def clear(self) -> None:
        """Begins the next update: no parameter has a gradient."""
        for parameter in self._parameters:
            parameter.grad = None
        self._absent = list(self._parameters)
        # A buffer has its own tensor, a view for each parameter, and the counts: a further tensor is the user's.
        sizes = enumerate(map(len, self._kinds))
        if held := [number for number, size in sizes if is_shared(self._flats[number], size + 2)]:
            self._lay_out(held)
        for counts in self._all_counts:
            counts.fill_(1)
        if self.loss_count is not None:
            self.loss_count.clear()


class WideGradientSum(GradientSum):
    """Gradients that are summed in a wider dtype than their parameters have, over micro-batches and over ranks.

    After `wait` a parameter has the sum as ``main_grad``, and the sum rounded to the parameter's dtype as ``grad``.
    """

    def collect(self) -> None:
        """Adds the gradients of a backward to those of earlier micro-batches. Call it after each backward."""
        first = set(self._absent)
        new = [p for p in self._parameters if p.grad is not None]
        with torch.no_grad():
            for parameter in new:
                if parameter in first:
                    self._views[parameter].copy_(_dense(parameter))
                else:
                    self._views[parameter].add_(_dense(parameter))
                parameter.grad = None
        self._absent = [p for p in self._absent if p not in set(new)]

    def wait(self) -> None:
        """Waits as `GradientSum.wait`, then sets ``main_grad`` and ``grad``; without any gradient both stay None."""
        self._settle_all()
        without = {*self._absent}.difference(self._with_gradient_elsewhere())
        for parameter in self._parameters:
            if parameter not in without:
                set_gradient(parameter, self._shown(parameter))

    @property
    def disturbed(self) -> torch.nn.Parameter | None:
        """None: the sum is in the flat buffer, and nothing that happens to ``grad`` changes it."""
        return None

    def clear(self) -> None:
        """Begins the next update: no parameter has a gradient."""
        for parameter in self._parameters:
            parameter.main_grad = None  # type: ignore[attr-defined]
        super().clear()


def main_gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """The gradient of a parameter in the dtype in which it was summed; None once ``grad`` is cleared."""
    wide: torch.Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if wide is None or parameter.grad is None else wide


def set_gradient(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """Sets ``grad`` of a parameter, rounded to its dtype; if that is another one, the gradient itself becomes
    ``main_grad``.
    """
    if gradient.dtype == parameter.dtype:
        parameter.grad = gradient
    else:
        parameter.main_grad = gradient  # type: ignore[attr-defined]
        parameter.grad = gradient.to(parameter.dtype)


def _dense(parameter: torch.nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient.to_dense() if gradient.is_sparse else local(laid_out_like(parameter, gradient))


def total_norm(
    control_group: ControlGroup, job: Job, gradients: Mapping[Group, Sequence[torch.Tensor]], norm_type: float
) -> torch.Tensor:
    """Returns the norm over all weights in float64, the same on every rank; every rank must call it. ``gradients`` are
    those on this rank by weight group, which only the first of its ranks counts.
    """
    place = control_group.place
    firsts = {group: place.ranks_of(job.members(group))[0] for group in gradients}
    counted = [g for group, tensors in gradients.items() if firsts[group] == place.rank for g in tensors]
    numbers = torch.tensor(norms(counted, norm_type), dtype=torch.float64)
    largest, power = math.isinf(norm_type), norm_type or 1.0  # a norm of order 0 is a count, and counts add up
    total = (numbers.amax() if largest and counted else (numbers**power).sum()).reshape(1)
    kind = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    control_group.reduce(total, "for the norm of the gradients", kind)
    return (total if largest else total ** (1 / power)).reshape(())


def gradients_of(parameters: Mapping[Group, Iterable[torch.nn.Parameter]]) -> dict[Group, list[torch.Tensor]]:
    """The gradients of parameters, by weight group, in the dtype that they were summed in."""
    return {
        group: [g for p in of_group if (g := main_gradient(p)) is not None] for group, of_group in parameters.items()
    }


def scale_down(parameters: Iterable[torch.nn.Parameter], max_norm: float, norm: torch.Tensor) -> None:
    """Scales gradients in place as torch.nn.utils.clip_grads_with_norm_. Raises `Misuse` if ``max_norm`` is negative or
    NaN.
    """
    if not max_norm >= 0:
        raise norm_is_negative(max_norm=max_norm)
    share = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    shown = [(parameter.grad, main_gradient(parameter)) for parameter in parameters]
    gradients = {id(gradient): gradient for pair in shown for gradient in pair if gradient is not None}
    if gradients:
        parts = [local(gradient) for gradient in gradients.values()]
        torch._foreach_mul_(parts, share.to(parts[0].device))


def agree_on_infinite(
    control_group: ControlGroup, device: torch.device, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
) -> None:
    """Makes all ranks skip the step if ``scaler.unscale_(optimizer)`` found infinite gradients on any; every rank calls
    it. A rank without gradients counts as finite.
    """
    flags: dict[Any, torch.Tensor] = scaler._found_inf_per_device(optimizer)
    if not flags:
        flags[device] = torch.zeros((), device=device)
    largest = torch.tensor([max(map(float, flags.values()))], dtype=torch.float64)
    control_group.reduce(largest, "for what any rank has found infinite", dist.ReduceOp.MAX)
    for flag in flags.values():
        flag.fill_(float(largest))
