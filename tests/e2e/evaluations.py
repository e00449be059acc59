"""Evaluates compiled schedules beside one process, on every rank of a torchrun.

    torchrun --nproc-per-node=4 evaluations.py JOBS.json

JOBS.json is {"log": PATH, "jobs": [[NAME, DIRECTORY], ..]}; rank r writes what it found of every job to PATH.r.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from chimera_runtime import Pipeline
from chimera_runtime.data.feed import Feed
from chimera_runtime.evaluate.evaluation import Evaluation, LossTotal, OutputStore
from chimera_runtime.model.model import Model
from chimera_runtime.program.compiled_program import load
from chimera_runtime.ranks.agreement import added_over_all, gathered
from chimera_runtime.ranks.world import join_group
from chimera_runtime.stage.stage import Stage
from chimera_runtime.start import assemble, probe
from chimera_runtime.start.assemble import RankContext, components_of, lane_of, run_stream
from chimera_runtime.values.nested import digest, joined

B, WIDTH, WORDS = 4, 3, 7

Pair = tuple[dict[str, torch.Tensor], torch.Tensor]


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.drop = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.4)

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.drop(self.words(batch["word"])) + batch["shift"], batch["word"]


class Middle(nn.Module):
    """Hands on a view of what it received, too; a part of it is always in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.frozen = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5).eval()

    def train(self, mode: bool = True) -> "Middle":
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, state: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, word = state
        return hidden + self.frozen(torch.tanh(self.norm(self.linear(hidden)))), word.view(-1)


class Last(Middle):
    """Returns memory that it received, where it changes nothing."""

    def forward(self, state: tuple[torch.Tensor, torch.Tensor]) -> Any:
        hidden, word = super().forward(state)
        return {"hidden": hidden, "word": word}


