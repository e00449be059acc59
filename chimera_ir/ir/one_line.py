"""The line that shows a level in a session of Python, in place of all its operations."""

from typing import TYPE_CHECKING

from chimera_ir.plural import counted

if TYPE_CHECKING:
    from chimera_ir.ir.levels import Header


class OneLine:
    """Base class of types with a header: their ``repr`` is a line with the type, the scheme and its size."""

    __slots__ = ()
    header: "Header"

    def __repr__(self) -> str:
        header = self.header
        numbers = (
            (header.workers, "worker"),
            (header.stages, "stage"),
            (header.micro_batches // header.parts, "micro-batch"),
        )
        sizes = ", ".join(counted(number, noun) for number, noun in numbers)
        return f"<{type(self).__name__} of {header.title}: {sizes}>"
