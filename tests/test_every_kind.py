"""A row of the table of kinds that another table lacks is found, and the page on the code adds one that works."""

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from chimera_ir.cost.durations import Costs
from chimera_ir.ir.kinds import BACKWARD, COSTED, GRADIENTS, KINDS, Kind
from chimera_ir.ir.text.header import FORMS, FORMS_OF_TURN
from chimera_ir.picture.looks import Shade
from chimera_ir.profile.costs import ENTRIES
from chimera_runtime.tools.command.options import KINDS as REHEARSED
from tests import forkserver
from tests.e2e.ranks import torchrun
from tests.every_kind import TABLES, incomplete
from tests.pages import page_of
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = re.findall(r"^```diff\n(\S+)\n(.*?)^```$", page_of("code.md").read_text(encoding="utf-8"), re.M | re.S)
"""The files that the example on the page changes, each with the changed lines and lines around them."""


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_every_table_has_every_kind(kind: Kind) -> None:
    assert not incomplete([kind]), "add the kind there"
    assert Costs()[kind.letter] > 0
    assert Shade.of(kind) in Shade
    assert ENTRIES[kind.letter].replace("_", " ") == kind.noun
    assert FORMS[kind.letter].split()[0] == FORMS_OF_TURN[kind.letter].split()[0] == kind.letter


def test_a_rank_names_kinds_and_pairs_as_the_table_does() -> None:
    assert [*REHEARSED] == [*COSTED]


def test_a_row_that_only_the_table_has_is_missing_in_every_other_table() -> None:
    row = replace(BACKWARD, letter="X", noun="example", makes=(replace(GRADIENTS, letter="dz", made="dzs"),))
    assert incomplete([*KINDS.values(), row]) == [*TABLES]


def applied(text: str, change: str) -> str:
    """A text with a change: the lines before, which occur once, become the lines after, in each part after ``@@``."""
    for part in change.rstrip("\n").split("\n@@\n"):
        lines = [(line[:1], line[1:]) for line in part.split("\n")]
        before, after = ("\n".join(line for sign, line in lines if sign != other) for other in "+-")
        assert text.count(before) == 1, f"these lines are not there once:\n{before}"
        text = text.replace(before, after)
    return text


def changed(tree: Path, files: list[tuple[str, str]]) -> None:
    for file, change in files:
        (tree / file).write_text(applied((tree / file).read_text(encoding="utf-8"), change), encoding="utf-8")


def said(tree: Path, program: str, *words: str) -> str:
    """Output of a program that imports both packages, and the files that they read, from a tree."""
    return passed(forkserver.run(("-c", program, *words), os.environ | {"PYTHONPATH": str(tree)}, tree, PATIENCE))


