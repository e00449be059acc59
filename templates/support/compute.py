"""The stages: what a forward keeps for its backward, and the compute of a lane.

Everything that can be decided before the first update is decided in the constructors, as in runtime.py.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Self

import torch

from runtime import BadModel, GradientSum, Tensors, draw_seed, join, part, plain, seed_torch
from support.blame import Calling
from support.faults import FAILED
from support.nested import joined, parts
from support.versions import Weights


@dataclass(frozen=True)
class Boundary:
    """What a stage hands to the next one, for every micro-batch: found once, at start.

    ``single`` says that the stage returned a tensor rather than a tuple; ``recorded`` marks the tensors that require a
    gradient, ``differentiable`` those of them whose gradients come back: the later stages use them.
    """

    single: bool
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    recorded: tuple[bool, ...]
    differentiable: tuple[bool, ...]

    def shape(self, tensor: int, micros: int) -> tuple[int, ...]:
        """The shape of a tensor that holds several micro-batches along dimension 0."""
        rows = self.shapes[tensor]
        return rows if micros == 1 else (micros * rows[0], *rows[1:])

    def buffers(self, device: torch.device, micros: int = 1) -> Tensors:
        """Room for one message of activations."""
        return tuple(
            torch.zeros(self.shape(i, micros), dtype=dtype, device=device) for i, dtype in enumerate(self.dtypes)
        )

    def gradient_buffers(self, device: torch.device, micros: int = 1) -> Tensors:
        """Room for one message of gradients: of the differentiable tensors alone."""
        return tuple(compress(self.buffers(device, micros), self.differentiable))

    def mismatch(self, outputs: Sequence[torch.Tensor], micros: int) -> str | None:
        """How the tensors differ from what was found at start, or nothing; gradients count where they are recorded."""
        if len(outputs) != len(self.shapes):
            return f"{len(outputs)} tensors instead of {len(self.shapes)}"
        for i, output in enumerate(outputs):
            shape = self.shape(i, micros)
            if output.shape != shape or output.dtype != self.dtypes[i]:
                found, wanted = f"{tuple(output.shape)} {output.dtype}", f"{shape} {self.dtypes[i]}"
                return f"tensor {i} is {found} and was {wanted} for the first micro-batch"
            if torch.is_grad_enabled() and output.requires_grad != self.recorded[i]:
                return f"tensor {i} requires a gradient for one micro-batch and none for another"
        return None


class Pass:
    """A micro-batch in a stage, between its forward and its backward.

    It keeps what was handed on until somebody takes that, and otherwise nothing but the graph.
    """

    __slots__ = ("_outputs", "inputs", "roots")

    def __init__(self, inputs: Tensors, outputs: Tensors, roots: Tensors) -> None:
        self._outputs = outputs
        self.inputs = inputs
        self.roots = roots

    def take(self) -> Tensors:
        """What the forward hands on, to be sent or to be read by the next stage: once."""
        outputs, self._outputs = self._outputs, ()
        return outputs


class _Root(torch.autograd.Function):
    """Where the backward of a result begins: of the result's shape, without its memory."""

    @staticmethod
    def forward(_context: Any, result: torch.Tensor) -> torch.Tensor:
        return result.new_empty(()).expand(result.shape)

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Kept:
    """A micro-batch in a stage that recomputes, between its forward and its backward: how to run the forward again.

    ``buffers`` are copies of those that the stage updates, from before its forward.
    """

    __slots__ = ("buffers", "inputs", "micro", "seed", "target")

    def __init__(self, micro: int, seed: int, inputs: Any, target: Any, buffers: dict[str, torch.Tensor]) -> None:
        self.micro = micro
        self.seed = seed
        self.inputs = inputs
        self.target = target
        self.buffers = buffers


@dataclass(frozen=True)
class Traits:
    """What a stage was seen to do with the first micro-batch.

    ``buffers`` are those that it updates; ``alone`` says why it cannot run several micro-batches at once, if so.
    """

    buffers: tuple[str, ...]
    alone: str


