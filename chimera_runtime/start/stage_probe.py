"""Probe of one stage on one micro-batch: its forward, which inputs get gradients, and what half a backward keeps."""

import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch.utils.weak import TensorWeakRef

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import FAILED, Misuse
from chimera_runtime.errors import start as mistakes
from chimera_runtime.model.model import Model
from chimera_runtime.stage.engine import edge_of
from chimera_runtime.stage.module_state import ModuleState
from chimera_runtime.stage.recomputation import versions_of
from chimera_runtime.stage.saved_tensors import Footprint, SavedTensors, memory_of, operand_storages, saved_storages
from chimera_runtime.stage.splitting import SecondHalf, obstacle, reachable, run_first_half
from chimera_runtime.stage.stage_output import collecting, roots_of
from chimera_runtime.values.boundary import (
    NO_CARRY,
    Boundary,
    Carry,
    Keywords,
    Stack,
    Traits,
    Whole,
    called,
    slice_arguments,
    slice_length,
)
from chimera_runtime.values.last_stage import alone, judge_in
from chimera_runtime.values.losses import as_pair
from chimera_runtime.values.mesh_tensors import is_spread, local
from chimera_runtime.values.nested import (
    ONE_TENSOR,
    Form,
    Tensors,
    fresh,
    has_drawn,
    is_rows,
    leaves,
    states_beside_torch,
    taken_apart,
)
from chimera_runtime.values.shared_memory import note_received

_FAR = 2.0**9
"""Factor by which gradients are made larger and smaller: clipping shows in one of the two."""


# Strangers: what a forward or the loss trains or writes, and the pipeline does not know.

Named = Mapping[str, Any]


def leaves_of(tensors: Iterable[Any]) -> dict[int, torch.Tensor]:
    """The tensors in which the graphs of some tensors end and that get a gradient, by id."""
    with_graph = [t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]
    ends = [t for t in with_graph if t.grad_fn is None]
    nodes = reachable(t.grad_fn for t in with_graph if t.grad_fn is not None)
    ends += [node.variable for node in nodes if hasattr(node, "variable")]
    return {id(t): t for t in ends}


def surroundings(function: Any) -> dict[str, Any]:
    """Values that a function refers to: variables around it, arguments of a partial, attributes of an object."""
    if isinstance(function, partial):
        arguments = {f"argument {number}": value for number, value in enumerate(function.args)}
        return {**surroundings(function.func), **arguments, **function.keywords}
    owner = getattr(function, "__self__", None if inspect.isfunction(function) else function)
    code = inspect.unwrap(
        getattr(function, "__func__", function if inspect.isfunction(function) else type(owner).__call__)
    )
    variables = inspect.getclosurevars(code) if inspect.isfunction(code) else None
    around = {} if variables is None else {**variables.globals, **variables.nonlocals}
    return {**around, **getattr(owner, "__dict__", {})}


def _tensors_in(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.nn.Module):
        named = (*value.named_parameters(), *value.named_buffers())
        yield from ((f"{inside} of {name}", tensor) for inside, tensor in named)
    elif isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, element in value.items():
            yield from _tensors_in(f"{name}[{key!r}]", element)
    elif isinstance(value, list | tuple):
        for place, element in enumerate(value):
            yield from _tensors_in(f"{name}[{place}]", element)


