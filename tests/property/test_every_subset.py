"""Every subset of F, B, I and W, each up to twice, for a micro-batch on a stage is complete or gets one message.

The oracle knows nothing of the table of kinds: one F with one B is complete, and one F with one I and one W.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product

import pytest

from chimera_ir.diagnostics.model import Diagnostic, Rejected, Severity
from chimera_ir.elaborate.elaborate import elaborate
from chimera_ir.ir.levels import Plan, Program
from chimera_ir.ir.streams import ProgramStream
from chimera_ir.ir.text.reader import parse as parse_ir
from chimera_ir.lower.lower import lower, order
from chimera_ir.source import Source
from chimera_ir.syntax.parser import parse
from chimera_ir.verify.verify import verify_lowered, verify_program, verify_schedule

COMPLETE = ({"F": 1, "B": 1}, {"F": 1, "I": 1, "W": 1})
LETTERS = "FBIW"
SUBSETS = [dict(zip(LETTERS, numbers, strict=True)) for numbers in product(range(3), repeat=len(LETTERS))]
GROUPS = ((), ("0",), ("1",), ("0", "1"), ("0,1",), ("0,1", "1"), ("0,1", "0,1"))
"""The operations of one kind on two micro-batches: those of each, one by one or in a group."""


def errors(source: Source) -> list[Diagnostic]:
    """The errors of a text; a text without errors is compiled down to its verified program."""
    try:
        level = elaborate(parse(source), {}, 1000)[0] if source.name.endswith(".chim") else parse_ir(source)
        if isinstance(level, Program | ProgramStream):
            verify_program(level)
            return []
        schedule, plan = (order(level), level) if isinstance(level, Plan) else (level, None)
        checked = verify_schedule(schedule, plan)
        listed = [each for each in checked.findings.diagnostics if each.severity is Severity.ERROR]
        if not listed:
            verify_lowered(lower(checked.level), checked)
        return listed
    except Rejected as rejected:
        return list(rejected.diagnostics)


def incomplete(operations: Iterable[tuple[str, str]], cells: Iterable[str]) -> set[str]:
    """The cells whose operations, each a letter and a cell, are not complete."""
    counts = Counter(operations)
    there = {cell: {letter: counts[letter, cell] for letter in LETTERS if counts[letter, cell]} for cell in cells}
    return {cell for cell, letters in there.items() if letters not in COMPLETE}


def judged(text: str, wrong: set[str], name: str = "subset.sir") -> list[str]:
    """Nothing, or the text if the errors are not those of so many incomplete cells."""
    listed = errors(Source(name, text))
    right = not listed if not wrong else 1 <= len(listed) <= len(wrong)
    return [] if right else [f"{text}\n{wrong}: {[each.fill(each.title) for each in listed]}"]


def header(level: str, micro_batches: str, micros: str, stages: int = 1) -> str:
    workers = " ".join(map(str, range(stages)))
    return (
        f"{level} subsets\nworkers {stages}\nstages {stages}\nmicro_batches {micro_batches}\n"
        f"pipe p on {workers} micros {micros}\n"
    )


def repeated(subset: dict[str, int]) -> Iterator[str]:
    """The letters of a subset in the order of a micro-batch, with their repetitions."""
    for letter, number in subset.items():
        yield from letter * number


def lane(worker: int, lines: Iterable[str]) -> str:
    return f"worker {worker}:\n" + "".join(f"  {line}\n" for line in lines)


@pytest.mark.parametrize("level", ["schedule", "program"])
def test_of_a_micro_batch_on_a_stage(level: str) -> None:
    failures = []
    last = ["all_reduce s0", "wait all_reduce s0", "step s0"] if level == "program" else []
    for subset in SUBSETS:
        wrong = incomplete([(letter, "m0") for letter in repeated(subset)], ["m0"])
        lines = [f"{letter} m0 s0" for letter in repeated(subset)]
        failures += judged(header(level, "1", "0..1") + lane(0, lines + last), wrong)
    assert not failures, failures[0]


@pytest.mark.parametrize("level", ["schedule", "program"])
def test_of_every_micro_batch_of_a_stream(level: str) -> None:
    failures = []
    before, after = (["wait all_reduce s0 v", "step s0 v"], ["all_reduce s0 v+1"]) if level == "program" else ([], [])
    turn = header(level, "1", "0..1").replace("pipe", "updates 1 per turn\npipe")
    for subset in SUBSETS:
        wrong = incomplete([(letter, "m") for letter in repeated(subset)], ["m"])
        lines = [f"{letter} m s0 v" for letter in repeated(subset)]
        failures += judged(turn + lane(0, before + lines + after), wrong)
    assert not failures, failures[0]


@pytest.mark.parametrize("parts", ["", " halves"])
def test_of_two_micro_batches_alone_and_in_groups(parts: str) -> None:
    failures = []
    for several in product(GROUPS, repeat=len(LETTERS)):
        lines = [
            (letter, group.split(",")) for letter, groups in zip(LETTERS, several, strict=True) for group in groups
        ]
        wrong = incomplete([(letter, micro) for letter, group in lines for micro in group], "01")
        shown = [f"{letter} {','.join(f'm{micro}' for micro in group)} s0" for letter, group in lines]
        failures += judged(header("schedule", f"2{parts}", "0..2") + lane(0, shown), wrong)
    assert not failures, failures[0]


def test_on_two_stages_at_once() -> None:
    failures = []
    subsets = [subset for subset in SUBSETS if max(subset.values()) < 2]
    for pair in product(subsets, repeat=2):
        operations = [(letter, f"s{stage}") for stage, subset in enumerate(pair) for letter in repeated(subset)]
        lanes = [
            lane(stage, (f"{letter} m0 {cell}" for letter, cell in operations if cell == f"s{stage}"))
            for stage in (0, 1)
        ]
        failures += judged(
            header("schedule", "1", "0..1", stages=2) + "".join(lanes), incomplete(operations, ["s0", "s1"])
        )
    assert not failures, failures[0]


def scheme(subset: dict[str, int], *, micros: str, group: str, clause: str = "") -> str:
    """Two stages, of which the last has the operations of the subset, and the first a forward and a backward."""
    others = f"  F({group}, s) @ 100*m when s == 0\n  B({group}, s) @ 100*m + 90 when s == 0\n"
    lines = (
        f"  {letter}({group}, s) @ 100*m + {10 + clock} when s == 1\n" for clock, letter in enumerate(repeated(subset))
    )
    ends = "" if clause else "(N = 4)"
    reads = "  reads version m\n" if clause else ""
    head = f"scheme subsets{ends}\n{clause}pipe p {{\n  stages s in 0..2 on s\n  micros m in {micros}\n"
    return f"{head}{reads}{others}{''.join(lines)}}}\n"


@pytest.mark.parametrize(
    ("micros", "group", "clause"),
    [
        ("0..N", "m", ""),
        ("0..N by 2", "m..m+2", ""),
        ("0..N halves", "m", ""),
        ("0..N halves by 2", "m..m+2", ""),
        ("0..", "m", "update every 1\n"),
    ],
    ids=["whole", "grouped", "halved", "halves together", "without a flush"],
)
def test_of_the_lines_of_a_scheme(micros: str, group: str, clause: str) -> None:
    failures = []
    for subset in SUBSETS:
        wrong = incomplete([(letter, "s1") for letter in repeated(subset)], ["s1"])
        failures += judged(scheme(subset, micros=micros, group=group, clause=clause), wrong, "subset.chim")
    assert not failures, failures[0]


def test_a_stray_weight_gradient_beside_a_backward_does_its_work_again() -> None:
    text = header("schedule", "2", "0..2") + lane(0, ["F m0 s0", "F m1 s0", "I m0 s0", "B m1 s0", "W m0,m1 s0"])
    (message,) = errors(Source("stray.sir", text))
    assert message.fill(message.title) == "`W m0,m1 s0` does again what `B m1 s0` does"
