"""``--save``, ``--resume``, ``--load`` and ``--export``, and the checkpoint at a SIGTERM or Ctrl-C."""

import argparse
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from chimera_runtime.checkpoint.checkpoints import Checkpoints
from chimera_runtime.checkpoint.entries import Stateful
from chimera_runtime.errors import INTERRUPTED, TERMINATED
from chimera_runtime.errors.state import weights_cannot_be_written
from chimera_runtime.errors.tools import optimizer_cannot_be_saved
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.state.exporting import require_writable
from chimera_runtime.update.outcome import Outcome


class Terminated(Exception):
    """End of a run after a signal such as SIGTERM, once a checkpoint is saved; ``status`` is that of the rank."""

    def __init__(self, name: str, update: int, directory: Path) -> None:
        super().__init__(f"{name}: saved after update {update} in {directory}, for --resume")
        self.status = INTERRUPTED if name == "SIGINT" else TERMINATED


@dataclass
class Saving:
    """Reads and writes weights and checkpoints for the training loop, as the options ask.

    ``write`` writes a line for the user; on other ranks than 0 it does nothing. ``termination`` returns the name of the
    signal that has come to any rank, such as SIGTERM, or None. ``shared`` are further objects that `Checkpoints` saves,
    with a state that is the same on all ranks, such as the position in the data. ``reserve`` refuses the path of an
    option if another job will write it. If ``--export`` names a directory,
    ``describe`` writes all files there except the weights; it is None if ``--export`` names a file. ``is_over`` says
    that training ends before its last update, because a rank has called `Pipeline.ask_to_stop`.
    """

    options: argparse.Namespace
    pipe: Pipeline
    optimizers: Iterable[Any]
    schedulers: Sequence[Any]
    shared: Mapping[str, Stateful]
    write: Callable[[str], None]
    termination: Callable[[], str | None]
    reserve: Callable[[str, Path], None]
    describe: Callable[[Path], None] | None = None
    is_over: bool = False
    _checkpoints: Checkpoints | None = None
    _outcomes: deque[Outcome] = field(default_factory=deque)
    _saved: int = -1

    def __post_init__(self) -> None:
        if (directory := self.options.save or self.options.resume) is not None:
            optimizers, keep = _saveable(self.optimizers), self.options.keep
            self._checkpoints = Checkpoints(
                directory, self.pipe, optimizers, schedulers=self.schedulers, shared=self.shared, keep=keep
            )

    def begin(self) -> None:
        """Loads the weights of ``--load``, then everything from the checkpoint of ``--resume``.

        Raises `BadCheckpoint` or `Misuse` if either cannot be loaded, or ``--save`` or ``--export`` cannot be written
        later.
        """
        options = self.options
        if options.export is not None:
            if self.describe is not None:
                _make_directory(options.export)
            require_writable(self._exported)
            self.reserve("--export", self._exported)
        if options.load is not None:
            unknown = self.pipe.load_weights(options.load)
            if unknown:
                self.write(f"--load {options.load}: the model has no {', '.join(unknown)}")
        if options.resume is not None and self._checkpoints is not None:
            resumed = self._checkpoints.resume(options.resume)
            if resumed is None:
                self.write(f"--resume {options.resume}: no checkpoint there yet; the training begins")
            else:
                self._saved = resumed.update
                self.write(f"resumed from {resumed.path}, after update {resumed.update}, item {resumed.items}")
                for remark in resumed.remarks:
                    self.write(remark)
                if resumed.update >= (updates := options.steps) and not options.check_only:
                    self.write(f"nothing left to do: {resumed.update} of {updates} updates are done (--steps)")
        if options.save is not None and self._checkpoints is not None:
            self._checkpoints.claim()

    @property
    def _exported(self) -> Path:
        """The file of ``--export``."""
        path: Path = self.options.export
        return path if self.describe is None else path / "model.safetensors"

    def is_due(self, outcome: Outcome | None) -> bool:
        """Whether to save now, after the update with this outcome.

        Also sets `is_over`. For that it reads the outcome of the update before: reading the newest one would wait for
        the slowest rank.
        """
        if outcome is not None:
            self._outcomes.append(outcome)
        self.is_over = len(self._outcomes) > 1 and self._outcomes.popleft().is_last
        every = self.options.save_every
        return every is not None and self.pipe.updates % every == 0 and self.pipe.updates != self.options.steps

    def save(self) -> None:
        """Saves, unless there is a checkpoint of the last update already."""
        if self._checkpoints is not None and self._saved != self.pipe.updates:
            self._checkpoints.save()
            self._saved = self.pipe.updates

    def end(self) -> None:
        """Saves and exports at the end of training, whether it was planned or asked for.

        Raises `Terminated` if training ended after a signal. Raises `BadCheckpoint` if a file cannot be written.
        """
        options = self.options
        if options.save is not None and not options.check_only:
            self.save()
        if self._checkpoints is not None:
            self._checkpoints.close()
        if self.is_over and (name := self.termination()) is not None:
            raise Terminated(name, self.pipe.updates, options.save)
        if options.export is not None:
            self.pipe.export_weights(self._exported)
            if self.describe is not None and self.pipe.copy == self.pipe.worker == 0:
                self.describe(options.export)
            self.write(f"exported to {options.export}")


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise weights_cannot_be_written(path, str(error.strerror)) from error


def _saveable(optimizers: Iterable[Any]) -> list[torch.optim.Optimizer]:
    of_torch = list(optimizers)
    other = next((o for o in of_torch if not isinstance(o, torch.optim.Optimizer)), None)
    if other is not None:
        raise optimizer_cannot_be_saved(type(other).__name__)
    return of_torch
