"""Probe of one stage on one micro-batch: its forward, which inputs get gradients, and what half a backward keeps."""

from collections.abc import Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, NamedTuple

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import FAILED
from chimera_runtime.model.model import Model
from chimera_runtime.stage.module_state import ModuleState
from chimera_runtime.stage.recomputation import versions_of
from chimera_runtime.stage.saved_tensors import Footprint, SavedTensors, memory_of, operand_storages, saved_storages
from chimera_runtime.stage.splitting import SecondHalf, obstacle, run_first_half
from chimera_runtime.stage.stage_output import collecting, root_of, roots_of
from chimera_runtime.start.strangers import Strangers
from chimera_runtime.values.boundary import (
    NO_CARRY,
    Boundary,
    Carry,
    Keywords,
    Stack,
    Traits,
    Whole,
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


class StageCall(NamedTuple):
    """Arguments of a stage. ``inputs`` are the tensors of the stage before, or the input from the dataset on stage 0.

    ``before`` describes the tensors of the stage before; None on stage 0. Only the last stage has a target. ``carry``
    is the carry of the slice before; ``leaves_carry`` says that a slice follows, for which the stage returns a carry.
    """

    before: Boundary | None
    inputs: Any
    target: Any
    is_last: bool
    keywords: Keywords
    carry: Carry = NO_CARRY
    leaves_carry: bool = False


@dataclass(frozen=True)
class ProbedForward:
    """Results of a stage's forward on one micro-batch, with the graph of autograd.

    ``inputs`` are the input tensors, for which gradients go back to the stage before. ``outputs`` and ``form`` are the
    tensors that the module returned and their structure; on the last stage the loss alone.

    ``traits`` is the behaviour of the stage; ``traits.whole`` is empty until `with_obstacle`. ``footprint`` is the
    memory that the forward keeps for the backward; ``activations`` in it is 0 if that was not measured. ``count`` is
    the count that ``loss`` has returned with a sum, else None.

    ``carry`` is the carry for the next slice, None if no slice follows; ``carry_leaves`` are the tensors of the carry
    of the slice before. ``auxiliary`` are the auxiliary losses. A backward begins at outputs, carry and auxiliary
    losses. ``strangers`` has looked for what the pipeline does not know.
    """

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

    def roots(self, differentiable: tuple[bool, ...] | None) -> Tensors:
        """The tensors at which a backward begins: those of the carry, auxiliary losses, and ``differentiable`` outputs.

        ``differentiable`` says for each output whether a gradient comes back from the next stage; None stands for all.
        """
        outputs = self.outputs if differentiable is None else compress(self.outputs, differentiable)
        passed = {id(leaf) for leaf in self.carry_leaves}
        carried = [t for t in taken_apart(self.carry)[0] if id(t) not in passed]
        return tuple([t for t in (*outputs, *self.auxiliary, *carried) if t.requires_grad])

    def next_carry(self, call: StageCall) -> Carry:
        """The carry for the next slice; ``call`` has the arguments of this forward."""
        return Carry.of(self.carry, call.carry.position + slice_length(call.inputs))


def probe_forward(model: Model, stage: int, module: torch.nn.Module, call: StageCall, measures: bool) -> ProbedForward:
    """Runs the forward of a stage on a micro-batch, on the last stage also the loss, and observes its `Traits`.

    If ``measures`` is true, the footprint has the memory that is saved for the backward.
    """
    # New lists and dicts: the module may change them, and `measure_halves` uses the call again.
    before, handed, target, is_last, keywords, carry, leaves_carry = call._replace(
        inputs=fresh(call.inputs), target=fresh(call.target), keywords=fresh(call.keywords)
    )
    inputs: Tensors = ()
    argument = handed
    if before is not None:
        inputs = tuple(t.detach().requires_grad_(d) for t, d in zip(handed, before.recorded, strict=True))
        argument = before.form.filled(inputs)
    takes, carry_leaves = slice_arguments(alone(module)).without(keywords), carry.leaves()
    named = {**{str(name): value for name, value in keywords.items()}, **carry.arguments(takes, carry_leaves)}
    # The state before the forward: buffers, versions of tensors, and random generators.
    state = ModuleState(module)
    contents = state.snapshot(thorough=True)
    values = {"its input": argument, "a keyword argument": keywords, "its target": target}
    versions = {name: versions_of(value) for name, value in values.items()}
    generators, generators_beside = _generators_of_torch(), states_beside_torch()
    plain = model.loss if is_last and judge_in(module) is None else None
    strangers = Strangers(stage, module, plain, [argument if before is None else None, target, keywords])
    # The forward.
    saved = SavedTensors(module.parameters)
    with saved.counting() if measures else nullcontext():
        with UserCode(f"the forward of stage {stage}", FAILED), collecting() as auxiliary:
            returned = alone(module)(argument, **named)
        returned, new_carry = takes.split_result(f"stage {stage}", returned)
        new_carry = new_carry if leaves_carry else None
        form, outputs = model.outputs(stage, returned) if not is_last else (ONE_TENSOR, ())
        count = None
        if is_last:
            with collecting(auxiliary):
                loss, count = as_pair(model.judge(returned, target))
            outputs = (loss,)
    # What has changed since.
    seeds_all = has_drawn(generators_beside)
    draws = seeds_all or any(not torch.equal(a, b) for a, b in zip(generators, _generators_of_torch(), strict=True))
    changes = {*state.changed(contents)}
    made = {*(state.tensors - contents.versions.keys()), *map(id, inputs), *map(id, carry_leaves)}
    handed_on = [returned, new_carry, [value for _, value in auxiliary]]
    strangers.look(module, made, leaves(handed_on), outputs[0] if is_last else None)
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
    return ProbedForward(
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


def _made(module: torch.nn.Module) -> Iterable[torch.nn.Module]:
    """Module that the user's functions have made of a stage: its layers, or the stage itself."""
    return module.values() if isinstance(module, Stack) else (module,)


def with_obstacle(probed: ProbedForward) -> ProbedForward:
    """Returns a copy with ``traits.whole``, the reason why the backward of the stage cannot be split."""
    leaves = (*probed.inputs, *probed.carry_leaves)
    return replace(probed, traits=replace(probed.traits, whole=obstacle(probed.roots(None), leaves)))


def probe_backward(
    stage: int, module: torch.nn.Module, probed: ProbedForward, differentiable: tuple[bool, ...] | None
) -> list[bool]:
    """Runs a backward of a stage; returns for each input whether it has got a gradient. Clears gradients of parameters.

    ``differentiable`` is as in `ProbedForward.roots`; it is None for the last stage, whose backward begins at the loss.
    """
    roots = probed.roots(differentiable)
    if roots:
        with UserCode(f"the backward of stage {stage}", FAILED):
            torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])
    for parameter in module.parameters():
        parameter.grad = None
    return [leaf.grad is not None for leaf in probed.inputs]


