"""The page on conformance, as Markdown: an overview, then each schedule with its numbers."""

from collections.abc import Iterator, Sequence
from textwrap import fill

from conformance.published import Compared, Published, compared, schedules
from paper_tables.formula import Size

_HEAD = """\
# Conformance

Every published schedule in the library: where it is defined, whose code exists, where its stages are placed, and
its published numbers, compared with those of the library's scheme. Only published data is entered by hand
([published.toml](../conformance/published.toml); a new schedule is a new row there): `python docs/conformance` compiles
the schemes and prints this page, and a test compares the two.

D is the number of stages, P of workers, N of micro-batches. Makespans are for free communication and the costs given
below each heading; activations are counted in micro-batches on a stage (M_a), weights in copies of a stage (M_theta).
"Bubble ratio" is that of the makespan unless the row says otherwise
([the report](../explanation/performance.md#the-report)).
"""


def page() -> str:
    """The text of docs/evidence/conformance.md: a table of all schedules, and the figures of each."""
    numbers = {schedule.name: compared(schedule) for schedule in schedules()}
    overview = [_overview(schedule, numbers[schedule.name]) for schedule in schedules()]
    parts = [_HEAD, _table(("schedule", "scheme", "placement", "published numbers", "agree"), overview)]
    parts += [_section(schedule, numbers[schedule.name]) for schedule in schedules()]
    return "\n".join(parts)


def _overview(schedule: Published, numbers: Sequence[Compared]) -> tuple[str, ...]:
    agreeing = sum(number.agrees for number in numbers)
    scheme = f"[{schedule.scheme}](../reference/schemes/{schedule.scheme}.md)"
    return (
        schedule.name,
        scheme,
        schedule.placement,
        str(len(numbers)),
        "all" if agreeing == len(numbers) else str(agreeing),
    )


def _section(schedule: Published, numbers: Sequence[Compared]) -> str:
    costs = ", ".join(f"{kind} = {cost}" for kind, cost in schedule.costs.items() if kind in schedule.costs.given)
    facts = [
        _wrapped(f"- defined in {schedule.definition}"),
        _wrapped(f"- code: {schedule.code}"),
        _wrapped(f"- placement: {schedule.placement}"),
        f"- costs: {costs}",
    ]
    heads = ("figure", "published", "where", *map(_size, schedule.sizes), "")
    table = _table(heads, [_row(number) for number in numbers])
    differing = (number.number for number in numbers if not number.agrees)
    reasons = [_wrapped(f"*{number.measure.value}*, {number.place}: {number.differs}.") for number in differing]
    return "\n".join([f"## {schedule.name}\n", *facts, "", table, *(f"{reason}\n" for reason in reasons)])


def _wrapped(text: str) -> str:
    return fill(
        text, 120, subsequent_indent="  " * text.startswith("-"), break_long_words=False, break_on_hyphens=False
    )


def _row(number: Compared) -> tuple[str, ...]:
    return tuple(_cells(number))


def _cells(number: Compared) -> Iterator[str]:
    over = "" if number.number.over == "1" else f" / ({number.number.over})"
    formula = number.number.formula
    yield number.number.measure.value
    yield f"`({formula}){over}`" if over else f"`{formula}`"
    yield number.number.place
    for published, compiled in zip(number.published, number.compiled, strict=True):
        yield str(published) if published == compiled else f"{published}, compiled {compiled}"
    yield "agrees" if number.agrees else "differs"


def _size(size: Size) -> str:
    return ", ".join(f"{name} = {number}" for name, number in size.items())


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
