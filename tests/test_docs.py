"""The pages tell the truth: what they quote is what is printed, what they show is what is drawn."""

import doctest
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from chimera_ir import library
from chimera_ir.compilation import Compilation
from chimera_ir.request import Request
from chimera_ir.source import Source
from chimera_ir.verify.findings import Rule
from site_hooks import navigation
from tests.e2e.ranks import environment
from tests.pages import PAGES, page_of, page_text
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parent.parent


def ended(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, f"docs/{script}"],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_every_quoted_command_prints_what_the_page_says() -> None:
    done = ended("check.py")
    assert done.returncode == 0, f"run docs/check.py --update and read the difference:\n{done.stdout}{done.stderr}"


def test_every_picture_is_what_the_schemes_compile_to() -> None:
    done = ended("figures.py")
    assert done.returncode == 0, f"run docs/figures.py --update and look at:\n{done.stdout}{done.stderr}"


def test_every_list_of_codes_options_and_names_is_that_of_the_code() -> None:
    done = ended("listings.py")
    assert done.returncode == 0, f"run docs/listings.py --update:\n{done.stdout}{done.stderr}"


def test_the_page_on_python_shows_what_its_lines_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    monkeypatch.chdir(tmp_path)
    found = doctest.testfile(str(page_of("python.md")), module_relative=False)
    assert found.attempted > 10
    assert found.failed == 0
    assert (tmp_path / "out" / "train.py").exists()


@pytest.mark.parametrize("page", ["solver.md", "networkx.md"])
def test_the_python_of_a_page_finds_what_the_page_says(page: str) -> None:
    found = doctest.testfile(str(page_of(page)), module_relative=False)
    assert found.attempted > 8
    assert found.failed == 0


@pytest.mark.parametrize("name", library.names())
def test_every_library_scheme_has_a_page_with_its_picture_and_command(name: str) -> None:
    page = page_text(f"{name}.md")
    for part in (f"images/schemes/{name}.svg", f"    chimera compile {name}"):
        assert part in page
    assert f"]({name}.md)" in (page_of(f"{name}.md").parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def pages_of(entry: object) -> Iterator[str]:
    """The pages of a navigation, or of a part of it."""
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from pages_of(part)


def test_every_page_is_in_the_index_which_is_the_navigation_of_the_site() -> None:
    pages = Counter(pages_of(navigation((ROOT / "docs" / "README.md").read_text(encoding="utf-8"))))
    expected = Counter(
        path.relative_to(ROOT / "docs").as_posix() for path in PAGES if path.is_relative_to(ROOT / "docs")
    )
    assert pages == expected, "each page has one line in docs/README.md: - [What it is about](folder/page.md): .."


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "images").rglob("*.svg")), ids=lambda path: path.stem)
def test_every_picture_is_shown_on_a_page(path: Path) -> None:
    shown = {
        (page.parent / link).resolve()
        for page in PAGES
        for link in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    }
    assert path in shown


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "schemes").glob("*.chim")), ids=lambda path: path.stem)
def test_every_example_scheme_compiles(path: Path) -> None:
    request = Request(Source(path.name, path.read_text()))
    assert Compilation(request, warn=lambda warning: pytest.fail(warning.code)).report.verified


def test_every_name_of_a_rule_has_a_section_on_the_page_on_proofs() -> None:
    sections = re.findall(r"^## (.*)$", page_text("proofs.md"), re.M)
    assert {rule.value for rule in Rule} <= {*sections}


def test_the_page_on_formats_quotes_how_its_examples_begin() -> None:
    quoted = re.findall(r"^```toml\n(.*?)^```$", page_text("formats.md"), re.M | re.S)
    files = [ROOT / "docs" / "examples" / f"small.{kind}.toml" for kind in ("profile", "cluster")]
    assert all(path.read_text(encoding="utf-8").startswith(text) for text, path in zip(quoted, files, strict=True))


def test_the_quick_tables_of_the_papers_experiments_are_what_the_planner_says() -> None:
    """docs/experiments.py without --only tells of all, in minutes."""
    command = [sys.executable, "docs/experiments.py", "--only", "selection", "strategies"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (0, "")


CODE = [
    path
    for folder in ("chimera_ir", "chimera_runtime", "grammar", "templates", "tests", "docs")
    for path in sorted((ROOT / folder).rglob("*.*"))
]


def test_the_page_on_the_code_names_what_there_is() -> None:
    """A path is that of a file or folder, or its end; of anything else in backticks every word is in the code."""
    page = re.sub(r"^    [^\n]*$|^```\w.*?^```$", "", page_text("code.md"), flags=re.MULTILINE | re.DOTALL)
    paths = [f"/{path.relative_to(ROOT).as_posix()}" for path in CODE]
    words = {
        word
        for path in CODE
        if path.suffix in (".py", ".lark")
        for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))
    }
    gone = []
    for quoted in dict.fromkeys(re.findall(r"`([^`]+)`", page)):
        if re.fullmatch(r"[\w/]*/|[\w/]+\.(py|lark|sir|md|toml)", quoted):
            gone += [] if any(f"/{quoted}" in path for path in paths) else [quoted]
        else:
            gone += [word for word in re.findall(r"[A-Za-z_]\w+", quoted) if word not in words]
    assert gone == []