def is_linear(module: torch.nn.Module, probed: ProbedForward, differentiable: tuple[bool, ...] | None) -> bool:
    """Whether the backward of a stage multiplies all its gradients where it begins with a multiple; keeps the graph.

    A hook that clips gradients does not. Factors are powers of 2, which nothing rounds. If the graph cannot run several
    times, nothing is known, and the result is True. Gradients are cleared; ``differentiable`` is as in
    `probe_backward`.
    """
    roots, tensors = probed.roots(differentiable), [*module.parameters(), *probed.inputs, *probed.carry_leaves]
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
    for tensor in (*tensors, *module.parameters()):
        tensor.grad = None
    return True


def measure_halves(
    model: Model,
    stage: int,
    module: torch.nn.Module,
    call: StageCall,
    *,
    differentiable: tuple[bool, ...] | None,
    is_whole: bool,
) -> dict[str, int]:
    """Runs a forward and the first half of its backward; returns the fields of a `Footprint` for split backwards.

    ``differentiable`` is as in `probe_backward`; ``is_whole`` says that the stage's backward cannot be split.
    """
    saved = SavedTensors(module.parameters)
    with saved.counting():
        probed = probe_forward(model, stage, module, call, measures=False)
    roots = probed.roots(differentiable)
    gradients = tuple(map(torch.zeros_like, roots))
    received = memory_of(_received(probed, roots, gradients))
    before, inputs = dict(saved.sizes), memory_of((call.inputs, call.carry.tensors))
    carried, results = memory_of(probed.carry).keys() - inputs.keys(), memory_of(probed.outputs)
    half = _half(stage, module, probed, roots, gradients, is_whole=is_whole, apart=False)
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


