"""Script of every rank of benchmarks/host_time.py: runs ours, torch's and the bare modules of each job, in turns.

    torchrun --nproc-per-node=2 host_time.py PLAN.json

PLAN.json is {"result": FILE, "backend": NAME, "rounds": COUNT, "jobs": [..]}; what a job holds is said by `Job` of
benchmarks/host_time.py. Rank 0 writes the result: for each job, way of messages and rank a `Figures`.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from chimera_runtime import Pipeline
from chimera_runtime.ranks.devices import keep_memory
from chimera_runtime.start.assemble import components_of, lane_of

WIDTH = 4
WARM_UP, DISCARDED = 3, 5
"""Steps before anything is measured, and the first rounds of a measurement, which do not count."""

LOSS = nn.functional.mse_loss


class Branches(nn.Module):
    """A stage that takes a keyword argument and hands on two tensors; the last one returns one.

    Ours calls a stage with what the stage before has returned, a tuple; torch's with its tensors, one by one.
    """

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.is_last = is_last

    def forward(self, *inputs: Any, scale: torch.Tensor) -> Any:
        """The scaled layer with a residual, which is the second of two inputs."""
        tensors = inputs[0] if isinstance(inputs[0], tuple) else inputs
        scaled = self.linear(tensors[0]) * scale
        return scaled + tensors[-1] if self.is_last else (scaled, scaled + tensors[0])


def linear(stage: int, _stages: int) -> nn.Module:
    """A stage with so little work that the host's time is the runtime's."""
    torch.manual_seed(stage)
    return nn.Linear(WIDTH, WIDTH)


def branches(stage: int, stages: int) -> nn.Module:
    """A stage with a keyword argument and two outputs."""
    torch.manual_seed(stage)
    return Branches(stage == stages - 1)


@dataclass(frozen=True)
class Task:
    """Work of all contenders of a job on this rank: to train stages ``numbers`` of ``stages`` on one mini-batch."""

    build_stage: Callable[[int, int], nn.Module]
    stages: int
    numbers: tuple[int, ...]
    micro_batches: int
    device: torch.device
    inputs: torch.Tensor
    target: torch.Tensor
    keywords: dict[str, torch.Tensor]

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first stage."""
        return 0 in self.numbers

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.stages - 1 in self.numbers


def task(job: Mapping[str, Any], device: torch.device) -> Task:
    """The task of a job: its stages go round the ranks, and micro-batches have one item."""
    rank, ranks, count = dist.get_rank(), dist.get_world_size(), job["micro_batches"]
    stages = ranks * job["stages_of_rank"]
    torch.manual_seed(0)
    inputs, target, scale = (torch.randn(count, width, device=device) for width in (WIDTH, WIDTH, 1))
    build_stage, keywords = (branches, {"scale": scale}) if job["branches"] else (linear, {})
    numbers = tuple(range(rank, stages, ranks))
    return Task(build_stage, stages, numbers, count, device, inputs, target, keywords)


class Contender(Protocol):
    """Modules that are trained on the task's mini-batch; ``modules`` are those of this rank, by stage."""

    modules: dict[int, nn.Module]

    def run(self) -> None:
        """Runs this rank's part of one update; gradients must have been cleared."""


class Ours:
    """A directory that chimera-compile wrote, by `Pipeline.step`."""

    def __init__(self, task: Task, directory: str) -> None:
        example = (task.inputs[:1], task.target[:1], {name: value[:1] for name, value in task.keywords.items()})
        self.pipe = Pipeline(directory, task.build_stage, LOSS, example, device=task.device)
        self.modules = self.pipe.stages
        inputs, target = (task.inputs if task.is_first else None), (task.target if task.is_last else None)
        self.batch = (inputs, target, task.keywords) if task.keywords else (inputs, target)

    def run(self) -> None:
        """A step as a user's loop has it."""
        self.pipe.step(self.batch)


