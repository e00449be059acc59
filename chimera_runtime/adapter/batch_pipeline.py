"""`BatchPipeline`: the `Pipeline` behind a `CompiledSchedule`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from chimera_runtime.adapter.given_stages import CalledStage
from chimera_runtime.adapter.results import LossFactor, Result, Results
from chimera_runtime.data.evaluation_batches import EvaluationBatch
from chimera_runtime.data.micro_batch_source import CutBatch
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.ranks.gathering import gathered
from chimera_runtime.values.nested import to_device


class BatchPipeline(Pipeline):
    """A `Pipeline` of ``modules`` that exist already; the last stage puts losses and outputs into ``results``."""

    def __init__(
        self,
        directory: str | Path,
        modules: Mapping[int, CalledStage],
        batch: CutBatch,
        results: Results,
        **options: Any,
    ) -> None:
        def build_stage(stage: int, _stages: int) -> torch.nn.Module:
            return modules[stage]

        def name(stage: int, parameter: str) -> str:
            return f"stages.{stage}.{parameter.removeprefix('module.')}"

        super().__init__(directory, build_stage, results.judge, batch, name=name, **options)
        self._results = results
        self._run_round = self._inference.runner(results)

    def add_gradients(self, batch: CutBatch, factor: LossFactor) -> None:
        """Runs an update, and adds its gradients to those that parameters have already."""
        earlier = {p: p.grad.clone() for p in self.parameters() if p.grad is not None}
        for parameter in earlier:
            parameter.grad = None
        self.step(batch, scaler=factor)
        for parameter, gradient in earlier.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def run_forwards(self, batch: CutBatch) -> None:
        """Runs the forwards of a batch."""
        self._guard.require_sound()
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