class Only(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = First(), Last()

    def forward(self, batch: dict[str, torch.Tensor]) -> Any:
        return self.last(self.first(batch))


def build_stage(stage: int, stages: int) -> nn.Module:
    torch.manual_seed(stage)
    kind: type[nn.Module] = First if stage == 0 else Last if stage == stages - 1 else Middle
    return (Only() if stages == 1 else kind()).double()


def loss(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return ((output["hidden"] - target) ** 2).sum(dim=1).mul(1 + output["word"]).mean()


def batch(seed: int, items: int) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    shift = torch.randn(items, WIDTH, generator=generator, dtype=torch.float64)
    words = torch.randint(WORDS, (items,), generator=generator)
    return {"word": words, "shift": shift}, torch.randn(items, WIDTH, generator=generator, dtype=torch.float64)


def rows(pair: Pair, start: int, count: int) -> Pair:
    inputs, target = pair
    return {name: value[start : start + count] for name, value in inputs.items()}, target[start : start + count]


def reference(stages: list[nn.Module], batches: list[Pair]) -> tuple[float, list[Any]]:
    """The mean loss over all items, and the outputs of each batch, of stages one after the other."""
    outputs, total, items = [], 0.0, 0
    with torch.no_grad():
        for inputs, target in batches:
            state: Any = inputs
            for stage in stages:
                state = stage.eval()(state)
            outputs.append(state)
            total += float(loss(state, target)) * len(target)
            items += len(target)
    return total / items, outputs


def in_one_process(states: Sequence[dict[int, Any]]) -> list[nn.Module]:
    """The stages with their state of the last rank that has them; no generator has moved."""
    known = {stage: state for of_rank in states for stage, state in of_rank.items()}
    with torch.random.fork_rng():
        stages = [build_stage(stage, len(known)) for stage in range(len(known))]
    for stage, state in known.items():
        stages[stage].load_state_dict(state)
    return stages


def everywhere(value: Any) -> list[Any]:
    listed: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(listed, value)
    return listed


def apart(mine: list[Any], theirs: list[Any]) -> float:
    """The largest difference between outputs; of integers as well."""
    found = [float((a[name] - b[name]).abs().max()) for a, b in zip(mine, theirs, strict=True) for name in a]
    return max(found)


def of_copy(pipeline: Pipeline, full: int) -> list[Pair]:
    """Batches of this copy: whole, smaller by less than a micro-batch, one item, and more than two rounds."""
    copy = pipeline._context.world.place.copy
    sizes = [full, full - 1, 1, 2 * full + 3, *([3] if copy else [])]
    return [batch(100 * copy + number, size) for number, size in enumerate(sizes)]


def alike(directory: Path) -> dict[str, Any]:
    """An evaluation and a prediction beside one process; training with and without them."""
    runs = []
    found: dict[str, Any] = {}
    for evaluates in (True, False):
        with Pipeline(directory, build_stage, loss, batch(0, B), seed=3, timeout=120) as pipeline:
            job, copy = pipeline._context.world.job, pipeline._context.world.place.copy
            full, optimizer = B * job.micro_batches, torch.optim.Adam(pipeline.parameters(), lr=0.1)
            losses = []
            torch.manual_seed(7)
            for update in range(4):
                if evaluates and update in (0, 2):
                    found[f"after {update}"] = held_against_one_process(pipeline, full)
                losses.append(pipeline.step(batch(1000 * copy + update, full)).loss)
                optimizer.step()
                optimizer.zero_grad()
            modes = [each.training for module in pipeline.stages.values() for each in module.modules()]
            state = [value for module in pipeline.stages.values() for value in module.state_dict().values()]
            runs.append((losses, modes, digest(state), digest([torch.get_rng_state()])))
    found["trains on as if nothing had been"] = runs[0] == runs[1]
    return found


def held_against_one_process(pipeline: Pipeline, full: int) -> dict[str, Any]:
    """The weights are those of the ranks, and so are buffers where no stage has a replica with others."""
    batches = of_copy(pipeline, full)
    evaluated = pipeline.evaluate(iter(batches))
    states = everywhere({stage: module.state_dict() for stage, module in pipeline.stages.items()})
    stages = in_one_process(states)
    every = dict(everywhere((pipeline._context.world.place.copy, batches)))
    mean, _ = reference(stages, [each for copy in sorted(every) for each in every[copy]])
    _, outputs = reference(stages, batches)
    longest = batch(7, B * pipeline._context.world.job.evaluated)
    called = pipeline.evaluate([lambda micro: rows(longest, B * micro, B)])
    whole, _ = reference(stages, [longest])
    predicted = list(pipeline.predict(iter(batches)))
    return {
        "loss": abs(evaluated - mean) / abs(mean),
        "loss of a function": abs(called - whole) / abs(whole),
        "same everywhere": len(set(everywhere(evaluated))) == 1,
        "outputs": apart(predicted, outputs),
        "in place": all(
            torch.equal(a["word"], inputs["word"]) for a, (inputs, _) in zip(predicted, batches, strict=True)
        ),
    }


def followed(directory: Path) -> dict[str, Any]:
    """A stream in a loop of one's own: an evaluation of what is under way, and training after it as after a drain."""
    runs = []
    found: dict[str, Any] = {}

    def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.Adam([parameter for _, parameter in named], lr=0.1)

    for evaluates in (True, False):
        with Pipeline(directory, build_stage, loss, batch(0, B), seed=3, timeout=120, optimizer=optimizer) as pipeline:
            full = B * pipeline._context.world.job.micro_batches
            for update in range(7):
                pipeline.step(batch(update, full))
                if update not in (2, 4):
                    continue
                if evaluates:
                    found[f"after {update}"] = held_against_one_process(pipeline, full)
                else:
                    pipeline.drain()
            pipeline.drain()
            state = [value for module in pipeline.stages.values() for value in module.state_dict().values()]
            runs.append(digest(state))
    found["trains on as if nothing had been"] = runs[0] == runs[1]
    return found


def streamed(directory: Path) -> dict[str, Any]:
    """A schedule without a flush: before the first update and after some, on the newest weights."""
    compiled = load(directory)
    job = compiled.job
    world = join_group(job, None, "pipeline", None, 20.0)
    model = Model(Path("model.py"), build_stage, loss)
    feed = Feed(job, B)
    built = assemble.modules(world, model, 3)
    for update in range(3):
        feed.put(update, batch(update, B * job.micro_batches))
    findings = probe.probe_stages(world, model, feed, built, seed=3, measures=False)
    setting = RankContext(
        world, compiled.script(world.place.worker), compiled.ranks[world.place.worker], model, findings, 3, feed
    )
    stages = assemble.assemble(setting, built, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    found = {"before": beside(setting, stages)}
    run_stream(setting, lane_of(setting, components_of(setting, stages)), 3)
    found["after"] = beside(setting, stages)
    world.control_group.barrier("for everybody to finish")
    world.close()
    return found


def beside(setting: RankContext, stages: dict[int, Stage]) -> dict[str, Any]:
    job = setting.world.job
    losses, store = LossTotal(setting.model.judge), OutputStore()
    batches = [batch(50, B * job.evaluated), batch(51, 3)]
    for last in (losses, store):
        evaluation = Evaluation(setting, stages, B, dict.fromkeys(setting.world.job.sinks, last))
        outputs = []
        for each in batches:
            for of in evaluation.evaluation_batches(each):
                evaluation.run(of)
                if last is store:
                    outputs += gathered(setting.world.control_group, [job.placement[0][-1]], store.take()).values()
    total, items = added_over_all(setting.world.control_group, losses.total.item(), losses.items)
    mean = total / items
    one = in_one_process(everywhere({number: stage.module.state_dict() for number, stage in stages.items()}))
    expected, theirs = reference(one, batches)
    return {"loss": abs(mean - expected) / abs(expected), "outputs": apart([joined(outputs)], [joined(theirs)])}


def found(
    kinds: dict[str, Callable[[Path], dict[str, Any]]], jobs: list[tuple[str, str, str]]
) -> Iterator[tuple[str, Any]]:
    for name, kind, directory in jobs:
        yield name, kinds[kind](Path(directory))


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    result = dict(found({"alike": alike, "followed": followed, "streamed": streamed}, given["jobs"]))
    Path(f"{given['log']}.{dist.get_rank()}").write_text(json.dumps(result))
    dist.destroy_process_group()
