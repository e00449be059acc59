"""`BatchPipeline`: the `Pipeline` behind a `CompiledSchedule`."""

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from chimera_runtime.adapter.batches import TorchBatch, require_rows, rows_of
from chimera_runtime.adapter.given_stages import CalledStage
from chimera_runtime.adapter.results import LossFactor, Result, Results
from chimera_runtime.data.evaluation_batches import EvaluationBatch
from chimera_runtime.data.micro_batch_source import CutBatch
from chimera_runtime.errors.adapter import argument_looks_like_borders
from chimera_runtime.errors.check import module_cannot_be_sent
from chimera_runtime.model.model import Model
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.ranks.gathering import Enquiry, gathered
from chimera_runtime.ranks.object_exchange import ObjectExchange
from chimera_runtime.ranks.refusals import Refusals
from chimera_runtime.values.keywords import borders_in
from chimera_runtime.values.last_stage import alone
from chimera_runtime.values.nested import to_device


class BatchPipeline(Pipeline):
    """A `Pipeline` of ``modules`` that exist already; the last stage puts losses and outputs into ``results``."""

    def __init__(
        self,
        directory: str | Path,
        modules: Mapping[int, CalledStage],
        batch: TorchBatch,
        results: Results,
        **options: Any,
    ) -> None:
        def build_stage(stage: int, _stages: int) -> torch.nn.Module:
            return modules[stage]

        def name(stage: int, parameter: str) -> str:
            return f"stages.{stage}.{parameter.removeprefix('module.')}"

        self.rows: int | None = None
        self._rising: list[str] = []
        super().__init__(directory, build_stage, results.loss, batch, name=name, **options)
        self._results = results
        self._add_remarks(map(argument_looks_like_borders, self._rising))
        self._sent: dict[int, Any] = {}
        self._run_round = self._inference.runner(results)

    @property
    def refusals(self) -> Refusals:
        """Refusals of all ranks."""
        return self._world.control_group.refusals

    def _compare_example(self, example: Any) -> None:
        """Raises `Misuse` on all ranks if on any of them a tensor that is cut by default has not the batch's rows."""
        control = self._world.control_group
        exchange = ObjectExchange(control.group, "the inputs of a batch", control.timeout)
        arguments, rising = zip(*exchange.all_gather((example.cut, borders_in(example.by_default))), strict=True)
        self._rising = [*dict.fromkeys(name for name in rising if name is not None)]
        first = self._world.job.holders[0][0]
        self.rows = rows_of([arguments[first], *arguments])
        for of_rank in arguments:
            require_rows(of_rank, self.rows)

    def add_gradients(self, batch: CutBatch, factor: LossFactor) -> None:
        """Runs an update, and adds its gradients to those that parameters have already."""
        earlier = {p: p.grad.clone() for p in self.parameters() if p.grad is not None}
        for parameter in earlier:
            parameter.grad = None
        self.step(batch, scaler=factor)
        for parameter, gradient in earlier.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def check_batch(self, batch: CutBatch) -> str:
        """Checks the pipeline on a batch: see `Pipeline.check`. Rank 0 gets copies of the modules of all stages."""
        self._sent = self._guard.on_all_ranks(lambda: self._packed(batch))
        try:
            return self.check(batch)
        finally:
            self._sent = {}
            self._results.clear()

    def _packed(self, batch: CutBatch) -> dict[int, Any]:
        """What rank 0 needs of each stage of this rank: the module as bytes, and its keyword arguments."""
        given = [keywords["keywords"] for _, _, keywords in batch.triples]
        packed: dict[int, Any] = {}
        for number, module in self._modules.items():
            content = io.BytesIO()
            try:
                torch.save(alone(module), content)
            except Exception as error:
                raise module_cannot_be_sent(number, f"{type(error).__name__}: {error}") from error
            packed[number] = torch.frombuffer(bytearray(content.getvalue()), dtype=torch.uint8), given
        return packed

    def _check_answers(self) -> dict[str, Callable[..., Any]]:
        return {"module": self._sent.__getitem__, "loss": lambda: self._results.loss_kwargs}

    def _model_alone(self, enquiry: Enquiry) -> Model:
        def holder(stage: int) -> int:
            return self._world.place.ranks_of(self.job.holders[stage])[0]

        def build_stage(stage: int, _stages: int) -> torch.nn.Module:
            content, given = enquiry.ask(holder(stage), "module", stage)
            module: CalledStage = torch.load(io.BytesIO(content.numpy().tobytes()), "cpu", weights_only=False)
            module.given = to_device(given, self._world.device)
            return module

        self._results.loss_kwargs = enquiry.ask(holder(self.job.stages - 1), "loss")
        return replace(self._context.model, build_stage=build_stage)

    def run_forwards(self, batch: CutBatch) -> None:
        """Runs the forwards of a batch."""
        self._guard.require_sound()
        self.refusals.note_sending()
        self._run_round(EvaluationBatch([1] * len(batch.triples), batch.triples.__getitem__))

    def take_results(self) -> list[Result]:
        """Removes and returns the results of all micro-batches of the batch, in order.

        Where several ranks hold the last stage, each gets the results of all of them. These ranks must all call it, and
        no other rank may.
        """
        results, workers = dict(self._results.by_micro), self.job.holders[-1]
        self._results.clear()
        if len(workers) > 1:
            with self._located:
                others = gathered(self._world.control_group, workers, results, everywhere=False)
            results = to_device(others, self._world.device) | results
        return [results[micro] for micro in sorted(results)]
