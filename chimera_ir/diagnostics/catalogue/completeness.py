"""CH302, CH303, CH318, CH329: what a micro-batch lacks on a stage, or has twice."""

from typing import ClassVar

from chimera_ir.diagnostics.catalogue.syntax import LIMITS
from chimera_ir.diagnostics.model import Diagnostic, Note
from chimera_ir.plural import and_more
from chimera_ir.source import Span


class Missing(Diagnostic):
    """A micro-batch lacks operations on a stage."""

    code: ClassVar[str] = "CH302"
    title: ClassVar[str] = "micro-batch {micro} has no {lacking} on stage {stage}{others}"
    label: ClassVar[str] = "pipe {pipe} runs stage {stage} on worker {worker}"
    help: ClassVar[str] = "add `{operations}` on worker {worker}: every micro-batch meets every stage once{directions}"

    pipe: str
    worker: int
    micro: int
    stage: int
    kinds: tuple[str, ...]
    operations: str
    directions: str
    count: int

    @property
    def lacking(self) -> str:
        """The nouns of the operations that are missing."""
        return " and no ".join(self.kinds)

    @property
    def others(self) -> str:
        """How many more are missing."""
        return and_more(self.count)


class Skipped(Missing):
    """A micro-batch has no operation at all on a stage."""

    code: ClassVar[str] = "CH329"
    help: ClassVar[str] = Missing.help + f"; no stage can be skipped; see {LIMITS}"


class Duplicate(Diagnostic):
    """Two places of a schedule have the same operation."""

    code: ClassVar[str] = "CH303"
    title: ClassVar[str] = "`{operation}` is there twice{others}"
    label: ClassVar[str] = "the second, on worker {worker}"
    help: ClassVar[str] = "keep one of the two: every micro-batch meets every stage once{directions}"

    operation: str
    worker: int
    first_worker: int
    first_span: Span
    directions: str
    count: int

    @property
    def others(self) -> str:
        """How many more operations these two lines repeat."""
        return and_more(self.count)

    def notes(self) -> tuple[Note, ...]:
        """The first of the two."""
        return (Note(f"the first is on worker {self.first_worker}", self.first_span),)


class DoneTwice(Diagnostic):
    """Two kinds of operations do the same for a micro-batch, as a backward and an input gradient do."""

    code: ClassVar[str] = "CH318"
    title: ClassVar[str] = "`{operation}` does again what `{first}` does{others}"
    label: ClassVar[str] = "on worker {worker}"
    help: ClassVar[str] = "on each stage a micro-batch has either one `B`, or one `I` and one `W`"

    operation: str
    first: str
    worker: int
    first_worker: int
    first_span: Span
    count: int

    @property
    def others(self) -> str:
        """How many more operations of these two lines do the same."""
        return and_more(self.count)

    def notes(self) -> tuple[Note, ...]:
        """The first of the two."""
        return (Note(f"`{self.first}` is on worker {self.first_worker}", self.first_span),)
