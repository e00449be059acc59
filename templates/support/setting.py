"""What a rank knows before it builds its stages."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from runtime import Lane
from support.batches import Batches
from support.compute import Stage
from support.job import RankScript
from support.model import Model
from support.nested import to_device
from support.probe import Findings
from support.world import World

Load = Callable[[int, int], Any]
Parts = tuple[Mapping[int, Any], Mapping[int, Any], Load, Load]


@dataclass(frozen=True)
class Setting:
    """The same for the check and for the training that follows it."""

    world: World
    script: RankScript
    options: argparse.Namespace
    model: Model
    batches: Batches
    findings: Findings

    @property
    def share(self) -> float:
        """What the loss of a micro-batch counts in that of its update, the mean over all copies."""
        return 1 / (self.world.job.passes * self.world.place.copies)

    def lane(self, stages: dict[int, Stage]) -> Lane:
        """What the rank's script is called with."""
        return Lane(*self.parts(stages))

    def parts(self, stages: dict[int, Stage]) -> Parts:
        """What a lane is made of: stages, peers, and how inputs and targets are loaded; a rehearsal loads no data."""
        peers = {worker: self.world.peer(worker) for worker in self.script.PEERS}
        if self.options.rehearse:
            return stages, peers, lambda _update, _micro: None, lambda _update, _micro: None
        device, batches = self.world.device, self.batches
        return (
            stages,
            peers,
            lambda update, micro: to_device(batches.input(update, micro), device),
            lambda update, micro: to_device(batches.target(update, micro), device),
        )
