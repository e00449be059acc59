"""What the design promises about the code as text: who imports whom, what is nowhere, how long a file may be."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from chimera_ir import library
from tests.patience import PATIENCE
from tests.syntax_trees import imported, nodes, python

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "chimera_ir"
TEMPLATES = ROOT / "templates"
RUNTIME = ROOT / "chimera_runtime"

IMPORTS = {
    part: {*below.split()}
    for part, below in {
        "escapes": "",
        "garbage": "",
        "plural": "",
        "progress": "",
        "records": "",
        "source": "",
        "console": "escapes",
        "highlight": "source",
        "notebook": "escapes",
        "tables": "escapes",
        "templates": "escapes source",
        "diagnostics": "escapes highlight records source",
        "errors": "diagnostics source",
        "ir": "diagnostics errors source",
        "output": "errors source",
        "flow": "ir",
        "profile": "diagnostics errors escapes ir source",
        "syntax": "diagnostics ir plural records source",
        "cost": "errors flow ir tables",
        "elaborate": "diagnostics errors ir source syntax",
        "library": "diagnostics errors profile source syntax",
        "lower": "flow ir source",
        "measure": "ir output profile",
        "verify": "diagnostics flow ir source",
        "codegen": "flow ir source templates verify",
        "predict": "cost errors flow garbage ir lower profile tables verify",
        "torch_text": "diagnostics errors ir lower source verify",
        "orders": "cost diagnostics errors flow ir lower predict verify",
        "picture": "cost ir source templates",
        "request": "cost errors ir orders predict source syntax torch_text",
        "trace": "cost diagnostics escapes flow ir picture predict profile source tables verify",
        "comparison": "diagnostics elaborate errors ir library lower request source syntax",
        "page": "cost diagnostics errors escapes flow ir lower picture predict request source verify",
        "repeated": "codegen cost diagnostics elaborate flow ir lower verify",
        "several": "codegen errors ir verify",
        "compilation": (
            "codegen comparison cost diagnostics elaborate errors flow garbage ir lower notebook orders output "
            "page picture predict repeated request several source syntax torch_text trace verify"
        ),
        "answer": "compilation console cost ir library picture predict syntax",
        "options": "compilation cost elaborate errors escapes ir library orders predict profile request source syntax",
        "recorded_page": "compilation cost diagnostics errors page predict profile request source trace",
        "compare": (
            "comparison compilation console cost diagnostics elaborate errors ir library notebook options "
            "picture predict request source tables"
        ),
        "planner": (
            "codegen compilation cost diagnostics elaborate errors escapes flow garbage ir library lower options "
            "orders predict profile request several source syntax tables verify"
        ),
        "fitting": "compilation diagnostics elaborate errors flow ir lower orders planner source syntax",
        "__init__": "compare compilation errors fitting ir options planner source",
        "commands": (
            "__version__ answer compare compilation console cost diagnostics elaborate errors escapes fitting "
            "garbage highlight library measure options orders output planner profile progress recorded_page "
            "request several source syntax torch_text trace"
        ),
        "start": "commands garbage",
        "__main__": "start",
    }.items()
}
"""What each part of the package may import of the others; `compilation` sees nearly all of it."""

EVERYWHERE = {"plural"}
"""What any part may import: how one writes."""

ROOMS = (
    *("errors", "blame", "values", "program", "ranks", "model", "huggingface", "data", "stage", "lane", "start"),
    *("optimizer", "update", "evaluate", "state", "check", "pipeline", "adapter", "checkpoint", "tools"),
)
"""Rooms of the runtime, from the bottom up: each may import of those before it. Files at the root are rooms as well."""

TOOL_ROOMS = ("open", "command", "fail", "record", "loop", "watch", "run", "launch")
"""Rooms of the runtime's `tools`, in the same order."""

FILES = {".py", ".j2", ".lark"}
TOP = (
    *(".ci", ".github", "benchmarks", "chimera_ir", "chimera_runtime", "docs", "editors", "examples", "grammar"),
    *("templates", "tests"),
)
TEXTS = {*FILES, ".md", ".toml", ".txt", ".chim", ".sir", ".err", ".svg", ".json", ""}
SCHEME_NAMES = {*library.names(), "pipedream", "2bw", "dualpipe", "interleaved", "zb_h1"} - {"chimera"}


