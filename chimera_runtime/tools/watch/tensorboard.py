"""``--tensorboard DIR``: the numbers of the log as curves of TensorBoard."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from chimera_runtime.errors import Unwritable
from chimera_runtime.errors import tools as mistakes

_FLUSHED_EVERY = 10
"""Seconds between writes to the disk."""


class TensorBoard:
    """Adds scalars to a directory by ``torch.utils.tensorboard``, in the background.

    Raises `Misuse` if the package tensorboard, which torch uses, is not installed. Raises `Unwritable` if the directory
    cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise mistakes.package_is_missing(f"{error}") from error
        self._directory = directory
        with self._refusing():
            self._writer: Any = SummaryWriter(str(directory), flush_secs=_FLUSHED_EVERY)

    def add(self, facts: Mapping[str, Any]) -> None:
        """Adds each number in a line of the log as a scalar. Raises `Unwritable` if a number cannot be written."""
        with self._refusing():
            for tag, number in scalars(facts):
                self._writer.add_scalar(tag, number, facts["update"])

    def keep(self) -> None:
        """Writes and ends as `close` does, without its errors; called when the run ends early."""
        with suppress(Unwritable):
            self.close()

    def close(self) -> None:
        """Writes the numbers that are still in memory, and ends; errors as in `add`."""
        with self._refusing():
            self._writer.close()

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise mistakes.file_cannot_be_written("--tensorboard", self._directory, error.strerror) from error


def scalars(facts: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the numbers in a line of the log, each with its tag.

    The tag of a report is ``reports/accuracy``. The tag of a learning rate is ``learning_rates/0`` for stage 0, and
    ``learning_rates/0/1`` if its optimizer has several groups of parameters. A loss that is not a finite number is a
    point as well, which TensorBoard marks.
    """
    for name, value in facts.items():
        if isinstance(value, Mapping):
            for stages, rates in value.items():
                if not isinstance(rates, list):
                    yield f"{name}/{stages}", math.nan if rates is None else rates
                    continue
                for group, rate in enumerate(rates):
                    yield f"{name}/{stages}{f'/{group}' if len(rates) > 1 else ''}", rate
        elif name != "update" and value is not None:
            yield name, value
