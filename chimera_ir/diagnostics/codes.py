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
    """Each class with a code of its own, by this code, in the order of the codes."""
    modules = (import_module(f"{catalogue.__name__}.{module.name}") for module in iter_modules(catalogue.__path__))
    classes = {value for module in modules for value in vars(module).values() if _is_message(value)}
    return {message.code: message for message in sorted(classes, key=lambda message: message.code)}


def _is_message(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Diagnostic) and "code" in vars(value)


def meaning(described: type) -> str:
    """Meaning of a message or an error: the first paragraph of its docstring, without marks of code."""
    return " ".join(cleandoc(described.__doc__ or "").partition("\n\n")[0].split()).replace("``", "`")


def pattern(template: str) -> str:
    """A title or help with placeholders for its fields, as in ``worker <worker> has no stage``."""
    return _FIELD.sub(r"<\1>", template.replace("{{", "{").replace("}}", "}"))


def example(code: str) -> Example | None:
    """The shortest example of a message, or None; preferred are texts that get this message first and are not empty."""
    shown = min(_examples(code), key=lambda pair: (pair[0], not pair[1].text.strip(), len(pair[1].text)), default=None)
    return shown and shown[1]


def _examples(code: str) -> Iterator[tuple[int, Example]]:
    """Every text that gets this message, with the number of messages before it."""
    for path in sorted(resources.mistakes().rglob("*.err")):
        outputs = [part for part in _HEAD.split(path.read_text(encoding="utf-8")) if part]
        place = next((number for number, output in enumerate(outputs) if f"[{code}]" in output.split(":")[0]), None)
        if place is not None:
            (source,) = (other for other in path.parent.glob(f"{path.stem}.*") if other != path)
            yield place, Example(source.name, source.read_bytes().decode("utf-8", errors="replace"), outputs[place])
