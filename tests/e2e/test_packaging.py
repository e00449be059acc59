"""What is built and installed works where the checkout is not, and what is generated where the compiler is not."""

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import chimera_ir
from tests.e2e.ranks import compiled
from tests.programs import program

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.e2e


def call(*command: str | Path) -> str:
    """What a command says, run from `/` without anything of the checkout on its path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a new environment that holds the wheel.

    The dependencies are lent by this environment: a path file makes its packages importable, but does not read the
    path files among them, so that an editable install of the compiler remains invisible.
    """
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    call(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", built[1])
    packages = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    lent = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "lent.pth").write_text("\n".join(lent) + "\n")
    where = Path(call(python, "-c", "import chimera_ir; print(chimera_ir.__file__)").strip())
    assert where.is_relative_to(folder)
    return folder / "bin"


def test_the_source_distribution_holds_what_a_newcomer_needs(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        held = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    for folder in ("chimera_ir", "grammar", "templates", "tests", "docs", "examples"):
        assert sources(folder) - held == set()
    assert {"pyproject.toml", "Makefile", "constraints.txt", "README.md", "LICENSE"} <= held
    assert not [name for name in held if "_cache" in name or name.endswith((".pyc", ".out"))]


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
    program = f"""
import importlib, sys
sys.path.insert(0, {str(directory)!r})
for name in ("chimera_ir", "click", "lark", "rich"):
    sys.modules[name] = None
for name in {modules!r}:
    module = importlib.import_module(name)
    assert module.__file__.startswith({str(directory)!r}), module.__file__
"""
    call(sys.executable, "-I", "-B", "-c", program)
