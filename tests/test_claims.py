"""Claims of the pages hold: options, codes, paths, words, numbers of lines."""

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import click
import pytest
from click.testing import CliRunner

import chimera_ir
from chimera_ir.commands import common
from chimera_ir.commands.compile_command import compile_command
from chimera_ir.commands.plan_command import plan_command
from chimera_ir.commands.profile_command import profile_command
from chimera_ir.commands.run_command import run_command
from chimera_ir.commands.search_command import search_command
from chimera_ir.commands.trace_command import trace_command
from chimera_ir.diagnostics import catalogue
from chimera_runtime import errors
from chimera_runtime.tools.command import options
from paper_tables.tables import tables_command
from tests import pages
from tests.lowered import scripts_of
from tests.pages import page_text

ROOT = Path(__file__).resolve().parent.parent
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in pages.PAGES}
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
ALIASED: dict[str, click.Command] = {
    "compile": compile_command,
    "plan": plan_command,
    "profile": profile_command,
    "trace": trace_command,
}
COMMANDS: dict[str, click.Command] = {
    **{f"chimera {name}": program for name, program in ALIASED.items()},
    **{f"chimera-{name}": program for name, program in ALIASED.items()},
    "chimera run": run_command,
    "chimera search": search_command,
    "docs/paper_tables": tables_command,
}
OTHERS = {
    *("--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--standalone", "--no-python"),
    *("--max-restarts", "--redirects", "--tee", "--signal", "--hypothesis-profile", "--update-goldens", "--fix"),
}
"""Options of torchrun, pytest and ruff."""


