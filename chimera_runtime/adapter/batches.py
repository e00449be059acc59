"""Batches of a schedule of torch: cuts them into micro-batches as torch does, and merges outputs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.pipelining.microbatch import TensorChunkSpec, merge_chunks, split_args_kwargs_into_chunks
from torch.utils import _pytree as pytree

from chimera_runtime.data.micro_batch_source import CutBatch
from chimera_runtime.errors import Misuse
from chimera_runtime.errors import adapter as mistakes
from chimera_runtime.values.keywords import Keywords, Whole, cut_alone
from chimera_runtime.values.nested import is_mask


@dataclass(frozen=True)
class Cutting:
    """Says how batches are cut into ``micro_batches`` micro-batches, and how outputs are merged.

    ``args``, ``kwargs`` and ``outputs`` are the chunk specs of torch, or None. Where the compiled schedule cuts a
    micro-batch into ``parts``, each part counts as one of the micro-batches here.
    """

    micro_batches: int
    parts: int
    args: Any
    kwargs: Any
    outputs: Any

    def cut(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        arg_mbs: list[Any] | None,
        kwarg_mbs: list[Any] | None,
        target_mbs: list[Any] | None,
    ) -> "TorchBatch":
        """Returns a batch as micro-batches; inputs that are given as lists (``.._mbs``) are cut already.

        In the triple of a micro-batch, the target is a pair of the micro-batch's number and the target, and the keyword
        arguments have the number, too: `Results.judge` and `CalledStage` take them so.

        Keyword arguments that are declared as whole go to every micro-batch. Raises `Misuse` if a batch is given both
        whole and cut, does not have the right number of micro-batches, or has a tensor without dimensions to cut.
        """
        self._require_one_form("positional inputs", bool(args), "arg_mbs", arg_mbs)
        self._require_one_form("keyword arguments", bool(kwargs), "kwarg_mbs", kwarg_mbs)
        self._require_one_form("target", target is not None, "target_mbs", target_mbs)
        wholes = {str(name): value for name, value in kwargs.items() if isinstance(name, Whole)}
        kwargs = cut_alone(kwargs)
        rows = [*self._rows("input ", args, self.args), *self._rows("", kwargs, self.kwargs)]
        size = rows[0].size if args and rows else None  # keyword arguments alone do not say how many rows there are
        for argument in rows:  # with fewer rows torch would make fewer micro-batches of all
            is_short = argument.size is not None and argument.size < self.micro_batches and not argument.is_declared
            if argument.size is None or (is_short and argument.size != size):
                raise mistakes.argument_has_other_rows(argument.name, argument.shape, size)
        inputs, keywords = self._chunks(args, kwargs, self.args, self.kwargs)
        keywords = [{**of_micro, **wholes} for of_micro in keywords]
        targets = [None if not part else part[0] for part in self._chunks(() if target is None else (target,), {})[0]]
        triples = [
            (args, (micro, target), {"micro_batch": micro, "keywords": kwargs})
            for micro, (args, kwargs, target) in enumerate(
                zip(arg_mbs or inputs, kwarg_mbs or keywords, target_mbs or targets, strict=True)
            )
        ]
        return TorchBatch(triples, self.parts, tuple(rows), kwargs if self.kwargs is None else {})

    def merged(self, outputs: list[Any]) -> Any:
        """Returns the outputs of all micro-batches as one, as torch merges them."""
        return merge_chunks(outputs, self.outputs)

    def _chunks(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], args_spec: Any = None, kwargs_spec: Any = None
    ) -> tuple[list[Any], list[Any]]:
        if not args and not kwargs:
            return [()] * self.micro_batches, [{}] * self.micro_batches
        try:
            inputs, keywords = split_args_kwargs_into_chunks(args, kwargs, self.micro_batches, args_spec, kwargs_spec)
        except AssertionError as error:
            raise mistakes.batch_cannot_be_cut(self.micro_batches, str(error)) from error
        if len(inputs) != self.micro_batches:
            raise mistakes.batch_cannot_be_cut(self.micro_batches, f"it gives {len(inputs)}")
        return inputs, keywords

    def _rows(self, name: str, arguments: Any, specs: Any) -> Iterator["CutArgument"]:
        """Yields the tensors among positional or keyword arguments with the sizes along which they are cut."""
        flat = pytree.tree_flatten_with_path(arguments, is_leaf=is_mask)[0]
        chunked = [None] * len(flat) if specs is None else pytree.tree_leaves(specs)
        for (path, leaf), spec in zip(flat, chunked, strict=False):  # a spec of another form is refused by torch
            if isinstance(leaf, torch.Tensor) and (spec is None or isinstance(spec, TensorChunkSpec)):
                dimension = 0 if spec is None else spec.split_dim
                size = leaf.size(dimension) if leaf.dim() > dimension else None
                first, *inside = path
                place = f"{name}{getattr(first, 'key', getattr(first, 'idx', ''))}{pytree.keystr((*inside,))}"
                yield CutArgument(place, tuple(leaf.shape), size, spec is not None)

    def _require_one_form(self, name: str, is_given: bool, list_name: str, listed: list[Any] | None) -> None:
        if listed is None:
            return
        if is_given:
            raise mistakes.batch_is_given_twice(name, list_name)
        if len(listed) != self.micro_batches:
            raise mistakes.wrong_number_of_micro_batches(list_name, self.micro_batches, len(listed))


class CutArgument(NamedTuple):
    """A tensor that torch cuts along a dimension of this ``size``, because a chunk spec says so or by default."""

    name: str
    shape: tuple[int, ...]
    size: int | None
    is_declared: bool


@dataclass(frozen=True)
class TorchBatch(CutBatch):
    """A batch of a schedule of torch.

    ``cut`` are the tensors of this rank's inputs before they were cut, ``by_default`` the keyword arguments that no
    chunk spec was given for.
    """

    cut: tuple[CutArgument, ...] = ()
    by_default: Keywords = field(default_factory=dict)


def rows_of(arguments: Sequence[Sequence[CutArgument]]) -> int | None:
    """Returns the size along which the batch is cut, that of the first tensor on the first rank that has one."""
    return next((argument.size for of_rank in arguments for argument in of_rank), None)


def require_rows(arguments: Sequence[CutArgument], rows: int | None) -> None:
    """Raises `Misuse` if a tensor that is cut by default has another number of rows than the batch."""
    for argument in arguments:
        if not argument.is_declared and argument.size != rows:
            raise mistakes.argument_has_other_rows(argument.name, argument.shape, rows)


def has_inputs(batch: CutBatch) -> bool:
    """Whether a batch has positional inputs or keyword arguments."""
    args, _, keywords = batch.triples[0]
    return bool(args or keywords["keywords"])


def has_targets(batch: CutBatch) -> bool:
    """Whether a batch has targets."""
    return batch.triples[0][1][1] is not None


def require(batch: CutBatch, *, inputs: bool, targets: bool) -> None:
    """Raises `Misuse` if a batch lacks inputs or targets that this rank needs."""
    if inputs and not has_inputs(batch):
        raise Misuse(mistakes.INPUTS_ARE_MISSING)
    if targets and not has_targets(batch):
        raise Misuse(mistakes.TARGETS_ARE_MISSING)
