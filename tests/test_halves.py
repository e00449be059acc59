"""The halves of a backward are known to the table of kinds and to what reads or writes their names, to no pass."""

import ast
from pathlib import Path

from tests.syntax_trees import python, tree
from tests.test_architecture import PACKAGE, ROOT, RUNTIME

HALVES = {"I", "INPUT_GRADIENT", "backward_input"}
"""The names of the first half of a backward: its letter, its row, and the call of a rank."""

KNOW_HALVES = {
    "the table": {"chimera_ir/ir/kinds.py"},
    "its calls": {"chimera_runtime/stage/stage.py", "chimera_runtime/program/compiled_program.py"},
    "its cells in torch's files": {"chimera_ir/torch_text/csv_reader.py"},
    "its sleeps": {"chimera_runtime/tools/command/options.py"},
    "its cost, set or measured": {
        *("chimera_ir/cost/durations.py", "chimera_ir/predict/equation.py", "chimera_ir/predict/setting.py"),
        *(f"chimera_ir/profile/{name}.py" for name in ("costs", "layers", "read")),
        *("chimera_ir/measure/stages.py", "chimera_ir/measure/stations.py"),
    },
}
"""The modules that name it, by what they have of it; docs/explanation/code.md lists the same for a kind that is new."""


def named(path: Path) -> set[str]:
    """The names in a file of variables, attributes, arguments, imports and functions, and its strings."""
    fields = {
        ast.Name: "id",
        ast.Attribute: "attr",
        ast.alias: "name",
        ast.keyword: "arg",
        ast.FunctionDef: "name",
        ast.Constant: "value",
    }
    values = (getattr(node, fields[type(node)]) for node in ast.walk(tree(path)) if type(node) in fields)
    return {value for value in values if isinstance(value, str)}


def test_what_the_halves_of_a_backward_are_is_known_to_the_table_and_to_what_reads_or_writes_their_names() -> None:
    """No pass: what is lowered, proven, priced, drawn and planned follows from the rows."""
    knowing = {
        path.relative_to(ROOT).as_posix() for path in (*python(PACKAGE), *python(RUNTIME)) if named(path) & HALVES
    }
    assert knowing == set().union(*KNOW_HALVES.values())
