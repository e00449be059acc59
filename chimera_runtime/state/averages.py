"""Averages of the weights that a loop keeps, such as an exponential moving average (EMA).

An average is a second set of the pipeline's stages, or of some of their parameters: it is saved and loaded like them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from chimera_runtime.errors import state as mistakes
from chimera_runtime.state.state import State, StateDict

Average = Mapping[str, torch.Tensor] | Mapping[int, torch.nn.Module]
"""Tensors by the names of `Pipeline.named_parameters`; or by stage, copies of modules or AveragedModels of them."""


class AverageState:
    """The state of an average on this rank, by the names of the parameters that are averaged.

    ``average`` has copies of stages by number, or tensors by the name of their parameter. ``what`` is the name of the
    average in messages, ``state`` the state of the pipeline's own weights.

    Raises `Misuse` if the average has a parameter that the pipeline does not have on this rank.
    """

    def __init__(self, what: str, average: Average, state: State) -> None:
        self._what = what
        self._names = {parameter: name for name, parameter in state.parameters.items()}
        self._wrappers = [copy for copy in average.values() if isinstance(copy, AveragedModel)]
        entries: Mapping[Any, Any] = average
        modules = {
            key: copy.module if isinstance(copy, AveragedModel) else copy
            for key, copy in entries.items()
            if isinstance(copy, torch.nn.Module)
        }
        unknown = [key for key in entries if not (key in state.modules if key in modules else isinstance(key, str))]
        if unknown:
            raise mistakes.average_has_unknown_key(what, unknown[0])
        self._tensors: dict[str, list[torch.Tensor]] = {}
        by_name = ((name, tensor) for name, tensor in entries.items() if isinstance(name, str))
        for name, tensor in (*by_name, *self._of_modules(modules, state.modules)):
            parameter = state.parameters.get(name)
            if parameter is None or not isinstance(tensor, torch.Tensor) or tensor.shape != parameter.shape:
                raise mistakes.average_is_not_of_a_parameter(what, name)
            self._tensors.setdefault(name, []).append(tensor)
        first: dict[str, Any] = {name: tensors[0] for name, tensors in self._tensors.items()}
        self._state = replace(state, modules=modules, parameters=first)

    def saved(self, replica: int | None = None) -> StateDict:
        """Returns the average in the form of `State.saved`, with one entry more, ``count``.

        It has the number of updates that an AveragedModel has averaged, and is empty without one.
        """
        count = {"0": self._wrappers[0].n_averaged} if self._wrappers else {}
        return {**self._state.saved(replica), "count": count}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any], replica: int | None = None) -> None:
        """Loads an average that `saved` returned, and gives all copies of a tied parameter the same value."""
        self._state.load(state, replica)
        for copy in self._wrappers:
            copy.n_averaged.copy_(state["count"]["0"])
        for first, *others in self._tensors.values():
            for other in others:
                other.copy_(first)

    def _of_modules(
        self, modules: Mapping[int, torch.nn.Module], stages: Mapping[int, torch.nn.Module]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every parameter of averaged stages after its name in the model; ``stages`` are the originals."""
        for stage, module in modules.items():
            original = dict(stages[stage].named_parameters(remove_duplicate=False))
            for inside, tensor in module.named_parameters(remove_duplicate=False):
                if inside not in original:
                    raise mistakes.average_has_unknown_parameter(self._what, inside, stage)
                yield self._names[original[inside]], tensor
