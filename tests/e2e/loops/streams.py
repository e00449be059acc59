"""Streams in loops of one's own on four ranks, a case each; what must hold is asserted on every rank.

torchrun --nproc-per-node=4 streams.py CASE DIRECTORY [RESULT.json]
torchrun --nproc-per-node=4 streams.py compared CASE DIRECTORY [CASE DIRECTORY ..]
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from chimera_runtime import Misuse, Outcome, PeerLost, Pipeline, StageStep
from chimera_runtime.data.micro_batch_source import Batches
from chimera_runtime.model.model import load

SIZE, WIDTH, UPDATES = 2, 4, 9
MODELS = Path(__file__).resolve().parent.parent / "models"

Pair = tuple[torch.Tensor, torch.Tensor]
Named = list[tuple[str, nn.Parameter]]


def build_stage(stage: int, _stages: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def adam(named: Named) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=0.05)


class Facts:
    """What a test reads of a program."""

    def __init__(self, directory: Path) -> None:
        facts = json.loads((directory / "program.json").read_text())
        self.stages, self.micro_batches = int(facts["stages"]), int(facts["micro_batches"])
        self.copies = dist.get_world_size() // int(facts["workers"])
        self.copy = dist.get_rank() // int(facts["workers"])
        self.lag, self.period = int(facts["lag"]), int(facts["period"])
        self.reads = [[offset for offset, count in runs for _ in range(count)] for runs in facts["reads"]]

    def mini_batch(self, update: int) -> Pair:
        """That of all copies."""
        generator = torch.Generator().manual_seed(update)
        items = SIZE * self.micro_batches * self.copies
        x, y = torch.randn(2, items, WIDTH, generator=generator, dtype=torch.float64)
        return x, y

    def share(self, pair: Pair) -> Pair:
        """That of this rank's copy."""
        mine = SIZE * self.micro_batches
        return pair[0][self.copy * mine : (self.copy + 1) * mine], pair[1][self.copy * mine : (self.copy + 1) * mine]


def pipeline(directory: Path, **options: Any) -> Pipeline:
    x, y = Facts(directory).mini_batch(0)
    return Pipeline(directory, build_stage, loss, (x[:SIZE], y[:SIZE]), **{"optimizer": adam, **options})


class OneProcess:
    """The whole model: every micro-batch runs on the versions of a list that a run begins anew."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.modules = [build_stage(stage, facts.stages) for stage in range(facts.stages)]
        self.optimizers = [adam([*module.named_parameters()]) for module in self.modules]
        self.begin()

    def begin(self) -> None:
        """A run begins: its version 0 are the weights that there are."""
        self.versions = [[[p.detach().clone() for p in module.parameters()]] for module in self.modules]
        self.updates = 0

    def show(self, stage: int, version: int) -> None:
        for parameter, tensor in zip(self.modules[stage].parameters(), self.versions[stage][version], strict=True):
            parameter.data = tensor

    def update(self, pair: Pair) -> float:
        """Makes an update; its loss."""
        facts, total = self.facts, 0.0
        for place, (x, y) in enumerate(zip(*(t.split(SIZE) for t in pair), strict=True)):
            micro = self.updates * facts.micro_batches + place % facts.micro_batches
            turn, number = divmod(micro, facts.period)
            for stage in range(facts.stages):
                read = turn * (facts.period // facts.micro_batches) + facts.reads[stage][number]
                self.show(stage, max(0, read))
            value = loss(nn.Sequential(*self.modules)(x), y) / (facts.micro_batches * facts.copies)
            value.backward()
            total += value.item()
        for stage, optimizer in enumerate(self.optimizers):
            self.versions[stage].append([tensor.clone() for tensor in self.versions[stage][-1]])
            self.show(stage, -1)
            optimizer.step()
            optimizer.zero_grad()
        self.updates += 1
        return total


def compare(directory: Path, drains: Collection[int]) -> None:
    """Losses, read as soon as they are returned, and weights after each drain."""
    facts = Facts(directory)
    of, one = pipeline(directory), OneProcess(facts)
    told: list[Outcome] = []
    losses: list[float] = []
    seen: list[float] = []
    for update in range(UPDATES):
        pair = facts.mini_batch(update)
        outcome = of.step(facts.share(pair))
        losses.append(one.update(pair))
        if outcome is not None:
            told.append(outcome)
            seen.append(outcome.loss)
        if update in drains or update == UPDATES - 1:
            told += of.drain()
            seen += [outcome.loss for outcome in told[len(seen) :]]
            for stage, module in of.stages.items():
                for mine, expected in zip(module.parameters(), one.versions[stage][-1], strict=True):
                    torch.testing.assert_close(mine.detach(), expected, rtol=1e-12, atol=1e-14)
            one.begin()
    assert [outcome.update for outcome in told] == [*range(UPDATES)]
    assert max(abs(mine - theirs) for mine, theirs in zip(seen, losses, strict=True)) < 1e-13
    of.close()


def steady(directory: Path) -> None:
    """Without a drain, it is what one process computes that reads the versions of the program."""
    compare(directory, ())


def drained(directory: Path) -> None:
    """After a drain versions are counted anew; one drain right after another changes nothing."""
    compare(directory, (0, 3, 4))


def compared(*words: Path) -> None:
    """Cases one after the other; each rank says which have passed."""
    for case, directory in zip(words[::2], words[1::2], strict=True):
        {"steady": steady, "drained": drained}[case.name](directory)
        print(f"passed: {case.name} {directory}", flush=True)


def trained(directory: Path, result: Path) -> None:
    """The losses of a model file in a loop of one's own, for who compares them with those of train.py."""
    facts, model = Facts(directory), load(MODELS / "zoo.py")
    batches = Batches(model.items(), SIZE, facts.micro_batches, 1, facts.copies, facts.copy, 0)
    example = batches.input(0, 0), batches.target(0, 0)

    def optimizer(named: Named) -> Any:
        return model.optimizer([parameter for _, parameter in named])

    of = Pipeline(directory, model.build_stage, model.loss, example, optimizer=optimizer)

    def step(update: int) -> Outcome | None:
        return of.step(lambda micro: (batches.input(update, micro), batches.target(update, micro)))

    told = [*map(step, range(UPDATES)), *of.drain()]
    if dist.get_rank() == 0:
        result.write_text(json.dumps([outcome.loss for outcome in told if outcome is not None]))
    of.close()


