"""Tables with an entry for each kind of operation, apart from the table of kinds itself."""

import re
from collections.abc import Callable, Iterable
from functools import partialmethod

from chimera_ir import resources
from chimera_ir.codegen.statements import CALLS, MADE
from chimera_ir.ir.kinds import Kind
from chimera_ir.syntax.ast import LETTERS
from chimera_ir.trace.spans import Activity
from chimera_ir.verify.recording import ROLES, RecordedStage
from chimera_ir.verify.scripts import BUFFERS
from chimera_runtime.program.operations import OPERATIONS
from chimera_runtime.stage.stage import Stage
from chimera_runtime.tools.loop.rehearsal import RehearsedStage


def in_grammar(kind: Kind) -> bool:
    (letters,) = re.findall("^LETTER: (.*)$", resources.grammar("ir.lark"), re.MULTILINE)
    return f'"{kind.letter}"' in letters.split()


def is_recorded(kind: Kind) -> bool:
    methods = (method for method in vars(RecordedStage).values() if isinstance(method, partialmethod))
    return any(method.args == (kind,) for method in methods) and {*kind.hands_on} <= ROLES.keys()


TABLES: dict[str, Callable[[Kind], bool]] = {
    "chimera_ir/syntax/ast.py": lambda kind: kind.letter in LETTERS,
    "grammar/ir.lark": in_grammar,
    "chimera_ir/codegen/statements.py": lambda kind: kind in CALLS and {*kind.hands_on} <= MADE.keys(),
    "chimera_ir/verify/recording.py": is_recorded,
    "chimera_ir/verify/scripts.py": lambda kind: {*kind.hands_on} <= BUFFERS.keys(),
    "chimera_ir/trace/spans.py": lambda kind: kind.noun in {activity.value for activity in Activity},
    "chimera_runtime/program/operations.py": lambda kind: kind.letter in OPERATIONS,
    "chimera_runtime/stage/stage.py": lambda kind: OPERATIONS.get(kind.letter, "") in vars(Stage),
    "chimera_runtime/tools/loop/rehearsal.py": lambda kind: OPERATIONS.get(kind.letter, "") in vars(RehearsedStage),
}
"""Whether the tables of a file have a kind, and the values that it hands on."""


def incomplete(kinds: Iterable[Kind]) -> list[str]:
    """The files whose tables lack any of the kinds."""
    rows = tuple(kinds)
    return [file for file, has in TABLES.items() if not all(map(has, rows))]
