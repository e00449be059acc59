"""Mistakes that one rank alone can see, on four ranks: all ranks end soon, with the words of that rank.

torchrun --nproc-per-node=4 refusals.py CASE DIRECTORY..
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from chimera_runtime import CompiledSchedule, Misuse, Pipeline, stages_of
from tests.e2e.loops.pipelines import SIZE, WIDTH, build_stage, data, loss, pipeline, raised

SOON = 15.0
"""Seconds: far below the time-out of a pipeline, for a machine that is busy."""


def refused(call: Callable[[], object], rank: int, words: str) -> None:
    """A call that one rank refuses with these words ends on all ranks, where others raise its error."""
    start = time.monotonic()
    error = raised(call)
    assert isinstance(error, Misuse), repr(error)
    assert words in str(error), error
    assert str(error).startswith(f"rank {rank}: ") == (dist.get_rank() != rank), error
    assert time.monotonic() - start < SOON


def ended(of: Pipeline) -> None:
    """After the error the pipeline runs nothing more."""
    error = raised(lambda: of.step(data(4)))
    assert isinstance(error, Misuse)
    assert "make a new one" in str(error) or "rank " in str(error), error
    of.close()


def from_function(directory: Path) -> None:
    """A micro-batch that only the rank of stage 0, or of the loss, has: smaller, of another length, with a graph."""
    x, y = (t.view(4, SIZE, WIDTH) for t in data(4))

    def smaller(micro: int) -> Any:
        return x[micro], y[micro][: SIZE - (micro == 3)]

    def with_graph(micro: int) -> Any:
        return (x[micro].clone().requires_grad_() if micro == 1 else x[micro]), y[micro]

    for batch, rank, words in ((smaller, 3, "dimension 0 of the target is 1"), (with_graph, 0, "requires a gradient")):
        of = pipeline(directory)
        assert of.step((x.flatten(0, 1), y.flatten(0, 1))).loss > 0
        of.clip_grad_norm_(1.0)
        for parameter in of.parameters():
            parameter.grad = None
        refused(lambda of=of, batch=batch: of.step(batch), rank, words)  # type: ignore[misc]
        ended(of)


def frozen_later(directory: Path) -> None:
    """A parameter that is frozen after start on one rank ends the step of all, and the next call of that rank."""
    of = pipeline(directory)
    assert of.step(data(4)).loss > 0
    for parameter in of.parameters():
        parameter.grad = None
        parameter.requires_grad_(dist.get_rank() != 1)
    refused(lambda: of.step(data(4)), 1, "requires_grad of stages.1.0.weight has changed")
    for parameter in of.parameters():
        parameter.requires_grad_()
    ended(of)


def on_all(directory: Path) -> None:
    """A call that every rank refuses, some much later than others, leaves the pipeline as it was."""
    of = pipeline(directory)
    x, y = data(4)
    for number in range(3):
        time.sleep(0.0 if dist.get_rank() == number else 2.5)
        assert "requires a gradient" in str(raised(lambda: of.step((x.clone().requires_grad_(), y))))
        assert of.step((x, y)).loss > 0
        for parameter in of.parameters():
            parameter.grad = None
    time.sleep(2.5)
    assert of.step((x, y)).loss > 0
    of.close()


def without_data(directory: Path) -> None:
    """An item that cannot be loaded on one rank is the cause that the others give when that rank has ended."""
    of = pipeline(directory, timeout=60.0)
    x, y = data(4)
    items = [*zip(x, y, strict=True)]

    def collate(of_micro: list[Any]) -> Any:
        stacked = tuple(torch.stack([item[part] for item in of_micro]) for part in range(2))
        return stacked if dist.get_rank() != 3 else (stacked[0], stacked[1][:1])

    def train() -> None:
        for batch in of.loader(items, collate_fn=collate):
            of.step(batch)

    start = time.monotonic()
    error = raised(train)
    assert "what collate returned: dimension 0 of the target is 1" in str(error), repr(error)
    assert str(error).startswith("rank 3: ") == (dist.get_rank() != 3)
    assert time.monotonic() - start < SOON
    sys.stdout.flush()
    os._exit(0)


def first_batch(directory: Path) -> None:
    """Input that one rank gives to a `CompiledSchedule` is refused on all, before the ranks join and after."""
    rank = dist.get_rank()
    x, y = data(4)
    modules = {stage: build_stage(stage, 4) for stage in stages_of(directory, rank)}
    schedule = CompiledSchedule(directory, modules, loss)

    def step(inputs: torch.Tensor = x, **keywords: Any) -> None:
        given = (inputs,) if rank == 0 else ()
        schedule.step(*given, target=y if rank == 3 else None, **(keywords if rank == 1 else {}))

    for _ in range(2):
        refused(lambda: step(few=torch.zeros(2)), 1, "few is a tensor of shape (2,)")
    step()
    refused(lambda: step(x.clone().requires_grad_()), 0, "requires a gradient")
    schedule.close()
    schedule = CompiledSchedule(directory, modules, loss)
    step()
    refused(lambda: step(few=torch.zeros(2)), 1, "few is a tensor of shape (2,)")
    schedule.close()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    globals()[sys.argv[1]](*map(Path, sys.argv[2:]))
    dist.barrier()
    dist.destroy_process_group()
