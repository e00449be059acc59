"""Formulas of the scheme language outside of a scheme: the size that a table is for, and what is claimed at it."""

from collections.abc import Iterable, Mapping

from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.elaborate.settings import SettingError, evaluate_globals, require_settable
from chimera_ir.source import Source
from chimera_ir.syntax.parser import parse

Size = Mapping[str, int]
"""The numbers that formulas speak of, by name: D stages, N micro-batches, f as in section 3.6."""


class NoSuchSize(Exception):
    """The paper's formulas say nothing for such a size; the message says why, to whoever asked for it."""


def size(text: str, settings: Size) -> Size:
    """The size that a header like a scheme's has with these settings; every ``require`` in the text holds.

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
    except SettingError as error:
        raise NoSuchSize(str(error)) from error
    except Rejected as rejected:
        raise NoSuchSize(summary(rejected.diagnostics)) from rejected


def value(formula: str, at: Size) -> int:
    """The value of a formula at a size; of a condition, whether it holds. It may use no other names than the size's.

    Examples
    --------
    >>> value("D / 2 + 1", {"D": 8})
    5
    """
    given = ", ".join(f"{name} = {number}" for name, number in at.items())
    scheme = parse(Source("formula", f"scheme formula({given}) let value = {formula}"))
    return evaluate_globals(scheme, {}).scope.values["value"]


def summary(diagnostics: Iterable[Diagnostic]) -> str:
    """What is wrong with a text, without the places."""
    return "; ".join(dict.fromkeys(each.fill(each.title) for each in diagnostics))
