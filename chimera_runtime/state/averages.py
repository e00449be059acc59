"""Averages of the weights that a loop keeps beside them, such as an exponential moving average (EMA).

A second set of the pipeline's stages, or of some of their parameters: so it is saved and read as the pipeline's own.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from chimera_runtime.errors import Misuse
from chimera_runtime.start.rank_context import Setting
from chimera_runtime.state.state import State, StateDict

Average = Mapping[str, torch.Tensor] | Mapping[int, torch.nn.Module]
"""Tensors by the names of `Pipeline.named_parameters`; or copies of stages, AveragedModels too, by their numbers."""


class AverageState:
    """The state of an average on this rank, by the names of the parameters that are averaged.

    Parameters
    ----------
    what
        What the average is called in messages.
    stages, named
        Those of the pipeline.

    Raises
    ------
    Misuse
        If it is not one of parameters that the pipeline has here.
    """

    def __init__(
        self,
        what: str,
        average: Average,
        setting: Setting,
        stages: Mapping[int, torch.nn.Module],
        named: Mapping[str, torch.nn.Parameter],
    ) -> None:
        self._what = what
        self._named = named
        self._wrappers = [copy for copy in average.values() if isinstance(copy, AveragedModel)]
        given: Mapping[Any, Any] = average
        modules = {key: _inside(copy) for key, copy in given.items() if isinstance(copy, torch.nn.Module)}
        unknown = [key for key in given if not (key in stages if key in modules else isinstance(key, str))]
        if unknown:
            raise Misuse(
                f"{what} has {unknown[0]!r}: give tensors by the names of pipe.named_parameters(), or modules by the "
                "numbers of pipe.stages"
            )
        self._tensors: dict[str, list[torch.Tensor]] = {}
        for name, tensor in (*_tensors(average), *self._of_modules(modules, stages)):
            parameter = named.get(name)
            if parameter is None or not isinstance(tensor, torch.Tensor) or tensor.shape != parameter.shape:
                raise Misuse(
                    f"{what} has {name}, which is not a tensor in the shape of a parameter of pipe.named_parameters(): "
                    "shared= or of_rank= keep anything else that has a state_dict"
                )
            self._tensors.setdefault(name, []).append(tensor)
        first: dict[str, Any] = {name: tensors[0] for name, tensors in self._tensors.items()}
        self._state = State(setting, modules, first)

    def saved(self, replica: int | None = None) -> StateDict:
        """As `State.saved`; ``count`` has how often the average was taken, where it is known."""
        count = {"0": self._wrappers[0].n_averaged} if self._wrappers else {}
        return {**self._state.saved(replica), "count": count}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any], replica: int | None = None) -> None:
        """As `State.load`."""
        self._state.load(state, replica)
        for copy in self._wrappers:
            copy.n_averaged.copy_(state["count"]["0"])
        for first, *others in self._tensors.values():
            for other in others:
                other.copy_(first)

    def _of_modules(
        self, modules: Mapping[int, torch.nn.Module], stages: Mapping[int, torch.nn.Module]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        names = {parameter: name for name, parameter in self._named.items()}
        for stage, module in modules.items():
            original = dict(stages[stage].named_parameters(remove_duplicate=False))
            for inside, tensor in module.named_parameters(remove_duplicate=False):
                if inside not in original:
                    raise Misuse(f"{self._what} has the parameter {inside} of stage {stage}, which that stage has not")
                yield names[original[inside]], tensor


def _inside(copy: torch.nn.Module) -> torch.nn.Module:
    return copy.module if isinstance(copy, AveragedModel) else copy


def _tensors(average: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in average.items() if isinstance(name, str))