class OursUnsent:
    """The script of this rank on a lane of its own, whose messages go to ``group``.

    It does what a step does, from cutting the mini-batch to reading the losses, without the sum of the losses over the
    ranks and the comparison of their facts, which need answers.
    """

    def __init__(self, ours: Ours, group: dist.ProcessGroup) -> None:
        context, self._updates = ours.pipe._context, ours.pipe._updates
        workers = range(dist.get_world_size())
        world = replace(context.world, channels=dict.fromkeys(permutations(workers, 2), group))
        self._context = replace(context, world=world)
        self._lane = lane_of(self._context, components_of(self._context, self._updates.stages))
        self._batch = ours.batch
        self.modules = ours.modules

    def run(self) -> None:
        """Does what `Pipeline.step` does on this rank alone."""
        updates, update = self._updates, self._updates.started
        updates.feed.put(update, self._batch)
        updates.prepare(False, None)
        with self._context.probed.generators_kept():
            self._lane.begin(update)
            (only,) = updates.rounds  # type: ignore[attr-defined]
            updates.scripts[only.number](self._lane)  # type: ignore[attr-defined]
            for stage in updates.stages.values():
                stage.take_loss(update)
        updates.feed.drop(update)


class Torch:
    """A schedule of torch.distributed.pipelining, as its documentation says."""

    def __init__(self, task: Task, schedule: str) -> None:
        self.modules = {number: task.build_stage(number, task.stages).to(task.device) for number in task.numbers}
        self._stages = [
            pipelining.PipelineStage(module, number, task.stages, task.device)
            for number, module in self.modules.items()
        ]
        make: Any = getattr(pipelining, schedule)
        takes_one = issubclass(make, PipelineScheduleSingle)
        self._schedule = make(self._stages[0] if takes_one else self._stages, task.micro_batches, loss_fn=LOSS)
        self._task = task

    def run(self) -> None:
        """A step that keeps its losses, and no outputs."""
        task, losses = self._task, list[torch.Tensor]()
        inputs = (task.inputs,) if task.is_first else ()
        targets = {"target": task.target, "losses": losses} if task.is_last else {}
        self._schedule.step(*inputs, **targets, **task.keywords, return_outputs=False)

    def send_to(self, group: dist.ProcessGroup) -> None:
        """Replaces the group that messages go to."""
        for stage in self._stages:
            stage.group = group


class Bare:
    """The modules' own forwards and backwards, on leaves such as both systems make them, and nothing else."""

    def __init__(self, task: Task, modules: dict[int, nn.Module]) -> None:
        self.modules = modules
        self._last = task.stages - 1
        self._width = 2 if task.keywords else 1
        self._gradients = [torch.ones(1, WIDTH, device=task.device)] * self._width
        keywords = [{name: value[i : i + 1] for name, value in task.keywords.items()} for i in range(len(task.inputs))]
        self._micro_batches = [*zip(torch.split(task.inputs, 1), torch.split(task.target, 1), keywords, strict=True)]

    def run(self) -> None:
        """One micro-batch after the other, stage by stage."""
        for number, module in self.modules.items():
            for inputs, target, keywords in self._micro_batches:
                received = [inputs] if number == 0 else [inputs.detach().requires_grad_() for _ in range(self._width)]
                output = module(*received, **keywords)
                if number == self._last:
                    torch.autograd.backward(LOSS(output, target))
                else:
                    torch.autograd.backward(output, self._gradients)


@dataclass(frozen=True)
class Figures:
    """Measurements of a job on a rank: for each contender its samples, in microseconds, and the calls of an update.

    ``operations`` are forwards, backwards or halves of backwards, sends and receives of this rank in an update.
    """

    job: str
    messages: str
    rank: int
    operations: int
    samples: dict[str, list[float]]
    calls: dict[str, int]


