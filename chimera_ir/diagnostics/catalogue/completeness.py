"""CH302, CH303, CH318, CH329: operations that a micro-batch lacks on a stage, or has twice."""

from chimera_ir.diagnostics.catalogue.syntax import LIMITS
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.source import Span


class Missing(Diagnostic, code="CH302"):
    """A micro-batch lacks operations on a stage."""

    title = "micro-batch {micro} has no {lacking} on stage {stage}{count:and more}"
    label = "pipe {pipe} runs stage {stage} on worker {worker}"
    help = "add `{operations}` on worker {worker}: every micro-batch meets every stage once{directions}"
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
        """The missing operations in words, as in ``forward and no backward``."""
        return " and no ".join(self.kinds)


class Skipped(Missing, code="CH329"):
    """A micro-batch has no operation at all on a stage."""

    help = Missing.help + f"; no stage can be skipped; see {LIMITS}"


class Duplicate(Diagnostic, code="CH303"):
    """Two places of a schedule have the same operation."""

    title = "`{operation}` is there twice{count:and more}"
    label = "the second, on worker {worker}"
    help = "keep one of the two: every micro-batch meets every stage once{directions}"
    related = ("first_span", "the first is on worker {first_worker}")
    operation: str
    worker: int
    first_worker: int
    first_span: Span
    directions: str
    count: int


class DoneTwice(Diagnostic, code="CH318"):
    """Two operations of different kinds do the same for a micro-batch, such as a backward and an input gradient."""

    title = "`{operation}` does again what `{first}` does{count:and more}"
    label = "on worker {worker}"
    help = "on each stage a micro-batch has either one `B`, or one `I` and one `W`"
    related = ("first_span", "`{first}` is on worker {first_worker}")
    operation: str
    first: str
    worker: int
    first_worker: int
    first_span: Span
    count: int