@dataclass
class Strangers:
    """Looks for strangers in one forward of a stage and, on the last stage, in the loss. Make it before the forward.

    ``loss`` is the loss if no module of it stands beside the stage. Leaves that a forward makes, as by
    ``requires_grad_()`` of an input, are no strangers: they are gone with the graph, and `complaint` comes after that.
    ``is_spread`` says whether the module had DTensors before the forward: FSDP puts others in their place.
    """

    stage: int
    module: InitVar[torch.nn.Module]
    loss: InitVar[Callable[..., Any] | None]
    given: InitVar[Any]
    _around: dict[str, Any] = field(default_factory=dict, init=False)
    _buffers: list[tuple[str, torch.Tensor, int]] = field(default_factory=list, init=False)
    _found: list[tuple[str, bool, TensorWeakRef]] = field(default_factory=list, init=False)
    _written: str | None = field(default=None, init=False)

    def __post_init__(self, module: torch.nn.Module, loss: Callable[..., Any] | None, given: Any) -> None:
        self._known = {*map(id, module.parameters())}.union(leaves_of(leaves(given)))
        self.is_spread = any(map(is_spread, module.parameters()))
        self._around = {} if loss is None else surroundings(loss)
        known = {*map(id, module.buffers())}
        for name, value in self._around.items():
            if isinstance(value, torch.nn.Module) and self._known.isdisjoint(map(id, value.parameters())):
                buffers = [(f"{inside} of {name}", b) for inside, b in value.named_buffers() if id(b) not in known]
                self._buffers += [(words, b, b._version) for words, b in buffers if not b.is_inference()]

    def look(self, module: torch.nn.Module, made: Iterable[int], returned: Iterable[Any], loss: Any) -> None:
        """Looks at the graphs of what the stage ``returned`` and of the ``loss``. ``made`` are ids of tensors that the
        forward has made or was given otherwise.
        """
        around, self._around, known = self._around, {}, self._known.union(made)
        if self.is_spread or any(map(is_spread, module.parameters())):
            return
        of_stage = leaves_of(returned)
        for key, leaf in {**of_stage, **leaves_of([loss])}.items():
            if key not in known:
                self._found.append((_words(leaf, module, around), key in of_stage, TensorWeakRef(leaf)))
        self._written = next((words for words, buffer, version in self._buffers if buffer._version != version), None)
        self._buffers.clear()

    def complaint(self) -> Misuse | None:
        """The error about a stranger, if there is one; call it when the graphs are gone."""
        if self._written is not None:
            return mistakes.loss_writes_what_is_unknown(words=self._written)
        if any(ref() is not None for *_, ref in self._found):
            gc.collect()
        for words, is_of_stage, ref in self._found:
            if ref() is not None:
                return mistakes.leaf_is_unknown(self.stage if is_of_stage else None, words)
        return None


def _words(leaf: torch.Tensor, module: torch.nn.Module, around: Named) -> str:
    """Words for a leaf: its name in the module, or ``around`` the loss, if it has one."""
    named = dict(around)
    for place, part in module.named_modules():
        named |= {f"{place}.{name}".lstrip("."): value for name, value in vars(part).items() if name[:1] != "_"}
    words = (words for name, value in named.items() for words, tensor in _tensors_in(name, value) if tensor is leaf)
    return next(words, f"a tensor of shape {tuple(leaf.shape)}")


class StageCall(NamedTuple):
    """Arguments of a stage. ``inputs`` are the tensors of the stage before, or the input from the dataset on stage 0.

    Only the last stage has a target. ``carry`` is the carry of the slice before; ``leaves_carry`` says that a slice
    follows, for which the stage returns a carry.
    """

    inputs: Any
    target: Any
    keywords: Keywords
    carry: Carry = NO_CARRY
    leaves_carry: bool = False


@dataclass(frozen=True)
class ProbedForward:
    """Results of a stage's forward on one micro-batch, with the graph of autograd.

    ``inputs`` are the input tensors, ``outputs`` and ``form`` the tensors that the module returned and their structure;
    on the last stage the loss alone. ``footprint.activations`` is 0 if it was not measured. ``count`` is the count that
    ``loss`` has returned with a sum, else None. ``carry`` is the carry for the next slice, None if none follows;
    ``carry_leaves`` are the tensors of the carry of the slice before. A backward begins at outputs, carry and auxiliary
    losses. ``strangers`` has looked for what the pipeline does not know.
    """

    call: StageCall
    inputs: Tensors
    outputs: Tensors
    form: Form
    traits: Traits
    footprint: Footprint
    count: float | None
    auxiliary: Tensors
    carry_leaves: Tensors
    carry: Any
    strangers: Strangers

    @property
    def leaves(self) -> Tensors:
        """The tensors in which the graph ends, besides parameters."""
        return (*self.inputs, *self.carry_leaves)

    @property
    def next_carry(self) -> Carry:
        """The carry for the next slice."""
        return Carry.of(self.carry, self.call.carry.position + slice_length(self.call.inputs))

    def roots(self, differentiable: tuple[bool, ...] | None) -> Tensors:
        """The tensors at which a backward begins: those of the carry, auxiliary losses, and the outputs, or those of
        them that are ``differentiable``, for which the next stage sends gradients.
        """
        outputs = self.outputs if differentiable is None else compress(self.outputs, differentiable)
        passed = {id(leaf) for leaf in self.carry_leaves}
        carried = [t for t in taken_apart(self.carry)[0] if id(t) not in passed]
        return tuple([t for t in (*outputs, *self.auxiliary, *carried) if t.requires_grad])


