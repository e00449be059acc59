"""Comparison of layers from outside: layers with equal keys take equally long, so one of them is measured.

A key has classes, hyper-parameters, the code of functions, the shapes and dtypes of parameters, the contents of
buffers, the optimizer, and all that was recorded of a layer on its first micro-batch, but no values of
parameters. A value that cannot be compared equals itself alone, so that in doubt a layer is measured.
"""

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

import torch

from chimera_ir.measure.stations import Station

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))


@dataclass(frozen=True, eq=False)
class _Compared:
    """A value in a signature, with the function that compares two values: by default, whether they are one object."""

    value: Any
    are_equal: Callable[[Any, Any], bool] = operator.is_

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Compared) and self.are_equal(self.value, other.value)


def passes(station: Station) -> object:
    """Key that is equal for two stations (stages, ready to run) only if passes through them take equally long."""
    recorded = station.shape, station.before, station.after, station.traits, station.footprints
    return "passes", recorded, _Signature().layers(station)


def step(station: Station) -> object:
    """Key that is equal for two stations only if the steps of their optimizers take equally long."""
    optimizer = station.optimizer
    signature = _Signature()
    if not isinstance(optimizer, torch.optim.Optimizer):
        return "step", signature.layers(station), _Compared(optimizer)
    groups = [signature.of(group) for group in optimizer.param_groups]
    return "step", signature.layers(station), type(optimizer), groups


class _Signature:
    """Turns values into nested lists, which are equal if the values are.

    Where an object occurs again, there is its number in place of its content.
    """

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._kept: list[object] = []

    def layers(self, station: Station) -> list[object]:
        return [self.of(layer) for layer in station.module.children()]

    def of(self, value: object) -> object:
        if isinstance(value, (Enum, type)) or type(value) in _PLAIN:
            return type(value), value
        if id(value) in self._places:
            return "the same as", self._places[id(value)]
        self._places[id(value)] = len(self._places)
        self._kept.append(value)
        return [type(value), *self._parts(value)]

    def _parts(self, value: object) -> Iterator[object]:
        match value:
            case torch.nn.Module():
                yield self._pairs(vars(value))
            case torch.Tensor():
                yield value.shape, value.dtype, value.device, value.layout, value.requires_grad
                yield value.stride() if value.layout is torch.strided else _Compared(value)
                if not isinstance(value, torch.nn.Parameter):
                    yield _Compared(value, torch.equal)
            case dict() if type(value) in (dict, OrderedDict):
                yield self._pairs(value)
            case list() | tuple():
                yield [self.of(entry) for entry in value]
            case set() | frozenset() if all(type(entry) in _PLAIN for entry in value):
                yield frozenset(value)
            case partial():
                yield [self.of(part) for part in (value.func, value.args, value.keywords)]
            case FunctionType():
                yield value.__code__, _Compared(value.__globals__)
                yield [self.of(part) for part in (value.__defaults__, value.__kwdefaults__, value.__closure__)]
            case MethodType():
                yield [self.of(part) for part in (value.__func__, value.__self__)]
            case CellType():
                yield self.of(value.cell_contents)
            case BuiltinFunctionType():
                yield value
            case _:
                yield _Compared(value)

    def _pairs(self, pairs: Mapping[Any, object]) -> list[object]:
        return [(self.of(name), self.of(value)) for name, value in pairs.items()]
