"""With this folder on PYTHONPATH, ``python -m torch.distributed.run`` imports what its ranks do, and forks them.

It is torchrun otherwise, and so is each rank the script that it runs: see `tests.forking`.
"""

import sys
from pathlib import Path

_MODULE = ["-m", "torch.distributed.run"]

for _place in (1, 2):  # behind `-P`, as `chimera run` has it
    if sys.orig_argv[_place : _place + 2] == _MODULE:
        sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
        from tests import forking

        forking.replace_torchrun(sys.orig_argv[_place + 2 :])
