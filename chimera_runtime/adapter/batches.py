"""Batches of a schedule of torch: cuts them into micro-batches as torch does, and merges outputs."""

from dataclasses import dataclass
from typing import Any

from torch.distributed.pipelining.microbatch import merge_chunks, split_args_kwargs_into_chunks

from chimera_runtime.data.micro_batch_source import CutBatch
from chimera_runtime.data.mini_batch import Triple
from chimera_runtime.errors import Misuse
from chimera_runtime.errors import adapter as mistakes


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
    ) -> CutBatch:
        """Returns a batch as micro-batches; inputs that are given as lists (``.._mbs``) are cut already.

        In the triple of a micro-batch, the target is a pair of the micro-batch's number and the target, and the keyword
        arguments have the number, too: `Results.judge` and `CalledStage` take them so.

        Raises `Misuse` if a batch is given both whole and cut, or does not have the right number of micro-batches.
        """
        self._require_one_form("positional inputs", bool(args), "arg_mbs", arg_mbs)
        self._require_one_form("keyword arguments", bool(kwargs), "kwarg_mbs", kwarg_mbs)
        self._require_one_form("target", target is not None, "target_mbs", target_mbs)
        inputs, keywords = self._chunks(args, kwargs, self.args, self.kwargs)
        targets = [None if not part else part[0] for part in self._chunks(() if target is None else (target,), {})[0]]
        triples: list[Triple] = [
            (args, (micro, target), {"micro_batch": micro, "keywords": kwargs})
            for micro, (args, kwargs, target) in enumerate(
                zip(arg_mbs or inputs, kwarg_mbs or keywords, target_mbs or targets, strict=True)
            )
        ]
        return CutBatch(triples, self.parts)

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

    def _require_one_form(self, name: str, is_given: bool, list_name: str, listed: list[Any] | None) -> None:
        if listed is None:
            return
        if is_given:
            raise mistakes.batch_is_given_twice(name, list_name)
        if len(listed) != self.micro_batches:
            raise mistakes.wrong_number_of_micro_batches(list_name, self.micro_batches, len(listed))


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
