"""Makes the properties of a compilation, each computed at most once."""

from collections.abc import Callable
from functools import cached_property, wraps
from typing import Protocol, TypeVar

from chimera_ir.diagnostics.model import Rejected
from chimera_ir.errors import TextError
from chimera_ir.garbage import uncollected
from chimera_ir.request import Request

C = TypeVar("C", bound="Requested")
T = TypeVar("T")


class Requested(Protocol):
    """An object that was made for a request to compile, and knows this request."""

    @property
    def request(self) -> Request:
        """The request to compile."""


def _level(make: Callable[[C], T]) -> cached_property[T]:
    """Decorator: makes ``make`` a property that is computed once, without the garbage collector.

    If ``make`` raises `Rejected`, the property raises `TextError`.
    """

    @wraps(make)
    def made(compilation: C) -> T:
        with uncollected():
            try:
                return make(compilation)
            except Rejected as rejected:
                raise TextError([(compilation.request.source, rejected.diagnostics)]) from None

    return cached_property(made)
