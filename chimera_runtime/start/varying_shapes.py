"""Updates of several shapes: what the stages hand on follows from the input, and is found out when a shape first comes.

Messages of a smaller update take the first part of the memory that was reserved for the largest, the example's.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.data.feed import Feed
from chimera_runtime.errors import FAILED, BadModel, Misuse
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.stage import Stage
from chimera_runtime.start.probe import Findings, state_of
from chimera_runtime.values.boundary import Boundary
from chimera_runtime.values.keywords import Keywords
from chimera_runtime.values.nested import fresh, leaves, mapped, taken_apart, to_device
from chimera_runtime.values.shards import rest
from chimera_runtime.values.tensors import Tensors, all_generators_kept, draw_seed

Shapes = tuple[tuple[int, ...], ...]

First = tuple[Any, Keywords]
"""The inputs and the keyword arguments of a micro-batch that is as large as the example in dimension 0."""


class Lengths:
    """The shapes of the updates of this rank's copy; other copies may have others.

    Made while the feed has the example as update 0. Every rank looks at the input of every update, and all ranks of a
    copy at the same one: so they agree on its shapes, and on whether these are new, without a message.
    """

    def __init__(
        self,
        world: World,
        feed: Feed,
        modules: Mapping[int, torch.nn.Module],
        stages: Mapping[int, Stage],
        findings: Findings,
    ) -> None:
        if world.job.period:
            raise Misuse(
                f"{world.job.name} has no flush: messages of several updates are under way together, so all have the "
                "example's shapes; leave out varying="
            )
        self._world = world
        self._feed = feed
        self._modules = modules
        self._stages = stages
        self._traits = findings.traits
        self._largest = findings.boundaries
        self._example = _shapes(self._first(0))
        self._current = self._example
        self._boundaries = {self._example: list(findings.boundaries)}

    def begin(self, update: int) -> None:
        """Makes the stages ready for an update that `check` has passed; every rank calls it, outside of the schedule.

        Raises
        ------
        BadModel
            If a stage hands on more than it did for the example.
        ModelError
            If the forward of a stage raises an error.
        PeerLost
            If another rank does not answer in time, or has ended.
        """
        first = self._first(update)
        if _shapes(first) == self._current:
            return
        boundaries = self.boundaries(first)
        for number, stage in self._stages.items():
            before = boundaries[number - 1] if number else None
            stage.resize(before, boundaries[number] if number < len(boundaries) else None)
        self._current = _shapes(first)

    def boundaries(self, first: First) -> list[Boundary]:
        """What the stages hand on for micro-batches of these shapes; when and with which errors as in `begin`."""
        shapes = _shapes(first)
        if shapes not in self._boundaries:
            with all_generators_kept():
                self._boundaries[shapes] = self._found(first, shapes)
        return self._boundaries[shapes]

    def _first(self, update: int) -> First:
        return self._feed.input(update, 0), self._feed.keywords(update, 0)

    def check(self, update: int) -> None:
        """Passes if an update is no larger than the example; errors as in `require_fitting`."""
        self.require_fitting(self._first(update))

    def require_fitting(self, first: First) -> None:
        """Passes if a micro-batch is no larger than the example; no rank has sent anything yet.

        Raises
        ------
        Misuse
            If it is.
        """
        shapes = _shapes(first)
        if len(shapes) != len(self._example):
            raise Misuse(
                f"a micro-batch has other tensors than the example: {len(shapes)} and not {len(self._example)}"
            )
        for now, largest in zip(shapes, self._example, strict=True):
            if len(now) != len(largest) or any(a > b for a, b in zip(now, largest, strict=True)):
                raise Misuse(
                    f"a tensor of a micro-batch is {now}, and the example's is {largest}: make the pipeline with an "
                    "example of the largest shapes that are to come"
                )

    def _rank(self, stage: int) -> int:
        place = self._world.place
        return place.rank_of(place.copy, self._world.job.placement[0][stage])

    def _found(self, first: First, shapes: Shapes) -> list[Boundary]:
        """One micro-batch goes down the first pipe of this copy; nothing of it remains."""
        world = self._world
        name = f"shapes/{world.place.copy}/{blake2b(repr(shapes).encode(), digest_size=8).hexdigest()}"
        known: list[Boundary] = []
        outputs: dict[int, Tensors] = {}
        for number, largest in enumerate(self._largest):
            if self._rank(number) == world.place.rank:
                handed = self._handed(number, known, outputs, first)
                outputs[number] = self._run(number, handed, first)
                world.control_group.store.set(f"{name}/{number}", json.dumps([list(t.shape) for t in outputs[number]]))
                after = self._rank(number + 1)
                if after != world.place.rank and number + 1 < len(self._largest):
                    for tensor in outputs[number]:
                        world.control_group.send(tensor, after, f"for stage {number + 1} to see new shapes")
            what = f"for the shapes of what stage {number} hands on"
            heard = json.loads(world.control_group.wait_for_key(f"{name}/{number}", self._rank(number), what))
            known.append(replace(largest, shapes=tuple(map(tuple, heard))))
        return known

    def _handed(self, number: int, known: list[Boundary], outputs: dict[int, Tensors], first: First) -> Any:
        """What a stage is called on."""
        world = self._world
        if number == 0:
            inputs = to_device(first[0], world.device)
            return mapped(inputs, torch.clone)  # the stage may change them in place
        before = known[-1]
        if number - 1 in outputs:
            return before.form.filled(outputs[number - 1])
        buffers = before.buffers(torch.device("cpu"))
        for tensor in buffers:
            world.control_group.recv(tensor, self._rank(number - 1), f"for new shapes of stage {number - 1}")
        return before.form.filled([t.to(world.device) for t in buffers])

    @torch.no_grad()
    def _run(self, number: int, handed: Any, first: First) -> Tensors:
        module, largest = self._modules[number], self._largest[number]
        names = self._traits[number].keywords
        loaded = to_device(first[1], self._world.device) if names else {}
        state, before = state_of(module)
        torch.manual_seed(draw_seed("shapes", number))
        with UserCode(f"the forward of stage {number}", FAILED):
            tensors, form = taken_apart(module(handed, **fresh({name: loaded[name] for name in names})))
        state.restore(before)
        rest(module)
        if wrong := largest.excess(tensors, form):
            raise BadModel(f"stage {number} returned for shapes that are no larger than the example's: {wrong}")
        return tensors


def _shapes(first: First) -> Shapes:
    """Of all tensors that stages are called on."""
    return tuple(tuple(leaf.shape) for leaf in leaves(first) if isinstance(leaf, torch.Tensor))
