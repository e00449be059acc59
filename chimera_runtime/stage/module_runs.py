"""Runs of a stage's module on one micro-batch, or on several at once."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import FAILED, BadModel
from chimera_runtime.errors import stage as mistakes
from chimera_runtime.program.numbering import Numbering
from chimera_runtime.stage.recomputation import ForwardArguments, ForwardResult
from chimera_runtime.stage.stage_output import StageInput, collecting
from chimera_runtime.values.boundary import Keywords, Traits, unwritten
from chimera_runtime.values.nested import Tensors, fresh, mapped, seed_all, seed_torch

# Pairs: a forward and a backward of different micro-batches that a rank runs as one operation, see `Stage.pair`.
#
# A module may have a method for both, ``forward_and_backward(inputs, backward, **keywords)``: it returns what its
# forward returns for the inputs, and also runs a `Backward`, in any order and on any CUDA streams.

METHOD = "forward_and_backward"
"""Name of the method with which a module runs a forward and a backward together."""


def differentiate(roots: Tensors, gradients: Tensors) -> None:
    """Runs a backward from its roots, which begin with ``gradients``, to the leaves of its graph."""
    if roots:
        torch.autograd.backward(roots, gradients)


class Backward:
    """Backward of a pair, which the method ``forward_and_backward`` of the forward's module gets as an argument.

    To call this object is to run the backward, which adds to the ``.grad`` of the leaves of the graph. A method that
    runs the backward piece by piece takes ``roots`` and ``gradients`` instead. ``module`` is the module whose forward
    made the graph; it may belong to another stage than the method. ``begun`` says whether the method has run the
    backward, or taken the roots in order to run it.
    """

    def __init__(self, module: torch.nn.Module, roots: Tensors, gradients: Tensors) -> None:
        self.module = module
        self.begun = False
        self._roots = roots
        self._gradients = gradients

    def __call__(self) -> None:
        """Runs the backward, in one go."""
        if self.begun:
            raise BadModel(mistakes.BACKWARD_OF_PAIR_RAN_TWICE)
        self.begun = True
        differentiate(self._roots, self._gradients)

    @property
    def roots(self) -> Tensors:
        """Tensors at which the backward begins. A method that reads this property must run the backward."""
        self.begun = True
        return self._roots

    @property
    def gradients(self) -> Tensors:
        """The gradient of each of the roots, with which the backward begins."""
        return self._gradients


LoadKeywords = Callable[[int, int], Keywords]
"""Function (update, number) that loads the keyword arguments of a micro-batch, counted from the first of the update."""


class ModuleRuns:
    """Runs of a stage's module, each after seeding: both runs of a recomputed forward have the same random numbers.

    ``forward`` and ``backward`` are what runs the module's forward and a backward; a pair replaces both while it runs.
    """

    def __init__(
        self,
        number: int,
        module: torch.nn.Module,
        stage_input: StageInput,
        traits: Traits,
        numbering: Numbering,
        load_keywords: LoadKeywords | None,
    ) -> None:
        self.module = module
        self.forward: Callable[..., Any] = module
        self.backward: Callable[[Tensors, Tensors], None] = differentiate
        self._number = number
        self._input = stage_input
        self._traits = traits
        self._numbering = numbering
        self.load_keywords = load_keywords
        self._seed = seed_all if traits.seeds_all else seed_torch
        self._in_forward = UserCode(f"the forward of stage {number}", FAILED)

    def seed_of(self, micro: int) -> int:
        """Returns the seed of the forward of a micro-batch."""
        return self._numbering.forward_seed(micro, self._number)

    def keywords_of(self, micro: int) -> Keywords:
        """Loads those keyword arguments of a micro-batch that the stage takes. Raises `BadModel` if one is missing."""
        names = self._traits.keywords
        if not names or self.load_keywords is None:
            return {}
        loaded = self.load_keywords(self._numbering.first, micro)
        if missing := [name for name in names if name not in loaded]:
            raise mistakes.keyword_argument_is_missing(micro=micro, name=missing[0])
        keywords = {name: loaded[name] for name in names}
        return mapped(keywords, torch.clone) if self._traits.in_place else keywords

    def run(self, arguments: ForwardArguments) -> ForwardResult:
        """Calls the module after seeding."""
        seed, inputs, keywords, carry, leaves_carry = arguments
        self._seed(seed)
        input_leaves, argument = self._input.argument(inputs)
        shared, takes = self._traits.shared, self._traits.takes
        carry_leaves = carry.leaves() if carry.tensors else ()
        watching = unwritten(self._number, keywords, shared) if shared else nullcontext()
        with watching, self._in_forward, collecting() as auxiliary:
            named: Keywords = fresh(keywords) if keywords else {}
            if takes.any:
                named.update(carry.arguments(takes, carry_leaves))
            returned = self.forward(argument, **named)
        output, new_carry = takes.split_result(f"stage {self._number}", returned)
        return ForwardResult(input_leaves, output, auxiliary, carry_leaves, new_carry if leaves_carry else None)
