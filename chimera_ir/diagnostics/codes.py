"""Messages by their codes, with their meanings and example texts."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from inspect import cleandoc
from pkgutil import iter_modules

from chimera_ir import resources
from chimera_ir.diagnostics import catalogue
from chimera_ir.diagnostics.model import Diagnostic

_HEAD = re.compile(r"^(?=(?:error|warning)\[CH\d+\])", re.MULTILINE)
_FIELD = re.compile(r"\{(?:\w+\.)*(\w+)[^{}]*\}")


@dataclass(frozen=True, slots=True)
class Example:
    """A file with a mistake, and the message that the compiler prints for it."""

    name: str
    text: str
    output: str


def messages() -> dict[str, type[Diagnostic]]:
    """The message classes that have a code of their own, by code, in ascending order; not those that inherit one."""
    modules = (import_module(f"{catalogue.__name__}.{module.name}") for module in iter_modules(catalogue.__path__))
    values = (value for module in modules for value in vars(module).values() if isinstance(value, type))
    classes = {value for value in values if issubclass(value, Diagnostic) and "code" in vars(value)}
    return {message.code: message for message in sorted(classes, key=lambda message: message.code)}


def meaning(described: type) -> str:
    """Meaning of ``described``, the class of a message or an error: the first paragraph of its docstring."""
    return " ".join(cleandoc(described.__doc__ or "").partition("\n\n")[0].split()).replace("``", "`")


def pattern(template: str) -> str:
    """A title or help with its fields in angle brackets, as in ``worker <worker> has no stage``."""
    return _FIELD.sub(r"<\1>", template.replace("{{", "{").replace("}}", "}"))


def example(code: str) -> Example | None:
    """Returns the best example of a message, None without any.

    The best one shows no other message before it, or as few as possible; of those, its text is not empty; of those, it
    is the shortest.
    """
    shown = min(_examples(code), key=lambda pair: (pair[0], not pair[1].text.strip(), len(pair[1].text)), default=None)
    return shown and shown[1]


def _examples(code: str) -> Iterator[tuple[int, Example]]:
    """Yields every example text that gets the message ``code``, each after the number of messages that come first."""
    for path in sorted(resources.mistakes().rglob("*.err")):
        outputs = [part for part in _HEAD.split(path.read_text(encoding="utf-8")) if part]
        place = next((number for number, output in enumerate(outputs) if f"[{code}]" in output.split(":")[0]), None)
        if place is not None:
            (source,) = (other for other in path.parent.glob(f"{path.stem}.*") if other != path)
            yield place, Example(source.name, source.read_bytes().decode("utf-8", errors="replace"), outputs[place])
