"""With this folder on PYTHONPATH, torchrun imports what its ranks do, and forks them.

It is torchrun otherwise, and so is each rank the script that it runs: see `tests.forking`. Where the environment names
a server of forks, torchrun is forked from it, and this process passes on its signals and ends as it ends.
"""

import sys
from pathlib import Path

_words = [word for word in sys.orig_argv[1:] if word != "-P"]  # as `chimera run` has it
_behind = 2 if _words[:2] == ["-m", "torch.distributed.run"] else 1 if Path(*_words[:1]).name == "torchrun" else 0
if _behind:
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from tests import forking

    forking.replace_torchrun(_words[_behind:])
