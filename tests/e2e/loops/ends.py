"""Loops of one's own that end early: torchrun --nproc-per-node=2 ends.py DIRECTORY CASE FOLDER."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from chimera_runtime import Checkpoints, Misuse, PeerLost, Pipeline, fresh_store

X = torch.linspace(-1, 1, 16).reshape(4, 4)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> torch.Tensor:
        raise ValueError("no gradient")


class FailingBack(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Failing.apply(super().forward(x))


def made(stage: Callable[[int], nn.Module] = lambda _stage: nn.Linear(4, 4), timeout: float = 60) -> Pipeline:
    example = X[:2], X[:2]
    return Pipeline(
        sys.argv[1], lambda stage_, _: stage(stage_), nn.functional.mse_loss, example=example, timeout=timeout
    )


def restarts(folder: Path) -> None:
    """Rank 1 dies in the first attempt, once there is a checkpoint of update 2."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        dist.init_process_group("gloo")
        with pytest.raises(Misuse, match=r"chimera_runtime\.fresh_store"):
            made()
        dist.barrier()  # a rank that still connects would find the connection closed
        dist.destroy_process_group()
    dist.init_process_group("gloo", **fresh_store())
    pipe = made()
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    checkpoints = Checkpoints(folder / "saved", pipe, optimizer)
    resumed = checkpoints.resume()
    while pipe.updates < 4:
        outcome = pipe.step((X, X))
        optimizer.step()
        optimizer.zero_grad()
        if pipe.updates == 2:
            checkpoints.save()
            checkpoints.close()
        if pipe.updates == 3 and resumed is None and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    assert resumed.update == 2
    pipe.close()
    print(f"rank {dist.get_rank()}: resumed after {resumed.update}, {outcome.loss:.3f}")


def goes_on(_folder: Path) -> None:
    """Until torchrun is gone; ranks that are forked from it get a SIGINT then, others do not."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    dist.init_process_group("gloo")
    pipe = made()
    while True:
        try:
            pipe.step((X, X))
        except PeerLost as error:
            print(error, flush=True)
            raise
        for parameter in pipe.parameters():
            parameter.grad = None
        if pipe.updates == 3 and not dist.get_rank():
            print("3 updates", flush=True)


def messages(_folder: Path) -> None:
    """What the ranks raise for errors at start, and for a call that one of them makes alone."""
    dist.init_process_group("gloo")
    dist.barrier()
    start = time.monotonic()
    try:
        made(lambda stage: FailingBack(4, 4) if stage else nn.Linear(4, 4))
    except Exception as error:
        told(error)
    assert time.monotonic() - start < 30
    for is_barrier, alone in ((False, lambda pipe: pipe.clip_grad_norm_(1.0)), (True, lambda _pipe: dist.barrier())):
        pipe = made(timeout=5)
        try:
            for step in range(3):
                pipe.step((X, X))
                if step == 1 and dist.get_rank() == 1:
                    alone(pipe)
                for parameter in pipe.parameters():
                    parameter.grad = None
        except PeerLost as error:
            told(error)
        if not is_barrier or dist.get_rank() == 0:
            dist.barrier()


def told(error: Exception) -> None:
    print("".join(traceback.format_exception(error)))


if __name__ == "__main__":
    {"restarts": restarts, "goes on": goes_on, "messages": messages}[sys.argv[2]](Path(sys.argv[3]))
