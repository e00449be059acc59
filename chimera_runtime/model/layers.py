"""A model as a list of layers, which a split cuts into stages. Names and weights depend only on a layer's index."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from chimera_runtime.errors import Misuse
from chimera_runtime.errors import model as mistakes


@dataclass(frozen=True)
class Layers:
    """A model as a list of layers, for a `Pipeline` in place of ``build_stage``.

    Parameter p of layer i has the name ``layers.<i>.p``, and an initial value that depends on the seed and i. Both are
    the same for any number of stages and any split. ``tied`` and ``name`` number layers in place of stages. The module
    of a stage has its layers as children by their index: ``pipe.stages[0]["3"]``.

    Parameters
    ----------
    layers
        A function for each layer, which makes the layer on the ranks that hold its stage. A layer is called with the
        output of the layer before, and with the keyword arguments that it accepts.
    split
        The first layer of each stage, from 0 upwards. By default stages have equal numbers of layers, or
        numbers that differ by one.

    Raises
    ------
    Misuse
        If a layer is not a function, or the split does not fit the layers.
    """

    layers: Sequence[Callable[[], torch.nn.Module]]
    split: Sequence[int] | None = None
    remarks: Sequence[str] = field(default=(), kw_only=True, repr=False)
    """Remarks on the model that a pipeline makes at start."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise Misuse(mistakes.NO_LAYERS)
        for index, make in enumerate(self.layers):
            if isinstance(make, torch.nn.Module) or not callable(make):
                raise mistakes.layer_is_made_already(index, type(make).__name__)
        if self.split is not None:
            self._require_split(self.split)

    def _require_split(self, split: Sequence[int]) -> None:
        if isinstance(split, str) or not isinstance(split, Sequence):
            raise mistakes.split_is_no_list(type(split).__name__)
        for layer in split:
            if isinstance(layer, bool) or not hasattr(layer, "__index__"):
                raise mistakes.split_has_no_number(layer)
        if not split or split[0] != 0:
            raise mistakes.split_does_not_begin_with_0(split)
        after = next((second for first, second in pairwise(split) if second <= first), None)
        if after is not None:
            raise mistakes.split_does_not_ascend(split, after)
        if split[-1] >= len(self.layers):
            raise mistakes.split_goes_too_far(split, len(self.layers))

    def first(self, stages: int) -> Sequence[int]:
        """The number of the first layer of each stage.

        Raises
        ------
        Misuse
            If there are fewer layers than stages, or the split is for another number of stages.
        """
        count = len(self.layers)
        if stages > count:
            raise mistakes.layers_are_too_few(count, stages)
        if self.split is None:
            return [count * stage // stages for stage in range(stages)]
        if len(self.split) != stages:
            raise mistakes.split_is_for_other_stages(self.split, stages)
        return self.split

    def ranges(self, stages: int) -> list[range]:
        """The numbers of the layers of each stage."""
        return [range(*ends) for ends in pairwise((*self.first(stages), len(self.layers)))]

    def stage_of(self, layer: int, stages: int) -> int:
        """The number of the stage that has a layer."""
        return bisect_right(self.first(stages), layer) - 1
