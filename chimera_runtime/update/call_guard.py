"""`CallGuard`: the checks before calls of a pipeline, which must not be closed or have failed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from chimera_runtime.blame import Located
from chimera_runtime.errors import Misuse
from chimera_runtime.errors.pipeline import PIPELINE_IS_CLOSED, UPDATE_HAS_FAILED, schedule_has_no_flush
from chimera_runtime.ranks.object_exchange import ObjectExchange
from chimera_runtime.ranks.world import World
from chimera_runtime.start.probe import ProbeResult
from chimera_runtime.update.updates import Updates

T = TypeVar("T")

_PATIENCE = 600.0
"""Smallest number of seconds that ranks wait for a rank whose modules return or load their state."""


@dataclass(frozen=True)
class CallGuard:
    """Checks made before the calls of a pipeline: refuses them once it is closed or has failed.

    Before calls that need complete updates, it completes those under way. ``located`` is the context in which the
    pipeline makes its calls: it notes whether a call has failed.
    """

    world: World
    probed: ProbeResult
    located: Located
    updates: Updates

    def require_sound(self) -> None:
        """Raises `Misuse` if the pipeline is closed or an update has failed, `PeerLost` if a wait has failed."""
        if self.located.closed:
            raise Misuse(PIPELINE_IS_CLOSED)
        if self.located.failed:
            raise Misuse(UPDATE_HAS_FAILED)
        with self.located:
            self.world.control_group.check()

    def require_flush(self, consequence: str) -> None:
        """Raises a Misuse unless the schedule has a flush; ``consequence`` says why a method needs one."""
        if self.world.job.period:
            raise schedule_has_no_flush(self.world.job.name, consequence)

    def finish(self) -> None:
        """Completes the updates that are under way; errors as in `require_sound`, and those of an update."""
        self.require_sound()
        with self.located, self.probed.generators_kept():
            self.updates.finish()

    def catch_up(self) -> None:
        """Completes the updates that are under way, and waits for the device to end them: then weights can be saved."""
        self.finish()
        with self.located:
            self.world.synchronize()

    def on_all_ranks(self, call: Callable[[], T]) -> T:
        """Makes a call on all ranks; returns this rank's result, or raises an error on all ranks if any call fails.

        After the error the pipeline can still be used.
        """

        def call_here() -> T:
            with self.located.for_loader():
                return call()

        control = self.world.control_group
        exchange = ObjectExchange(control.group, "the state of a pipeline", max(control.timeout, _PATIENCE))
        return exchange.on_all_ranks(call_here)
