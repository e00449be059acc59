"""Tries both ends of every range in pyproject.toml, and other Pythons: make versions, or with names of environments.

    python .ci/versions.py [lowest] [newest] [python3.12] ...

An environment is made for each in .venv-versions: the lowest and the newest releases that the ranges allow, and the
newest under each other Python on the path. Tests that depend on a library run in it, and docs/evidence/versions.md gets
a row with what they said. Nothing is pinned: constraints.txt is not read.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from install import for_uv

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv-versions"
PAGE = ROOT / "docs/evidence/versions.md"
COMPILER = (
    *("tests/errors", "tests/literature", "chimera_ir/syntax", "tests/property/test_ir_roundtrip.py"),
    *(
        f"tests/unit/test_{name}.py"
        for name in ("cli", "codegen", "for_torch", "graph", "library", "page_tables", "render", "search", "torch_text")
    ),
)
RUNTIME = (
    *(f"tests/unit/runtime/{room}" for room in ("checkpoint", "lane", "stage", "update", "values")),
    *(f"tests/e2e/test_{name}.py" for name in ("check", "failures", "transformers")),
)
ANY_PORT = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "localhost:0"}
"""Settings of torchrun that torch 2.11 has by itself: before, two jobs at a time both took port 29500."""
SHOWN = (
    "click",
    "jinja2",
    "lark",
    "networkx",
    "pygments",
    "rich",
    "torch",
    "numpy",
    "transformers",
    "safetensors",
    "ortools",
)
VERSIONS = """
import hashlib, platform, sys
from importlib.metadata import PackageNotFoundError, version
import chimera_ir

def shown(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"

page = chimera_ir.compile("chimera", D=4, N=4).page
print(platform.python_version(), *map(shown, sys.argv[1:]), hashlib.sha256(page.encode()).hexdigest()[:12])
"""


class Trial(NamedTuple):
    """An environment to try: its interpreter, which releases uv takes of each range, and the project with extras."""

    python: str
    resolution: str
    project: str = ".[hf,search,bench]"


def trials() -> dict[str, Trial]:
    """All environments by name; other Pythons are those on the path that are new enough."""
    others = (f"python3.{minor}" for minor in range(11, 20))
    own = f"python3.{sys.version_info.minor}"
    return {
        "lowest": Trial(sys.executable, "lowest-direct", ".[search,train]"),
        "lowest with transformers": Trial(sys.executable, "lowest-direct"),  # which needs newer ones of some others
        "newest": Trial(sys.executable, "highest"),
    } | {name: Trial(name, "highest") for name in others if name != own and runs(name)}


def tools() -> list[str]:
    """What tests need beside the project: the ranges of the extra ``dev`` that are not extras themselves."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    return [wanted for wanted in extras["dev"] if not wanted.startswith("chimera_ir")]


def runs(python: str) -> bool:
    """Whether an interpreter is there: a shim of a version manager may stand for one that is not."""
    return shutil.which(python) is not None and subprocess.run((python, "-c", ""), capture_output=True).returncode == 0


def tried(name: str, trial: Trial) -> str:
    """Makes an environment and runs the tests in it; returns its row of the page."""
    place = FOLDER / name.replace(" ", "-")
    python = place / "bin" / "python"
    if not python.exists():
        subprocess.run((trial.python, "-m", "venv", place), check=True)
        settings = subprocess.run((sys.executable, "-m", "pip", "config", "list"), capture_output=True, text=True)
        variables = {key: value for key, value in for_uv(settings.stdout).items() if key != "UV_CONSTRAINT"}
        uv = (sys.executable, "-m", "uv", "pip", "install", "--python", python, "--index-strategy", "unsafe-best-match")
        wanted = ("--resolution", trial.resolution, "-e", trial.project, *tools())
        subprocess.run((*uv, *wanted), env=os.environ | variables, cwd=ROOT, check=True)
    versions = subprocess.run((python, "-c", VERSIONS, *SHOWN), capture_output=True, text=True, cwd=ROOT, check=True)
    tests = (
        str(python),
        "-m",
        "pytest",
        *COMPILER,
        *RUNTIME,
        "--doctest-modules",
        "--override-ini=filterwarnings=default",  # old releases warn
        "--numprocesses=auto",
        "--dist=loadfile",
    )
    log = place / "tests.log"
    with log.open("w") as file:
        variables = os.environ | ANY_PORT | {"PATH": path_of(place)}
        subprocess.run(tests, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=variables)
    lines = log.read_text().splitlines()
    print(*(line for line in lines if line.startswith(("FAILED", "ERROR"))), sep="\n")
    last = [line for line in lines if re.search(r"\d+ (passed|failed|error)", line)]
    outcome = re.sub(r"^=+ | in [\d.]+s.*$", "", last[-1]) if last else "no test ran"
    return f"| {name} | " + " | ".join(versions.stdout.split()) + f" | {outcome} | {date.today()} |"


def path_of(environment: Path) -> str:
    """The path on which an environment's commands come first."""
    return os.pathsep.join((str(environment / "bin"), os.environ["PATH"]))


def main(names: list[str]) -> None:
    """Tries the environments that are named, or all, and writes their rows."""
    known = trials()
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"no environment {', '.join(unknown)}: there are {', '.join(known)}")
    for name in names or known:
        row = tried(name, known[name])
        print(row)
        text = PAGE.read_text(encoding="utf-8")
        kept = re.sub(rf"^\| {re.escape(name)} \|.*\n", "", text, flags=re.MULTILINE)
        PAGE.write_text(kept.rstrip("\n") + f"\n{row}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
