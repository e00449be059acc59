"""Runs many generated programs under one torchrun: each rank forks a child per job, so that torch is imported once.

    torchrun --nproc-per-node=4 run_jobs.py JOBS.json

JOBS.json is a list of {"train", "arguments", "log", "path", "environment", "grace"}. Rank r writes what the
job's rank r said to LOG.r, and its exit status to LOG.r.status. What every child would import is imported before, the
first step of an optimizer included.
"""

import json
import os
import runpy
import select
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed
import torch.utils.data

POLL = 0.02
LOOK = 0.1
"""Seconds after which a rank's parent looks again whether another rank has failed."""


def child(job: dict[str, object], log: Path) -> None:
    """Becomes rank RANK of a job, as if torchrun had started its train.py."""
    with log.open("w", buffering=1) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    train = str(job["train"])
    os.environ |= {str(k): str(v) for k, v in dict(job.get("environment") or {}).items()}  # type: ignore[call-overload]
    sys.argv = [train, *map(str, job["arguments"])]  # type: ignore[call-overload]
    sys.path[:1] = [os.path.dirname(train), *map(str, job.get("path") or [])]  # type: ignore[call-overload]
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


def keep_stores(ports: list[Path]) -> int:
    """Starts a process with a store for every job, each on a port that is free now; the ranks read which.

    It is a process of its own because stores have threads, and what is forked below must have none.
    """
    pid = os.fork()
    if pid:
        return pid
    stores = []
    for port in ports:
        stores.append(torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        written = port.with_suffix(".written")
        written.write_text(str(stores[-1].port))
        written.rename(port)
    while os.getppid() != 1:
        time.sleep(1)
    os._exit(0)


def wait_for(port: Path) -> str:
    while not port.exists():
        time.sleep(POLL)
    return port.read_text()


def main() -> None:
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    jobs = json.loads(Path(sys.argv[1]).read_text())
    # The stores live apart from the ranks, as torchrun's does: they outlive every rank of a job.
    keeper = keep_stores([Path(f"{job['log']}.port") for job in jobs]) if rank == "0" else None
    for job in jobs:
        log = Path(f"{job['log']}.{rank}")
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": wait_for(Path(f"{job['log']}.port"))}
        pid = os.fork()
        if pid == 0:
            child(job, log)
        status = wait_like_torchrun(pid, Path(f"{job['log']}.failed"), job["grace"])
        Path(f"{log}.status").write_text(str(status))
    while len(list(log.parent.glob(f"{log.stem}.*.status"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(POLL)
    if keeper is not None:
        os.kill(keeper, signal.SIGKILL)


def wait_like_torchrun(pid: int, failed: Path, grace: float) -> int:
    """The exit status of a rank; when another rank of its job fails first, it gets a SIGTERM, as from torchrun.

    Unlike there, it has some seconds to end by itself before.
    """
    end, told = os.pidfd_open(pid), False
    while not select.select([end], [], [], LOOK)[0]:
        if not told and failed.exists() and time.time() >= failed.stat().st_mtime + grace:
            os.kill(pid, signal.SIGTERM)
            told = True
    os.close(end)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        failed.touch()
    return status


if __name__ == "__main__":
    main()
