"""A sweep: the report of one text for every combination of some values of its parameters.

chimera D=4..8  ->  D=4: report    D=5: refused, "D stages must split evenly over the 2f pipelines"    ..    D=8: report
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from os import PathLike

from chimera_ir import texts
from chimera_ir.compilation import Compilation
from chimera_ir.cost.report import Report
from chimera_ir.diagnostics.model import Diagnostic, titles
from chimera_ir.errors import AboveMaxOperations, CompileError, OptionError, TextError
from chimera_ir.options import Options, integer, require_parameters
from chimera_ir.plural import counted
from chimera_ir.request import Request
from chimera_ir.source import Source

MOST = 10_000
"""The most combinations of values."""

Settings = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Refused:
    """The reason why there is no report for a combination of values."""

    reason: str


@dataclass(frozen=True, slots=True)
class SizeRow:
    """A combination of values, and its report or refusal; ``seconds`` is the replayed time of an update, if known."""

    settings: Settings
    outcome: Report | Refused
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Sweep:
    """The rows of a sweep, in the order of the values, and the names of the parameters that were set.

    Examples
    --------
    >>> import chimera_ir
    >>> sizes = chimera_ir.sweep("chimera", D=[4, 5, 8])
    >>> [row.outcome.makespan for row in sizes.compiled]
    [Fraction(16, 1), Fraction(36, 1)]
    >>> sizes.rows[1].outcome.reason
    'D stages must split evenly over the 2f pipelines'
    """

    names: tuple[str, ...]
    rows: tuple[SizeRow, ...]

    @property
    def compiled(self) -> tuple[SizeRow, ...]:
        """The rows that have a report."""
        return tuple(row for row in self.rows if isinstance(row.outcome, Report))


def sweep(
    text: str | PathLike[str] | Source,
    /,
    *,
    options: Options | None = None,
    **parameters: int | Iterable[int],
) -> Sweep:
    """The reports of a text for all combinations of values of its parameters; nothing is written.

    A combination without a report, because the scheme or the profile refuses it or it is too large, is a row that says
    why. ``text`` and ``options`` are as in `compile`; a parameter has a value, or several.

    Raises `CompileError` if there is no such text, no such parameter or option, the text cannot be read, or there are
    too many combinations.

    Examples
    --------
    >>> import chimera_ir
    >>> [(row.settings["N"], row.outcome.makespan) for row in chimera_ir.sweep("chimera", D=4, N=[4, 8]).rows]
    [(4, Fraction(16, 1)), (8, Fraction(30, 1))]
    """
    options = Options() if options is None else options
    values = {name: _integers(name, value) for name, value in parameters.items()}
    request = options.request(
        texts.source(text, options.library), {name: first for name, (first, *_) in values.items()}
    )
    return swept(request, values)


def swept(
    request: Request,
    values: Mapping[str, Sequence[int]],
    warn: Callable[[Diagnostic], None] = lambda _: None,
    tell: Callable[[str], None] = lambda _: None,
) -> Sweep:
    """The sweep of a request over values of its parameters; raises the errors of `sweep`.

    Calls ``tell`` with a few words before each compilation, and ``warn`` with each warning.
    """
    combinations = prod(map(len, values.values()))
    if combinations > MOST:
        raise OptionError(f"{counted(combinations, 'combination')} of values, and the limit is {MOST:,}")
    if values:
        from chimera_ir.elaborate.settings import require_settable

        scheme = Compilation(request).scheme
        require_parameters(values, scheme)
        require_settable(scheme, {name: max(numbers, key=abs) for name, numbers in values.items()})
    rows = []
    for number, chosen in enumerate(product(*values.values()), 1):
        tell(f"compiling {number} of {combinations}")
        settings = dict(zip(values, chosen, strict=True))
        rows.append(_row(Compilation(replace(request, settings=settings), warn=warn), settings))
    return Sweep(tuple(values), tuple(rows))


def _row(compilation: Compilation, settings: Settings) -> SizeRow:
    try:
        report, prediction = compilation.report, compilation.prediction
    except TextError as error:
        return SizeRow(settings, Refused(titles(error.diagnostics)))
    except AboveMaxOperations as error:
        return SizeRow(settings, Refused(error.excess))
    except CompileError as error:
        return SizeRow(settings, Refused(str(error)))
    return SizeRow(settings, report, prediction.replay.seconds if prediction else None)


def _integers(name: str, value: int | Iterable[int]) -> tuple[int, ...]:
    several = value if isinstance(value, Iterable) and not isinstance(value, str | bytes) else (value,)
    numbers = tuple(integer(name, number) for number in several)
    if not numbers:
        raise OptionError(f"{name}: there are no values")
    return numbers
