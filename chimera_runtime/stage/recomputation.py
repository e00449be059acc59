"""Forwards that keep their input alone, and are run again right before their backward.

Both runs begin with the same: inputs in containers of their own, seeds, and the state of the module. Both record
gradients, so that torch takes the same ways in both; what the first one saves for a backward is dropped at once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks

from chimera_runtime.errors import BadModel
from chimera_runtime.ranks.readout import Reader
from chimera_runtime.stage.module_state import ModuleState, StateSnapshot
from chimera_runtime.stage.rerun_comparison import (
    CAUSES,
    ForwardDigest,
    IsCompared,
    RerunComparison,
    parts,
    sampled,
    whole,
)
from chimera_runtime.values.aliases import versions
from chimera_runtime.values.keywords import Keywords
from chimera_runtime.values.nested import taken_apart

P = TypeVar("P")
T = TypeVar("T")

_OFTEN = 2
_NOTHING = nullcontext()


class SavedInput(NamedTuple):
    """A micro-batch between its forward and its backward: how to run the forward again.

    ``contents`` is the state of the module from before its forward. The forward was over ``of`` micro-batches; what it
    gave is the ``result`` where the two runs are to be compared.
    """

    seed: int
    inputs: Any
    target: Any
    keywords: Keywords
    versions: list[int]
    contents: StateSnapshot
    of: int
    result: ForwardDigest | None


class RecomputedForwards:
    """The two runs of forwards of a stage.

    Parameters
    ----------
    compared
        Of which updates, counted from the start of the run, both runs are compared.
    read
        How the results of comparisons are read.

    Attributes
    ----------
    alone
        Whether forwards over several micro-batches at once were seen to change the module's state: they would not do so
        one after another.
    began
        The first update of the run.
    """

    def __init__(self, stage: int, module: torch.nn.Module, compared: IsCompared, read: Reader) -> None:
        self.began = 0
        self._stage = stage
        self._compared = compared
        self._state = ModuleState(module)
        self._repeats = RerunComparison(stage, [parameter.dtype for parameter in module.parameters()], read)
        self._dropping: saved_tensors_hooks | None = saved_tensors_hooks(_drop, self._refuse)
        self._apart = 0

    @property
    def alone(self) -> bool:
        """Whether forwards over several micro-batches at once have to be run one by one."""
        return self._apart >= _OFTEN

    def compares(self, update: int) -> bool:
        """Whether the two runs of the forwards of an update are compared."""
        return self._compared(update - self.began)

    def first(
        self, update: int, of: int, run: Callable[[], P], finish: Callable[[P], T]
    ) -> tuple[T, StateSnapshot] | None:
        """A first run over ``of`` micro-batches: what ``finish`` makes of its result, and the state that it began with.

        None if it was over several and has changed that state: the state is as before, and they are to be run one by
        one.
        """
        thorough = self.compares(update)
        if thorough:
            self._state.find()
        before = self._state.look(thorough)

        def both() -> tuple[T, StateSnapshot] | None:
            result = run()
            contents = self._state.learn(before, thorough)
            return None if of > 1 and contents.written else (finish(result), contents)

        finished = self._without_graph(before, both)
        if finished is None:
            self._state.restore(before)
            self._apart += 1
        return finished

    def _without_graph(self, before: StateSnapshot, run: Callable[[], T]) -> T:
        """A run that drops what is saved for a backward, unless the forward itself needs that."""
        if self._dropping is not None:
            try:
                with self._dropping:
                    return run()
            except Exception as error:
                if not _needs_what_is_saved(error):
                    raise
            self._dropping = None
            self._state.restore(before)
        return run()

    def _refuse(self, _dropped: None) -> torch.Tensor:
        raise _DroppedTensorNeeded(
            f"stage {self._stage} goes back into the graph of a forward that is run again for its backward; detach "
            "what the module keeps from one forward to the next"
        )

    def results(self, update: int, made: Callable[[], Iterable[Any]], of: int) -> Sequence[ForwardDigest | None]:
        """What a forward over some micro-batches gave, for each of them; None where the runs are not compared."""
        if not self.compares(update):
            return (None,) * of
        compared = _tensors(made)
        return [whole(compared)] if of == 1 else [*parts(compared, of)]

    def again(self, update: int, kept: SavedInput) -> AbstractContextManager[None]:
        """A context of the second run.

        Raises
        ------
        BadModel
            If the first has changed its inputs, or the second changes what the first has left as it was.
        """
        if versions_of(kept.inputs, kept.target, kept.keywords) != kept.versions:
            raise BadModel(
                f"stage {self._stage} changes an input, a target or a keyword argument in place, or the loop does, but "
                "is to run on it again; let it work on a copy"
            )
        return self._as_of(update, kept.contents) if kept.contents.containers else _NOTHING

    @contextmanager
    def _as_of(self, update: int, contents: StateSnapshot) -> Iterator[None]:
        with self._state.as_of(contents, self.compares(update)) as strays:
            yield
        if strays:
            raise BadModel(
                f"stage {self._stage} changes {', '.join(strays)} when its forward is run again for the backward, and "
                f"not at first: {CAUSES}"
            )

    def compare(self, update: int, micro: int, kept: SavedInput, made: Callable[[], Iterable[Any]]) -> None:
        """Compares what the second run gave; errors as in `RerunComparison.compare`."""
        if kept.result is not None:
            compared = _tensors(made)
            result = whole(compared) if kept.of == 1 else sampled(compared)
            self._repeats.compare(update, micro, kept.of, kept.result, result)

    def check(self, update: int) -> None:
        """Reads what comparisons of an update are left; errors as in `RerunComparison.compare`."""
        self._repeats.check(update)


def _tensors(made: Callable[[], Iterable[Any]]) -> list[torch.Tensor]:
    return [value.detach() for value in made() if isinstance(value, torch.Tensor)]


class _DroppedTensorNeeded(BadModel):
    """What a graph has saved is needed, and was dropped."""


def _drop(_tensor: torch.Tensor) -> None:
    """Saves nothing of a tensor."""


def _needs_what_is_saved(error: BaseException | None) -> bool:
    """Whether a forward differentiates by itself; torch.func says in words that it takes no hooks."""
    while error is not None:
        if isinstance(error, _DroppedTensorNeeded) or (
            isinstance(error, RuntimeError) and "saved tensor hooks" in str(error)
        ):
            return True
        error = error.__cause__
    return False


def versions_of(*values: Any) -> list[int]:
    """The version counters of what a stage is given."""
    return [number for value in values if value is not None for number in versions(_tensors_of(value))]


def _tensors_of(value: Any) -> Sequence[torch.Tensor]:
    if type(value) is tuple and all(map(_is_tensor, value)):
        return value
    return () if type(value) is dict and not value else taken_apart(value)[0]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