def part(path: Path) -> str:
    """The part of the package that a file belongs to: a folder, or a file at the top."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def project_texts() -> Iterator[Path]:
    """Everything that a person wrote: what the version control tracks, or will; in a worktree `.git` is a file."""
    others = {".git", "gpu-report.md"}
    yield from (path for path in ROOT.iterdir() if path.is_file() and path.suffix in TEXTS and path.name not in others)
    for top in TOP:
        for path in (ROOT / top).rglob("*"):
            parts = path.relative_to(ROOT).parts[1:]
            hidden = any(each.startswith(".") or each == "__pycache__" or each.endswith(".out") for each in parts)
            if path.is_file() and not hidden and path.suffix in TEXTS:
                yield path


def test_every_import_goes_down() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in python(PACKAGE)
        for name, line in imported(path)
        if name.startswith("chimera_ir.") and name.split(".")[1] not in IMPORTS[part(path)] | {part(path)} | EVERYWHERE
    ]
    assert wrong == []


def test_the_table_of_imports_knows_every_part_and_has_no_cycle() -> None:
    parts = {part(path) for path in python(PACKAGE)}
    assert parts == IMPORTS.keys()
    resolved: set[str] = {"__version__"}
    while remaining := IMPORTS.keys() - resolved:
        ready = {name for name in remaining if IMPORTS[name] <= resolved}
        assert ready, f"a cycle among {remaining}"
        resolved |= ready


def test_the_code_generator_sees_of_verification_only_its_type() -> None:
    seen = {name for path in python(PACKAGE / "codegen") for name, _ in imported(path) if ".verify" in name}
    assert seen == {"chimera_ir.verify.verify.Verified"}


@pytest.mark.parametrize(
    ("name", "homes"),
    [
        ("networkx", {"flow", "ir"}),
        ("click", {"commands"}),
        ("torch", {"measure"}),
        ("chimera_runtime", {"measure", "commands", "predict", "profile"}),
        ("lark", {"source", "syntax", "ir"}),
        ("jinja2", {"templates"}),
        ("pygments", {"highlight"}),
    ],
)
def test_a_library_of_others_is_met_where_it_belongs(name: str, homes: set[str]) -> None:
    users = {part(path) for path in python(PACKAGE) for module, _ in imported(path) if module.split(".")[0] == name}
    assert users == homes


def test_the_compiler_imports_nothing_but_the_standard_library_and_what_it_declares() -> None:
    declared = {"click", "jinja2", "lark", "networkx", "pygments", "rich"}
    # The solver of a search, which is an extra and imported where a search begins.
    allowed = sys.stdlib_module_names | declared | {"chimera_ir", "chimera_runtime", "ortools"}
    compiler = [path for path in python(PACKAGE) if part(path) != "measure"]
    tops = {module.split(".")[0] for path in compiler for module, _ in imported(path)}
    assert tops - allowed == set()
    assert declared <= tops


def test_compiling_and_reading_the_options_of_training_import_neither_torch_nor_numpy() -> None:
    program = (
        "import sys; from chimera_ir.commands.compile_command import compile_command;"
        "compile_command(['chimera', '--emit', 'report'], standalone_mode=False);"
        "import chimera_ir.commands.run_command;"
        "sys.exit(', '.join(sorted({'torch', 'numpy', 'scipy', 'pandas', 'matplotlib'} & set(sys.modules))) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_what_runs_on_the_ranks_imports_only_the_standard_library_torch_and_itself() -> None:
    files = python(RUNTIME)
    assert files
    for path in files:
        for module, line in imported(path):
            top = module.split(".")[0]
            assert top in {"chimera_runtime", "torch"} | sys.stdlib_module_names, f"{path.name}:{line}: {module}"


def test_every_import_of_the_runtime_goes_down() -> None:
    """From a room to itself or to one below; `__init__` of the package, above all of them, imports when it is asked."""
    wrong = []
    for folder, rooms in ((RUNTIME, ROOMS), (RUNTIME / "tools", TOOL_ROOMS)):
        base = ".".join(folder.relative_to(ROOT).parts) + "."
        files = [path for path in python(folder) if path != folder / "__init__.py"]
        assert {path.relative_to(folder).parts[0].removesuffix(".py") for path in files} == {*rooms}
        for path in files:
            below = rooms[: rooms.index(path.relative_to(folder).parts[0].removesuffix(".py")) + 1]
            wrong += [
                f"{path.relative_to(ROOT)}:{line}: {name}"
                for name, line in imported(path)
                if name.startswith(base) and name.removeprefix(base).split(".")[0] not in below
            ]
    assert wrong == []


def test_the_root_of_the_runtime_has_only_the_pipeline_and_whose_code_failed() -> None:
    names = {path.stem for path in RUNTIME.glob("*.py")}
    assert names == {"__init__", "blame", "pipeline"}


def test_every_room_of_the_runtime_has_a_folder_of_unit_tests() -> None:
    tests = ROOT / "tests" / "unit" / "runtime"
    rooms = {path.relative_to(RUNTIME).parent for path in python(RUNTIME)}
    tested = {path.relative_to(tests).parent for path in python(tests) if path.name.startswith("test_")}
    assert sorted(map(str, rooms ^ tested)) == []


def test_the_reference_that_checks_the_loops_shares_no_code_with_the_runtime() -> None:
    names = {name for name, _ in imported(RUNTIME / "check/reference.py")}
    assert {name.split(".")[0] for name in names} <= {"torch"} | sys.stdlib_module_names


def test_generated_scripts_import_only_what_is_generated_beside_them() -> None:
    pattern = re.compile(r"^(?:from|import) +([\w.]+)", re.M)
    for path in TEMPLATES.glob("*.py.j2"):
        for module in pattern.findall(path.read_text(encoding="utf-8")):
            top = module.split(".")[0]
            assert top in {"chimera_runtime"} | sys.stdlib_module_names, f"{path.name}: {module}"


@cache
def lines_of_both_packages() -> list[tuple[str, str]]:
    """The lines of the packages and templates, each with its place."""
    readers = [*python(PACKAGE), *python(RUNTIME), *(path for path in TEMPLATES.rglob("*") if path.suffix in FILES)]
    return [
        (f"{path.relative_to(ROOT)}:{number}", line)
        for path in readers
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    ]


def test_neither_compiler_nor_templates_know_a_scheme() -> None:
    names = "|".join(map(re.escape, sorted(SCHEME_NAMES)))
    pattern = re.compile(rf"(?<![a-z0-9])(?:{names})(?![a-z0-9])", re.I)
    assert [place for place, line in lines_of_both_packages() if pattern.search(line)] == []


def test_the_word_chimera_is_the_project_and_never_the_scheme() -> None:
    """As a string of its own it would be a comparison, or a default, with the scheme's name; but for the command."""
    places = [
        path.relative_to(PACKAGE).as_posix()
        for path in python(PACKAGE)
        for node in nodes(path)
        if isinstance(node, ast.Constant) and node.value == "chimera"
    ]
    assert places == ["commands/group.py"]


