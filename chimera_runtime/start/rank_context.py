"""`RankContext`: a rank's part of a program together with the model, as it is before the stages are made."""

from dataclasses import dataclass
from functools import cached_property

from chimera_runtime.data.micro_batch_source import MicroBatchSource
from chimera_runtime.model.model import Model
from chimera_runtime.model.ties import Tie, declared
from chimera_runtime.program.compiled_program import RankScript
from chimera_runtime.program.rank_facts import RankFacts
from chimera_runtime.ranks.world import World
from chimera_runtime.start.probe import ProbeResult


@dataclass(frozen=True)
class RankContext:
    """Everything that stages and a lane are made from, for ``--check`` and then again for the training itself.

    ``script`` and ``facts`` are this rank's part of the program: its generated file, and its entry in program.json.
    ``probed`` is what the probe has learned about each stage. ``source`` loads inputs, targets and keyword arguments of
    a micro-batch; it is None in a rehearsal, which loads no data. ``ranges`` says that stages, ties and links are
    wrapped for a profiler.
    """

    world: World
    script: RankScript
    facts: RankFacts
    model: Model
    probed: ProbeResult
    seed: int
    source: MicroBatchSource | None
    ranges: bool = False

    @cached_property
    def ties(self) -> tuple[Tie, ...]:
        """Parameters that stages share, as the model file declares them."""
        return declared(self.model, self.world.job)
