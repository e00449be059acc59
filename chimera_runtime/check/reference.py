"""Reference of the check: the same updates in one process, without any code that the check tests.

The reference builds the whole model, runs the micro-batches one after another through ordinary autograd, and never
looks at the schedule; it only knows the version of the weights that a micro-batch reads. It shares with the ranks only
what the docs define (`reference_data`): the places of items (docs/howto/data.md), and the seeds (runtime.md).
"""

import hashlib
import inspect
import itertools
import math
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import IterableDataset, default_collate

# Data of the reference: the place of each item and its random numbers, without the code that ranks load data by.


def seed_of(*parts: object) -> int:
    """First 8 bytes of BLAKE2b of the parts, joined by slashes, as a 63-bit number."""
    digest = hashlib.blake2b("/".join(str(p) for p in parts).encode(), digest_size=8).hexdigest()
    return int(digest, 16) // 2


def mini_batches(
    model: Any, sizes: tuple[int, int, int], seed: int, device: torch.device, *, lengths: Sequence[int] = ()
) -> Iterator[list[list[Any]]]:
    """Yields for each update a list, which has input, target and keyword arguments of each part of each micro-batch.

    ``sizes`` is a triple: items of a micro-batch, micro-batches of all copies, parts of a micro-batch. Without
    ``lengths`` parts are cut between items; with ``lengths`` they are slices along dimension 1, in proportion to these.
    """
    size, count, parts = sizes
    cut = partial(_slice, lengths=lengths) if lengths else partial(_part, parts=parts)
    dataset = model.dataset()
    for epoch in itertools.count():
        items = _items_of_epoch(model, dataset, seed, epoch)
        update: list[list[Any]] = []
        for place in itertools.count(step=size):
            micro_batch = [*itertools.islice(items, size)]
            if len(micro_batch) < size:
                break
            seed_all(seed_of("collate", seed, epoch, place))
            whole = _collated(model, micro_batch)
            update += [_cut(whole, partial(cut, number=number), device) for number in range(parts)]
            if len(update) == count * parts:
                yield update
                update = []


def _items_of_epoch(model: Any, dataset: Any, seed: int, epoch: int) -> Iterator[Any]:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        seed_all(seed_of("item", seed, epoch, "begin"))
        _set_epoch(dataset, epoch)
        items = iter(dataset)
        for place in itertools.count():
            seed_all(seed_of("item", seed, epoch, place))
            try:
                item = next(items)
            except StopIteration:
                return
            yield item
    of_order = seed_of("order", seed, epoch)
    if model.sampler is None:
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(of_order)).tolist()
    else:
        sampler = model.sampler(dataset)
        seed_all(of_order)
        _set_epoch(sampler, epoch)
        order = list(sampler)
    for key in order:
        seed_all(seed_of("item", seed, epoch, key))
        yield dataset[key]


def _set_epoch(source: Any, epoch: int) -> None:
    if hasattr(source, "set_epoch"):
        source.set_epoch(epoch)


def _collated(model: Any, items: list[Any]) -> list[Any]:
    if model.collate is not None:
        return [*model.collate(items), {}][:3]
    triples = [(*item, {})[:3] for item in items]
    wholes = {name: value for name, value in triples[0][2].items() if _is_whole(name)}
    cut = [(*pair, {name: named[name] for name in named if name not in wholes}) for *pair, named in triples]
    inputs, targets, named = [default_collate(list(values)) for values in zip(*cut, strict=True)]
    return [inputs, targets, {**named, **wholes}]


def _is_whole(name: str) -> bool:
    """Whether a keyword argument is declared as whole: its name is of a class that is derived from str."""
    return type(name) is not str


def _cut(triple: Sequence[Any], cut: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> list[Any]:
    """Returns a part of input, target and keyword arguments; of these, those that are declared as whole are whole."""

    def part(value: Any, is_whole: bool = False) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda t: (t if is_whole else cut(t)).to(device), value)

    *pair, named = triple
    return [*map(part, pair), {name: part(value, _is_whole(name)) for name, value in named.items()}]


