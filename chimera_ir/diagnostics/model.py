"""A diagnostic is a frozen dataclass: its words are class text, its facts are fields; the raise site holds no prose."""

import re
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Self, dataclass_transform

from chimera_ir.plural import counted
from chimera_ir.source import Span


class Severity(Enum):
    """How grave a diagnostic is; an error stops the compilation at the end of its level."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Note:
    """A fact beside the main message, with a place in the text if it has one."""

    text: str
    span: Span | None = None


@dataclass_transform(frozen_default=True)
class _Message:
    """Makes each class below it a frozen dataclass, with its first instance or the first class below that.

    There are two hundred, and a compilation shows few: making all of them takes longer than reading a scheme.
    """

    def __init_subclass__(cls) -> None:
        for message in cls.__bases__:
            _make_dataclass(message)

    def __new__(cls, *_: object, **__: object) -> Self:
        _make_dataclass(cls)
        return super().__new__(cls)


def _make_dataclass(message: type) -> None:
    if "__dataclass_fields__" not in vars(message):
        dataclass(frozen=True)(message)


class Diagnostic(_Message):
    """One message to the user.

    ``title``, ``label`` and ``help`` are templates over the fields and properties of the subclass, in the manner of
    ``str.format`` with attribute names: ``"no parameter is called {name}"``.
    """

    severity: ClassVar[Severity] = Severity.ERROR
    code: ClassVar[str]
    title: ClassVar[str]
    label: ClassVar[str] = ""
    help: ClassVar[str] = ""

    span: Span

    def notes(self) -> tuple[Note, ...]:
        """Facts to show below the source line: values of the failing instance, other lines that take part."""
        return ()

    def drawing(self) -> tuple[str, ...]:
        """Lines of text to show as they are, below everything else."""
        return ()

    def fill(self, template: str) -> str:
        """The template filled with the facts of the diagnostic; ``{count:stage}`` counts stages."""
        return self.said(_Formatter().vformat(template, (), _Facts(self)))

    def said(self, text: str) -> str:
        """A text about micro-batches and versions, with these counted from the turn that the diagnostic is about."""
        if not self.span.turn:
            return text

        def from_turn(number: re.Match[str]) -> str:
            word, of = number[1], "m" if number[1].startswith("m") else "v"
            distance = int(number[2]) - self.span.turn[of == "v"]
            return f"{word if len(word) > 1 else ''}{of}{f'{distance:+}' if distance else ''}"

        return _COUNTED.sub(from_turn, text)


_COUNTED = re.compile(r"\b(m|v|micro-batch |version |update )([0-9]+)\b")
"""A micro-batch or a version, in a line or in prose."""


def once(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """The diagnostics; of those about a line of a turn only those of the turn in the middle, as they are all alike.

    So they are of the steady state, if not only warm-up or drain is wrong.
    """
    listed = tuple(diagnostics)
    turns: dict[tuple[type, int], set[tuple[int, ...]]] = {}
    for diagnostic in listed:
        turns.setdefault((type(diagnostic), diagnostic.span.start), set()).add(diagnostic.span.turn)
    middle = {key: sorted(several)[len(several) // 2] for key, several in turns.items()}
    return tuple(
        diagnostic for diagnostic in listed if diagnostic.span.turn == middle[type(diagnostic), diagnostic.span.start]
    )


class _Facts(Mapping[str, object]):
    """Looks template names up among a diagnostic's fields and properties."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        self._diagnostic = diagnostic

    def __getitem__(self, name: str) -> object:
        return getattr(self._diagnostic, name)

    def __iter__(self) -> Iterator[str]:
        return iter(dir(self._diagnostic))

    def __len__(self) -> int:
        return len(dir(self._diagnostic))


class _Formatter(string.Formatter):
    """Formats a number that has a noun after the colon as a count of that noun."""

    def format_field(self, value: object, format_spec: str) -> str:
        """The text of one fact."""
        if isinstance(value, int) and re.fullmatch("[a-z][a-z -]+", format_spec):
            return counted(value, format_spec)
        return format(value, format_spec)


class Rejected(Exception):
    """The errors of one level of the compilation, in the order of the text."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(sorted(diagnostics, key=lambda d: (d.span, d.code)))
        super().__init__(", ".join(d.code for d in self.diagnostics))


def raise_errors(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """The warnings among the diagnostics.

    Raises
    ------
    Rejected
        With all errors, if there are any; warnings are then left out, as they may follow from errors.
    """
    messages = tuple(diagnostics)
    errors = [d for d in messages if d.severity is Severity.ERROR]
    if errors:
        raise Rejected(errors)
    return messages
