"""Recomputation: forwards that keep only their input and are run again. Also the types of what a forward keeps.

Both runs of a recomputed forward begin with the same inputs in new containers, the same seeds, and the same state of
the module. Both record a graph, so that torch takes the same code paths; the first run drops at once the tensors that
it saves for a backward.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks

from chimera_runtime.errors import BadModel
from chimera_runtime.errors import stage as mistakes
from chimera_runtime.ranks.messages import Numbers, Reader
from chimera_runtime.stage.carries import CarryGraph
from chimera_runtime.stage.engine import Roots
from chimera_runtime.stage.module_state import ModuleState, ParameterSnapshot, StateSnapshot
from chimera_runtime.stage.stage_output import Auxiliary
from chimera_runtime.values.boundary import Carry, Keywords
from chimera_runtime.values.fingerprint import INTEGERS
from chimera_runtime.values.mesh_tensors import local
from chimera_runtime.values.nested import Tensors, plain, rows, taken_apart
from chimera_runtime.values.shared_memory import versions

# Comparison of the two runs of a recomputed forward.
#
# If the first run is over one micro-batch, the second must give the same bits. If the first run is over several
# micro-batches, there is a second run for each of them alone, which may round differently: then samples are compared
# with a tolerance, and the comparison finds items that influence each other.

_AT_FIRST, _EVERY = 3, 100

_BLOCK = 2**20
"""Numbers that a digest takes at once, in eight bytes each."""

_SAMPLE = 4096
"""Largest number of values of a tensor in a sample."""

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 5e-3}
"""Largest relative difference of two samples, by the coarsest dtype of outputs and weights; 5e-2 for half precision."""

_FACTOR = 0x9E3779B97F4A7C1


def in_some(update: int) -> bool:
    """Whether an update is one of the first 3, or its number a multiple of 100: by default these are compared."""
    return update < _AT_FIRST or update % _EVERY == 0


class ForwardDigest(NamedTuple):
    """Short form of a forward's result for one micro-batch: shape and dtype of each tensor, and a hash of all of its
    bits or, to compare with a tolerance, a sample of its elements.
    """

    kinds: list[tuple[tuple[int, ...], torch.dtype]]
    numbers: list[torch.Tensor]


def whole(tensors: Iterable[torch.Tensor]) -> ForwardDigest:
    """Returns the digest of a forward over one micro-batch, for a comparison bit by bit."""
    compared = _comparable(tensors)
    return ForwardDigest([_kind(t) for t in compared], [*map(digest, compared)])


def parts(tensors: Iterable[torch.Tensor], count: int) -> Iterator[ForwardDigest]:
    """Yields a digest with samples for each micro-batch of a forward over ``count`` micro-batches."""
    compared = _comparable(tensors)
    for number in range(count):
        yield sampled([rows(t, number * (len(t) // count), len(t) // count) for t in compared])


def sampled(tensors: Iterable[torch.Tensor]) -> ForwardDigest:
    """Returns a digest with samples of a forward over one micro-batch, to compare with one of the `parts`."""
    compared = [t for t in _comparable(tensors) if t.is_floating_point() or t.is_complex()]
    return ForwardDigest([_kind(t) for t in compared], [*map(_sample, compared)])


def _comparable(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the dense tensors on the device of the first of them; of spread tensors, this rank's part."""
    with_values = [t for t in map(local, tensors) if t.layout == torch.strided and not t.is_meta and not t.is_quantized]
    return [t for t in with_values if t.device == with_values[0].device]


