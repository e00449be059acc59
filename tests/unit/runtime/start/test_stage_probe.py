"""Nothing remains of the micro-batch at start, in modules, generators and the example."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from chimera_runtime.data.micro_batch_source import Batches
from chimera_runtime.errors import Misuse
from chimera_runtime.ranks.world import World
from chimera_runtime.start import assemble, probe
from tests.unit.runtime.models import loss, model
from tests.unit.runtime.start.test_probe import WIDTH, linear, stages
from tests.unit.runtime.thread_ranks import alone_job, worlds


def test_nothing_of_it_remains(alone: World) -> None:
    used = stages(lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), linear()), linear)
    with worlds(alone, alone_job()) as (world,):
        built = assemble.modules(world, used, 0)
        before = [tensor.clone() for module in built.values() for tensor in module.state_dict().values()]
        state = torch.get_rng_state()
        probe.probe_stages(world, used, Batches(used.items(), 3, 2, 1, 1, 0, 0), built, seed=0, measures=True)
        after = [tensor for module in built.values() for tensor in module.state_dict().values()]
        assert all(map(torch.equal, before, after))
        assert torch.equal(torch.get_rng_state(), state)
        assert all(p.grad is None for module in built.values() for p in module.parameters())


class Traced(nn.Module):
    """Counts its calls, keeps things, draws from every generator and changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(1))
        self.calls, self.past, self.numbers = 0, ["none"], np.random.default_rng(0)
        self.seen: torch.Tensor

    def forward(self, x: torch.Tensor, extra: Any) -> torch.Tensor:
        self.calls += 1
        self.past.append("one")
        self.cache = x.detach()
        self.seen = torch.cat([self.seen, self.seen])
        self.register_buffer("late", torch.ones(1))
        self.register_forward_hook(lambda *_: None)
        extra["more"][0].mul_(2)
        extra["more"].append(None)
        x.mul_(2)
        draws = random.random() + np.random.rand() + self.numbers.random()
        return self.linear(x) * float(draws)  # type: ignore[no-any-return]


@pytest.mark.parametrize("split", [(), (0,)])
def test_neither_modules_nor_generators_nor_the_example_have_a_trace_of_it(
    alone: World, split: tuple[int, ...]
) -> None:
    used = stages(Traced)
    torch.manual_seed(0)
    x, more, target = torch.rand(3, 3, WIDTH, dtype=torch.float64)
    extra = {"extra": {"more": [more]}}
    example: Any = SimpleNamespace(
        input=lambda *_: x, target=lambda *_: target, keywords=lambda *_: extra, micro_batch_size=3
    )

    def written(module: nn.Module) -> str:
        state = {name: value for name, value in vars(module).items() if name != "numbers"}
        generators = [module.numbers.bit_generator.state, random.getstate(), np.random.get_state()]
        return repr((sorted(state.items()), [*module.named_buffers()], x, extra, target, generators))

    with worlds(alone, alone_job(stages=1, split_backward=split)) as (world,):
        built = assemble.modules(world, used, 0)
        before = written(built[0])
        findings = probe.probe_stages(world, used, example, built, seed=0, measures=True)
        assert written(built[0]) == before
    assert findings.traits[0].seeds_all
    assert findings.traits[0].alone == "draws random numbers"


@pytest.mark.parametrize(("name", "of"), [("extra", "a keyword argument"), ("x", "its input"), ("y", "its target")])
def test_a_stage_that_is_run_again_must_leave_alone_all_that_it_is_given(alone: World, name: str, of: str) -> None:
    class Hasty(nn.Linear):
        def forward(self, x: torch.Tensor, extra: Any = None) -> torch.Tensor:
            if name != "y":
                {"x": x, "extra": extra}[name].mul_(2)
            return super().forward(x)

    def judge(output: torch.Tensor, target: torch.Tensor) -> Any:
        return loss(output, target.mul_(2) if name == "y" else target)

    used = model(lambda *_: Hasty(WIDTH, WIDTH).double(), judge)
    torch.manual_seed(0)
    x, extra, target = torch.rand(3, 3, WIDTH, dtype=torch.float64)
    example: Any = SimpleNamespace(
        input=lambda *_: x, target=lambda *_: target, keywords=lambda *_: {"extra": extra}, micro_batch_size=3
    )
    words = f"stage 0 changes {of} in place, but is to run on it again"
    with worlds(alone, alone_job(stages=1, recomputing=(0,))) as (world,), pytest.raises(Misuse, match=words):
        probe.probe_stages(world, used, example, assemble.modules(world, used, 0), seed=0, measures=False)
