"""Runs of a stage's module on one micro-batch, or on several at once."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import FAILED, BadModel
from chimera_runtime.errors import stage as mistakes
from chimera_runtime.program.numbering import Numbering
from chimera_runtime.stage import engine
from chimera_runtime.stage.engine import Roots
from chimera_runtime.stage.recomputation import ForwardResult
from chimera_runtime.stage.stage_output import COLLECTED, Auxiliary, StageInput, StageOutput
from chimera_runtime.values.boundary import (
    NO_CARRY,
    NO_KEYWORDS,
    Carry,
    Keywords,
    Traits,
    called,
    require_unwritten,
    versions_in,
)
from chimera_runtime.values.nested import Tensors, fresh, mapped, seed_all, seed_torch

# Pairs: a forward and a backward of different micro-batches that a rank runs as one operation, see `Stage.pair`.
#
# A module may have a method for both, ``forward_and_backward(inputs, backward, **keywords)``: it returns what its
# forward returns for the inputs, and also runs a `Backward`, in any order and on any CUDA streams.

METHOD = "forward_and_backward"
"""Name of the method with which a module runs a forward and a backward together."""


class Backward:
    """Backward of a pair, which the method ``forward_and_backward`` of the forward's module gets as an argument.

    To call this object is to run the backward, which adds to the ``.grad`` of the leaves of the graph. A method that
    runs the backward piece by piece takes ``roots`` and ``gradients`` instead. ``module`` is the module whose forward
    made the graph; it may belong to another stage than the method. ``begun`` says whether the method has run the
    backward, or taken the roots in order to run it.
    """

    def __init__(self, module: torch.nn.Module, roots: Roots, gradients: Tensors) -> None:
        self.module = module
        self.begun = False
        self._roots = roots
        self._gradients = gradients

    def __call__(self) -> None:
        """Runs the backward, in one go."""
        if self.begun:
            raise BadModel(mistakes.BACKWARD_OF_PAIR_RAN_TWICE)
        self.begun = True
        engine.run(self._roots, self._gradients)

    @property
    def roots(self) -> Roots:
        """Tensors, or edges of the graph, at which the backward begins: arguments of `torch.autograd.backward`. A
        method that reads this property must run the backward.
        """
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
    ``forward`` is called with what `StageInput.argument` returns.
    """

    def __init__(
        self,
        number: int,
        module: torch.nn.Module,
        stage_input: StageInput,
        output: StageOutput,
        traits: Traits,
        numbering: Numbering,
        load_keywords: LoadKeywords | None,
    ) -> None:
        self.module = module
        self.forward = called(module, stage_input.before)
        self.backward: Callable[[Roots, Tensors], None] = engine.run
        self._number = number
        self._input = stage_input
        self._output = output
        self._traits = traits
        self._numbering = numbering
        self.load_keywords = load_keywords
        self._collected = Auxiliary()  # a forward that tells nothing leaves it to the next one
        self.begin()
        self._in_forward = UserCode(f"the forward of stage {number}", FAILED)

    def begin(self) -> None:
        """Begins an update: finds which generators are in use, so which a forward's seed is for."""
        plain = torch.default_generator.manual_seed
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._seed: Callable[[int], Any] = seed_all if self._traits.seeds_all else seed_torch if on_gpu else plain

    def keywords_of(self, micro: int) -> Keywords:
        """Loads those keyword arguments of a micro-batch that the stage takes. Raises `BadModel` if one is missing."""
        names = self._traits.keywords
        if not names or self.load_keywords is None:
            return NO_KEYWORDS
        loaded = self.load_keywords(self._numbering.first, micro)
        if missing := [name for name in names if name not in loaded]:
            raise mistakes.keyword_argument_is_missing(micro=micro, name=missing[0])
        keywords = {name: loaded[name] for name in names}
        return mapped(keywords, torch.clone) if self._traits.in_place else keywords

    def run(
        self,
        micros: Sequence[int],
        targets: Sequence[Any],
        seed: int,
        inputs: Any,
        keywords: Keywords = NO_KEYWORDS,
        carry: Carry = NO_CARRY,
        leaves_carry: bool = False,
    ) -> ForwardResult:
        """Calls the module after seeding, and makes of what it returns tensors to send, or the loss with ``targets``.

        Arguments from ``seed`` on are those of `ForwardArguments`.
        """
        self._seed(seed)
        input_leaves, argument = self._input.argument(inputs, micros[0])
        traits, takes = self._traits, self._traits.takes
        carry_leaves = carry.leaves() if carry.tensors else ()
        before = versions_in(keywords, traits.shared) if traits.shared else []
        auxiliary = self._collected
        if auxiliary or auxiliary.reports:
            auxiliary = self._collected = Auxiliary()
        new_carry, token = None, COLLECTED.set(auxiliary)
        try:
            try:
                if keywords or takes.carry or takes.start:
                    named: Keywords = fresh(keywords) if keywords else {}
                    if takes.carry or takes.start:
                        named.update(carry.arguments(takes, carry_leaves))
                    returned = self.forward(argument, **named)
                else:
                    returned = self.forward(argument)
            except BaseException as error:
                self._in_forward.blame(error)
                raise
            if before:
                require_unwritten(self._number, keywords, traits.shared, before)
            if takes.carry:
                returned, new_carry = takes.split_result(f"stage {self._number}", returned)
                new_carry = new_carry if leaves_carry else None
            if auxiliary.reports:
                auxiliary.weigh(len(micros))
            results, roots = self._output.finish(micros, returned, targets)
        finally:
            COLLECTED.reset(token)
        values = input_leaves, returned, auxiliary, carry_leaves, new_carry, results, roots
        return tuple.__new__(ForwardResult, values)  # as its own constructor, without a call of Python
