"""Each mistake of a schedule, a program or its text with the message it gets: ``middle/<mistake>.sir`` (or ``.chim``,
where the scheme's lines are what the message must name) beside ``middle/<mistake>.err``.

A file may say in its first lines what its workers need, as a prediction would: ``#: bytes 300 200`` or ``host_bytes``.
"""

import re
from pathlib import Path

import pytest

from chimera_ir.cost.durations import Costs
from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.elaborate.elaborate import elaborate
from chimera_ir.ir.levels import Plan, Program, Quantity
from chimera_ir.ir.streams import Level, ProgramStream
from chimera_ir.ir.text.reader import parse as parse_ir
from chimera_ir.lower.lower import lower
from chimera_ir.orders.ordering import scheduled
from chimera_ir.source import Source
from chimera_ir.syntax.parser import parse
from chimera_ir.verify.verify import verify_lowered, verify_program, verify_schedule
from tests.errors.goldens import compare, inputs, read

MIDDLE = Path(__file__).parent / "middle"
MISTAKES = inputs(MIDDLE, "*.sir", "*.chim")
NOT_IN_A_FILE = {
    # No text spells these, the parsers reject it first; levels that are built by hand can have them: see test_verify.
    "PlacedOutside",
    "StagesUnplaced",
    "MicrosNotNumbered",
    "NoSuchOperation",
    "NumberNotThere",
    "MicroNamedTwice",
    "VersionOfOneUpdate",
    "NoVersionNamed",
    "UnevenPlan",
    "UnknownMessage",
    "NoStageOfMessage",
    "RedundantLine",
    "NeverReplaced",
    "NoSuchUpdate",
    "VersionOfOneStep",
    "LaneCount",
    "StateDiffers",  # Lanes that go round one by one and not together; none is known that the other rules pass.
    "ScriptDiffers",  # The code generator would have to be wrong: see test_scripts.
    "NoTurnFound",  # Said of costs with which a list schedule does not repeat: see test_ordering.
    "NothingTrained",  # Said where a report is asked for: see test_forwards.
    "MoreMistakes",  # Too long for a file, and the next two.
    "MoreErrors",
    "MoreWarnings",
}
"""Messages that no golden pair shows."""


def diagnostics(source: Source) -> tuple[Diagnostic, ...]:
    try:
        return tuple(_compile(source))
    except Rejected as rejected:
        return rejected.diagnostics


def _compile(source: Source) -> tuple[Diagnostic, ...]:
    given = re.findall(r"^#: (bytes|host_bytes) ([0-9 ]+)$", source.text, re.M)
    needs = (lambda _: {Quantity(name): [*map(int, row.split())] for name, row in given}) if given else None
    if source.name.endswith(".chim"):
        level: Level = elaborate(parse(source), {}, 1000)[0]
    else:
        level = parse_ir(source)
    if isinstance(level, Program | ProgramStream):
        verify_program(level)
        return ()
    schedule, plan = (scheduled(level, Costs()), level) if isinstance(level, Plan) else (level, None)
    checked = verify_schedule(schedule, plan, needs)
    if not checked.findings.diagnostics:
        verify_lowered(lower(checked.level), checked)
    return checked.findings.diagnostics


@pytest.mark.parametrize("path", MISTAKES, ids=lambda path: path.stem)
def test_a_mistake_gets_its_message(path: Path, update_goldens: bool) -> None:
    source = read(path)
    compare(path, diagnostics(source), source, update_goldens)
