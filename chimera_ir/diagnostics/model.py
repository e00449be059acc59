"""Diagnostics as frozen dataclasses: a class has the words of a message, and its fields fill them in."""

import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from enum import Enum
from fractions import Fraction
from importlib import import_module
from inspect import cleandoc
from pkgutil import iter_modules
from typing import ClassVar, NamedTuple, Self, TypeVar

from chimera_ir.diagnostics import catalogue
from chimera_ir.plural import and_more, counted
from chimera_ir.records import LazyDataclass
from chimera_ir.source import Span, mistakes

# Suggestions of a known name for an unknown one.

_LONGEST = 64
"""Most characters of a name that is compared with others."""


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar to ``name``, if any is similar enough.

    Examples
    --------
    >>> closest("shaer", ["min", "share"])
    'share'
    >>> closest("d", ["N", "D"])
    'D'
    >>> closest("zebra", ["N", "D"]) is None
    True
    """
    candidates = sorted(other for other in set(known) - {name} if len(other) <= _LONGEST)
    same = [candidate for candidate in candidates if candidate.lower() == name.lower()]
    near = same or (get_close_matches(name, candidates, n=1, cutoff=0.6) if len(name) <= _LONGEST else [])
    return near[0] if near else None


# Rewrites messages about a schedule of torch.distributed.pipelining: lines of IR become cells of the user's file.

_WORDS = (
    (r"([FBIW]) m(\d+) s(\d+) & ([FBIW]) m(\d+) s(\d+)", r"(\3\1\2;\6\4\5)OVERLAP_F_B"),
    (r"([FBIW]) m(\d+) s(\d+)", r"\3\1\2"),
)
_COMPUTED = [(re.compile(f"`{line}`"), f"`{cell}`") for line, cell in _WORDS]
_MESSAGE = re.compile(r"`(wait )?(send|recv) m(\d+) s(\d+)->s(\d+)[^`]*`")


def as_cells(text: str) -> str:
    """Returns the text with each line of IR in backquotes replaced by the cell for the same action.

    Examples
    --------
    >>> as_cells("rank 0 stands at `wait recv m1 s1->s0`, for `B m1 s0`")
    'rank 0 stands at the wait for `0RECV_B1`, for `0B1`'
    >>> as_cells("no `send m0 s0->s1 to w1`, after `F m0 s0`")
    'no `0SEND_F0`, after `0F0`'
    """
    for line, cell in _COMPUTED:
        text = line.sub(cell, text)
    return _MESSAGE.sub(_cell, text)


def _cell(message: re.Match[str]) -> str:
    wait, verb, micro, start, end = message.groups()
    stage, direction = start if verb == "send" else end, "F" if int(start) < int(end) else "B"
    cell = f"`{stage}{verb.upper()}_{direction}{micro}`"
    return f"the wait for {cell}" if wait else cell


T = TypeVar("T")
U = TypeVar("U")


class Severity(Enum):
    """Error or warning; after an error the compilation stops at the end of the level that it was found in."""

    ERROR = "error"
    WARNING = "warning"


class Note(NamedTuple):
    """A fact in addition to the main message, with a place in the text if it has one."""

    text: str
    span: Span | None = None


class Diagnostic(LazyDataclass):
    """One message to the user.

    A message is a class with a code: ``class X(Diagnostic, code="CH..")``. A subclass of it that sets no code is
    another form of the message: it has the same code, and other words. `worded` makes a form that adds no fields. Where
    the class itself has no ``label``, only its forms are shown to users. ``meaning`` describes the code in lists.

    ``title``, ``label`` and ``help`` are templates over the fields and properties of the subclass, in the manner of
    ``str.format`` with attribute names: ``"no parameter is called {name}"``. ``related`` is a note at another place of
    the text: the field with the place, and a template; there is no note if the place is None.
    """

    severity: ClassVar[Severity] = Severity.ERROR
    code: ClassVar[str]
    meaning: ClassVar[str]
    title: ClassVar[str]
    label: ClassVar[str] = ""
    help: ClassVar[str] = ""
    related: ClassVar[tuple[str, str] | None] = None

    span: Span

    def __init_subclass__(cls, code: str | None = None) -> None:
        super().__init_subclass__()
        if code is not None:
            cls.code = code

    @classmethod
    def worded(cls, name: str, **words: str) -> type[Self]:
        """A form of the message: a subclass called ``name`` with another ``title``, ``label`` or ``help``."""
        subclass: type[Self] = type(name, (cls,), {"__module__": cls.__module__, **words})
        return subclass

    def notes(self) -> tuple[Note, ...]:
        """Returns facts to show below the source line: values of the failing instance, other lines that take part."""
        if self.related is None:
            return ()
        place, template = self.related
        span = getattr(self, place)
        return () if span is None else (Note(self.fill(template), span),)

    def drawing(self) -> tuple[str, ...]:
        """Returns lines of text to show as they are, below everything else."""
        return ()

    def fill(self, template: str) -> str:
        """Fills a template with the fields and properties of the diagnostic.

        A word after a colon says how a number is shown. ``{count:stage}`` gives ``3 stages``; ``{count:is or are}``
        gives the verb. ``{count:and more}`` stands behind the first of ``count`` mistakes and gives the number of the
        others in words; ``{others:(and more)}`` gives `` (and 2 more)`` if ``others`` is 2. Both are empty if there are
        no others.

        ``{closest:else unknown}`` gives ``did you mean ..?`` with the value of ``closest``, or ``unknown`` if it is
        None.
        """
        return self.relative_to_turn(_Formatter(self).format(template))

    def relative_to_turn(self, text: str) -> str:
        """Rewrites micro-batches and versions in ``text`` relative to the turn of the wrong line, as ``m+1``.

        The text stays as it is if the line belongs to no turn.
        """
        if not self.span.turn:
            return text

        def from_turn(number: re.Match[str]) -> str:
            word, of = number[1], "m" if number[1].startswith("m") else "v"
            distance = int(number[2]) - self.span.turn[of == "v"]
            return f"{word if len(word) > 1 else ''}{of}{f'{distance:+}' if distance else ''}"

        return _COUNTED.sub(from_turn, text)


_COUNTED = re.compile(r"\b(m|v|micro-batch |version |update )([0-9]+)\b")
"""A micro-batch or a version, in a line of IR, such as ``m3``, or in prose, such as ``update 3``."""


def once(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Drops repetitions: of a line that is wrong in several turns, only the diagnostics of one turn are left.

    It is the middle one of these turns, which is part of the steady state.
    """
    listed = tuple(diagnostics)
    turns: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    for diagnostic in listed:
        turns.setdefault((diagnostic.code, diagnostic.span.start), set()).add(diagnostic.span.turn)
    middle = {key: sorted(several)[len(several) // 2] for key, several in turns.items()}
    return tuple(
        diagnostic for diagnostic in listed if diagnostic.span.turn == middle[diagnostic.code, diagnostic.span.start]
    )


class _Formatter(string.Formatter):
    def __init__(self, diagnostic: Diagnostic) -> None:
        self._diagnostic = diagnostic

    def get_value(self, key: int | str, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        return getattr(self._diagnostic, str(key))

    def format_field(self, value: object, format_spec: str) -> str:
        if format_spec.startswith("else "):
            return f"did you mean `{value}`?" if value else format_spec.removeprefix("else ")
        if isinstance(value, int) and format_spec == "and more":
            return and_more(value)
        if format_spec == "is or are":
            return "is" if value in (0, 1) else "are"
        if format_spec == "(and more)":
            return f" (and {value} more)" if value else ""
        if isinstance(value, int | Fraction) and re.fullmatch("[a-z][a-z -]+", format_spec):
            return counted(value, format_spec)
        return format(value, format_spec)


class Rejected(Exception):
    """Raised with the errors of one level of the compilation, in the order of the text."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(sorted(diagnostics, key=lambda d: (d.span, d.code)))
        super().__init__(", ".join(d.code for d in self.diagnostics))


class Attempts:
    """Context for steps that do not depend on one another: a rejected step does not keep the others from being made.

    The end of the context raises the diagnostics of all rejected steps together; ``failed`` has the diagnostics so far.
    """

    def __init__(self) -> None:
        self.failed: list[Diagnostic] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            reject(self.failed)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of a step, which ends at the first ``Rejected`` in it."""
        try:
            yield
        except Rejected as rejected:
            self.failed += rejected.diagnostics

    def each(self, things: Iterable[T], make: Callable[[T], U]) -> list[U]:
        """The results of ``make``, with a step for each thing; a rejected thing has no result."""
        made: list[U] = []
        for thing in things:
            try:
                made.append(make(thing))
            except Rejected as rejected:
                self.failed += rejected.diagnostics
        return made


def made_of(things: Iterable[T], make: Callable[[T], U]) -> list[U]:
    """Returns the results of ``make`` for all ``things``.

    If calls raise ``Rejected``, the others are still made; then the diagnostics of all calls are raised together.
    """
    with Attempts() as attempts:
        return attempts.each(things, make)


def reject(failed: Iterable[Diagnostic]) -> None:
    """Raises `Rejected` with the given diagnostics, if there are any.

    Of several diagnostics of one type at one place, as from all pipes of an indexed pipe, only the first is kept.
    """
    distinct = {(type(diagnostic), diagnostic.span): diagnostic for diagnostic in reversed(list(failed))}
    if distinct:
        raise Rejected(distinct.values())


def titles(diagnostics: Iterable[Diagnostic]) -> str:
    """The titles of diagnostics in one line, each once, without their places."""
    return "; ".join(dict.fromkeys(diagnostic.fill(diagnostic.title) for diagnostic in diagnostics))


def raise_errors(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """The warnings among the diagnostics; raises `Rejected` with all errors instead, if there are any."""
    messages = tuple(diagnostics)
    errors = [d for d in messages if d.severity is Severity.ERROR]
    if errors:
        raise Rejected(errors)
    return messages


# Messages by their codes, with their meanings and example texts.

_HEAD = re.compile(r"^(?=(?:error|warning)\[CH\d+\])", re.MULTILINE)
_FIELD = re.compile(r"\{(?:\w+\.)*(\w+)[^{}]*\}")


class Example(NamedTuple):
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
    """Meaning of a message, or of an error: the first paragraph of its docstring."""
    if issubclass(described, Diagnostic):
        return described.meaning
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
    """Yields the example texts that get the message ``code``, each after the number of messages that come first."""
    for path in sorted(mistakes().rglob("*.err")):
        outputs = [part for part in _HEAD.split(path.read_text(encoding="utf-8")) if part]
        place = next((number for number, output in enumerate(outputs) if f"[{code}]" in output.split(":")[0]), None)
        if place is not None:
            (source,) = (other for other in path.parent.glob(f"{path.stem}.*") if other != path)
            yield place, Example(source.name, source.read_bytes().decode("utf-8", errors="replace"), outputs[place])
