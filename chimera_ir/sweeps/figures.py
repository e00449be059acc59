"""The figures of a report by flat names, for tables that programs read."""

from collections.abc import Mapping
from fractions import Fraction

from chimera_ir.cost.report import Report

_SIZES = ("workers", "stages", "micro_batches", "makespan", "bubble_ratio", "steady_period", "clock_span")


def figures_of(report: Report) -> Mapping[str, int | str | Fraction]:
    """The figures of a report, keyed by their names in report.json.

    Of a figure that each worker has, it is the largest. Figures of the baseline have names with ``baseline_`` in front.
    """
    return {
        **{name: getattr(report, name) for name in _SIZES},
        **report.critical_path,
        **{name: max(getattr(report, name)) for name in ("weights", "activations", "stashed_inputs")},
        **{f"baseline_{name}": getattr(report.baseline, name) for name in ("scheme", "makespan", "bubble_ratio")},
    }


def times_as_fast(report: Report) -> Fraction:
    """The makespan of the baseline over that of the schedule, rounded to thousandths."""
    return Fraction(round(1000 * report.baseline.makespan / report.makespan), 1000)
