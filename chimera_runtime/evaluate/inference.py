"""Inference between updates: the work of `Pipeline.evaluate` and `Pipeline.predict`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from chimera_runtime.blame import Located
from chimera_runtime.errors import Misuse
from chimera_runtime.errors.evaluate import NOTHING_TO_EVALUATE, PREDICTIONS_HAVE_NO_ITEMS
from chimera_runtime.evaluate.evaluation import Evaluation, LossTotal, OutputStore
from chimera_runtime.ranks.gathering import added_over_all, gathered
from chimera_runtime.stage.stage import Stage
from chimera_runtime.start.rank_context import RankContext
from chimera_runtime.start.stage_probe import state_of
from chimera_runtime.start.varying_shapes import VaryingShapes
from chimera_runtime.values.losses import Tally
from chimera_runtime.values.nested import is_rows, joined
from chimera_runtime.values.tensors import all_generators_kept


@dataclass(frozen=True)
class Inference:
    """Computes losses and outputs of the stages. Call it only while no update is under way.

    Random generators, and the buffers and attributes of modules, are restored afterwards. ``size`` is the number of
    items of a micro-batch. After an error inside ``located`` the pipeline refuses further calls. ``varying`` is as in
    `Evaluation`.
    """

    context: RankContext
    stages: Mapping[int, Stage]
    size: int
    located: Located
    varying: VaryingShapes | None = None

    def mean_loss(self, batches: Iterable[Any]) -> float:
        """Returns the mean loss over all items in the batches of all copies, the same on every rank.

        Raises `Misuse` if a batch has none of the forms of `evaluation_batches`, or there is no item at all. Raises
        `BadModel`, `ModelError` or `PeerLost` if a forward or a message fails.
        """
        losses = LossTotal(self.context.model.judge)
        evaluation = self._evaluation(losses)
        with self._unchanged():
            for batch in batches:
                for micro_batches in evaluation.evaluation_batches(batch):
                    with self.located, all_generators_kept():
                        evaluation.run(micro_batches)
        with self.located:
            control_group = self.context.world.control_group
            items, total, count = added_over_all(control_group, losses.items, losses.total, losses.count)
        if not items:
            raise Misuse(NOTHING_TO_EVALUATE)
        return Tally(total, count).mean

    def predictor(self) -> Callable[[Any], Any]:
        """Returns a function from a batch to the outputs of the last stage, on the CPU.

        Every rank of the copy calls the function and gets the outputs. It raises the errors of `mean_loss`, and
        `Misuse` if outputs cannot be joined along dimension 0.
        """
        world, store = self.context.world, OutputStore()
        evaluation = self._evaluation(store)

        def outputs_of(batch: Any) -> Any:
            outputs: list[Any] = []
            for micro_batches in evaluation.evaluation_batches(batch):
                with self.located, all_generators_kept(), self._unchanged():
                    evaluation.run(micro_batches)
                    outputs += gathered(world.control_group, world.job.holders[-1], store.take()).values()
            if not all(map(is_rows, outputs)):
                raise Misuse(PREDICTIONS_HAVE_NO_ITEMS)
            return joined(outputs)

        return outputs_of

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Context at whose end the buffers and attributes of the stages are restored."""
        states = [state_of(stage.module) for stage in self.stages.values()]
        yield
        for state, before in states:
            state.restore(before)

    def _evaluation(self, output: LossTotal | OutputStore) -> Evaluation:
        return Evaluation(self.context, self.stages, self.size, output, varying=self.varying)
