"""What every rank of a benchmark runs: comparisons, each of contenders that take turns.

    torchrun --nproc-per-node=4 race.py PLAN.json

PLAN.json is {"result": FILE, "backend": NAME, "comparisons": [..]}; what a comparison holds is said by
`side_by_side.Comparison`. Rank 0 writes the result: for each comparison and contender, for each round [seconds, CPU
seconds of the busiest rank].
"""

import gc
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import Contender, Generated, ListedPeer, Loop, Numbers, OneProcess, Peer, Task, WholeBatches
from sleepers import Sleep, sleepers
from torch.distributed import pipelining
from torch.distributed.distributed_c10d import PrefixStore

from chimera_runtime import CompiledSchedule
from chimera_runtime.model.model import load
from chimera_runtime.program.job import Job
from chimera_runtime.ranks.devices import keep_memory
from chimera_runtime.ranks.rendezvous import find_store
from chimera_runtime.ranks.world import World, begin, join_group
from chimera_runtime.tools.loop.saving import overshoot

TIMEOUT = 120.0


def task(comparison: dict[str, Any]) -> Task:
    """What the contenders do; sleeps are shorter by as much as they last too long on this machine."""
    count, size = comparison["micro_batches"], comparison["micro_batch_size"]
    if comparison["model"] is not None:
        return Task(load(Path(comparison["model"])), count, size, None)
    forward, late = comparison["forward"], overshoot()
    backward = forward - late if comparison["halves"] else 2 * forward - late
    sleep = Sleep(forward - late, backward, comparison["floats"], comparison["halves"])
    seconds = {"F": forward, "B": 2 * forward, "I": forward, "W": forward, "pair": 3 * forward}
    return Task(sleepers(sleep), count, size, seconds if comparison["rehearsed"] else None)


def contender(kind: str, name: str, world: World, task: Task) -> Contender:
    """A system, ready to run."""
    match kind:
        case "generated":
            return Generated(world, task, Path(name))
        case "loop":
            return Loop(world, task, Path(name))
        case "numbers":
            directory, numbers = name.rsplit(":", 1)
            return Numbers(world, task, Path(directory), [*map(int, numbers.split(","))])
        case "torch":
            of_torch = getattr(pipelining, name)
            return Peer(task, lambda stage: of_torch(stage, task.micro_batches, task.model.loss), world.device)
        case "interface":
            return Peer(task, lambda stage: CompiledSchedule(name, stage, task.model.loss), world.device)
        case "pipeline":
            return WholeBatches(world, task, Path(name))
        case "torch, listed":
            return ListedPeer(task, name, [dist.get_rank()], dist.get_world_size(), world.device)
        case "torch, v":
            rank, stages = dist.get_rank(), 2 * dist.get_world_size()
            return ListedPeer(task, name, [rank, stages - 1 - rank], stages, world.device)
        case "alone":
            return OneProcess(task, int(name), world.device)
    raise ValueError(kind)


def timed(world: World, one: Contender) -> list[float]:
    """Start, end and CPU seconds of one step, kernels included; all ranks begin together."""
    world.control_group.barrier("for a step to begin")
    cpu, start = time.process_time(), time.monotonic()
    one.step()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return [start, time.monotonic(), time.process_time() - cpu]


def compared(world: World, comparison: dict[str, Any]) -> dict[str, list[list[float]]]:
    """For each contender and round the seconds from the first start to the last end, and the busiest rank's CPU."""
    work = task(comparison)
    contenders = {label: contender(kind, name, world, work) for label, kind, name in comparison["contenders"]}
    taken: dict[str, list[list[float]]] = {label: [] for label in contenders}
    for number in range(comparison["rounds"] + 1):
        for label in list(contenders)[:: -1 if number % 2 else 1]:
            taken[label].append(timed(world, contenders[label]))
    world.control_group.barrier("for everybody to be done")
    for one in contenders.values():
        one.close()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, taken)
    return {label: [_over_ranks([t[label][n] for t in everyone]) for n in range(1, number + 1)] for label in contenders}


def _over_ranks(samples: list[list[float]]) -> list[float]:
    starts, ends, cpu = zip(*samples, strict=True)
    return [max(ends) - min(starts), max(cpu)]


def main() -> None:
    """Runs the plan."""
    torch.set_num_threads(1)
    keep_memory()
    plan = json.loads(Path(sys.argv[1]).read_text())
    store, rank, size = find_store(TIMEOUT)
    everyone = Job("benchmark", "", size, size, 1, 1, 1, (), (), (), (), 0, (), 0)
    begin(everyone, store, rank, size, "pipeline", plan["backend"], TIMEOUT)
    world = join_group(everyone, None, "pipeline", None, TIMEOUT)
    results = []
    for number, comparison in enumerate(plan["comparisons"]):
        store = PrefixStore(str(number), world.control_group.store)
        apart = replace(world, control_group=replace(world.control_group, store=store))
        results.append(compared(apart, comparison))
        gc.collect()
        if rank == 0:
            print(f"{number + 1}/{len(plan['comparisons'])}: {comparison['name']}", file=sys.stderr, flush=True)
            Path(plan["result"]).write_text(json.dumps(results))
    world.control_group.barrier("for everybody to finish")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
