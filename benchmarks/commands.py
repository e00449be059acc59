"""The commands that benchmarks run."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

COMPILE = (sys.executable, "-c", "from chimera_ir.start import compile_; compile_()")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def torchrun(words: Sequence[str], variables: Mapping[str, str] = {}) -> None:
    """Runs torchrun with these words behind its name; each rank has one thread, and further variables.

    What ranks print is not shown.

    Raises
    ------
    subprocess.CalledProcessError
        If a rank failed; why stands on standard error.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | dict(variables)
    subprocess.run([*TORCHRUN, *words], env=environment, check=True, stdout=subprocess.DEVNULL)
