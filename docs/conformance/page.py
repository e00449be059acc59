"""The page on conformance, as Markdown: what agrees, then each schedule with its numbers."""

import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from textwrap import fill

from conformance.published import Compared, Number, Published, compared, schedules
from paper_tables.formula import Size

_HEAD = """\
# Conformance

**Question.** Does each scheme of the library have the numbers that are published for its schedule?

{answer}

Each schedule was compiled at the sizes given; makespans and bubble ratios are for free messages and `F` = 1, `B` = 2
unless other costs are given. `python docs/conformance` prints this page from
[published.toml](../conformance/published.toml), where a new schedule is a new row, and a test compares the two.

- D is the number of stages, P of workers, N of micro-batches. Stage s is on worker s unless a place is given; on
  a *V of stages*, worker s has the stages s and 2P-1-s.
- A *bubble ratio* is [that of the makespan](../explanation/performance.md#the-report) unless the row says otherwise.
- *Most* and *fewest* are those of the fullest and of the emptiest worker: activations in micro-batches on a stage
  (M_a), weights in copies of a stage (M_theta).
- The page of a scheme says where it is defined. Where no code is named, none was compared. *Chimera, Table 2*: Li and
  Hoefler, SC 2021.
"""

_USUAL = "F=1, B=2"
_PLACED = "stage s on worker s"


def page() -> str:
    """The text of docs/evidence/conformance.md: the figures of each schedule."""
    numbers = {schedule.name: compared(schedule) for schedule in schedules()}
    head = _HEAD.format(answer=_answer(numbers))
    return "\n".join([head, *(_section(schedule, numbers[schedule.name]) for schedule in schedules())])


def _answer(numbers: Mapping[str, Sequence[Compared]]) -> str:
    differing = {name: sum(not number.agrees for number in several) for name, several in numbers.items()}
    count, wrong = sum(map(len, numbers.values())), sum(differing.values())
    derived = sum(bool(number.number.derived) for several in numbers.values() for number in several)
    names = ", ".join(f"{name} ({number})" for name, number in differing.items() if number)
    return _wrapped(
        f"**Answer.** {count - wrong - derived} of {count - derived} published numbers agree, at every size that was "
        f"compiled. The other {wrong} have the reason below their table: {names}. {derived} more were not taken from a "
        "publication but derived from the published order, and agree."
    )


def _link(schedule: Published) -> str:
    return f"[{schedule.scheme}](../reference/schemes/{schedule.scheme}.md)"


def _section(schedule: Published, numbers: Sequence[Compared]) -> str:
    costs = ", ".join(f"{kind}={cost}" for kind, cost in schedule.costs.items() if kind in schedule.costs.user_set)
    facts = [f"{_link(schedule)}: {schedule.placement}." if schedule.placement != _PLACED else f"{_link(schedule)}."]
    facts += [f"Code: {schedule.code}."] if schedule.code else []
    facts += [f"Costs: {costs}."] if costs != _USUAL else []
    facts += [f"Sizes: {'; '.join(map(_size, schedule.sizes))}."]
    differing = [number for number in numbers if not number.agrees]
    notes = {number.number: f"[{place}]" for place, number in enumerate(differing, 1)}
    rows = [tuple(_cells(number, notes)) for number in numbers]
    table = _table(("figure", "published", "where"), rows) if rows else "No numbers of this order are published.\n"
    remarks = [_wrapped(f"{notes[number.number]} {_difference(number)}") + "\n" for number in differing]
    return "\n".join([f"## {schedule.name}\n", _wrapped(" ".join(facts)), "", table, *remarks])


def _wrapped(text: str) -> str:
    return fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _cells(number: Compared, notes: Mapping[Number, str]) -> Iterator[str]:
    formula, over = map(_compact, (number.number.formula, number.number.over))
    yield number.number.measure.value
    if formula.startswith("if "):
        yield _listed(number.published)
    else:
        yield f"`{formula}`" if over == "1" else f"`({formula}) / ({over})`"
    source = number.number.place or f"not published, derived: {number.number.derived}"
    yield f"{source} {notes.get(number.number, '')}".strip()


def _difference(number: Compared) -> str:
    """The figures that differ, at the sizes of the schedule, and why."""
    return f"Compiled {_listed(number.compiled)} instead of {_listed(number.published)}: {number.number.differs}."


def _listed(figures: Sequence[Fraction]) -> str:
    return ", ".join(map(str, figures))


def _compact(formula: str) -> str:
    return re.sub(r" ([-+*/]) ", r"\1", formula)


def _size(size: Size) -> str:
    return " ".join(f"{name}={number}" for name, number in size.items())


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = f"|{'---|' * len(heads)}\n"
    head, *lines = (f"| {' | '.join(cells)} |\n" for cells in (heads, *rows))
    return "".join([head, rule, *lines])
