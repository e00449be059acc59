"""Formulas of the scheme language outside of schemes: the size of a table, and values claimed at that size."""

from collections.abc import Mapping
from functools import cache

from chimera_ir.diagnostics.model import Rejected, titles
from chimera_ir.elaborate.settings import evaluate_globals, require_settable
from chimera_ir.errors import ParameterError
from chimera_ir.source import Source
from chimera_ir.syntax.ast import Scheme
from chimera_ir.syntax.parser import parse

Size = Mapping[str, int]
"""The numbers in formulas by name: D stages, N micro-batches, f as in section 3.6."""


class NoSuchSize(Exception):
    """The formulas of the paper do not hold for a size; the message says why."""


def size(text: str, settings: Size) -> Size:
    """The parameters of a header with the given settings; every ``require`` in the text holds.

    Raises
    ------
    NoSuchSize
        If a setting is of no parameter, or a requirement does not hold.

    Examples
    --------
    >>> size("scheme a(D = 4, N = 2*D)", {"D": 8})
    {'D': 8, 'N': 16}
    """
    scheme = parse(Source("size", text))
    try:
        require_settable(scheme, settings)
        return dict(evaluate_globals(scheme, settings).parameters)
    except ParameterError as error:
        raise NoSuchSize(str(error)) from error
    except Rejected as rejected:
        raise NoSuchSize(titles(rejected.diagnostics)) from rejected


def value(formula: str, at: Size) -> int:
    """The value of a formula at a size, or the truth of a condition; it uses only the names of the size.

    Examples
    --------
    >>> value("D / 2 + 1", {"D": 8})
    5
    """
    return evaluate_globals(_scheme(formula, tuple(at)), at).scope.values["value"]


@cache
def _scheme(formula: str, names: tuple[str, ...]) -> Scheme:
    """A scheme with parameters of these names that has the formula as its only line."""
    given = ", ".join(f"{name} = 0" for name in names)
    return parse(Source("formula", f"scheme formula({given}) let value = {formula}"))