def takes(program: click.Command) -> set[str]:
    """The options of a command and of those below it."""
    below = program.commands.values() if isinstance(program, click.Group) else ()
    names = {name for parameter in program.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return names.union({"--help"}, *map(takes, below))


@pytest.fixture
def trains_with(capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The options of train.py."""
    with pytest.raises(SystemExit):
        options.parse(["--help"])
    return set(OPTION.findall(capsys.readouterr().out))


def options_given(text: str, name: str) -> Iterator[str]:
    """The options that a text gives to a program, line by line, up to the end of the command."""
    for line in re.findall(rf"(?<![\w-]){re.escape(name)} ([^\n`|#;]*)", text):
        yield from OPTION.findall(line.partition(" -- ")[0])


@pytest.mark.parametrize("page", PAGES)
def test_every_option_on_a_page_is_one_that_the_program_takes(page: str, trains_with: set[str]) -> None:
    text = PAGES[page]
    for name, program in COMMANDS.items():
        assert {*options_given(text, name)} - takes(program) == set(), name
    train = options_given(text, "train.py")
    assert set(train) - trains_with == set()
    folders = ("benchmarks", "docs", "examples", "tests/e2e", "tests/gpu")
    written = "".join(path.read_text(encoding="utf-8") for top in folders for path in (ROOT / top).glob("*.py"))
    known = OTHERS.union(trains_with, OPTION.findall(written), *map(takes, COMMANDS.values()))
    assert set(OPTION.findall(re.sub(" -- .*", "", text))) - known == set()


def test_one_table_has_every_option_of_train_py(trains_with: set[str]) -> None:
    _, _, behind = page_text("train.md").partition("## Options\n")
    assert trains_with - {"--help"} - set(OPTION.findall(behind.partition("\n## ")[0])) == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_code_path_and_heading_that_a_page_names_exists(page: str) -> None:
    modules = (import_module(f"{catalogue.__name__}.{module.name}") for module in iter_modules(catalogue.__path__))
    codes = {member.code for module in modules for member in vars(module).values() if hasattr(member, "code")}
    assert set(re.findall(r"CH\d{3}", PAGES[page])) - codes == set()
    tops = "chimera_ir|templates|tests|docs|benchmarks|grammar"
    paths = re.findall(rf"(?<![\w/.-])((?:{tops})/[\w./-]*\w)", PAGES[page])
    assert [path for path in paths if not [*ROOT.glob(path), *ROOT.glob(f"{path}.*")]] == []
    for link, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)]+)\)", PAGES[page]):
        target = ((ROOT / page).parent / link).resolve() if link else ROOT / page
        assert anchor in headings(target), f"{link}#{anchor}"


@cache
def headings(path: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", text, re.M)}


def test_a_script_has_as_many_lines_as_the_page_says() -> None:
    (scheme, N, lines), *rest = re.findall(
        r"worker 0 of `(\w+)` with N = (\d+) has ([\d,]+) lines", page_text("runtime.md")
    )
    assert rest == []
    script = scripts_of(chimera_ir.compile(scheme, N=int(N)).verified)["rank_0.py"]
    assert len(script.splitlines()) == int(lines.replace(",", ""))


def words(grammar: str) -> set[str]:
    """The words that a grammar has between quotation marks, comments left out."""
    text = re.sub(r"//.*", "", (ROOT / "grammar" / grammar).read_text(encoding="utf-8"))
    return set(re.findall(r'"([a-z_]{2,})"', text))


def test_the_pages_have_every_word_of_the_grammars() -> None:
    (listed,) = re.findall(r"These words are not names: `(.*?)`", page_text("language.md"), re.S)
    assert set(listed.split()) == words("scheme.lark")
    page = page_text("ir.md")
    shape = page[page.index("    file  ") : page.index("Each of these is one line")]
    tables = "".join(re.findall(r"^\|.*$", page, re.M))
    within_lines = {"to", "from", "into", "of", "prefer"}
    missing = {word for word in words("ir.lark") if f'"{word}"' not in shape and f"`{word} " not in tables}
    assert missing <= within_lines


def test_the_statuses_of_a_rank_are_those_that_it_ends_with() -> None:
    ends = {0, errors.FAILED, errors.MISUSED, errors.OUR_FAULT, errors.INTERRUPTED, errors.TERMINATED}
    assert ends == statuses("train.md", "of a rank|a rank")


def test_the_statuses_of_the_compiler_are_those_that_it_ends_with() -> None:
    ends = {0, common.WRONG_TEXT, common.WRONG_COMMAND, common.DOES_NOT_FIT, common.OUR_FAULT, common.INTERRUPTED}
    assert ends == statuses("commands.md", "every command")


def statuses(page: str, subject: str) -> set[int]:
    """The numbers of a table of exit statuses."""
    (table,) = re.findall(rf"^\| [^|\n]*(?:{subject})[^|\n]* \| \|\n\|---\|---\|\n((?:\|.*\n)+)", page_text(page), re.M)
    first = (line.split("|")[1] for line in table.splitlines())
    return {int(number) for cell in first for number in cell.split(",")}


def test_every_row_of_the_report_is_explained(tmp_path: Path) -> None:
    """Stages that recompute give the table all its rows."""
    printed = (
        CliRunner().invoke(compile_command, ["chimera_doubling", "--details", "--out", str(tmp_path / "out")]).stdout
    )
    lines = [line.strip() for line in printed.splitlines()]
    start = next(at for at, line in enumerate(lines) if line.startswith("──"))
    rows = [re.split(r"\s{2,}", line)[0] for line in lines[start + 1 : lines.index("", start)]]
    assert rows[0] == "makespan"
    assert len(rows) == 11
    assert [row for row in rows if f"| {row} |" not in page_text("performance.md")] == []
    words = {word for row in rows for word in row.split(", ")}
    assert {word for word in words if f"| {word} |" not in page_text("glossary.md")} == set()


def test_every_folder_of_the_compiler_is_on_the_page_about_the_code() -> None:
    folders = {path.parent.name for path in (ROOT / "chimera_ir").glob("*/__init__.py")} | {"schemes"}
    assert {name for name in folders if f"`{name}/" not in page_text("code.md")} == set()


def test_the_badges_of_the_readme_say_what_the_package_says() -> None:
    readme = PAGES["README.md"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (torch,) = (need for need in project["optional-dependencies"]["train"] if need.startswith("torch"))
    assert re.findall(r"^!\[(.*?)\]\(https://img\.shields\.io/badge/", readme, re.M) == [
        f"Python {project['requires-python'].removeprefix('>=')}+",
        f"torch {torch.removeprefix('torch>=')}+",
        f"Licence {project['license']}",
    ]