def operations(task: Task, pipe: Pipeline) -> int:
    """The operations of this rank in an update: a stage receives and sends on each side where it has a neighbour."""
    compute = sum(3 if number in pipe.job.split_backward else 2 for number in task.numbers)
    messages = sum(2 * ((number > 0) + (number < task.stages - 1)) for number in task.numbers)
    return task.micro_batches * (compute + messages)


def cleared(contender: Contender) -> Contender:
    """A contender whose modules have no gradients."""
    for module in contender.modules.values():
        module.zero_grad()
    return contender


def require_equal_work(ours: Contender, torch_: Contender) -> None:
    """Runs an update of each; raises AssertionError if their gradients differ."""
    for contender in (ours, torch_):
        cleared(contender).run()
    for number, module in torch_.modules.items():
        for mine, other in zip(ours.modules[number].parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)


def microseconds(contender: Contender, device: torch.device) -> float:
    """The time of this thread in an update, without garbage collection.

    On a GPU it is the time until the update is launched: there autograd runs backwards in a thread of its own. The GPU
    has nothing else to do before.
    """
    cleared(contender)
    clock = time.thread_time_ns
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        clock = time.perf_counter_ns
    gc.disable()
    start = clock()
    contender.run()
    duration = clock() - start
    gc.enable()
    return duration / 1000


def python_calls(contender: Contender) -> int:
    """The Python functions that this thread calls in an update, the modules' own among them."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    cleared(contender)
    sys.setprofile(note)
    contender.run()
    sys.setprofile(None)
    return count


Measured = tuple[dict[str, list[float]], dict[str, int]]


def in_turns(
    contenders: Mapping[str, Contender], rounds: int, device: torch.device, meet: Callable[[], object]
) -> Measured:
    """The samples of all contenders, whose order every round reverses, and their calls; ``meet`` precedes each run."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(DISCARDED + rounds):
        for name in list(contenders)[:: -1 if number % 2 else 1]:
            meet()
            samples[name].append(microseconds(contenders[name], device))
    calls = {}
    for name, contender in contenders.items():
        meet()
        calls[name] = python_calls(contender)
    return {name: values[DISCARDED:] for name, values in samples.items()}, calls


def one_after_another(measure: Callable[[], Measured]) -> Measured:
    """Measures on each rank while all others wait at a barrier."""
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank():
            measured = measure()
        dist.barrier()
    return measured


def measured(job: Mapping[str, Any], plan: Mapping[str, Any], device: torch.device) -> list[Figures]:
    """The figures of this rank: with messages of the backend, then where nothing is sent, which is for the CPU."""
    work = task(job, device)
    ours, torch_ = Ours(work, job["directory"]), Torch(work, job["schedule"])
    bare = Bare(work, torch_.modules)
    for _ in range(WARM_UP):
        require_equal_work(ours, torch_)
    gc.collect()
    gc.freeze()
    turns: dict[str, Contender] = {"ours": ours, "torch": torch_, "bare": bare}
    results = {plan["backend"]: in_turns(turns, plan["rounds"], device, dist.barrier)}
    if device.type == "cpu":
        fake = dist.new_group(backend="fake")
        torch_.send_to(fake)
        unsent = turns | {"ours": OursUnsent(ours, fake)}
        results["fake"] = one_after_another(lambda: in_turns(unsent, plan["rounds"], device, lambda: None))
    gc.unfreeze()
    count, rank = operations(work, ours.pipe), dist.get_rank()
    ours.pipe.close()
    return [Figures(job["label"], messages, rank, count, *both) for messages, both in results.items()]


def main() -> None:
    """Runs all jobs of the plan, and writes what it has measured."""
    torch.set_num_threads(1)
    keep_memory()
    plan = json.loads(Path(sys.argv[1]).read_text())
    device = torch.device("cpu")
    if plan["backend"] == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(plan["backend"])
    results = [asdict(figures) for job in plan["jobs"] for figures in measured(job, plan, device)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, results)
    if dist.get_rank() == 0:
        Path(plan["result"]).write_text(json.dumps([figures for figures_of in everyone for figures in figures_of]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
