"""Errors of a compilation; ``str()`` of an error is the whole message, ready to be shown."""

from collections.abc import Iterable

from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.diagnostics.render import render_all
from chimera_ir.plural import counted
from chimera_ir.source import Source


class CompileError(Exception):
    """An error in a text or in an option; the base class of all errors of the Python interface."""


class TextError(CompileError):
    """Errors in texts: a scheme, an IR text or a schedule of torch, a profile, a cluster.

    ``texts`` has each text with its errors.
    """

    def __init__(self, texts: Iterable[tuple[Source, tuple[Diagnostic, ...]]]) -> None:
        self.texts = tuple(texts)
        super().__init__(self.texts)

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """The errors of all texts."""
        return tuple(diagnostic for _, diagnostics in self.texts for diagnostic in diagnostics)

    def rendered(self, color: bool = False) -> str:
        """The errors with their places and help; with ``color``, in the colours of a terminal."""
        return "\n\n".join(render_all(diagnostics, source, color) for source, diagnostics in self.texts)

    def __str__(self) -> str:
        return self.rendered()


class ParameterError(CompileError):
    """A parameter has a value that it cannot have."""


class OptionError(CompileError):
    """An option has a value that it cannot have, or conflicts with another option."""


class WrongOption(OptionError):
    """An option that does not go with what is compiled.

    The message is the option's name, as in `Options`, and ``problem``.
    """

    def __init__(self, option: str, problem: str) -> None:
        self.option, self.problem = option, problem
        super().__init__(option, problem)

    def __str__(self) -> str:
        return f"{self.option}{self.problem}"


class NoSuchTie(OptionError):
    """A tie names a stage that the scheme does not have, or one stage alone."""

    def __init__(self, tie: str, problem: str) -> None:
        self.tie, self.problem = tie, problem
        super().__init__(tie, problem)

    def __str__(self) -> str:
        return f"tied: {self.tie}: {self.problem}"


class Incomparable(WrongOption):
    """The text to compare with cannot be compiled for as many workers and micro-batches."""


class NotProven(WrongOption):
    """The text of a program is not proven to finish with the communicators that are asked for."""


class NotInTorch(WrongOption):
    """The schedule is not one that torch.distributed.pipelining can run."""


class UnreadableText(CompileError):
    """A file cannot be read, or the library has no scheme of that name."""


class NoSuchLevel(CompileError):
    """The level that is asked for comes before the one that the IR text has."""

    def __init__(self, text: str, level: str) -> None:
        self.text, self.level = text, level
        super().__init__(text, level)

    def __str__(self) -> str:
        return f"{self.text} enters below the level {self.level}; ask for a later one"


class DoesNotFit(CompileError):
    """A worker needs more memory than the cluster file says it has, and `Options.require_fit` asks for a fit."""

    def __init__(self, text: str, worker: int, needed: int, available: int) -> None:
        self.text, self.worker, self.needed, self.available = text, worker, needed, available
        super().__init__(text, worker, needed, available)

    def __str__(self) -> str:
        needs = f"worker {self.worker} needs {self.needed:,} bytes, and the cluster file has {self.available:,} for it"
        return f"{self.text} does not fit: {needs}"


class TooLarge(CompileError):
    """An IR text, or the baseline of the report, is larger than a limit."""


class AboveMaxOperations(TooLarge):
    """A schedule has more operations than the limit, which the user may raise."""

    def __init__(self, what: str, operations: int, limit: int) -> None:
        self.what, self.operations, self.limit = what, operations, limit
        super().__init__(what, operations, limit)

    @property
    def excess(self) -> str:
        """The number of operations and the limit, as a sentence."""
        return f"{self.what} has {counted(self.operations, 'operation')}, and the limit is {self.limit:,}"

    def __str__(self) -> str:
        return f"{self.excess}; options=Options(max_operations={self.operations}) raises it"


class ProgramsDiffer(CompileError):
    """Programs for several numbers of micro-batches cannot share a directory: they differ in more than the number."""


class NotFitted(CompileError):
    """No scheme with formulas of the forms that are tried has these orders; the message says what does not fit."""