def seed_devices(seed: int) -> None:
    """Seeds torch without the work of torch.manual_seed, which formats the stack for each kind of unused device."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def seed_all(seed: int) -> None:
    """Seeds the generators that an item may draw from: torch's, Python's, and NumPy's if it is in use."""
    seed_devices(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _part(tensor: torch.Tensor, number: int, parts: int) -> torch.Tensor:
    return tensor.chunk(parts)[number] if tensor.dim() else tensor


def _slice(tensor: torch.Tensor, number: int, lengths: Sequence[int]) -> torch.Tensor:
    if tensor.dim() < 2:
        return tensor
    return torch.split(tensor, items_of_slices(tensor.shape[1], lengths), 1)[number].contiguous()


def items_of_slices(length: int, lengths: Sequence[int]) -> list[int]:
    """Returns the number of items of each slice of a sequence of ``length`` items; ``lengths`` are relative.

    Each boundary between slices is at the nearest item with which every slice before it and after it has at least one
    item.
    """
    ends = [0]
    for place in range(1, len(lengths) + 1):
        exact = Fraction(length * sum(lengths[:place]), sum(lengths))
        end = int(exact + Fraction(1, 2))
        least, most = ends[-1] + 1, length - (len(lengths) - place)
        ends.append(least if end < least else most if end > most else end)
    return [end - start for start, end in itertools.pairwise(ends)]


Gradients = Sequence[torch.Tensor | None]
"""Gradients of the trained parameters of a weight group; None for a parameter without one."""

Ties = Mapping[tuple[int, ...], Sequence[Sequence[tuple[int, str]]]]
"""Shared parameters, by the stages that share them: each is a list of stages and names, and the first gives the value.

If the key is a single stage, layers of that stage share them.
"""


_NO_FACTORS: Mapping[int, float] = {}


class PassLoss(NamedTuple):
    """Loss of a micro-batch or a slice as a sum, its count of ``items`` (1 for a mean), and its auxiliary losses."""

    total: float
    items: float
    auxiliary: Mapping[str, float]
    dtype: torch.dtype


@dataclass(frozen=True)
class Reference:
    """The model and the data that one process trains on: B*N*W items per update.

    If micro-batches are cut into ``parts``, it runs one part after another, each with its own dropout, batch statistics
    and share of the loss. If the parts are ``slices`` of sequences, with relative ``lengths`` if these differ, they run
    with the carries between them, in one graph.

    ``listening`` makes a context that collects auxiliary losses by name. ``label`` gives parameters their names in the
    model. ``with_loss`` joins a stage that feeds no other, by the name of its group, and a copy of the module that the
    loss is, if it is one; then ``alone`` returns the stage in it, and ``judge_in`` the loss. ``data`` yields, for a
    number of slices, the micro-batches of each update in place of the dataset of the ``model``.

    ``feeds`` are the edges of the graph of stages, each with the keyword of its argument, if it has one, in the order
    of arguments; without any, each stage feeds the next one. ``names`` has the name of the group of each stage.
    ``lacking`` has for a stage the micro-batches that the program leaves out there, or their parts if these are not
    slices, which repeat after ``cycle`` updates. The data leave out a stage whose entry of the inputs is None, and with
    it its group, and groups that only such groups feed. ``counts`` has for stages with one of several losses functions
    that return the count of a target.
    """

    model: Any
    stages: int
    micro_batch_size: int
    micro_batches: int
    parts: int
    copies: int
    seed: int
    device: torch.device
    ties: Ties = field(default_factory=dict)
    listening: Callable[[], Any] = lambda: nullcontext(())
    label: Callable[[Sequence[torch.nn.Module]], None] = lambda _modules: None
    with_loss: Callable[[torch.nn.Module, str], torch.nn.Module] = lambda module, _name: module
    alone: Callable[[torch.nn.Module], torch.nn.Module] = lambda module: module
    judge_in: Callable[[torch.nn.Module], Callable[[Any, Any], Any] | None] = lambda _module: None
    data: Callable[[int], Iterator[list[list[Any]]]] | None = None
    slices: int = 1
    lengths: tuple[int, ...] = ()
    feeds: Sequence[tuple[int, int, str]] = ()
    names: Sequence[str] = ()
    lacking: Mapping[int, Collection[int]] = field(default_factory=dict)
    cycle: int = 1
    counts: Mapping[int, Callable[[Any], Any]] = field(default_factory=dict)

    @property
    def passes(self) -> int:
        """Number of forwards of each stage in an update of one copy: one for each part of each micro-batch."""
        return self.micro_batches * self.parts

    def run(
        self,
        built: Sequence[torch.nn.Module],
        batches: Sequence[Any],
        place: tuple[int, int, int] = (0, 0, 0),
        divisor: float | None = None,
        factors: Mapping[int, float] = _NO_FACTORS,
        note: Callable[[int, int, Any], None] = lambda _micro, _stage, _output: None,
    ) -> list[PassLoss]:
        """Runs a micro-batch slice by slice, then its backward: gradients are divided by ``divisor``, by default by the
        sum of the counts. The losses of stages in ``factors`` are multiplied by these, and then count as means.
        Returns the loss of each slice.

        ``batches`` has input, target and keyword arguments of each slice; ``place`` is the number of the update, of the
        copy, and of the first slice. ``note`` is called with the number of the slice, and number and output of each
        stage.
        """
        update, copy, first = place
        carries: dict[int, tuple[Any, int]] = {}  # of each stage, with the place at which the next slice starts
        losses, roots = [], list[torch.Tensor]()
        for micro, (inputs, target, named) in enumerate(batches, start=first):
            outputs: dict[int, Any] = {}
            pairs: list[tuple[Any, Any]] = []  # a loss and its count, for each stage that feeds no other
            with self.listening() as auxiliary:
                absent = self._absent(update, micro, inputs)
                for s, module in enumerate(map(self.alone, built)):
                    if s in absent and len(built) == self.stages:
                        continue
                    seed_all(seed_of("forward", self.seed, update, copy, micro, s))
                    arguments, by_name = self._arguments(s, outputs, inputs, is_whole=len(built) < self.stages)
                    carry, start = carries.get(s, (None, 0))
                    end = start + _items((arguments, by_name))
                    outputs[s], left = _called(module, arguments, by_name, named, carry, start)
                    carries[s] = left, end
                    note(micro, s, outputs[s])
                for s in (s for s in self._sinks() if s not in absent):
                    loss = self._judged(built, s, outputs, target)
                    pair = (*loss,) if isinstance(loss, (tuple, list)) else (loss, 1)
                    pairs.append((factors[s] * pair[0], 1) if s in factors else pair)
            total, count = sum(value for value, _ in pairs), pairs[-1][1]
            roots += [term.reshape(()) for term in (total, *(term for _, term in auxiliary)) if term.requires_grad]
            sums: dict[str, float] = {}
            for name, term in auxiliary:
                sums[name] = sums.get(name, 0.0) + term.item()
            losses.append(PassLoss(float(total.item()), float(count), sums, total.dtype))
        if divisor is None:
            divisor = sum(loss.items for loss in losses) or 1.0
        if roots:
            torch.autograd.backward([root / divisor for root in roots])
        return losses

    def factors(self, update: int, batches: Sequence[Any]) -> dict[int, float]:
        """By what the losses in ``counts`` are multiplied in an update with these slices of all copies: each is divided
        by the sum of its own counts, and not by the number of slices.
        """
        totals = dict.fromkeys(self.counts, 0.0)
        for place, (inputs, target, _) in enumerate(batches):
            absent = self._absent(update, place % self.passes, inputs)
            for stage in totals.keys() - absent:
                totals[stage] += float(self.counts[stage](self._part(target, stage, self._sinks())))
        return {stage: len(batches) / total if total else 0.0 for stage, total in totals.items()}

    def _absent(self, update: int, micro: int, inputs: Any) -> set[int]:
        number = (update % self.cycle * self.passes + micro) // self.slices
        left_out = {stage for stage, micros in self.lacking.items() if number in micros}
        absent = set[int]()
        edges, fed = self._edges(), {target for _, target, _ in self._edges()}
        sources = [stage for stage in range(self.stages) if stage not in fed]
        for name in dict.fromkeys(self.names) if len(sources) > 1 else ():
            group = [stage for stage in range(self.stages) if self.names[stage] == name]
            given = [self._part(inputs, stage, sources) for stage in group if stage in sources]
            feeding = [source for source, target, _ in edges if target in group and source not in group]
            if any(part is None for part in given) or (not given and absent.issuperset(feeding)):
                absent.update(group)
        return absent | left_out

    def _edges(self) -> Sequence[tuple[int, int, str]]:
        return self.feeds or [(stage, stage + 1, "") for stage in range(self.stages - 1)]

    def _sinks(self) -> list[int]:
        feeding = {source for source, _, _ in self._edges()}
        return [stage for stage in range(self.stages) if stage not in feeding]

    def _arguments(
        self, stage: int, outputs: Mapping[int, Any], inputs: Any, *, is_whole: bool
    ) -> tuple[list[Any], dict[str, Any]]:
        """Returns the positional arguments of a stage, and those by name: outputs of the stages that feed it, or its
        input. The ``is_whole`` model gets the whole input.
        """
        if is_whole:
            return [inputs], {}
        edges = self._edges()
        fed = {target for _, target, _ in edges}
        feeds = [(outputs.get(source), keyword) for source, target, keyword in edges if target == stage]
        if stage not in fed:
            return [self._part(inputs, stage, [s for s in range(self.stages) if s not in fed])], {}
        return [value for value, name in feeds if not name], {name: value for value, name in feeds if name}

    def _part(self, value: Any, stage: int, ends: Sequence[int]) -> Any:
        """The entry for a stage if a value is a dict with one for each of several ``ends``, by name; else the whole."""
        if len(ends) > 1 and isinstance(value, dict) and {*value} <= {self.names[end] for end in ends}:
            return value.get(self.names[stage])
        return value

    def _judged(self, built: Sequence[torch.nn.Module], stage: int, outputs: Mapping[int, Any], target: Any) -> Any:
        """Returns the loss of a stage that feeds no other; of a whole model, which returns a dict if there are several
        such stages, the loss of the stage's entry.
        """
        is_whole, sinks = len(built) < self.stages, self._sinks()
        output, module = (outputs[0], built[0]) if is_whole else (outputs[stage], built[stage])
        if is_whole and len(sinks) > 1:
            output = output[self.names[stage]]
        loss: Any = self.judge_in(module) if stage == sinks[-1] or not is_whole else None
        if loss is None:
            loss = self.model.loss
            loss = loss[self.names[stage]] if isinstance(loss, Mapping) else loss
        return loss(output, self._part(target, stage, sinks))

    def build(self, stage: int) -> torch.nn.Module:
        """Builds a stage with its initial weights."""
        layers = self.model.layers
        if layers is None:
            module = self._made(stage, lambda: self.model.build_stage(stage, self.stages))
        else:
            held = layers.ranges(self.stages)[stage]
            module = _InTurn({str(index): self._made(index, layers.layers[index]) for index in held})
        if any(parameter.is_meta for parameter in module.parameters()):
            module = module.to_empty(device=self.device)
        module = module.to(self.device)
        evaluating = [part for part in module.modules() if not part.training]
        if module.training:
            module.train()
        for part in evaluating:
            part.training = False
        is_sink = stage in self._sinks()
        return self.with_loss(module, self.names[stage] if self.names else "").to(self.device) if is_sink else module

    def _made(self, number: int, make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
        torch.manual_seed(seed_of("weights", self.seed, number))
        return make()

    def batches(self) -> Iterator[list[list[Any]]]:
        """Yields the data of each update: input, target and keyword arguments of every part, see `mini_batches`."""
        if self.data is not None:
            return self.data(self.slices)
        return mini_batches(
            self.model,
            (self.micro_batch_size, self.micro_batches * self.copies, self.parts),
            self.seed,
            self.device,
            lengths=(self.lengths or (1,) * self.slices) if self.slices > 1 else (),
        )


class _InTurn(torch.nn.ModuleDict):
    """Layers in sequence: each is called with the output of the layer before."""

    def in_turn(
        self,
        arguments: Sequence[Any],
        by_name: Mapping[str, Any],
        named: Mapping[str, Any],
        carries: Any,
        start: int,
    ) -> tuple[Any, Any]:
        """Returns the last output, and the carries of all layers."""
        left = {}
        for number, layer in enumerate(self.values()):
            carry = None if carries is None else carries[number]
            given = {name: value for name, value in by_name.items() if _takes(layer, name, len(arguments))}
            value, left[number] = _called(layer, arguments, given, named, carry, start)
            arguments = [value]
        return value, left


def _called(
    module: torch.nn.Module,
    positional: Sequence[Any],
    by_name: Mapping[str, Any],
    named: Mapping[str, Any],
    carry: Any,
    start: int,
) -> tuple[Any, Any]:
    """Calls a module on the slice that begins at ``start``, with its own arguments and those of the keyword arguments
    ``named`` that it takes; returns the output, and the carry for the next slice or None.
    """
    if isinstance(module, _InTurn):
        return module.in_turn(positional, by_name, named, carry, start)
    arguments = {**{name: named[name] for name in named if _takes(module, name, len(positional))}, **by_name}
    parameters = inspect.signature(module.forward).parameters.keys() - named.keys()
    if "start" in parameters:
        arguments["start"] = start
    if "carry" not in parameters:
        return module(*positional, **arguments), None
    output, left = module(*positional, **arguments, carry=carry)
    return output, left


def _items(value: Any) -> int:
    leaves = pytree.tree_leaves(value)
    return next((leaf.shape[1] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 1), 0)


def _takes(module: torch.nn.Module, name: str, positional: int) -> bool:
    """Whether the forward of a module takes a keyword argument behind so many positional ones."""
    try:
        inspect.signature(module.forward).bind_partial(*[None] * positional, **{name: None})
    except TypeError:
        return False
    return True


class Training:
    """Training of the reference: for every update `gradients`, then a `step` with the gradients of the ranks, which
    have been compared. So the next update begins on the weights of the ranks, and no optimizer magnifies a rounding
    error.

    ``reads`` has for each stage pairs (offset, count): the next ``count`` micro-batches of a period read version
    (updates in earlier periods) + offset. ``modules`` are the stages, by default new ones. ``note`` is called in the
    first update with copy, micro-batch, stage and output of each forward.
    """

    def __init__(
        self,
        reference: Reference,
        period: int,
        reads: Sequence[Sequence[tuple[int, int]]],
        modules: Sequence[torch.nn.Module] | None = None,
        note: Callable[[int, int, int, Any], None] = lambda _copy, _micro, _stage, _output: None,
    ) -> None:
        self._reference = reference
        self._updates_of_a_period = period // reference.passes
        self._batches = reference.batches()
        self._update = 0
        self._note = note
        self.modules = modules or [reference.build(stage) for stage in range(reference.stages)]
        for parameters in reference.ties.values():
            for ends in parameters:
                _tie(self.modules, ends)
        reference.label(self.modules)
        offsets = [[offset for offset, count in runs for _ in range(count)] for runs in reads]
        self._ties = {stages: shared for stages, shared in reference.ties.items() if len(stages) > 1}
        has_versions = self._updates_of_a_period > 1 or any(offset for of_stage in offsets for offset in of_stage)
        self.histories = {
            group: History(self._trained(group), reference.model.optimizer, offsets[group[0]], has_versions)
            for group in (*((stage,) for stage in range(reference.stages)), *self._ties)
        }
        """Histories of weight groups: each stage, then the ties."""
        self.losses: list[float] = []
        self.loss_sizes: list[float] = []
        self.auxiliary: list[dict[str, tuple[float, float]]] = []
        self.dtypes = {p.dtype for module in self.modules for p in module.parameters()}
        if reference.model.autocast is not None:
            self.dtypes.add(reference.model.autocast)

    def _trained(self, group: tuple[int, ...]) -> dict[str, torch.nn.Parameter]:
        ties = self._ties
        shared = {
            f"{name} of stage {stage}": dict(self.modules[stage].named_parameters(remove_duplicate=False))[name]
            for parameters in ([ties[group]] if group in ties else ties.values())
            for (stage, name), *_ in parameters
        }
        if group in ties:
            return {name: parameter for name, parameter in shared.items() if parameter.requires_grad}
        apart = {*map(id, shared.values())}
        named = self.modules[group[0]].named_parameters()
        return {name: p for name, p in named if p.requires_grad and id(p) not in apart}

    def gradients(self) -> dict[tuple[int, ...], Gradients]:
        """Computes the gradients of the next update, by weight group; appends its loss, the mean absolute loss of its
        micro-batches, and both numbers of each auxiliary loss.

        Gradients are those of the sum of all losses, divided by the sum of all counts; if that is 0, they are 0 and the
        loss is NaN.
        """
        reference = self._reference
        batches = next(self._batches)
        losses: list[PassLoss] = []
        factors = reference.factors(self._update, batches)
        for micro in range(0, reference.passes, reference.slices):
            for history in self.histories.values():
                history.show(self._update * reference.passes + micro, self._updates_of_a_period)
            for copy in range(reference.copies):
                first = copy * reference.passes + micro
                losses += reference.run(
                    self.modules,
                    batches[first : first + reference.slices],
                    (self._update, copy, micro),
                    reference.copies * reference.passes,
                    factors,
                    partial(self._note, copy) if self._update == 0 else lambda _micro, _stage, _output: None,
                )
        self.dtypes |= {loss.dtype for loss in losses}
        count = sum(loss.items for loss in losses)

        def mean_and_size(terms: Sequence[float]) -> tuple[float, float]:
            return (sum(terms) / count, sum(map(abs, terms)) / count) if count else (math.nan, math.nan)

        mean, size = mean_and_size([loss.total for loss in losses])
        self.losses.append(mean)
        self.loss_sizes.append(size)
        names = {name for loss in losses for name in loss.auxiliary}
        self.auxiliary.append({n: mean_and_size([loss.auxiliary.get(n, 0.0) for loss in losses]) for n in names})
        factor = reference.copies * reference.passes / count if count else 0.0
        return {group: history.take_gradients(factor) for group, history in self.histories.items()}

    def step(self, gradients: Mapping[tuple[int, ...], Gradients]) -> None:
        """Steps the optimizer of each weight group with the gradients of the group."""
        for group, history in self.histories.items():
            history.step(gradients[group], seed_of("step", self._reference.seed, self._update, *group))
        self._update += 1


def _tie(modules: Sequence[torch.nn.Module], ends: Sequence[tuple[int, str]]) -> None:
    (stage, name), *others = ends
    first = dict(modules[stage].named_parameters(remove_duplicate=False))[name]
    for other, other_name in others:
        old = dict(modules[other].named_parameters(remove_duplicate=False))[other_name]
        for part in modules[other].modules():
            for key, parameter in [*part.named_parameters(recurse=False, remove_duplicate=False)]:
                if parameter is old:
                    setattr(part, key, first)


class History:
    """Versions of the weights of a group: one after every update, each kept as long as later micro-batches read it.

    If every micro-batch reads the newest version, that is, without ``has_versions``, there is one, which steps change
    in place: so memory that parameters share, or buffers with them, remains shared. ``largest_step`` is the largest
    change of any weight in one step.
    """

    def __init__(
        self,
        trained: Mapping[str, torch.nn.Parameter],
        make_optimizer: Callable[[Any], Any],
        offsets: Sequence[int],
        has_versions: bool = True,
    ) -> None:
        self.names = list(trained)
        self.largest_step = 0.0
        self._parameters = list(trained.values())
        self._optimizer = make_optimizer(self._parameters) if self._parameters else None
        self._offsets = offsets
        self._has_versions = has_versions
        self._versions = [[p.data for p in self._parameters]]
        self._forgotten = 0

    @property
    def newest(self) -> list[torch.Tensor]:
        """Weights after the last update."""
        return self._versions[-1]

    @property
    def is_adaptive(self) -> bool:
        """Whether the optimizer is not `torch.optim.SGD`."""
        return not isinstance(self._optimizer, torch.optim.SGD | None)

    def show(self, micro: int, updates: int) -> None:
        """Points the parameters to the version that a micro-batch reads, and forgets versions that no later one reads;
        a period has ``updates``.
        """
        if not self._has_versions:
            return
        period, place = divmod(micro, len(self._offsets))
        self._point_to(self._versions[max(0, period * updates + self._offsets[place]) - self._forgotten])
        while period * updates + min(self._offsets) > self._forgotten:
            del self._versions[0]
            self._forgotten += 1

    def take_gradients(self, factor: float = 1.0) -> Gradients:
        """Returns the gradients that backwards have added since the last call, times a factor, and removes them."""
        gradients = [None if p.grad is None else p.grad.to_dense() * factor for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return gradients

    def step(self, gradients: Gradients, seed: int) -> None:
        """Adds a version: steps the optimizer on a copy of the newest one, with these gradients and this seed."""
        before = self.newest
        if self._has_versions:
            self._versions.append(_cloned(before))
            self._point_to(self.newest)
        else:
            before = [tensor.clone() for tensor in before]
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        seed_devices(seed)
        if self._optimizer is not None:
            self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
        self.largest_step = max(self.largest_step, distance(self.newest, before))

    def _point_to(self, version: Sequence[torch.Tensor]) -> None:
        for parameter, tensor in zip(self._parameters, version, strict=True):
            parameter.data = tensor


def _cloned(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies tensors; those that share memory share it in the copy, too."""
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    storages: dict[int, torch.UntypedStorage] = {}
    clones = []
    for tensor, place in zip(tensors, places, strict=True):
        if places.count(place) == 1 or not tensor.numel():
            clones.append(tensor.clone())
            continue
        if place not in storages:
            storages[place] = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
        clone = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        clones.append(clone.set_(storages[place], tensor.storage_offset(), tensor.size(), tensor.stride()))
    return clones


def distance(computed: Gradients, wanted: Gradients) -> float:
    """Largest difference between the elements of two lists of tensors; infinite if only one of them has a None."""
    return max(differences(computed, wanted), default=0.0)


def differences(computed: Gradients, wanted: Gradients, roundings: int = 0) -> Iterator[float]:
    """Yields for each tensor the largest difference of its elements, less what ``roundings`` roundings can explain."""
    for mine, theirs in zip(computed, wanted, strict=True):
        if mine is None or theirs is None:
            yield 0.0 if mine is theirs else float("inf")
        elif mine.numel() == 0:
            yield 0.0
        else:
            expected = _wide(theirs)
            is_rounded = theirs.is_floating_point() or theirs.is_complex()
            explained = roundings * torch.finfo(theirs.dtype).eps * expected.abs() if is_rounded else 0.0
            beyond = float(((_wide(mine) - expected).abs() - explained).max())
            yield max(0.0, beyond) if beyond == beyond else float("inf")


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.to("cpu", torch.complex128 if value.is_complex() else torch.float64)


def size(gradients: Gradients) -> float:
    """Largest absolute value in a list of gradients."""
    return max((float(_wide(g).abs().max()) for g in gradients if g is not None and g.numel()), default=0.0)