def _kind(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    numbers = tensor.reshape(-1)
    sample = numbers[:: -(-numbers.numel() // _SAMPLE) or 1]
    return sample.to(torch.complex128 if tensor.is_complex() else torch.float64, copy=True)


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """A hash of the bits of a tensor, in the order of its memory if that has no gaps; computed on its device."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    numbers = plain(torch.view_as_real(tensor) if tensor.is_complex() else tensor.permute(order)).reshape(-1)
    bits = numbers.view(INTEGERS[numbers.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _BLOCK):
        block = bits[start : start + _BLOCK].long()
        places = _mixed(torch.arange(1, block.numel() + 1, device=tensor.device))
        total = total * _FACTOR + (_mixed(block) * (places | 1)).sum()
    return total


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    numbers = numbers * _FACTOR
    return (numbers ^ (numbers >> 15)) * _FACTOR


IsCompared = Callable[[int], bool]
"""Function that says whether the forwards of an update are compared; updates are counted from the start of the run."""


T = TypeVar("T")

_OFTEN = 2


class ForwardArguments(NamedTuple):
    """Arguments of a run of a module. ``leaves_carry`` says that a slice follows, for which the run returns a carry."""

    seed: int
    inputs: Any
    keywords: Keywords
    carry: Carry
    leaves_carry: bool


class ForwardResult(NamedTuple):
    """Result of one run of a module. ``leaves`` are the input tensors for which the backward computes gradients.

    ``returned`` is what the module returned, without the carry. ``carry`` is the carry for the next slice, None if no
    slice reads it; ``carry_leaves`` are the tensors of the carry of the slice before. ``results`` are the tensors for
    the next stage, none on the last one, and ``roots`` those at which the backward begins.
    """

    leaves: Tensors
    returned: Any
    auxiliary: Auxiliary
    carry_leaves: Tensors
    carry: Any
    results: Tensors
    roots: Roots


class SavedGraph(NamedTuple):
    """The autograd graph that an ordinary forward keeps for its backward, from its leaves to its roots. Auxiliary
    losses are roots as well; ``carries`` has the leaves and roots that belong to carries.
    """

    leaves: Tensors
    roots: Roots
    auxiliary: Tensors
    carries: CarryGraph

    @property
    def all_roots(self) -> Roots:
        """The roots, the auxiliary losses, and the roots in the carry for the next slice."""
        return (*self.roots, *self.auxiliary, *self.carries.roots.values())


class SavedInput(NamedTuple):
    """Arguments of a second run, which a recomputed forward keeps of a micro-batch in place of a graph.

    ``versions`` are the version counters of all tensors in the arguments and the ``target``, ``state`` is the module's
    state before the first run. The first run was over ``micro_batches`` micro-batches together. ``digest`` is the
    result of the first run in short form; it is None if the two runs are not compared.
    """

    arguments: ForwardArguments
    target: Any
    versions: list[int]
    state: StateSnapshot
    micro_batches: int
    digest: ForwardDigest | None


class RecomputedForwards:
    """The two runs of the recomputed forwards of a stage, and their comparison.

    ``is_compared(n)`` says whether the two runs are compared in the n-th update after ``first_update``, with which this
    training run began. ``touched`` are the parameters that forwards are known to write, with the values that they had.
    ``read`` reads the results of comparisons from the device.
    """

    def __init__(
        self, stage: int, module: torch.nn.Module, is_compared: IsCompared, touched: Collection[str], read: Reader
    ) -> None:
        self.first_update = 0
        self._stage = stage
        self._is_compared = is_compared
        self._parameters = partial(ParameterSnapshot, module, touched)
        self._state = ModuleState(module)
        self._dtypes = {parameter.dtype for parameter in module.parameters()}
        self._read = read
        self._open: dict[int, list[tuple[BadModel, Numbers]]] = {}
        self._dropping: saved_tensors_hooks | None = saved_tensors_hooks(_drop, partial(_refuse, stage))
        self._separated = 0

    @property
    def one_by_one(self) -> bool:
        """Whether the stage must run micro-batches one by one, because joint forwards changed the module's state."""
        return self._separated >= _OFTEN

    def compares(self, update: int) -> bool:
        """Whether the two runs of the forwards of an update are compared."""
        return self._is_compared(update - self.first_update)

    def first_run(self, update: int, count: int, run: Callable[[], T]) -> tuple[T, StateSnapshot] | None:
        """Calls ``run``, a forward over ``count`` micro-batches; returns its result and the earlier state.

        The state is a snapshot of the module from before the forward, with ``written`` filled in. Returns None if a
        forward over several micro-batches has changed the module's state: each micro-batch should have seen the changes
        of the one before. Then the state is restored, and the caller must run the micro-batches one by one.
        """
        # A thorough look at all state is slow: only the updates whose runs are compared get it.
        thorough = self.compares(update)
        if thorough:
            self._state.find_containers()
        before = self._state.snapshot(thorough)
        result = self._without_graph(before, run)
        state = self._state.with_changes(before, thorough)
        if count == 1 or not state.written:
            return result, state
        del result  # frees its memory before the state is copied
        self._state.restore(before)
        self._separated += 1
        return None

    def _without_graph(self, before: StateSnapshot, run: Callable[[], T]) -> T:
        """Calls ``run`` and drops what it saves for a backward, unless the forward itself needs the saved tensors."""
        if self._dropping is not None:
            try:
                with self._dropping:
                    return run()
            except Exception as error:
                if not _needs_saved_tensors(error):
                    raise
            self._dropping = None
            self._state.restore(before)
        return run()

    def digests(self, update: int, values: Callable[[], Iterable[Any]], count: int) -> Sequence[ForwardDigest | None]:
        """Returns the digests of a first run, one for each micro-batch; each is None if the runs are not compared."""
        if not self.compares(update):
            return (None,) * count
        compared = _tensors(values)
        return [whole(compared)] if count == 1 else [*parts(compared, count)]

    @contextmanager
    def second_run(self, update: int, saved: SavedInput) -> Iterator[None]:
        """Context of a second run, in which the module has the state with which the first run began. Raises `BadModel`
        if inputs have changed, or the second run changes a part of the state that the first did not, or, where runs are
        compared, a parameter.
        """
        if versions_of_arguments(saved.arguments, saved.target) != saved.versions:
            raise mistakes.input_was_changed(stage=self._stage)
        thorough = self.compares(update)
        parameters = self._parameters() if thorough else None
        as_at_first: AbstractContextManager[list[str]] = nullcontext([])
        if saved.state.containers:
            as_at_first = self._state.as_of(saved.state, thorough)
        with as_at_first as strays:
            yield
        if parameters is not None and (changed := parameters.writes().changed):
            raise mistakes.recomputed_forward_writes_parameter(stage=self._stage, names=changed)
        if strays:
            raise mistakes.second_run_changes_state(stage=self._stage, names=strays)

    def compare(self, update: int, micro: int, saved: SavedInput, values: Callable[[], Iterable[Any]]) -> None:
        """Begins to compare the second run of a forward with the first. Raises `BadModel` on the CPU if they differ; on
        a GPU `check` raises it later.
        """
        first, count = saved.digest, saved.micro_batches
        if first is None:
            return
        if count == 1:
            error = mistakes.second_run_differs(stage=self._stage, micro=micro, update=update + 1)
            second = whole(_tensors(values))
        else:
            error = mistakes.items_influence_each_other(
                stage=self._stage, micro=micro, update=update + 1, others=count - 1
            )
            second = sampled(_tensors(values))
        if first.kinds != second.kinds:
            raise error
        if not first.numbers:
            return
        if count == 1:
            differ = (torch.stack(first.numbers) != torch.stack(second.numbers)).any()
        else:
            differ = torch.stack([*map(self._far, first.kinds, first.numbers, second.numbers)]).any()
        self._open.setdefault(update, []).append((error, self._read(update, [differ])))
        if differ.device.type == "cpu":
            self.check(update)

    def check(self, update: int) -> None:
        """Reads the open comparisons of an update; errors as in `compare`."""
        for error, numbers in self._open.pop(update, ()):
            if any(numbers()):
                raise error

    def _far(
        self, kind: tuple[tuple[int, ...], torch.dtype], first: torch.Tensor, second: torch.Tensor
    ) -> torch.Tensor:
        """Whether two samples differ by more than rounding explains; differences that are NaN count as 0."""
        dtypes = {dtype for dtype in {kind[1], *self._dtypes} if dtype.is_floating_point or dtype.is_complex}
        tolerance = max(_TOLERANCES.get(dtype.to_real(), 5e-2) for dtype in dtypes)
        difference = (first - second).nan_to_num(0.0).abs().square().sum()
        return difference > tolerance**2 * first.nan_to_num(0.0).abs().square().sum()


def _tensors(values: Callable[[], Iterable[Any]]) -> list[torch.Tensor]:
    return [value.detach() for value in values() if isinstance(value, torch.Tensor)]


def _drop(_tensor: torch.Tensor) -> None:
    """Hook for saved tensors that drops what the graph would keep: the forward runs again before the backward."""


def _refuse(stage: int, _dropped: None) -> torch.Tensor:
    raise mistakes.backward_goes_past_its_forward(stage=stage)


def _needs_saved_tensors(error: BaseException | None) -> bool:
    """Whether an error says that a forward computes gradients itself; torch.func says so in the text alone."""
    while error is not None:
        if isinstance(error, mistakes.DroppedTensorNeeded):
            return True
        if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
            return True
        error = error.__cause__
    return False


def versions_of_arguments(arguments: ForwardArguments, target: Any) -> list[int]:
    """The version counters of the tensors that a run of a module, and then the loss, reads."""
    return versions_of(arguments.inputs, target, arguments.keywords, arguments.carry.tensors)


def versions_of(*values: Any) -> list[int]:
    """The version counters of the tensors in ``values``. Torch increases a counter when the tensor is written."""
    return [number for value in values if value is not None for number in versions(_tensors_of(value))]


def _tensors_of(value: Any) -> Sequence[torch.Tensor]:
    if type(value) is tuple and all(isinstance(element, torch.Tensor) for element in value):
        return value
    return () if type(value) is dict and not value else taken_apart(value)[0]
