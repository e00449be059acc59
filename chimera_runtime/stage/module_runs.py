"""Runs of a stage's module on one micro-batch, or on several at once."""

from collections.abc import Callable
from contextlib import nullcontext

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import FAILED
from chimera_runtime.errors import stage as mistakes
from chimera_runtime.program.numbering import Numbering
from chimera_runtime.stage.auxiliary_losses import collecting
from chimera_runtime.stage.paired_operations import ModuleCalls
from chimera_runtime.stage.recomputation import ForwardArguments, ForwardResult
from chimera_runtime.stage.stage_input import StageInput
from chimera_runtime.values.boundary import Traits
from chimera_runtime.values.keywords import Keywords, unwritten
from chimera_runtime.values.nested import fresh, mapped
from chimera_runtime.values.tensors import seed_all, seed_torch

LoadKeywords = Callable[[int, int], Keywords]
"""Function (update, number) that loads the keyword arguments of a micro-batch, counted from the first of the update."""


class ModuleRuns:
    """Runs of a stage's module, each after seeding: the second run of a recomputed forward has the same random numbers.

    ``load_keywords`` is None if there are no keyword arguments.
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
        self.calls = ModuleCalls(module)
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
            raise mistakes.keyword_argument_is_missing(micro, missing[0])
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
            returned = self.calls.forward(argument, **named)
        output, new_carry = takes.split_result(f"stage {self._number}", returned)
        return ForwardResult(input_leaves, output, auxiliary, carry_leaves, new_carry if leaves_carry else None)
