"""A device in Python, named board: its tensors are not the host's, and it counts what the host reads of them.

A board computes at once, on the CPU. The host sees nothing of its tensors but what is copied to it: a read, for which a
GPU would have to compute all that is before it.
"""

import traceback
from collections import Counter
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.unit.runtime.gpu_model import ModelGpu, ModelStream

DEVICE = "board:0"


class Board:
    """What the host has read.

    Attributes
    ----------
    reads
        How often, by the operation of torch and the function of chimera_runtime that called it.
    """

    def __init__(self) -> None:
        self.reads: Counter[tuple[str, str]] = Counter()

    def note(self, operation: str) -> None:
        """Counts a read, for whoever called it."""
        frames = [frame for frame in traceback.extract_stack() if "chimera_runtime" in frame.filename]
        self.reads[operation, frames[-1].name if frames else ""] += 1


BOARD = Board()


class OnBoard(torch.Tensor):
    """A tensor of the board; ``content`` is what is in it."""

    content: torch.Tensor

    @staticmethod
    def __new__(cls, content: torch.Tensor) -> "OnBoard":
        """Of the same shape, on the board."""
        made: OnBoard = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            content.size(),
            strides=content.stride(),
            storage_offset=content.storage_offset(),
            dtype=content.dtype,
            device=DEVICE,
        )
        made.content = content
        return made

    @property
    def data(self) -> torch.Tensor:
        """The same content, outside of the graph, which counts its changes by itself."""
        return OnBoard(self.content)

    @data.setter
    def data(self, other: "OnBoard") -> None:
        self.content = other.content

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory that its content is in, which says what is a view of what."""
        return self.content.untyped_storage()

    def data_ptr(self) -> int:
        """Where its content begins."""
        return self.content.data_ptr()

    def tolist(self) -> Any:
        """Its numbers: a read."""
        BOARD.note("tolist")
        return self.content.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Computes on the CPU; what has no tensor as its result, or one of the host, is a read."""
        given = pytree.tree_leaves((args, kwargs or {}))
        wrapped = {id(value.content): value for value in given if isinstance(value, OnBoard)}
        plain_args, plain_kwargs = pytree.tree_map_only(OnBoard, lambda tensor: tensor.content, (args, kwargs or {}))
        to_host = _is_to_host(func, args, plain_kwargs)
        if "device" in plain_kwargs:
            plain_kwargs["device"] = torch.device("cpu")
        result = func(*plain_args, **plain_kwargs)
        if to_host or any(not isinstance(value, torch.Tensor | None) for value in pytree.tree_leaves(result)):
            BOARD.note(func.__name__)
            return result

        def on_board(tensor: torch.Tensor) -> OnBoard:
            same = wrapped.get(id(tensor))
            return OnBoard(tensor) if same is None else same

        return pytree.tree_map_only(torch.Tensor, on_board, result)


def _is_to_host(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation copies from the board to the host."""
    if func is torch.ops.aten.copy_.default:
        return not isinstance(args[0], OnBoard)
    return func is torch.ops.aten._to_copy.default and torch.device(kwargs.get("device") or DEVICE).type != "board"


class BoardGpu(ModelGpu):
    """The model of a GPU for tensors of the board: its copies to and from pinned memory are no reads."""

    def copy(self, stream: ModelStream, target: torch.Tensor, source: torch.Tensor) -> None:
        """As in `ModelGpu`, of what is in the tensors."""
        super().copy(stream, *(getattr(tensor, "content", tensor) for tensor in (target, source)))


class Generators:
    """What torch asks of a kind of device: nothing is drawn at random on a board."""

    def is_initialized(self) -> bool:
        """As if it was in use from the beginning."""
        return True

    def is_available(self) -> bool:
        """There is a board."""
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Torch calls it with every torch.manual_seed; a board has no generator."""

    def device_count(self) -> int:
        """``board:0`` is all there is: ranks are processes, each with its own."""
        return 1


_setup_privateuseone_for_python_backend("board", Generators())
_LIBRARY = torch.library.Library("aten", "IMPL")


def _empty(size: Any, *_rest: Any, dtype: torch.dtype | None = None, **_options: Any) -> OnBoard:
    return OnBoard(torch.empty(size, dtype=dtype))


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype | None = None, **_options: Any) -> OnBoard:
    return OnBoard(torch.empty_strided(size, stride, dtype=dtype))


_LIBRARY.impl("empty.memory_format", _empty, "PrivateUse1")
_LIBRARY.impl("empty_strided", _empty_strided, "PrivateUse1")
