"""A model as a list of layers, which a split cuts into stages: names and weights follow from a layer's index alone."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from chimera_runtime.errors import Misuse


@dataclass(frozen=True)
class Layers:
    """A model as a list of layers, for a `Pipeline` in place of ``build_stage``.

    Parameter p of layer i is ``layers.<i>.p`` of the model, and its initial value follows from the seed and i: neither
    depends on how many stages there are and where they begin. ``tied`` and ``name`` number layers, not stages. The
    module of a stage has its layers as children by their index: ``pipe.stages[0]["3"]``.

    Parameters
    ----------
    layers
        A function for each layer, which makes it when it is called; that happens where a rank holds its stage. A layer
        is called on what the one before returned, with the keyword arguments that it knows.
    split
        The first layer of each stage, from 0 upwards. By default stages have equal numbers of layers; where that does
        not come out even, some have one more.

    Raises
    ------
    Misuse
        If a layer is no function, or the split is none of these layers.
    """

    layers: Sequence[Callable[[], torch.nn.Module]]
    split: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise Misuse("layers: the list is empty; a model has one layer at least")
        for index, make in enumerate(self.layers):
            if isinstance(make, torch.nn.Module) or not callable(make):
                kind = type(make).__name__
                raise Misuse(
                    f"layers: layer {index} is a {kind} itself; list functions that make the layers, as in "
                    f"[lambda: {kind}(..)], so that a rank builds only those of its stages"
                )
        if self.split is not None:
            self._require_split(self.split)

    def _require_split(self, split: Sequence[int]) -> None:
        said = f"split {','.join(map(str, split))}"
        if not split or split[0] != 0:
            raise Misuse(f"{said}: it lists the first layer of each stage, so it begins with 0")
        after = next((second for first, second in pairwise(split) if second <= first), None)
        if after is not None:
            raise Misuse(f"{said}: {after} is not behind the layer before it; every stage has one layer at least")
        if split[-1] >= len(self.layers):
            raise Misuse(f"{said}: there is no layer {split[-1]}; there are the layers 0 to {len(self.layers) - 1}")

    def first(self, stages: int) -> Sequence[int]:
        """The first layer of each stage.

        Raises
        ------
        Misuse
            If that many stages cannot have the layers, or the split is for another number of stages.
        """
        count = len(self.layers)
        if stages > count:
            raise Misuse(
                f"layers: the schedule has the stages 0 to {stages - 1}, and there are the layers 0 to {count - 1}: a "
                "stage has one layer at least; compile for fewer stages"
            )
        if self.split is None:
            return [count * stage // stages for stage in range(stages)]
        if len(self.split) != stages:
            said = ",".join(map(str, self.split))
            raise Misuse(
                f"split {said}: it begins the stages 0 to {len(self.split) - 1}, and the schedule has the stages 0 to "
                f"{stages - 1}; list the first layer of each"
            )
        return self.split

    def ranges(self, stages: int) -> list[range]:
        """The layers of each stage."""
        return [range(*ends) for ends in pairwise((*self.first(stages), len(self.layers)))]

    def stage_of(self, layer: int, stages: int) -> int:
        """The stage that a layer is in."""
        return bisect_right(self.first(stages), layer) - 1
