"""What a checkpoint costs the steps beside it, relative to steps without one: see ranks/saving.py.

.venv/bin/python benchmarks/checkpoints.py

Two ranks of 192 MiB each on two otherwise idle cores, six steps for each checkpoint: to wait for one costs the time of
two steps (2.0 and 2.2 in two runs), to write it during the steps 1.2 and 1.8, because the steps keep both cores busy.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import chimera_ir

RANKS = Path(__file__).resolve().parent / "ranks" / "saving.py"


def main() -> None:
    """Compiles a schedule for two workers and runs both there."""
    with TemporaryDirectory() as folder:
        chimera_ir.compile("chimera", D=2, N=4).write(f"{folder}/chimera.out")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(RANKS)]
        subprocess.run([*command, f"{folder}/chimera.out", f"{folder}/checkpoints"], check=True)


if __name__ == "__main__":
    main()
