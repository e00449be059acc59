"""The list of library schemes that ``chimera compile --list`` prints."""

from pathlib import Path

from chimera_ir import errors, library
from chimera_ir.diagnostics.model import Rejected
from chimera_ir.escapes import visible


def listed_library(further: tuple[Path, ...]) -> str:
    """A line for each scheme, of the library and of ``further`` directories: its name, parameters and summary."""
    names = library.names(further)
    width = max(map(len, names))
    return "".join(f"{visible(f'{name:<{width}}  {described(name, further)}')}\n" for name in names)


def described(name: str, further: tuple[Path, ...]) -> str:
    """The parameters and the summary of a scheme, or why there are none."""
    try:
        return f"({library.parameters(name, further)}) {library.summary(name, further)}".rstrip()
    except Rejected:
        return f"a text with mistakes: {library.source(name, further).name}"
    except errors.UnreadableText as error:
        return str(error)
