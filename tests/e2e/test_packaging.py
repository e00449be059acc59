"""What is built and installed works where the checkout is not, and what is generated where the compiler is not."""

import os
import re
import runpy
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterable
from email import message_from_bytes
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import chimera_ir
from tests import forkserver
from tests.e2e.ranks import compiled, environment
from tests.patience import PATIENCE
from tests.programs import program

ROOT = Path(__file__).resolve().parents[2]
FORGETTING = "import sys\nfor name in [*sys.modules]: name.startswith('chimera_runtime') and sys.modules.pop(name)\n"
"""Program with which a process that begins with the runtime imported looks for it on its path."""


def call(*command: str | Path, status: int = 0, **variables: str) -> str:
    """What a command says, run from `/` without anything of the checkout on its path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | variables
    done = subprocess.run(
        [str(word) for word in command],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout or done.stderr


def bytes_of(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.parent.name != "__pycache__")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def sources(folder: str) -> set[str]:
    """The files of a folder of the checkout that somebody wrote."""
    found = (path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file())
    return {path.as_posix() for path in found if not any(p == "__pycache__" or p.startswith(".") for p in path.parts)}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built from nothing else."""
    folder = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def needed(names: Iterable[str]) -> set[str]:
    """The distributions that these need, themselves included, without extras."""
    resolved: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in resolved:
            resolved.add(name)
            needs = map(Requirement, metadata.requires(name) or ())
            waiting += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return resolved


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a new environment that holds the wheel and what it declares to need, and so no torch.

    What it needs is lent by this environment, package by package.
    """
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    call(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", built[1])
    packages = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for name in needed(["chimera_ir"]) - {"chimera_ir"}:
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            (packages / top).symlink_to(distribution.locate_file(top))
    where = Path(call(python, "-c", "import chimera_ir; print(chimera_ir.__file__)").strip())
    assert where.is_relative_to(folder)
    return folder / "bin"


def test_the_source_distribution_holds_what_a_newcomer_needs(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        held = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    for folder in ("chimera_ir", "grammar", "templates", "tests", "docs", "examples"):
        assert sources(folder) - held == set()
    assert {"pyproject.toml", "Makefile", "constraints.txt", "README.md", "LICENSE"} <= held
    assert {"CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md"} <= held
    assert {"mkdocs.yml", "hatch_build.py", "editors/vscode/package.json"} <= held
    assert not [name for name in held if "_cache" in name or name.endswith((".pyc", ".out"))]


def test_the_source_distribution_builds_the_same_wheel_as_the_checkout(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    """`built` has the wheel from the source distribution."""
    call(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(built[1]) as theirs:
        assert ours.namelist() == theirs.namelist()
        assert [name for name in ours.namelist() if ours.read(name) != theirs.read(name)] == []


def test_what_a_registry_shows_has_no_link_that_leads_nowhere(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        shown = message_from_bytes(archive.read(name))
    outside_code = re.sub(r"```.*?```|`[^`\n]+`", "", shown.get_payload(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)]+)\)|(?:src|href)=\"([^\"]+)", outside_code)
    assert [link for pair in links for link in pair if link and not re.match(r"https?://|#", link)] == []
    assert shown["Version"] == chimera_ir.__version__
    urls = [url.partition(", ")[2] for url in shown.get_all("Project-URL", [])]
    assert all(url.startswith("https://") for url in urls)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("", "code of `a` `[i](j)` and [more](https://a.org) or [below](#x)."),
        (
            "https://b.org/c",
            "![picture](https://b.org/c/raw/main/docs/p.svg)[code of `a`](https://b.org/c/blob/main/docs/x.md#y) "
            "`[i](j)` and [more](https://a.org) or [below](#x).",
        ),
    ],
)
def test_links_of_a_description_are_absolute_or_text(address: str, shown: str) -> None:
    page = "![picture](docs/p.svg)[code of `a`](docs/x.md#y) `[i](j)` and [more](https://a.org) or [below](#x)."
    without_relative_links = runpy.run_path(str(ROOT / "hatch_build.py"))["without_relative_links"]
    assert without_relative_links(page, address) == shown


def test_the_wheel_holds_the_package_with_its_grammars_templates_and_schemes_and_no_more(
    built: tuple[Path, Path],
) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    inside = {f"chimera_ir/{name}" for name in sources("grammar") | sources("templates")}
    texts = {name for name in sources("tests/errors") if name.count("/") == 3}
    inside |= {name.replace("tests/errors/", "chimera_ir/mistakes/") for name in texts}
    expected = sources("chimera_ir") | sources("chimera_runtime") | inside
    assert held == expected


def test_an_installed_wheel_lists_and_compiles_as_the_checkout_does(installed: Path, tmp_path: Path) -> None:
    names = [line.split()[0] for line in call(installed / "chimera-compile", "--list").splitlines()]
    assert {"gpipe", "dapple", "gems", "chimera"} <= set(names)
    call(installed / "chimera-compile", "chimera", "--set", "N=6", "--out", tmp_path / "installed")
    checkout = compiled(tmp_path, "chimera", N=6)
    assert bytes_of(tmp_path / "installed") == bytes_of(checkout)
    assert "    error[CH301]: worker 0 has two operations" in call(installed / "chimera", "explain", "CH301")
    call(installed / "chimera", "new", tmp_path / "model.py")


def test_an_installed_wheel_has_lexers(installed: Path) -> None:
    program = "from pygments.lexers import get_lexer_by_name as by; print(by('chim').name, 'and', by('sir').name)"
    assert call(installed / "python", "-c", program) == "Chimera scheme and Chimera IR\n"


def test_without_torch_what_needs_it_says_so_and_with_torch_it_is_there(installed: Path, tmp_path: Path) -> None:
    """With torch, in a process that has imported it."""
    run = (installed / "chimera", "run", "chimera", "--model", ROOT / "docs" / "examples" / "tiny.py")
    assert "needs torch, which is not installed: pip install 'chimera_ir[train]'" in call(*run, status=2)
    program = "import chimera_runtime as r; print(r.__file__, *(getattr(r, name).__name__ for name in r.__all__))"
    assert "ModuleNotFoundError: No module named 'torch'" in call(installed / "python", "-c", program, status=1)
    path = call(installed / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    there = forkserver.run(("-c", FORGETTING + program), environment() | {"PYTHONPATH": path}, tmp_path, PATIENCE)
    assert there.returncode == 0, there.stderr
    assert there.stdout.startswith(path)
    assert there.stdout.rstrip().endswith("whole")


def test_an_installed_wheel_knows_its_version_and_needs(installed: Path) -> None:
    for command in (["chimera-compile"], ["chimera"], ["chimera", "run"], ["python", "-m", "chimera_ir", "trace"]):
        assert chimera_ir.__version__ in call(installed / command[0], *command[1:], "--version")
    program = "import importlib.metadata as m; print(*m.requires('chimera_ir'), sep='\\n')"
    plain = [line for line in call(installed / "python", "-c", program).splitlines() if "extra ==" not in line]
    needs = {re.split(r"[^\w-]", line)[0] for line in plain}
    assert needs == {"click", "jinja2", "lark", "networkx", "pygments", "rich"}


def test_the_install_of_this_environment_works_from_anywhere(tmp_path: Path) -> None:
    script = program("chimera-compile", "chimera_ir")
    assert "chimera" in call(script, "--list")
    call(script, "chimera", "--set", "N=6", "--out", tmp_path / "editable")
    assert bytes_of(tmp_path / "editable") == bytes_of(compiled(tmp_path, "chimera", N=6))


def test_what_is_generated_imports_where_the_compiler_and_its_libraries_are_not(tmp_path: Path) -> None:
    directory = compiled(tmp_path, "chimera", N=4)
    modules = [
        path.relative_to(directory).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for path in sorted(directory.rglob("*.py"))
    ]
    assert {"train", "rank_0", "rank_3", "chimera_runtime", "chimera_runtime.tools.launch"} <= set(modules)
    program = f"""{FORGETTING}
import importlib
sys.path.insert(0, {str(directory)!r})
for name in ("chimera_ir", "click", "lark", "rich"):
    sys.modules[name] = None
for name in {modules!r}:
    module = importlib.import_module(name)
    assert module.__file__.startswith({str(directory)!r}), module.__file__
"""
    done = forkserver.run(("-c", program), environment(), tmp_path, PATIENCE)
    assert done.returncode == 0, done.stderr