def hooked(directory: Path) -> None:
    """Each stage clips its own gradients and steps its own scheduler, at each of its steps."""
    seen: dict[int, list[tuple[str, int]]] = {}

    def before(step: StageStep) -> None:
        seen.setdefault(step.stage, []).append(("before", step.update))
        parameters = [parameter for _, parameter in step.named_parameters]
        nn.utils.clip_grad_norm_(parameters, 1e-3)
        assert nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]) < 1.001e-3

    def after(step: StageStep) -> None:
        seen[step.stage].append(("after", step.update))
        schedulers[step.stage].step()

    facts, of = Facts(directory), pipeline(directory, before_step=before, after_step=after)
    schedulers = {stage: torch.optim.lr_scheduler.StepLR(made, 2, 0.5) for stage, made in of.optimizers.items()}
    for update in range(5):
        of.step(facts.share(facts.mini_batch(update)))
    of.drain()
    for stage in of.stages:
        assert seen[stage] == [(when, update) for update in range(5) for when in ("before", "after")]
        assert of.optimizers[stage].param_groups[0]["lr"] == 0.05 / 4
    x, y = facts.mini_batch(5)
    before_evaluation = of.evaluate([(x, y)])
    of.step(facts.share((x, y)))
    (update,) = [outcome for outcome in of.drain() if outcome.update == 5]
    assert abs(update.loss - before_evaluation) < 1e-13, "the first micro-batches of a run read the newest weights"
    for call in (lambda: of.clip_grad_norm_(1.0), lambda: of.step(facts.mini_batch(0), accumulate=True)):
        assert isinstance(raised(call), Misuse)
    of.step(facts.share(facts.mini_batch(6)))
    assert 0 < of.evaluate([(x, y)]) < before_evaluation, "it drains, and training helps"
    assert [outcome.update for outcome in of.drain()] == [6]
    of.close()


def killed(directory: Path) -> None:
    """A rank that dies under way ends the step of every other one with one error; nobody hangs."""

    class Mortal(nn.Linear):
        forwards = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Mortal.forwards += 1
            if Mortal.forwards == 12:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().forward(x)

    def build(stage: int, stages: int) -> nn.Module:
        return Mortal(WIDTH, WIDTH).double() if stage == 2 else build_stage(stage, stages)

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from torchrun, to those that are left
    facts = Facts(directory)
    x, y = facts.mini_batch(0)
    of = Pipeline(directory, build, loss, (x[:SIZE], y[:SIZE]), optimizer=adam, timeout=20.0)

    def train() -> None:
        for update in range(30):
            outcome = of.step(facts.share(facts.mini_batch(update)))
            _ = outcome and outcome.loss

    start = time.monotonic()
    error = raised(train)
    assert isinstance(error, PeerLost), error
    assert time.monotonic() - start < 60
    for call in (of.drain, lambda: of.step(facts.share((x, y)))):
        assert isinstance(raised(call), Misuse | PeerLost)
    os._exit(0)  # messages are under way for ever


def left(directory: Path) -> None:
    """What is under way may be left behind: closing does not wait for it."""
    facts, of = Facts(directory), pipeline(directory)
    for update in range(facts.lag + 2):
        of.step(facts.share(facts.mini_batch(update)))
    dist.barrier()
    of.close()
    again = pipeline(directory)
    again.step(facts.share(facts.mini_batch(0)))
    assert [outcome.update for outcome in again.drain()] == [0]
    again.close()


def raised(call: Callable[[], object]) -> Exception | None:
    """The error of a call."""
    try:
        call()
    except Exception as error:
        return error
    return None


if __name__ == "__main__":
    dist.init_process_group("gloo")
    globals()[sys.argv[1]](*map(Path, sys.argv[2:]))
    dist.destroy_process_group()
