"""Terms: formulas of the scheme language as texts, with their values at many points."""

from collections.abc import Iterable, Mapping, Sequence

from chimera_ir.elaborate.evaluate import Scope, compiled
from chimera_ir.source import Source
from chimera_ir.syntax import ast
from chimera_ir.syntax.parser import parse

VARIABLES = ("m", "s", "q")
"""The variables of a clock: a micro-batch of the pipe, a stage, a slice."""

Point = tuple[int, int, int]
"""The values of `VARIABLES`."""


def tabulated(terms: Sequence[str], settings: Mapping[str, int], points: Iterable[Point]) -> list[list[int]]:
    """The values of every term at each point; ``settings`` are the values of all other names."""
    scope = Scope(settings, {}, {}).with_variables(*VARIABLES)
    formulas = [compiled(expression, scope) for expression in expressions(terms)]
    return [[formula(point) for formula in formulas] for point in points]


def expressions(terms: Sequence[str]) -> list[ast.Expression]:
    """The syntax trees of terms."""
    lines = "\n".join(f"fn term{number}({', '.join(VARIABLES)}) = {term}" for number, term in enumerate(terms))
    scheme = parse(Source("", f"scheme terms\n{lines}\npipe none {{}}"))
    return [item.body for item in scheme.items if isinstance(item, ast.Function)]


def times(factor: str, term: str) -> str:
    """The product of two terms."""
    if "1" in (factor, term):
        return term if factor == "1" else factor
    return f"{factor}*{term}"


def weighted(factors: Sequence[int], terms: Sequence[str]) -> str:
    """The sum of terms times whole numbers, positive ones first.

    Examples
    --------
    >>> weighted([-1, 2, 0, 3], ["s", "m", "N", "1"])
    '2*m + 3 - s'
    """
    parts = [(factor, times(str(abs(factor)), term)) for factor, term in zip(factors, terms, strict=True) if factor]
    text = " + ".join(part for factor, part in parts if factor > 0)
    rest = "".join(f" - {part}" for factor, part in parts if factor < 0)
    return f"{text}{rest}" if text else f"0{rest}"
