"""Batches as `default_collate` makes them: tensors in tuples, lists and dicts, the micro-batch in dimension 0."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch


def leaves(value: Any) -> Iterator[Any]:
    """What lies inside the tuples, lists and dicts of a value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def is_rows(value: Any) -> bool:
    """Whether a value consists of tensors that have a dimension 0."""
    return all(isinstance(leaf, torch.Tensor) and leaf.dim() > 0 for leaf in leaves(value))


def joined(values: Sequence[Any]) -> Any:
    """Values of one structure as one, along dimension 0."""
    return values[0] if len(values) == 1 else _together(values, torch.cat)


def parts(value: Any, count: int) -> list[Any]:
    """A value as several of the same structure, equal parts along dimension 0."""

    def part(i: int) -> Any:
        return _together([value], lambda tensors: tensors[0].chunk(count)[i])

    return [part(i) for i in range(count)]


def _together(values: Sequence[Any], make: Callable[[Any], torch.Tensor]) -> Any:
    first = values[0]
    match first:
        case torch.Tensor():
            return make(list(values))
        case dict():
            return {key: _together([value[key] for value in values], make) for key in first}
        case tuple() | list():
            items = [_together(list(each), make) for each in zip(*values, strict=True)]
            return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
        case _:
            return first


def to_device(value: Any, device: torch.device) -> Any:
    """A collated batch on the device of the stages: tensors inside tuples, lists and dicts."""
    match value:
        case torch.Tensor():
            return value.to(device, non_blocking=True)
        case dict():
            return {key: to_device(item, device) for key, item in value.items()}
        case tuple() if hasattr(value, "_fields"):
            return type(value)(*(to_device(item, device) for item in value))
        case tuple() | list():
            return type(value)(to_device(item, device) for item in value)
        case _:
            return value
