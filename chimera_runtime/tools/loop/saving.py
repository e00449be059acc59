"""``--save``, ``--resume``, ``--load`` and ``--export``, and what a SIGTERM or Ctrl-C makes of them."""

import argparse
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from chimera_runtime.checkpoint.checkpoints import Checkpoints
from chimera_runtime.checkpoint.stateful import Stateful
from chimera_runtime.errors import INTERRUPTED, TERMINATED, Misuse
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.state.exporting import require_writable
from chimera_runtime.update.outcome import Outcome


class Terminated(Exception):
    """A signal such as SIGTERM came, and what there was is saved; ``status`` is that of a rank which it ends."""

    def __init__(self, name: str, saved: str) -> None:
        super().__init__(f"{name}: {saved}")
        self.status = INTERRUPTED if name == "SIGINT" else TERMINATED


class Saving:
    """What the options say of files with weights, for the training loop.

    Parameters
    ----------
    say
        Tells the user something; on rank 0 alone.
    termination
        The name of the signal that has come to any rank, such as SIGTERM; None if the model file asked for the end.
    optimizers, schedulers
        Those of this rank.
    shared
        What else is resumed, the same on all ranks, as `Checkpoints` takes it: the position in the data.

    Attributes
    ----------
    is_over
        Whether training ends before its last update: a rank has called `Pipeline.ask_to_stop`.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        pipe: Pipeline,
        optimizers: Iterable[Any],
        schedulers: Sequence[Any],
        shared: Mapping[str, Stateful],
        say: Callable[[str], None],
        termination: Callable[[], str | None],
    ) -> None:
        self._options = options
        self._termination = termination
        self._pipe = pipe
        self._say = say
        self._checkpoints: Checkpoints | None = None
        self._outcomes: deque[Outcome] = deque()
        self._saved = -1
        self.is_over = False
        directory = options.save or options.resume
        if directory is not None:
            self._checkpoints = Checkpoints(
                directory,
                pipe,
                _saveable(optimizers),
                schedulers=schedulers,
                shared=shared,
                keep=options.keep,
            )

    def begin(self) -> None:
        """Takes the weights of ``--load``, then all of the checkpoint of ``--resume``.

        Raises
        ------
        BadCheckpoint, Misuse
            If that cannot be.
        """
        options = self._options
        if options.export is not None:
            require_writable(options.export)
        if options.load is not None:
            unknown = self._pipe.load_weights(options.load)
            if unknown:
                self._say(f"--load {options.load}: the model has no {', '.join(unknown)}")
        if options.resume is not None and self._checkpoints is not None:
            resumed = self._checkpoints.resume(options.resume)
            if resumed is None:
                self._say(f"--resume {options.resume}: no checkpoint there yet; the training begins")
            else:
                self._saved = resumed.update
                self._say(f"resumed from {resumed.path}, after update {resumed.update}, item {resumed.items}")
                for remark in resumed.remarks:
                    self._say(remark)
                if resumed.update >= (updates := options.steps) and not options.check_only:
                    self._say(f"nothing left to do: {resumed.update} of {updates} updates are done (--steps)")
        if options.save is not None and self._checkpoints is not None:
            self._checkpoints.claim()

    def is_due(self, outcome: Outcome | None) -> bool:
        """Whether it is time to save, after an update with this outcome.

        Whether training ends is learnt from the outcome before, so that nobody waits for this one.
        """
        if outcome is not None:
            self._outcomes.append(outcome)
        self.is_over = len(self._outcomes) > 1 and self._outcomes.popleft().is_last
        every = self._options.save_every
        return every is not None and self._pipe.updates % every == 0 and self._pipe.updates != self._options.steps

    def save(self) -> None:
        """Saves, unless that has been done since the last update."""
        if self._checkpoints is not None and self._saved != self._pipe.updates:
            self._checkpoints.save()
            self._saved = self._pipe.updates

    def end(self) -> None:
        """The training is over, as planned or because that was asked for: saves what there is.

        Raises
        ------
        Terminated
            If it ended for a signal.
        BadCheckpoint
            If something cannot be written.
        """
        options = self._options
        if options.save is not None and not options.check_only:
            self.save()
        if self._checkpoints is not None:
            self._checkpoints.close()
        if self.is_over and (name := self._termination()) is not None:
            raise Terminated(name, f"saved after update {self._pipe.updates} in {options.save}, for --resume")
        if options.export is not None:
            self._pipe.export_weights(options.export)
            self._say(f"exported to {options.export}")


def _saveable(optimizers: Iterable[Any]) -> list[torch.optim.Optimizer]:
    of_torch = list(optimizers)
    other = next((o for o in of_torch if not isinstance(o, torch.optim.Optimizer)), None)
    if other is not None:
        raise Misuse(f"a {type(other).__name__} cannot be saved: --save needs optimizers of torch.optim")
    return of_torch
