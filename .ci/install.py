"""Installs the project with extras into a virtual environment: by uv, or by pip where uv cannot be had.

    python .ci/install.py .venv train

uv takes a fifth of pip's time. It reads none of pip's settings, so those that say where packages come from are handed
to it, and it chooses among indexes as pip does. Neither compiles: of the thousands of files of torch most are never
imported.
"""

import os
import subprocess
import sys
from pathlib import Path

SETTINGS = ("constraint", "extra-index-url", "find-links", "index-url", "no-index")
"""Settings of pip that uv has as variables of the environment."""


def for_uv(settings: str) -> dict[str, str]:
    """Variables with which uv finds packages where pip does, from what ``pip config list`` says.

    It lists settings of the environment, which count most, before those of files.
    """
    values = dict(line.partition(".")[2].split("=", 1) for line in reversed(settings.splitlines()))
    return {
        f"UV_{name.replace('-', '_').upper()}": values[name].strip("'").replace("\\n", " ").strip()
        for name in SETTINGS
        if name in values
    }


def install(environment: Path, extra: str) -> int:
    """Installs the project with an extra; returns the exit status of what installs."""
    python = environment / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    wanted = ("-c", "constraints.txt", "-e", f".[{extra}]")
    uv = (python, "-m", "uv", "pip", "install", "--quiet", "--python", python, "--index-strategy", "unsafe-best-match")
    has_uv = subprocess.run((python, "-c", "import uv"), stderr=subprocess.DEVNULL).returncode == 0
    if has_uv or subprocess.run((*pip, "uv"), stderr=subprocess.DEVNULL).returncode == 0:
        settings = subprocess.run((python, "-m", "pip", "config", "list"), stdout=subprocess.PIPE, text=True).stdout
        variables = os.environ | for_uv(settings)
        if subprocess.run((*uv, *wanted), env=variables, stderr=subprocess.DEVNULL).returncode == 0:
            return 0
    return subprocess.run((*pip, "--no-compile", *wanted)).returncode


if __name__ == "__main__":
    sys.exit(install(Path(sys.argv[1]), sys.argv[2]))
