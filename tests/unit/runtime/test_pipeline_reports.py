"""`report`: numbers beside the loss, each micro-batch once, whatever runs again."""

import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

import chimera_ir
from chimera_runtime import Misuse, ModelError, Pipeline, report
from chimera_runtime.model.model import load
from chimera_runtime.ranks.messages import from_host
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.stage_output import Auxiliary, SideNumbers, collecting
from chimera_runtime.values.losses import Tally
from tests.unit.runtime.models import loss as quiet
from tests.unit.runtime.one_rank import STAGES, WIDTH, B, N, batch, clear, example, step

EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples"

PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("interleaved", {"P": 1, "v": STAGES}),
    "recomputed": ("interleaved", {"P": 1, "v": STAGES, "options": chimera_ir.Options(recompute=True)}),
    "split": ("zb_h1", {"D": 1}),
}


class Stage(nn.Module):
    """Reports the mean of its inputs, by their items, within a checkpoint of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def part(self, x: torch.Tensor) -> torch.Tensor:
        report("inputs", x.mean(), len(x))
        return torch.tanh(self.linear(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.part, x, use_reentrant=False)
        return y


def build_stage(stage: int, _stages: int) -> nn.Module:
    torch.manual_seed(stage)
    return Stage()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    error = (output - target).square()
    report("error", error.max())
    positive = target[:, 0] > 0
    if positive.any():
        report("positive", error[positive].mean(), positive.sum())
    return error.mean()


def of_one_process(stages: int, x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    """What a plain loop over micro-batches would average."""
    sums: dict[str, list[tuple[float, float]]] = {}
    modules = [build_stage(stage, stages) for stage in range(stages)]
    for start in range(0, len(x), B):
        with collecting() as told:
            value = x[start : start + B]
            for module in modules:
                value = module(value)
            loss(value, y[start : start + B])
        told.weigh(len(value))
        for name, number, weight in told.reports:
            assert isinstance(number, float)
            assert isinstance(weight, float | int)
            sums.setdefault(name, []).append((number * weight, weight))
    return {name: sum(n for n, _ in pairs) / sum(w for _, w in pairs) for name, pairs in sums.items()}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    for name, (scheme, settings) in PROGRAMS.items():
        chimera_ir.compile(scheme, N=N, **settings).write(folder / name)
    return {name: folder / name for name in PROGRAMS}


@pytest.fixture
def make(opened: Callable[..., Any], compiled: dict[str, Path]) -> Callable[..., Pipeline]:
    return lambda program="plain", of=loss, build=build_stage: opened(Pipeline, compiled[program], build, of, example())


@pytest.mark.full
@pytest.mark.parametrize("program", PROGRAMS)
def test_each_micro_batch_reports_once(make: Callable[..., Pipeline], program: str) -> None:
    pipe = make(program)
    for seed in (1, 2):
        (x, y), stages = batch(seed), pipe.job.stages
        outcome = step(pipe, (x, y))
        assert outcome.reports == pytest.approx(of_one_process(stages, x, y))
        clear(pipe)
        evaluated = pipe.evaluate([(x, y), batch(5, 3)])
        assert evaluated.reports.keys() == outcome.reports.keys()
        assert pickle.loads(pickle.dumps(evaluated)).reports == evaluated.reports
        assert pipe.evaluate([(x, y)]).reports == pytest.approx(outcome.reports)
    pipe.check(batch(3))
    [*pipe.predict([(batch(4)[0], None)])]


def test_a_name_may_come_late_and_stay_away(make: Callable[..., Pipeline]) -> None:
    calls = iter(range(1000))

    def of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if (call := next(calls)) >= 1 + N and call % 3 == 0:
            report("late", call)
        return quiet(output, target)

    pipe, reports = make(of=of), []
    for seed in range(4):
        reports.append({name: value for name, value in step(pipe, batch(seed)).reports.items() if name == "late"})
        clear(pipe)
    assert reports == [{}, {"late": 6.0}, {"late": 10.5}, {"late": 15.0}]


def test_what_is_never_reported_costs_nothing(make: Callable[..., Pipeline]) -> None:
    pipe = make(of=quiet, build=lambda _stage, _stages: nn.Linear(WIDTH, WIDTH).double())
    assert step(pipe, batch(1)).reports == {}
    assert pipe.evaluate([batch(1)]).reports == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("x", torch.ones(2)), "the value is to be a real number"),
        (("x", "1"), "the value is to be a real number"),
        (("x", 1j), "the value is to be a real number"),
        (("x", 1.0, torch.ones(2)), "the count is to be a real number"),
        (("x", 1.0, 0), "the count is 0.0, and is to be positive"),
        (("x", 1.0, torch.tensor(-1)), "the count is -1.0, and is to be positive"),
        (("x", 1.0, math.inf), "the count is inf, and is to be positive and finite"),
        ((3, 1.0), "the name is a text"),
    ],
)
def test_what_is_no_report_is_an_error(make: Callable[..., Pipeline], arguments: tuple[Any, ...], words: str) -> None:
    def of(output: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
        report(*arguments)
        return output.mean()

    with pytest.raises(ModelError, match=words):
        make(of=of)


def test_the_example_of_the_page_reports(
    alone: World, compiled: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    model = load(EXAMPLES / "metrics.py")
    items = default_collate([model.items()[i] for i in range(2 * N)])
    with Pipeline(compiled["plain"], model.build_stage, model.loss, tuple(t[:2] for t in items)) as pipe:
        assert {*step(pipe, tuple(items)).reports} == {"sign", "recall"}
        assert "loss.log_variance" in dict(pipe.named_parameters())


def test_a_call_outside_is_an_error() -> None:
    with pytest.raises(Misuse, match=r"report\('x', \.\.\) is called outside of a step or an evaluation"):
        report("x", 1.0)


def test_numbers_of_a_device_are_read_later() -> None:
    """A tensor on another device than the CPU is not waited for; a CPU stands in for it here."""
    reports, heard = SideNumbers(from_host), Auxiliary(takes=False)
    value = torch.tensor(3.0)
    with collecting(heard):
        report("x", 1.0, 2)
    heard.reports.append(heard.reports[0]._replace(value=value, weight=torch.tensor(4)))
    reports.add(0, 0, 0, heard)
    value.zero_()
    assert reports.take(0) == Tally(reports={"x": (14.0, 6.0)})
    assert reports.take(0) == Tally()
