"""Where a `Pipeline` lets tools take part: those of train.py check, measure, rehearse and record by these."""

from collections.abc import Callable, Sequence

import torch

from chimera_runtime.errors import PeerLost
from chimera_runtime.lane.lane import Lane
from chimera_runtime.ranks.monitor import end_process
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.stage import Stage
from chimera_runtime.start.rank_context import Setting
from chimera_runtime.update.outcome import Outcomes


class Hooks:
    """Points in the making of a `Pipeline`, in the order of the methods; here nothing happens at any of them.

    Attributes
    ----------
    measures
        Whether the memory that a forward of each stage keeps is measured at start.
    loads
        Whether data are loaded; a rehearsal needs none.
    explains
        Whether the error of a lost rank gets notes with what the ranks that were waited for wait for themselves. That
        takes seconds; tools that follow the waits themselves have no use for it.
    """

    measures = False
    loads = True
    explains = True

    def lost(self, error: PeerLost) -> None:
        """Ends this process: what it waits for does not come, and its main thread does not return. In a thread."""
        end_process(error)

    def ready(self, setting: Setting, modules: dict[int, torch.nn.Module]) -> None:
        """The modules of this rank are built and what they hand on is known; no buffers are allocated yet."""

    def stage_maker(self, setting: Setting) -> Callable[..., Stage]:
        """What makes the stages: it is called like `Stage`."""
        return Stage

    def lane(self, setting: Setting, stages: dict[int, Stage]) -> Lane:
        """What the rank's script is called with."""
        return setting.lane(setting.parts(stages))

    def outcomes(self, world: World, counted: bool, names: Sequence[str]) -> Outcomes:
        """What sums the losses of an update over the ranks: it is called like `Outcomes`."""
        return Outcomes(world, counted, names)
