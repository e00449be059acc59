"""`Hooks`: functions that tools give a `Pipeline` to call; by them train.py checks, measures and records."""

import logging
from collections.abc import Callable

import torch

from chimera_runtime.errors import PeerLost, visible
from chimera_runtime.lane.lane import LaneComponents
from chimera_runtime.program.job import Job
from chimera_runtime.ranks.monitor import end_process
from chimera_runtime.stage.stage import Stage
from chimera_runtime.start.rank_context import RankContext
from chimera_runtime.update.outcome import Outcomes

_LOG = logging.getLogger("chimera_runtime")


class Hooks:
    """Functions that `Pipeline` calls while it is made. A tool overrides some of them; the rest keep the defaults here.

    ``measures`` says whether the memory that a forward of each stage keeps is measured at start. ``loads`` says whether
    data are loaded: a rehearsal needs none. ``explains`` says whether the error of a lost rank gets notes about the
    waits of other ranks. The notes take seconds to collect; a tool that follows all waits itself does without them.
    """

    measures = False
    loads = True
    explains = True

    def lost(self, error: PeerLost) -> None:
        """Called in a thread when a rank does not answer: ends this process, as its main thread would wait for ever."""
        end_process(error)

    def ready(self, context: RankContext, modules: dict[int, torch.nn.Module]) -> None:
        """Called when modules are built and probed, before any buffer is allocated."""

    def remark(self, remark: str) -> None:
        """Called on the first rank with each of `Pipeline.remarks`; gives it to the logger ``chimera_runtime``."""
        _LOG.warning("%s", visible(remark))

    def stage_maker(self, job: Job) -> Callable[..., Stage]:
        """Returns a function that makes a stage from the arguments of `Stage`."""
        return Stage

    def wrapped(self, components: LaneComponents, stages: dict[int, Stage]) -> LaneComponents:
        """Returns the components of the lane; a tool may return wrappers that record their calls."""
        return components

    def outcomes_class(self, job: Job) -> type[Outcomes]:
        """Returns the class of the pipeline's `Outcomes`."""
        return Outcomes