@dataclass(frozen=True)
class Seeds:
    """What random numbers depend on, beside update, stage and micro-batch: ``--seed``, and which copy this is.

    ``passes`` is how many micro-batches of a copy an update has, in the parts that they are cut into.
    """

    seed: int
    copy: int
    passes: int


def _root(result: torch.Tensor) -> torch.Tensor:
    root: torch.Tensor = _Root.apply(result)  # type: ignore[no-untyped-call]
    return root


def _payload(tensors: Tensors) -> Tensors:
    """Results as they are sent: without a graph, in memory of one piece."""
    return tuple(plain(t.detach()) for t in tensors)


class Stage:
    """A stage's module on this rank, its buffers and its part of an update.

    ``inputs[k]`` and ``gradients[k]`` are the receive buffers that schedule.sir calls slot k; ``updates`` counts the
    steps so far, and ``on_step`` is called after each.
    """

    def __init__(
        self,
        number: int,
        module: torch.nn.Module,
        weights: Weights,
        before: Boundary | None,
        after: Boundary | None,
        gradients: GradientSum,
        traits: Traits,
        seeds: Seeds,
    ) -> None:
        self.number = number
        self.module = module
        self.inputs: list[Tensors] = []
        self.gradients: list[Tensors] = []
        self.updates = 0
        self.on_step: Callable[[Stage], None] = lambda _stage: None
        self._weights = weights
        self._before = before
        self._after = after
        self._sum = gradients
        self._traits = traits
        self._seeds = seeds
        self._first = 0
        self._received: frozenset[int] = frozenset()
        self._forwarding = Calling(f"the forward of stage {number}", FAILED)
        self._going_back = Calling(f"the backward of stage {number}", FAILED)

    def reserve(self, inputs: Sequence[int], gradients: Sequence[int], device: torch.device) -> None:
        """Allocates the receive buffers: for each slot of activations and gradients, room for so many micro-batches."""
        if self._before is not None:
            self.inputs = [self._before.buffers(device, micros) for micros in inputs]
        if self._after is not None:
            self.gradients = [self._after.gradient_buffers(device, micros) for micros in gradients]
        self._received = frozenset(t.untyped_storage().data_ptr() for slot in self.gradients for t in slot)

    def begin(self, update: int) -> None:
        """From now on micro-batches are counted from the first of an update."""
        self._first = update

    def at(self, version: int) -> Self:
        """The stage with a version of its weights that is alive."""
        self._weights.select(version)
        return self

    def stash(self, version: int) -> None:
        """Keeps the newest weights, which are ``version``, beside those that the next step makes."""
        self._weights.stash(version)

    def drop(self, version: int) -> None:
        """Lets a stashed version go."""
        self._weights.drop(version)

    def forward(self, micro: int, inputs: Any) -> Pass:
        """Runs the stage on a micro-batch: a batch of the dataset for stage 0, else the tensors received."""
        leaves, returned = self._run(self._seed_of(micro), inputs)
        tensors = self._checked(micro, returned, 1)
        return Pass(leaves, _payload(tensors), self._roots(tensors))

    def forward_keep_input(self, micro: int, inputs: Any) -> tuple[Kept, Tensors]:
        """Runs the stage on a micro-batch and keeps nothing but its input, to run it again before the backward."""
        (state,), outputs = self.forward_keep_inputs((micro,), inputs if self._before else (inputs,))
        return state, outputs

    @torch.no_grad()
    def forward_keep_inputs(self, micros: Sequence[int], inputs: Any) -> tuple[tuple[Kept, ...], Tensors]:
        """The same for several micro-batches, at once where the stage allows that: one batch each for stage 0."""
        apart = self._apart(inputs, len(micros))
        if len(micros) > 1 and self._traits.alone:
            each = [self.forward_keep_input(micro, x) for micro, x in zip(micros, apart, strict=True)]
            return tuple(state for state, _ in each), join([outputs for _, outputs in each])
        states = tuple(self._kept(micro, x, None) for micro, x in zip(micros, apart, strict=True))
        _, returned = self._run(states[0].seed, self._together(inputs))
        return states, _payload(self._checked(micros[0], returned, len(micros)))

    def _apart(self, inputs: Any, micros: int) -> list[Any]:
        """The input of each micro-batch."""
        if self._before is None:
            return list(inputs)
        return [inputs] if micros == 1 else [part(inputs, i, i + 1, micros) for i in range(micros)]

    def _together(self, inputs: Any) -> Any:
        """The inputs of all micro-batches as one."""
        return joined(inputs) if self._before is None else inputs

    def _kept(self, micro: int, inputs: Any, target: Any) -> Kept:
        buffers = {name: self.module.get_buffer(name).clone() for name in self._traits.buffers}
        return Kept(micro, self._seed_of(micro), inputs, target, buffers)

    def _seed_of(self, micro: int) -> int:
        update, number = self._place(micro)
        return draw_seed("forward", self._seeds.seed, update, self._seeds.copy, number, self.number)

    def _place(self, micro: int) -> tuple[int, int]:
        """The update that a micro-batch belongs to, and its number there."""
        later, number = divmod(micro, self._seeds.passes)
        return self._first + later, number

    def _run(self, seed: int, inputs: Any) -> tuple[Tensors, Any]:
        seed_torch(seed)
        leaves, argument = self._argument(inputs)
        with self._forwarding:
            return leaves, self.module(argument)

    def _run_again(self, state: Kept) -> tuple[Tensors, Any]:
        """As `_run`, from what the first run began with; what it does to buffers is lost with their copies."""
        leaves, argument = self._argument(state.inputs)
        buffers, state.inputs, state.buffers = state.buffers, None, {}
        seed_torch(state.seed)
        with self._forwarding:
            if not buffers:
                return leaves, self.module(argument)
            return leaves, torch.func.functional_call(self.module, buffers, (argument,))

    def _argument(self, inputs: Any) -> tuple[Tensors, Any]:
        """The tensors whose gradients are wanted, and what the module is called on."""
        boundary = self._before
        if boundary is None:
            return (), inputs
        leaves = tuple(t.detach().requires_grad_(r) for t, r in zip(inputs, boundary.recorded, strict=True))
        return leaves, leaves[0] if boundary.single else leaves

    def _checked(self, micro: int, returned: Any, micros: int) -> Tensors:
        """What the module returned, as tensors."""
        assert self._after is not None
        tensors = returned if isinstance(returned, tuple) else (returned,)
        wrong = self._after.mismatch(tensors, micros)
        if wrong:
            raise BadModel(f"stage {self.number} returned for micro-batch {micro}: {wrong}; return the same every time")
        return tensors

    def _roots(self, tensors: Tensors) -> Tensors:
        """Where the backward begins; the results themselves are free to go."""
        assert self._after is not None
        return tuple(_root(t) for t in compress(tensors, self._after.differentiable))

    def backward(self, state: Pass, gradients: Tensors) -> Tensors:
        """Adds to the gradients of the weights; returns the gradients w.r.t. the differentiable inputs."""
        roots, leaves = state.roots, state.inputs
        state.roots = state.inputs = ()
        return self._backward(roots, leaves, gradients)

    def backward_recompute(self, state: Kept, gradients: Tensors) -> Tensors:
        """Runs the stage again on the input that was kept, then its backward."""
        leaves, returned = self._run_again(state)
        return self._backward(self._roots(self._checked(state.micro, returned, 1)), leaves, gradients)

    def _backward(self, roots: Tensors, leaves: Tensors, gradients: Tensors) -> Tensors:
        if roots:
            with self._going_back:
                torch.autograd.backward(roots, gradients)
        self._sum.collect()
        if self._before is None:
            return ()
        for leaf, expected in zip(leaves, self._before.differentiable, strict=True):
            if leaf.grad is not None and not expected:
                raise BadModel(
                    f"stage {self.number} uses a tensor of stage {self.number - 1} that it did not use for the first "
                    "micro-batch; use the same tensors every time"
                )
        return tuple(map(self._own, compress(leaves, self._before.differentiable)))

    def _own(self, leaf: torch.Tensor) -> torch.Tensor:
        """The leaf's gradient, in memory that no later message overwrites."""
        gradient = leaf.grad
        if gradient is None:
            return torch.zeros_like(leaf)
        if gradient.untyped_storage().data_ptr() in self._received:
            return plain(gradient).clone(memory_format=torch.contiguous_format)
        return plain(gradient)

    def all_reduce(self) -> GradientSum:
        """Launches the sum of this stage's gradients over all its replicas."""
        return self._sum.launch()

    def step(self) -> None:
        """Updates the weights and begins the stage's next update."""
        seed_torch(draw_seed("step", self._seeds.seed, self.updates, self.number))
        self._weights.step()
        self._sum.clear()
        self._stepped()

    def _stepped(self) -> None:
        self.updates += 1
        self.on_step(self)

    def take_loss(self, update: int) -> float:
        """The sum of the losses of an update that were computed here: none, but on the last stage."""
        return 0.0


