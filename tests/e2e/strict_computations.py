"""What a rank computes under the strict backend is put off: the stream of computations comes to it later, as on a GPU.

The host has the result at once, as memory that is written later. Its shape, strides and dtype are those that the same
operation has of zeros, which is tried once. (The device "meta" knows other strides than the CPU, and what is drawn at
random follows from strides.) These operations are not put off:

- a view, and what makes a tensor from no values of others: they touch no memory that anything else may touch;
- what has a result whose shape follows from values, or a number of Python, such as a selection by a mask or `.item()`;
- what draws random numbers, as the generator is that of the host;
- what involves numbers alone, none of which is under way: such as the step that an optimizer counts;
- those of other backends, and those that are given ``out``.

Before these the host waits for the stream, if anything under way touches the same memory; and before it looks into the
memory of a tensor by itself, as in `.cpu()`, `.tolist()`, `.numpy()` and when a tensor is pickled. What it reads or
writes through an array of numpy or a pointer from before is not noticed: it is what the memory holds by then. Memory
that ``copy_(.., non_blocking=True)`` writes may be made an array when `torch.cpu.synchronize` has returned.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from tests.e2e.strict_device import DEVICE, Access, access

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_READS = ("cpu", "tolist", "numpy", "__array__", "data_ptr", "__reduce_ex__", "__repr__")
"""Methods of a tensor by which the host looks into its memory."""
_ALLOCATES = ("new_", "empty", "_unsafe_view")
"""How the names of operations begin that make a tensor from no values; so do those with "_like" in it."""
_HOST = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
}
"""What torch says of operations that cannot be put off; of `index` it says so whether or not there is a mask."""
_MASKS = (torch.bool, torch.uint8)


class Layout(NamedTuple):
    """What is known of a result before it is there."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> torch.Tensor:
        """Memory on the host, with whatever is in it, until the stream writes the result there."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="cpu")

    def zeros(self) -> torch.Tensor:
        """The same of zeros, also where numbers lie in the same place."""
        count = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        return torch.zeros(max(count, 0), dtype=self.dtype, device="cpu").as_strided(self.shape, self.strides)

    @property
    def has_overlaps(self) -> bool:
        """Whether two numbers lie in the same place: it cannot be written."""
        return any(size > 1 and not step for size, step in zip(self.shape, self.strides, strict=True))


def layout_of(tensor: torch.Tensor) -> Layout:
    """That of a tensor."""
    return Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype)


@dataclass(frozen=True)
class Results:
    """Those of an operation: layouts, None, or the number of the tensor among the arguments that is handed back."""

    leaves: Sequence[Layout | int | None]
    structure: Any


class Computations(TorchDispatchMode):
    """Puts off the operations of torch, each with the leave of the device."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[object, Results | None] = {}
        self.is_on = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, or enters it in the stream of computations."""
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a subclass has operations of its own, which come here in turn
        kwargs = kwargs or {}
        name = func.__name__
        if not self.is_on or func.is_view or name.startswith(_ALLOCATES) or "_like" in name:
            return func(*args, **kwargs)
        arguments = [*_tensors(func, args, kwargs)]
        tensors = [tensor for tensor, _ in arguments]
        if any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        if not all(_is_dense(tensor) for tensor in tensors):
            DEVICE.computing.synchronise()
            return func(*args, **kwargs)
        memory = [access(tensor, writes) for tensor, writes in arguments]
        DEVICE.require_untouched(str(func), memory)
        if not tensors:
            return func(*args, **kwargs)
        results = self._results(func, args, kwargs)
        is_small = not any(tensor.dim() for tensor in tensors) and not DEVICE.computing.is_under_way(memory)
        if results is None or is_small:
            DEVICE.computing.synchronise(memory)
            return func(*args, **kwargs)
        return _put_off(func, args, kwargs, memory, results)

    def _results(self, func: Any, args: Any, kwargs: Any) -> Results | None:
        if func.namespace != "aten":
            return None
        key = func, _form(args), _form([*kwargs.items()])
        if key not in self._known:
            self._known[key] = _worked_out(func, args, kwargs)
        return self._known[key]


def _put_off(func: Any, args: Any, kwargs: Any, memory: list[Access], results: Results) -> Any:
    made = [leaf.make() if isinstance(leaf, Layout) else None for leaf in results.leaves]
    own_args, own_kwargs = _aliases(args), {name: _aliases(value) for name, value in kwargs.items()}
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]

    def run() -> None:
        for target, value in zip(made, tree_leaves(func(*own_args, **own_kwargs)), strict=True):
            if target is not None:
                target.copy_(value)

    written = [access(tensor, True) for tensor in made if tensor is not None]
    number = DEVICE.computing.put(str(func), [*memory, *written], run)
    if func is torch.ops.aten.copy_.default and (kwargs.get("non_blocking") or args[2:] == (True,)):
        DEVICE.computing.copied(memory[0], number)
    pairs = zip(results.leaves, made, strict=True)
    return tree_unflatten([tensors[leaf] if isinstance(leaf, int) else new for leaf, new in pairs], results.structure)


def _aliases(value: Any) -> Any:
    """Tensors of the same memory, which stay as they are when the program gives its own another form."""
    if isinstance(value, list | tuple):
        return type(value)(map(_aliases, value))
    return value.detach() if isinstance(value, torch.Tensor) else value


def _worked_out(func: Any, args: Any, kwargs: Any) -> Results | None:
    """The results of an operation, as it has them of zeros; None if they depend on more than the form of arguments."""
    is_index = func is torch.ops.aten.index.Tensor and not any(i is not None and i.dtype in _MASKS for i in args[1])
    takes_out = any(argument.is_out for argument in func._schema.arguments)
    if takes_out or (_HOST.intersection(func.tags) and not is_index):
        return None
    zeros: list[torch.Tensor] = []

    def of_zeros(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        zeros.append(layout_of(value).zeros())
        return zeros[-1]

    args, kwargs = tree_map(of_zeros, args), tree_map(of_zeros, kwargs)
    try:
        values, structure = tree_flatten(func(*args, **kwargs))
    except Exception:  # the host runs it as it is, and sees any error of the program
        return None
    leaves: list[Layout | int | None] = []
    for value in values:
        place = next((i for i, tensor in enumerate(zeros) if tensor is value), None)
        if value is None or place is not None:
            leaves.append(place)
        elif isinstance(value, torch.Tensor) and _is_dense(value) and not layout_of(value).has_overlaps:
            leaves.append(layout_of(value))
        else:
            return None
    return Results(leaves, structure)


def _form(value: Any) -> object:
    """What the layout of a result follows from."""
    if isinstance(value, torch.Tensor):
        return layout_of(value)
    if isinstance(value, list | tuple):
        return tuple(map(_form, value))
    return type(value), value


def _tensors(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[torch.Tensor, bool]]:
    """Those among the arguments, and whether the operation writes them."""
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        writes = (argument.alias_info is not None and argument.alias_info.is_write) or func.namespace == "c10d"
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, torch.Tensor):
                yield tensor, writes


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its memory is what it says."""
    return tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _after_writes(method: Callable[..., Any], mode: Computations) -> Callable[..., Any]:
    @wraps(method)
    def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if mode.is_on and not tensor.is_meta:
            memory = [access(tensor, False)] if type(tensor) in _PLAIN and _is_dense(tensor) else None
            if memory is not None and method.__name__ == "numpy":
                DEVICE.computing.require_copied(memory)  # a tensor of the host, then: what is on a GPU has no array
            DEVICE.computing.synchronise(memory)
        return method(tensor, *args, **kwargs)

    return read


def at_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that the host computes by itself, after all that was put off."""

    @wraps(function)
    def computed(*args: Any, **kwargs: Any) -> Any:
        DEVICE.computing.synchronise()
        with _disable_current_modes():
            return function(*args, **kwargs)

    return computed


@cache
def put_off() -> None:
    """From now on the device computes what this thread does with torch."""
    mode = Computations()
    for name in _READS:
        setattr(torch.Tensor, name, _after_writes(getattr(torch.Tensor, name), mode))
    torch.cpu.synchronize = lambda _device=None: DEVICE.computing.synchronise()
    os.register_at_fork(after_in_child=partial(setattr, mode, "is_on", False))
    mode.__enter__()
