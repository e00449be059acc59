"""What every rank of a benchmark runs: several programs one after another, so that Python and torch start once.

    torchrun --nproc-per-node=4 attempts.py PLAN.json

PLAN.json is a list of command lines. The first word of each is the file of a program that chimera-compile wrote, or
``chimera-profile``; ``{rank}`` stands for the rank. Each believes that torchrun started it, and meets its peers in a
store of its own, which rank 0 keeps.
"""

import importlib
import json
import os
import runpy
import socket
import sys
import time
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path

from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

OWN = ("chimera_runtime",)
"""The modules that come with a program; those of one are not those of the next."""


LONGEST = timedelta(hours=1)
"""For how long a rank waits for others to end a program; each measures a profile in a time of its own."""


def attempt(command: list[str]) -> None:
    """Runs one program to its end, in this process."""
    program, *arguments = (word.replace("{rank}", os.environ["RANK"]) for word in command)
    for name in [name for name in sys.modules if name.startswith(OWN)]:
        del sys.modules[name]
    before, sys.argv = (sys.argv, sys.path[:]), [program, *arguments]
    try:
        if program == "chimera-profile":
            importlib.import_module("chimera_ir.start").profile()
        else:
            sys.path.insert(0, str(Path(program).parent))
            runpy.run_path(program, run_name="__main__")
    except SystemExit as left:
        if left.code:
            raise
    finally:
        sys.argv, sys.path = before


def meeting_point(store: Store, number: int) -> None:
    """Lets the next program meet at a port of its own, which rank 0 chooses and is the one to open."""
    key = f"port/{number}"
    if os.environ["RANK"] == "0":
        with socket.socket() as free:
            free.bind(("", 0))
            store.set(key, str(free.getsockname()[1]))
    os.environ |= {"MASTER_PORT": store.get(key).decode(), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def main() -> None:
    """Runs the plan; rank 0 says how far it is."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    store, rank, size = next(rendezvous("env://"))
    for number, command in enumerate(plan):
        begin = time.monotonic()
        meeting_point(store, number)
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
            attempt(command)
        store.set(f"ended/{number}/{rank}", "")
        store.wait([f"ended/{number}/{other}" for other in range(size)], LONGEST)
        if rank == 0:
            said = f"{number + 1}/{len(plan)}: {time.monotonic() - begin:.0f} s"
            print(said, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
