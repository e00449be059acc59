"""Runs many generated programs under one torchrun: each rank forks a child per job, so that torch is imported once.

    torchrun --nproc-per-node=4 run_jobs.py JOBS.json

JOBS.json is a list of {"name", "train", "arguments", "port", "log"}; rank r writes what the job's rank r said to LOG.r and its exit
status to LOG.r.status.
"""

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed
import torch.utils.data  # noqa: F401


def child(job: dict[str, object], log: Path) -> None:
    """Becomes rank RANK of a job, as if torchrun had started its train.py."""
    with log.open("w", buffering=1) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    train = str(job["train"])
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(job["port"])}
    os.environ |= {str(k): str(v) for k, v in dict(job.get("environment") or {}).items()}  # type: ignore[call-overload]
    sys.argv = [train, *map(str, job["arguments"])]  # type: ignore[call-overload]
    sys.path[0] = os.path.dirname(train)
    status = 0
    try:
        runpy.run_path(train, run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    for job in json.loads(Path(sys.argv[1]).read_text()):
        log = Path(f"{job['log']}.{rank}")
        pid = os.fork()
        if pid == 0:
            child(job, log)
        _, code = os.waitpid(pid, 0)
        Path(f"{log}.status").write_text(str(os.waitstatus_to_exitcode(code)))


if __name__ == "__main__":
    main()