def _received(probed: ProbedForward, roots: Tensors, gradients: Tensors) -> list[torch.Tensor]:
    """Returns the ``gradients`` of those ``roots`` that are outputs: in training, the next stage sends them."""
    outputs = {*map(id, probed.outputs)}
    return [gradient for root, gradient in zip(roots, gradients, strict=True) if id(root) in outputs]


def _half(
    stage: int,
    module: torch.nn.Module,
    probed: ProbedForward,
    roots: Tensors,
    gradients: Tensors,
    *,
    is_whole: bool,
    apart: bool,
) -> SecondHalf:
    """Runs the first half of a backward by `run_first_half`, returns the second half, and clears all gradients."""
    leaves = (*probed.inputs, *probed.carry_leaves)
    with UserCode(f"the backward of stage {stage}", FAILED):
        half = run_first_half(roots, gradients, leaves, module.parameters(), is_whole=is_whole, apart=apart)
    for leaf in (*leaves, *module.parameters()):
        leaf.grad = None
    return half


def measure_moved(
    model: Model,
    stage: int,
    module: torch.nn.Module,
    call: StageCall,
    differentiable: tuple[bool, ...] | None,
) -> int:
    """Runs a forward; returns the bytes of what it saves that can move to the host.

    ``differentiable`` is as in `probe_backward`. Inputs from the dataset, tensors that pass between stages, and carries
    do not move.
    """
    probed = probe_forward(model, stage, module, call, measures=False)
    _note_what_stays(call, probed)
    roots = tuple(map(root_of, probed.roots(differentiable)))
    del probed
    return sum(storage.size for storage in saved_storages(stage, roots))


def measure_moved_operands(
    model: Model,
    stage: int,
    module: torch.nn.Module,
    call: StageCall,
    differentiable: tuple[bool, ...] | None,
    *,
    apart: bool,
) -> int:
    """Runs a forward and the first half of its backward; returns the bytes for the second half that can move.

    ``apart`` is as in `WholeBackward`, other arguments are as in `measure_moved`. Gradients of outputs do not move, nor
    does anything that `measure_moved` leaves out.
    """
    probed = with_obstacle(probe_forward(model, stage, module, call, measures=False))
    _note_what_stays(call, probed)
    roots = probed.roots(differentiable)
    gradients = tuple(map(torch.zeros_like, roots))
    note_received([] if call.is_last else _received(probed, roots, gradients))
    half = _half(stage, module, probed, roots, gradients, is_whole=bool(probed.traits.whole), apart=apart)
    del probed, roots, gradients
    return sum(storage.size for storage in operand_storages(stage, half))


def _note_what_stays(call: StageCall, probed: ProbedForward) -> None:
    note_received((call.inputs, call.target, call.keywords, probed.carry, *([] if call.is_last else [probed.outputs])))


def _generators_of_torch() -> list[torch.Tensor]:
    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if cuda else [])]


def _runs_alone(draws: bool, buffers: tuple[str, ...], joinable: bool, separable: bool) -> str:
    """Words for why a stage cannot run several micro-batches at once; empty if it can.

    ``draws``: it draws random numbers. ``buffers``: the ones that it updates. ``joinable`` and ``separable``: whether
    its inputs and its outputs can be joined and cut along dimension 0.
    """
    if draws:
        return "draws random numbers"
    if buffers:
        return f"updates its buffer{'s' if len(buffers) > 1 else ''} {', '.join(buffers)}"
    if not joinable:
        return "has inputs that are not tensors with the micro-batch in dimension 0"
    return "" if separable else "has outputs that are not tensors with the micro-batch in dimension 0"
