"""A model of two stages that is worked out by hand, and what a rank knows before it trains it."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from chimera_runtime.check.reference import Reference
from chimera_runtime.data.micro_batch_source import Batches
from chimera_runtime.lane import Lane
from chimera_runtime.model.model import ModelFile
from chimera_runtime.program.rank_facts import EvaluationFacts, KeptMicros, RankFacts, Route, StageFacts
from chimera_runtime.ranks.world import World
from chimera_runtime.start import assemble, probe
from chimera_runtime.start.assemble import RankContext
from chimera_runtime.tools.command.options import parse

RATE, ITEMS = 0.2, 24
CPU = torch.device("cpu")


def item(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.tensor([1.0, number / ITEMS], dtype=torch.float64)
    return x, x.sum().sin().reshape(1)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


class Layer(nn.Module):
    """The first of two maps to two numbers, through a function that is not linear; the second to one."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        self.last = stage == stages - 1
        start = torch.arange(2 if self.last else 4, dtype=torch.float64).reshape(-1, 2) / 5 + 0.1
        self.weight = nn.Parameter(start)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t() if self.last else torch.tanh(x @ self.weight.t())


def model(
    build: Callable[[int, int], nn.Module] = Layer,
    judge: Callable[[Any, Any], Any] = loss,
    items: Callable[[], Any] = lambda: [item(i) for i in range(ITEMS)],
    optimizer: Callable[[Any], Any] = lambda parameters: torch.optim.SGD(parameters, lr=RATE),
) -> ModelFile:
    return ModelFile(Path("model.py"), build, judge, items, optimizer)


def reference(micro_batches: int, copies: int = 1, **changed: Any) -> Reference:
    return Reference(model(**changed), 2, 1, micro_batches, 1, copies, 0, CPU)


def facts(*stages: int, incoming: Any = (), outgoing: Any = (), kept: Any = (), **changed: Any) -> RankFacts:
    """Of a worker that holds stages; ``changed`` is what is not so of all of them."""
    sending = dict(zip(("y", "dx"), changed.pop("sending", (0, 0)), strict=True))
    plain: dict[str, Any] = {"copies": 1, "sending": sending, "recomputed": (), "initial": (0, 0)}
    slots = {"y": (changed.pop("inputs", ()),), "dx": (changed.pop("gradients", ()),)}
    turns = changed.pop("turns", None)
    evaluation = changed.pop("evaluation", EvaluationFacts({}, (), ()))
    held = {s: StageFacts(slots, **plain | changed) for s in stages}
    moments = tuple(tuple(KeptMicros(*of_stage) for of_stage in moment) for moment in kept)
    routes = [tuple(Route(*route) for route in several) for several in (incoming, outgoing)]
    return RankFacts(held, *routes, moments, turns, ((0, 2),), ((0, 2),), evaluation)


def sequential(lane: Lane) -> None:
    """The script of a worker that holds both stages: two micro-batches, one after the other."""
    first, last = lane.stage(0), lane.stage(1)
    for micro in range(2):
        first.forward(micro, lane.input(micro))
        last.forward(micro, first.outputs(micro), lane.target(micro))
        last.backward(micro)
        first.backward(micro, last.input_gradients(micro))
    for stage in (last, first):
        stage.all_reduce()
        stage.wait_all_reduce()
        stage.step()


def given(trace: Path) -> Namespace:
    """What a recorder reads of the command line."""
    return Namespace(trace=trace, steps=5, micro_batch_size=3, rehearse=None, shard_optimizer=False)


def setting(
    world: World,
    of: RankFacts | None = None,
    of_model: ModelFile | None = None,
    update: Callable[[Lane], None] = sequential,
    options: str = "",
    measures: bool = False,
) -> tuple[RankContext, dict[int, nn.Module]]:
    """What a rank knows of a program, and the modules that were probed; alone it holds both stages."""
    used = model() if of_model is None else of_model
    arguments = parse(["--model", "model.py", *options.split()])
    place, job = world.place, world.job
    size, seed = arguments.micro_batch_size, arguments.seed
    batches = Batches(used.items(), size, job.micro_batches, job.parts, place.copies, place.copy, seed)
    built = assemble.modules(world, used, seed)
    findings = probe.probe_stages(world, used, batches, built, seed=seed, measures=measures)
    script: Any = SimpleNamespace(update=update)
    known = facts(*range(job.stages)) if of is None else of
    source = None if arguments.rehearse else batches
    return RankContext(world, script, known, used, findings, seed, source), built
