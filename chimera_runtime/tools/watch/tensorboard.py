"""``--tensorboard DIR``: what the log says of updates, as curves of TensorBoard."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from chimera_runtime.errors import Misuse, Unwritable

_FLUSHED_EVERY = 10
"""Seconds."""


class TensorBoard:
    """Adds scalars to a directory by ``torch.utils.tensorboard``, in the background.

    Raises
    ------
    Misuse
        If the package tensorboard, which torch needs for it, is not installed.
    Unwritable
        If the directory cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise Misuse(
                f"--tensorboard needs a package that is not there ({error}): pip install tensorboard; --log-file "
                "writes the same numbers without it"
            ) from error
        try:
            self._writer: Any = SummaryWriter(str(directory), flush_secs=_FLUSHED_EVERY)
        except OSError as error:
            raise Unwritable(f"--tensorboard {directory}: {error.strerror}") from error
        self._directory = directory
        self._failed: OSError | None = None

    def add(self, facts: Mapping[str, Any]) -> None:
        """What a line of the log says of an update, each number a scalar; after one that fails no further is tried."""
        if self._failed is not None:
            return
        try:
            for tag, number in scalars(facts):
                self._writer.add_scalar(tag, number, facts["update"])
        except OSError as error:
            self._failed = error

    def keep(self) -> None:
        """As `close`, as far as possible."""
        with suppress(Unwritable):
            self.close()

    def close(self) -> None:
        """Writes what is still in memory; nothing more is to come.

        Raises
        ------
        Unwritable
            If something could not be written.
        """
        try:
            self._writer.close()
        except OSError as error:
            self._failed = self._failed or error
        if self._failed is not None:
            raise Unwritable(f"--tensorboard {self._directory}: {self._failed.strerror}")


def scalars(facts: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers in a line of the log, each with its tag.

    A learning rate is ``learning_rates/0`` of stage 0, and ``learning_rates/0/1`` if its optimizer has several groups
    of parameters. A loss that is no finite number is a point as well, which TensorBoard marks.
    """
    for name, value in facts.items():
        if isinstance(value, Mapping):
            for stages, rates in value.items():
                for group, rate in enumerate(rates):
                    yield f"{name}/{stages}{f'/{group}' if len(rates) > 1 else ''}", rate
        elif name != "update" and value is not None:
            yield name, value