def passed(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


SECOND_VALUE = [
    (
        "chimera_ir/ir/kinds.py",
        """\
+NORMS = Value("n", "norms", Readers.FEEDING, Counted.MESSAGE, "it needs those norms", made="norms", slots="norms_read")
+N_READS, N_MAKES = (*BACKWARD.reads, NORMS), (*BACKWARD.makes, NORMS)
+KINDS["N"] = Kind("N", "normed backward", N_READS, N_MAKES, BACKWARD.frees, sums=True, cost=2)
 PAIR = Pairing("pair", "pair", (FORWARD, BACKWARD))
""",
    ),
    (
        "chimera_runtime/program/operations.py",
        """\
+OPERATIONS["N"], MAKES["N"] = "normed_backward", ("dx", "n")
 PAIRED = "pair"
""",
    ),
    (
        "chimera_runtime/program/rank_facts.py",
        """\
+VALUES["n"] = EdgeValue(False, made="norms", slots="norms_read", buffers="norm_buffers", views="views")
 def implied(source: int, target: int) -> str:
""",
    ),
    (
        "chimera_runtime/values/boundary.py",
        """\
+    def norm_buffers(self, device: torch.device, micros: int = 1) -> Tensors:
+        return (torch.zeros(1, dtype=torch.float64, device=device),)
+
     def views(self, memory: Tensors, micros: int, first: int = 0) -> Tensors:
""",
    ),
    (
        "chimera_runtime/stage/stage.py",
        """\
+    def normed_backward(self, micros: Micros, gradients: Tensors = (), norms: Tensors = ()) -> None:
+        def norm(tensors: Tensors) -> torch.Tensor:
+            return sum((tensor.double().norm() for tensor in tensors), torch.zeros(1, dtype=torch.float64))
+
+        assert not gradients or torch.equal(norms[0], norm(gradients)), "these are not the norms of the gradients"
+        self._hand_on("n", micros, (norm(self._backwards("N", self._backward, micros, gradients)),))
+
+    norms = _handed_on("n")
+
     def backward_input(self, micros: Micros, gradients: Tensors = ()) -> None:
""",
    ),
]
"""A backward that hands back norms as well: two values go from a stage to the one before."""

INCOMPLETE = "from tests.every_kind import *; from chimera_ir.ir.kinds import KINDS; print(*incomplete(KINDS.values()))"
COMPILE = "from chimera_ir.start import compile_; compile_()"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the compiler consists of."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in ("chimera_ir", "chimera_runtime", "grammar", "templates"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "tests").mkdir()
    for file in ("__init__.py", "every_kind.py"):
        shutil.copy(ROOT / "tests" / file, tree / "tests")
    return tree


def test_the_example_on_the_page_adds_a_kind_that_trains(tree: Path) -> None:
    (row,) = [(file, change) for file, change in EXAMPLE if file == "chimera_ir/ir/kinds.py"]
    others = [each for each in EXAMPLE if each != row]
    changed(tree, [row])
    assert sorted(said(tree, INCOMPLETE).split()) == sorted(file for file, _ in others)
    changed(tree, others)
    assert not said(tree, INCOMPLETE).split()
    text = (ROOT / "chimera_ir" / "schemes" / "dapple.chim").read_text(encoding="utf-8")
    (tree / "guarded.chim").write_text(text.replace("  B(m, s)", "  G(m, s)").replace("dapple", "guarded"))
    shutil.copy(ROOT / "tests" / "e2e" / "models" / "zoo.py", tree)
    report = said(tree, COMPILE, "guarded.chim", "D=2", "N=4", "--out", "out")
    assert "F = 1, G = 2" in report
    assert "G m3 s0" in (tree / "out" / "schedule.sir").read_text(encoding="utf-8")
    run = (tree / "out", 2, "--model", "zoo.py")
    assert "check: passed" in passed(torchrun(*run, "--check-only"))
    passed(torchrun(*run, "--rehearse", "F=0.001,B=0.002,G=0.002", "--steps", "1"))


def test_two_values_cross_one_edge_down_to_the_tags_of_messages(tree: Path) -> None:
    changed(tree, SECOND_VALUE)
    text = (ROOT / "chimera_ir" / "schemes" / "dapple.chim").read_text(encoding="utf-8")
    (tree / "normed.chim").write_text(text.replace("  B(m, s)", "  N(m, s)").replace("dapple", "normed"))
    shutil.copy(ROOT / "tests" / "e2e" / "models" / "zoo.py", tree)
    said(tree, COMPILE, "normed.chim", "D=2", "N=4", "--out", "normed")
    program = (tree / "normed" / "schedule.sir").read_text(encoding="utf-8")
    assert "\n  send m0 s1->s0 to w0\n  send n m0 s1->s0 to w0\n" in program
    script = (tree / "normed" / "rank_0.py").read_text(encoding="utf-8")
    assert 'in_n_s1_s0 = lane.incoming(1, 0, worker=1, value="n")' in script
    assert "stage0.normed_backward(0, in_s1_s0.take(0), in_n_s1_s0.take(0))" in script
    assert "check: passed" in passed(torchrun(tree / "normed", 2, "--model", "zoo.py", "--check-only"))
