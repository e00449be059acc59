"""Tables with an entry for each kind of operation, or each value that crosses an edge, besides the table of kinds."""

from collections.abc import Callable, Iterable

from chimera_ir.ir.kinds import Kind, Readers, Value
from chimera_runtime.program.operations import MAKES, MOVES, OPERATIONS
from chimera_runtime.program.rank_facts import VALUES
from chimera_runtime.stage.stage import Stage


def as_at_run_time(value: Value) -> tuple[bool, str, str]:
    return value.readers is Readers.FED, value.made, value.slots


TABLES: dict[str, Callable[[Kind], bool]] = {
    "chimera_runtime/program/operations.py": lambda kind: (
        (OPERATIONS.get(kind.letter), {*MAKES.get(kind.letter, ())})
        == (kind.method, {value.letter for value in kind.hands_on})
        and MOVES.get(kind.letter) == (kind.method if kind.moves else None)
    ),
    "chimera_runtime/program/rank_facts.py": lambda kind: all(
        value.letter in VALUES and VALUES[value.letter][:3] == as_at_run_time(value) for value in kind.hands_on
    ),
    "chimera_runtime/stage/stage.py": lambda kind: (
        {kind.method, *(value.made for value in kind.hands_on), *_waits(kind)} <= {*dir(Stage)}
    ),
}
"""Whether the tables of a file have a kind, and the values that it hands on."""


def _waits(kind: Kind) -> list[str]:
    return [f"wait_{kind.method}"] if kind.moves else []


def incomplete(kinds: Iterable[Kind]) -> list[str]:
    """The files whose tables lack any of the kinds."""
    rows = tuple(kinds)
    return [file for file, has in TABLES.items() if not all(map(has, rows))]