class LastStage(Stage):
    """The stage whose output goes to the loss; its passes carry the loss instead of activations."""

    def __init__(self, *arguments: Any, loss: Callable[[Any, Any], torch.Tensor], share: float) -> None:
        super().__init__(*arguments)
        self._loss = loss
        self._share = share
        self._losses: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    def forward_loss(self, micro: int, inputs: Any, target: Any) -> Pass:
        """Runs the stage and the loss on a micro-batch."""
        leaves, output = self._run(self._seed_of(micro), inputs)
        value = self._loss(output, target)
        self._note(micro, value.detach())
        return Pass(leaves, (), (value,) if value.requires_grad else ())

    def forward_loss_keep_input(self, micro: int, inputs: Any, target: Any) -> Kept:
        """The same, keeping nothing but the input and the target."""
        (state,) = self.forward_loss_keep_inputs((micro,), inputs if self._before else (inputs,), (target,))
        return state

    @torch.no_grad()
    def forward_loss_keep_inputs(self, micros: Sequence[int], inputs: Any, targets: Sequence[Any]) -> tuple[Kept, ...]:
        """The same for several micro-batches, at once where the stage allows that."""
        each = list(zip(micros, self._apart(inputs, len(micros)), targets, strict=True))
        if len(each) > 1 and self._traits.alone:
            return tuple(self.forward_loss_keep_input(*one) for one in each)
        states = tuple(self._kept(*one) for one in each)
        _, output = self._run(states[0].seed, self._together(inputs))
        outputs = [output] if len(each) == 1 else parts(output, len(each))
        for one, target, micro in zip(outputs, targets, micros, strict=True):
            self._note(micro, self._loss(one, target))
        return states

    def _note(self, micro: int, loss: torch.Tensor) -> None:
        update, _ = self._place(micro)
        self._losses[update].append(loss)

    def backward_loss(self, state: Pass) -> Tensors:
        """Backward from the loss, weighted so that the update averages over all micro-batches of all copies."""
        return self.backward(state, self._shares(state.roots))

    def backward_loss_recompute(self, state: Kept) -> Tensors:
        """Runs stage and loss again on the input that was kept, then their backward."""
        target, state.target = state.target, None
        leaves, output = self._run_again(state)
        value = self._loss(output, target)
        roots = (value,) if value.requires_grad else ()
        return self._backward(roots, leaves, self._shares(roots))

    def _shares(self, roots: Tensors) -> Tensors:
        return tuple(torch.full_like(root, self._share) for root in roots)

    def take_loss(self, update: int) -> float:
        """The sum of the losses of an update; they are forgotten."""
        return float(sum(value.item() for value in self._losses.pop(update, ())))