def calls(path: Path, names: set[str]) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {node.func.id}"


def test_only_the_command_line_prints() -> None:
    assert [call for path in python(PACKAGE) if part(path) != "commands" for call in calls(path, {"print"})] == []


def test_no_program_is_looked_for_beside_the_interpreter() -> None:
    """It may be installed elsewhere: a module is run by ``sys.executable``, a program found by `tests.programs`."""
    beside = re.compile(r"sys\.executable\)\.parent" + r" /")
    readers = [path for top in ("benchmarks", "docs", "examples", "tests") for path in python(ROOT / top)]
    assert [path.name for path in readers if beside.search(path.read_text(encoding="utf-8"))] == []


def test_nothing_that_a_scheme_says_is_executed() -> None:
    forbidden = {"eval", "exec", "compile", "__import__", "globals", "setattr", "breakpoint"}
    assert {path.name for path in python(PACKAGE) if any(calls(path, forbidden))} == {"scripts.py"}, "see test_scripts"
    modules = {name.split(".")[0] for path in python(PACKAGE) for name, _ in imported(path)}
    assert modules & {"pickle", "marshal", "subprocess", "runpy", "code", "shelve", "ctypes", "socket"} == set()


def test_no_file_is_longer_than_nine_hundred_lines() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in project_texts()
        if path.suffix in FILES
    }
    assert {n: k for n, k in lengths.items() if k > 900} == {}


def test_no_text_names_a_place_on_a_machine_or_leaves_work_for_later() -> None:
    places = re.compile("|".join(("/wo" + "rk/", "/ho" + "me/", "/ro" + "ot/", "/Us" + "ers/", r"[A-Z]:\\U" + "sers")))
    later = re.compile(r"\b(" + "TO" + "DO|FIX" + "ME|XX" + "X|HA" + r"CK)\b")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in project_texts()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if places.search(line) or later.search(line)
    ]
    assert wrong == []


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.j2")), ids=lambda path: path.name)
def test_a_template_holds_no_logic_but_loops_and_one_level_of_if(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    depth = 0
    for word in re.findall(r"{%[-+]?\s*(\w+)", text):
        assert word in {"for", "endfor", "if", "else", "endif", "extends", "block", "endblock"}
        depth += {"if": 1, "endif": -1}.get(word, 0)
        assert depth <= 1
    assert depth == 0
    for expression in re.findall(r"{{(.*?)}}", text, re.S):
        assert re.fullmatch(r"\s*[a-z_]+(\.[a-z_]+)*( [-+] \d+| \| first)?\s*", expression), expression


def test_schemes_are_text_without_python() -> None:
    kinds = {path.suffix for path in (PACKAGE / "schemes").iterdir() if path.is_file()}
    assert kinds == {".chim", ".toml"}
