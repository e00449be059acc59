"""Updates of several shapes: when new shapes come, each stage runs one forward, which shows the shapes of its outputs.

The example has the largest shapes. Memory is reserved for these, and messages of a smaller update use its first part.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.data.feed import Feed
from chimera_runtime.errors import FAILED, Misuse
from chimera_runtime.errors import start as mistakes
from chimera_runtime.errors.stage import forward_begins_to_write
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.auxiliary_losses import Auxiliary, collecting
from chimera_runtime.stage.module_state import state_of
from chimera_runtime.stage.stage import Stage
from chimera_runtime.start.probe import ProbeResult
from chimera_runtime.values.boundary import Boundary
from chimera_runtime.values.carries import NO_CARRY
from chimera_runtime.values.keywords import Keywords, cut_alone
from chimera_runtime.values.mesh_tensors import rest
from chimera_runtime.values.nested import fresh, leaves, mapped, taken_apart, to_device
from chimera_runtime.values.tensors import Tensors, all_generators_kept, draw_seed

Shapes = tuple[tuple[int, ...], ...]

FirstInputs = tuple[Any, Keywords]
"""Inputs and keyword arguments of a micro-batch that is as large as the example in dimension 0."""


@dataclass(eq=False)
class VaryingShapes:
    """Fits the stages of this rank to the shapes of each update; other copies may have other shapes.

    Make the object before training, while the feed still holds the example as update 0: the first shapes are those of
    the example. All ranks of a copy look at the input of the first micro-batch of each update. So they know without a
    message which shapes the update has, and whether these are new.
    """

    world: World
    feed: Feed
    modules: Mapping[int, torch.nn.Module]
    stages: Mapping[int, Stage]
    probed: ProbeResult

    def __post_init__(self) -> None:
        if self.world.job.period:
            raise mistakes.shapes_vary_without_flush(self.world.job.name)
        if self.world.job.lengths:
            raise Misuse(mistakes.VARYING_IN_UNEQUAL_SLICES)
        example = self._first_inputs(0)
        self._largest, self._current = _shapes_by_item(example), _shapes(example)
        self._boundaries = {self._current: list(self.probed.boundaries)}
        self._first: Shapes = ()
        self.feed.require_input = self._require_input

    def begin(self, update: int) -> None:
        """Resizes the stages for an update, after `check`; every rank calls it, before its script runs.

        Raises `BadModel` if a stage returns more numbers than it did for the example, `ModelError` if the forward of a
        stage raises an error, `PeerLost` if another rank does not answer in time or has ended.
        """
        inputs = self._first_inputs(update)
        if _shapes(inputs) == self._current:
            return
        boundaries = self.boundaries(inputs)
        for number, stage in self.stages.items():
            before = next((boundaries[feeding] for feeding in self.world.job.feeding[number]), None)
            stage.resize(before, boundaries[number] if self.world.job.fed[number] else None)
        self._current = _shapes(inputs)

    def boundaries(self, inputs: FirstInputs) -> list[Boundary]:
        """Returns the boundaries between stages for inputs of these shapes; all ranks call it. Errors as in `begin`."""
        shapes = _shapes(inputs)
        if shapes not in self._boundaries:
            with all_generators_kept():
                self._boundaries[shapes] = self._probe(inputs, shapes)
        return self._boundaries[shapes]

    def check(self, update: int) -> None:
        """Raises `Misuse`, as `require_fitting` does, if a tensor of the update does not fit.

        Also raises it if micro-batches in a list, which every rank has, differ in the shapes of their inputs.
        """
        self._first = ()
        inputs = self._first_inputs(update)
        self.require_fitting(inputs)
        if self.world.job.slices == 1:  # else these are of a slice
            self._first = _shapes(inputs[0])
        for micro, pair in enumerate(self.feed.listed(update)):
            self._require_input(micro, pair[0])

    def _require_input(self, micro: int, inputs: Any) -> None:
        """Raises `Misuse` if the inputs of a micro-batch, where this rank has them, differ in shape from the first."""
        shapes = _shapes(inputs)
        is_given = any(shape[:1] != (0,) for shape in shapes)  # a rank may give empty tensors where it uses none
        if is_given:
            self._first = self._first or shapes
            if shapes != self._first:
                raise mistakes.micro_batches_differ_in_shape(micro, shapes, self._first)

    def require_fitting(self, inputs: FirstInputs) -> None:
        """Raises `Misuse` if a tensor is larger than in the example in any dimension, or their number differs.

        Keyword arguments that are whole may have any shape. Call it before any rank has sent a message.
        """
        shapes = _shapes_by_item(inputs)
        if len(shapes) != len(self._largest):
            raise mistakes.number_of_tensors_differs(len(shapes), len(self._largest))
        for shape, largest in zip(shapes, self._largest, strict=True):
            if len(shape) != len(largest) or any(a > b for a, b in zip(shape, largest, strict=True)):
                raise mistakes.tensor_is_larger_than_example(shape, largest)

    def _first_inputs(self, update: int) -> FirstInputs:
        return self.feed.input(update, 0), self.feed.keywords(update, 0)

    def _rank_of(self, stage: int) -> int:
        place = self.world.place
        return place.rank_of(place.copy, self.world.job.placement[0][stage])

    def _probe(self, inputs: FirstInputs, shapes: Shapes) -> list[Boundary]:
        """Runs all forwards of one micro-batch in the first pipe of this copy, and returns the boundaries."""
        world = self.world
        name = f"shapes/{world.place.copy}/{blake2b(repr(shapes).encode(), digest_size=8).hexdigest()}"
        boundaries: list[Boundary] = []
        outputs: dict[int, Tensors] = {}
        for number, largest in enumerate(self.probed.boundaries):
            if self._rank_of(number) == world.place.rank:
                argument = self._argument_of(number, boundaries, outputs, inputs)
                outputs[number] = self._run(number, argument, inputs)
                world.control_group.store.set(f"{name}/{number}", json.dumps([list(t.shape) for t in outputs[number]]))
                for fed in (s for s in world.job.fed[number] if world.job.fed[s]):  # the last stage is not run
                    for tensor in () if self._rank_of(fed) == world.place.rank else outputs[number]:
                        world.control_group.send(tensor, self._rank_of(fed), f"for stage {fed} to see new shapes")
            what = f"for the shapes of what stage {number} hands on"
            answer = json.loads(world.control_group.wait_for_key(f"{name}/{number}", self._rank_of(number), what))
            boundaries.append(replace(largest, shapes=tuple(map(tuple, answer))))
        return boundaries

    def _argument_of(
        self, number: int, boundaries: list[Boundary], outputs: dict[int, Tensors], inputs: FirstInputs
    ) -> Any:
        """The argument that stage ``number`` is called with: the inputs, or the outputs of the stage before it.

        If another rank has the stage before, its outputs are received; else they are in ``outputs``.
        """
        world = self.world
        if not world.job.feeding[number]:
            return mapped(to_device(inputs[0], world.device), torch.clone)  # the stage may change them in place
        (feeding,) = world.job.feeding[number]
        before = boundaries[feeding]
        if feeding in outputs:
            return before.form.filled(outputs[feeding])
        buffers = before.buffers(torch.device("cpu"))
        for tensor in buffers:
            world.control_group.recv(tensor, self._rank_of(feeding), f"for new shapes of stage {feeding}")
        return before.form.filled([t.to(world.device) for t in buffers])

    @torch.no_grad()
    def _run(self, number: int, argument: Any, inputs: FirstInputs) -> Tensors:
        """Runs the forward of a stage and returns the outputs; the state of the module is restored afterwards."""
        module, largest = self.modules[number], self.probed.boundaries[number]
        traits = self.probed.traits[number]
        loaded = to_device(inputs[1], self.world.device) if traits.keywords else {}
        keywords = fresh({name: loaded[name] for name in traits.keywords})
        state, contents = state_of(module, traits.touched)
        torch.manual_seed(draw_seed("shapes", number))
        with UserCode(f"the forward of stage {number}", FAILED), collecting(Auxiliary(takes=False)):
            returned = module(argument, **keywords, **NO_CARRY.arguments(traits.takes, ()))
        tensors, form = taken_apart(traits.takes.split_result(f"stage {number}", returned)[0])
        lost = state.writes(contents).lost
        state.restore(contents)
        rest(module)
        if lost:
            raise forward_begins_to_write(number, lost[0])
        if excess := largest.excess(tensors, form):
            raise mistakes.output_is_larger_than_for_example(number, excess)
        return tensors


def _shapes_by_item(inputs: FirstInputs) -> Shapes:
    return _shapes((inputs[0], cut_alone(inputs[1])))


def _shapes(inputs: FirstInputs) -> Shapes:
    return tuple(tuple(leaf.shape) for leaf in leaves(inputs) if isinstance(leaf, torch.Tensor))
