"""The page on conformance, as Markdown: what agrees, then each schedule with its numbers."""

import re
from collections.abc import Iterator, Mapping, Sequence
from textwrap import fill

from conformance.published import Compared, Published, compared, schedules
from paper_tables.formula import Size

_HEAD = """\
# Conformance

**Question.** Does each scheme of the library have the numbers that are published for its schedule?

{answer}

Only published data is entered by hand, in [published.toml](../conformance/published.toml); a new schedule is a new row
there. `python docs/conformance` compiles the schemes and prints this page, and a test compares the two.

- D is the number of stages, P of workers, N of micro-batches.
- Makespans and bubble ratios are for free messages, with `F` = 1 and `B` = 2 unless the schedule says otherwise. A
  *bubble ratio* is [that of the makespan](../explanation/performance.md#the-report) unless the row says otherwise.
- *Most* and *fewest* are those of the fullest and of the emptiest worker: activations in micro-batches on a stage
  (M_a), weights in copies of a stage (M_theta).
- The page of a scheme says where it is defined. Where no code is named, none was compared. *Chimera, Table 2*: Li and
  Hoefler, SC 2021.
"""

_USUAL = "F=1, B=2"


def page() -> str:
    """The text of docs/evidence/conformance.md: the figures of each schedule."""
    numbers = {schedule.name: compared(schedule) for schedule in schedules()}
    head = _HEAD.format(answer=_answer(numbers))
    return "\n".join([head, *(_section(schedule, numbers[schedule.name]) for schedule in schedules())])


def _answer(numbers: Mapping[str, Sequence[Compared]]) -> str:
    differing = {name: sum(not number.agrees for number in several) for name, several in numbers.items()}
    count, wrong = sum(map(len, numbers.values())), sum(differing.values())
    names = ", ".join(f"{name} ({number})" for name, number in differing.items() if number)
    return _wrapped(
        f"**Answer.** {count - wrong} of {count} published numbers agree, at every size that was compiled. The other "
        f"{wrong} have the reason below their table: {names}."
    )


def _link(schedule: Published) -> str:
    return f"[{schedule.scheme}](../reference/schemes/{schedule.scheme}.md)"


def _section(schedule: Published, numbers: Sequence[Compared]) -> str:
    costs = ", ".join(f"{kind}={cost}" for kind, cost in schedule.costs.items() if kind in schedule.costs.given)
    facts = [f"{_link(schedule)}: {schedule.placement}."]
    facts += [f"Code: {schedule.code}."] if schedule.code else []
    facts += [f"Costs: {costs}."] if costs != _USUAL else []
    reasons = dict.fromkeys(number.number.differs for number in numbers if not number.agrees)
    notes = {reason: f"[{place}]" for place, reason in enumerate(reasons, 1)}
    heads = ("figure", "published", "where", *map(_size, schedule.sizes))
    table = _table(heads, [tuple(_cells(number, notes)) for number in numbers])
    remarks = [_wrapped(f"{note} {reason}.") + "\n" for reason, note in notes.items()]
    return "\n".join([f"## {schedule.name}\n", _wrapped(" ".join(facts)), "", table, *remarks])


def _wrapped(text: str) -> str:
    return fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _cells(number: Compared, notes: dict[str, str]) -> Iterator[str]:
    formula, over = map(_compact, (number.number.formula, number.number.over))
    yield number.number.measure.value
    yield f"`{formula}`" if over == "1" else f"`({formula}) / ({over})`"
    yield f"{number.number.place} {notes.get(number.number.differs, '')}".strip()
    for published, compiled in zip(number.published, number.compiled, strict=True):
        yield str(published) if published == compiled else f"{published}, compiled {compiled}"


def _compact(formula: str) -> str:
    return re.sub(r" ([-+*/]) ", r"\1", formula)


def _size(size: Size) -> str:
    return " ".join(f"{name}={number}" for name, number in size.items())


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = f"|{'---|' * len(heads)}\n"
    head, *lines = (f"| {' | '.join(cells)} |\n" for cells in (heads, *rows))
    return "".join([head, rule, *lines])
