"""Forwards between updates: what `Pipeline.evaluate` and `Pipeline.predict` do."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from chimera_runtime.blame import Located
from chimera_runtime.errors import Misuse
from chimera_runtime.evaluate.evaluation import Evaluation, Keeping, Weighing
from chimera_runtime.ranks.gathering import added_over_all, gathered
from chimera_runtime.stage.stage import Stage
from chimera_runtime.start.probe import state_of
from chimera_runtime.start.rank_context import Setting
from chimera_runtime.start.varying_shapes import Lengths
from chimera_runtime.values.losses import Tally
from chimera_runtime.values.nested import is_rows, joined
from chimera_runtime.values.tensors import all_generators_kept


class Inference:
    """Loss and outputs of the stages as they are while no update is under way.

    Generators and what modules hold beside their weights, buffers and attributes, are as before afterwards.

    Parameters
    ----------
    size
        The items of a micro-batch.
    located
        The context of what the pipeline runs: after an error inside nothing more runs on it.
    lengths
        Of a pipeline whose updates may have several shapes.
    """

    def __init__(
        self, setting: Setting, stages: Mapping[int, Stage], size: int, located: Located, lengths: Lengths | None = None
    ) -> None:
        self._setting = setting
        self._stages = stages
        self._size = size
        self._located = located
        self._lengths = lengths

    def mean_loss(self, batches: Iterable[Any]) -> float:
        """The mean loss over all items of this copy's batches and those of the others: the same on every rank.

        Raises
        ------
        Misuse
            If a batch has none of the forms of `evaluation_batches`, or there is no item at all.
        BadModel, ModelError, PeerLost
            If a forward or a message fails.
        """
        weighing = Weighing(self._setting.model.judge)
        evaluation = self._evaluation(weighing)
        with self._unchanged():
            for batch in batches:
                for of in evaluation.evaluation_batches(batch):
                    with self._located, all_generators_kept():
                        evaluation.run(of)
        with self._located:
            control = self._setting.world.control_group
            items, total, count = added_over_all(control, weighing.items, weighing.total, weighing.count)
        if not items:
            raise Misuse("there is nothing to evaluate: no batch was given")
        return Tally(total, count).mean

    def predictor(self) -> Callable[[Any], Any]:
        """A function from a batch to the outputs of the last stage, on every rank of the copy, on the CPU.

        It raises what `mean_loss` does; Misuse also if the outputs have no dimension 0 to put them together along.
        """
        world, keeping = self._setting.world, Keeping()
        evaluation = self._evaluation(keeping)

        def outputs_of(batch: Any) -> Any:
            outputs: list[Any] = []
            for of in evaluation.evaluation_batches(batch):
                with self._located, all_generators_kept(), self._unchanged():
                    evaluation.run(of)
                    outputs += gathered(world.control_group, world.job.holders[-1], keeping.take()).values()
            if not all(map(is_rows, outputs)):
                raise Misuse("the last stage returns something else than tensors with the items in dimension 0")
            return joined(outputs)

        return outputs_of

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Afterwards the stages hold what they held before, beside their weights."""
        states = [state_of(stage.module) for stage in self._stages.values()]
        yield
        for state, before in states:
            state.restore(before)

    def _evaluation(self, last: Weighing | Keeping) -> Evaluation:
        return Evaluation(self._setting, self._stages, self._size, last, self._lengths)