@dataclass(frozen=True)
class StageProbe:
    """A stage to run on one micro-batch. ``before`` describes the tensors of the stages that feed it, if any do. A
    stage that feeds no other (``is_last``) also runs the loss. If its backward ``splits``, traits have the reason why
    it cannot.

    In the methods ``differentiable`` is as in `ProbedForward.roots`.
    """

    model: Model
    stage: int
    module: torch.nn.Module
    before: Boundary | None
    is_last: bool
    splits: bool = False

    def slices(
        self, load: Callable[[int], tuple[Any, Any, Keywords]], slices: int, *, measures: bool = False
    ) -> Iterator[ProbedForward]:
        """Yields the forward on each slice of a micro-batch, with the carry of the slice before. ``load`` returns
        inputs, target and keyword arguments of a slice; ``measures`` is as in `forward`.
        """
        carry = NO_CARRY
        for place in range(slices):
            probed = self.forward(StageCall(*load(place), carry, leaves_carry=place + 1 < slices), measures=measures)
            yield probed
            carry = probed.next_carry

    def forward(self, call: StageCall, *, measures: bool = False) -> ProbedForward:
        """Runs a forward, on the last stage also the loss, and observes its `Traits`. If it ``measures``, the footprint
        has the memory that is saved for the backward.
        """
        # New lists and dicts: the module may change them, and the call is used again.
        stage, module, model, before = self.stage, self.module, self.model, self.before
        handed, target, keywords = map(fresh, call[:3])
        inputs: Tensors = ()
        argument = handed
        if before is not None:
            inputs = tuple(t.detach().requires_grad_(d) for t, d in zip(handed, before.recorded, strict=True))
            argument = before.form.filled(inputs)
        takes, carry_leaves = slice_arguments(alone(module)).without(keywords), call.carry.leaves()
        named = {**{str(name): value for name, value in keywords.items()}, **call.carry.arguments(takes, carry_leaves)}
        # The state before the forward: buffers, versions of tensors, and random generators.
        state = ModuleState(module)
        contents = state.snapshot(thorough=True)
        values = {"its input": argument, "a keyword argument": keywords, "its target": target}
        versions = {name: versions_of(value) for name, value in values.items()}
        generators, generators_beside = _generators_of_torch(), states_beside_torch()
        plain = model.loss if self.is_last and judge_in(module) is None else None
        strangers = Strangers(stage, module, plain, [argument if before is None else None, target, keywords])
        # The forward.
        saved = SavedTensors(module.parameters)
        with saved.counting() if measures else nullcontext():
            with UserCode(f"the forward of stage {stage}", FAILED), collecting() as auxiliary:
                returned = called(alone(module), before)(argument, **named)
            returned, new_carry = takes.split_result(f"stage {stage}", returned)
            new_carry = new_carry if call.leaves_carry else None
            form, outputs = model.outputs(stage, returned) if not self.is_last else (ONE_TENSOR, ())
            count = None
            if self.is_last:
                with collecting(auxiliary):
                    loss, count = as_pair(model.judge(returned, target))
                outputs = (loss,)
        # What has changed since.
        seeds_all = has_drawn(generators_beside)
        draws = seeds_all or any(not torch.equal(a, b) for a, b in zip(generators, _generators_of_torch(), strict=True))
        changes = {*state.changed(contents)}
        made = {*(state.tensors - contents.versions.keys()), *map(id, inputs), *map(id, carry_leaves)}
        handed_on = [returned, new_carry, [value for _, value in auxiliary]]
        strangers.look(module, made, leaves(handed_on), outputs[0] if self.is_last else None)
        buffers = tuple(name for name, _ in module.named_buffers() if name in changes)
        uncut = tuple(str(name) for name in keywords if isinstance(name, Whole))
        joinable, separable = not uncut and is_rows((argument, keywords)), is_rows(returned)
        traits = Traits(
            buffers=buffers,
            alone="has auxiliary losses" if auxiliary else _runs_alone(draws, buffers, joinable, separable),
            keywords=tuple(map(str, keywords)),
            uncut=uncut,
            auxiliary=tuple(sorted({name for name, _ in auxiliary})),
            reports=tuple(sorted({name for name, *_ in auxiliary.reports})),
            seeds_all=seeds_all,
            in_place=next((name for name, value in values.items() if versions_of(value) != versions[name]), ""),
            takes=takes,
            evaluates=not any(part.training for made in _made(alone(module)) for part in made.modules()),
        )
        probed = ProbedForward(
            call=call,
            inputs=inputs,
            outputs=outputs,
            form=form,
            traits=traits,
            footprint=saved.footprint(argument, outputs, (target, keywords), carry_leaves, taken_apart(new_carry)[0]),
            count=None if count is None else 0.0 if count.is_meta else count.item(),
            auxiliary=roots_of(auxiliary),
            carry_leaves=carry_leaves,
            carry=new_carry,
            strangers=strangers,
        )
        if not self.splits:
            return probed
        return replace(probed, traits=replace(traits, whole=obstacle(probed.roots(None), probed.leaves)))

    def backward(self, probed: ProbedForward, differentiable: tuple[bool, ...] | None) -> list[bool]:
        """Runs a backward, and clears gradients of parameters; returns for each input whether it got a gradient."""
        roots = probed.roots(differentiable)
        if roots:
            with UserCode(f"the backward of stage {self.stage}", FAILED):
                torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])
        for parameter in self.module.parameters():
            parameter.grad = None
        return [leaf.grad is not None for leaf in probed.inputs]

    def is_linear(self, probed: ProbedForward, differentiable: tuple[bool, ...] | None) -> bool:
        """Whether a backward that begins with a multiple multiplies all gradients, as one with a hook that clips does
        not.

        Factors are powers of 2, which nothing rounds. The result is True for a graph that cannot run several times. The
        graph stays, gradients are cleared.
        """
        roots, tensors = probed.roots(differentiable), [*self.module.parameters(), *probed.leaves]
        gradients = [torch.cos(torch.arange(r.numel(), device=r.device)).reshape(r.shape).to(r.dtype) for r in roots]

        def sizes(factor: float) -> torch.Tensor:
            torch.autograd.backward(roots, [gradient * factor for gradient in gradients], retain_graph=True)
            made = [t.grad for t in tensors if t.grad is not None]
            for tensor in tensors:
                tensor.grad = None
            return torch.stack([local(g).double().abs().sum().cpu() for g in made] or [torch.zeros(())]) / factor

        if (
            not roots
            or probed.strangers.is_spread
            or any(is_spread(t) or t.is_meta or t.dtype is torch.float16 for t in (*tensors, *roots))
        ):
            return True
        with suppress(Exception):
            once, again = sizes(1.0), sizes(1.0)
            if torch.allclose(once, again, rtol=1e-4):
                return all(torch.allclose(once, sizes(factor), rtol=1e-2) for factor in (_FAR, 1 / _FAR))
        for tensor in (*tensors, *self.module.parameters()):
            tensor.grad = None
        return True

    def halves(self, call: StageCall, differentiable: tuple[bool, ...] | None) -> dict[str, int]:
        """Runs a forward and the first half of its backward; returns the fields of a `Footprint` for split
        backwards.
        """
        saved = SavedTensors(self.module.parameters)
        with saved.counting():
            probed = self.forward(call)
        roots = probed.roots(differentiable)
        gradients = tuple(map(torch.zeros_like, roots))
        received = memory_of(_received(probed, roots, gradients))
        before, inputs = dict(saved.sizes), memory_of((call.inputs, call.carry.tensors))
        carried, results = memory_of(probed.carry).keys() - inputs.keys(), memory_of(probed.outputs)
        half = self._half(probed, roots, gradients, apart=False)
        # The last references to the part of the graph that the second half does not need: now its memory is released.
        del probed, roots
        # What is left of the carry counts as an operand, because the first half frees the carry.
        released = before.keys() - saved.sizes.keys() - inputs.keys() - carried
        operands = {piece: size for piece, size in memory_of(half.operands).items() if piece not in saved.sizes}
        operands |= {piece: size for piece, size in saved.sizes.items() if piece in carried}
        return {
            "released": sum(before[piece] for piece in released),
            "operands": sum(operands.values()),
            "received_operands": sum(received[piece] for piece in received.keys() & operands.keys()),
            "kept_results": sum(results[piece] for piece in results.keys() & (saved.sizes.keys() - inputs.keys())),
        }

    def moved(self, call: StageCall, differentiable: tuple[bool, ...] | None) -> int:
        """Runs a forward; returns the bytes of what it saves that can move to the host: not inputs from the dataset,
        tensors that pass between stages, and carries.
        """
        probed = self._forward_to_move(call)
        roots = tuple(map(edge_of, probed.roots(differentiable)))
        del probed
        return sum(storage.size for storage in saved_storages(self.stage, roots))

    def moved_operands(self, call: StageCall, differentiable: tuple[bool, ...] | None, *, apart: bool) -> int:
        """Runs a forward and the first half of its backward; returns the bytes for the second half that can move,
        without gradients of outputs. ``apart`` is as in `WholeBackward`, the rest as in `moved`.
        """
        probed = self._forward_to_move(call)
        roots = probed.roots(differentiable)
        gradients = tuple(map(torch.zeros_like, roots))
        note_received([] if self.is_last else _received(probed, roots, gradients))
        half = self._half(probed, roots, gradients, apart=apart)
        del probed, roots, gradients
        return sum(storage.size for storage in operand_storages(self.stage, half))

    def _forward_to_move(self, call: StageCall) -> ProbedForward:
        """Runs a forward, and marks the tensors that stay on the device."""
        probed = self.forward(call)
        note_received((*call[:3], probed.carry, *([] if self.is_last else [probed.outputs])))
        return probed

    def _half(self, probed: ProbedForward, roots: Tensors, gradients: Tensors, *, apart: bool) -> SecondHalf:
        """Runs the first half of a backward, returns the second half, and clears all gradients."""
        parameters, is_whole = self.module.parameters(), bool(probed.traits.whole)
        with UserCode(f"the backward of stage {self.stage}", FAILED):
            half = run_first_half(roots, gradients, probed.leaves, parameters, is_whole=is_whole, apart=apart)
        for leaf in (*probed.leaves, *self.module.parameters()):
            leaf.grad = None
        return half


def _made(module: torch.nn.Module) -> Iterable[torch.nn.Module]:
    """The modules that the user's functions have made: the layers of a stage, or the stage itself."""
    return module.values() if isinstance(module, Stack) else (module,)


def _received(probed: ProbedForward, roots: Tensors, gradients: Tensors) -> list[torch.Tensor]:
    """The ``gradients`` of those ``roots`` that are outputs, which the next stage sends in training."""
    outputs = {*map(id, probed.outputs)}
    return [gradient for root, gradient in zip(roots, gradients, strict=True) if id(root) in outputs]


def _generators_of_torch() -> list[torch.Tensor]:
    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if cuda else [])]


def _runs_alone(draws: bool, buffers: tuple[str, ...], joinable: bool, separable: bool) -> str:
    """Words for why a stage cannot run several micro-batches at once; empty if it can."""
    if draws:
        return "draws random numbers"
    if buffers:
        return f"updates its buffer{'s' if len(buffers) > 1 else ''} {', '.join(buffers)}"
    if not joinable:
        return "has inputs that are not tensors with the micro-batch in dimension 0"
    return "" if separable else "has outputs that are not tensors with the micro-batch in dimension 0"
