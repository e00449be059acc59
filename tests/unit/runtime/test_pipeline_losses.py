"""`Pipeline` on one rank, with a loss that is a module: it is trained, checked, saved and restored like a stage."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import chimera_ir
from chimera_runtime import BadCheckpoint, Checkpoints, Misuse, Pipeline, auxiliary_loss
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.stage_output import collecting
from tests.unit.runtime.models import loss as plain_loss
from tests.unit.runtime.one_rank import STAGES, WIDTH, N, batch, example, micro_batches, step

OF_LOSS = ["loss.scale", "loss.projection.weight"]


class Loss(nn.Module):
    """Has parameters, a buffer that every call moves, an attribute that counts, and an auxiliary loss."""

    center: torch.Tensor

    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.scale = nn.Parameter(torch.zeros(()).double())
        self.projection = nn.Linear(WIDTH, WIDTH, bias=False).double()
        if weight is not None:
            self.projection.weight = weight
        self.register_buffer("center", torch.zeros(WIDTH).double())
        self.calls = 0

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.center.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        auxiliary_loss("size", 0.1 * output.square().mean())
        error = (self.projection(output) - self.center.clone() - target).square().mean()
        return error * torch.exp(-self.scale) + self.scale

    def doubled(self, factor: float, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = factor * self(output, target)
        return loss


class Head(nn.Linear):
    """A last stage that has a child with the name of the loss."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.loss = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.loss(super().forward(x)))


def build_stage(stage: int, _stages: int) -> nn.Module:
    torch.manual_seed(stage)
    return (Head() if stage else nn.Linear(WIDTH, WIDTH)).double()


@pytest.fixture(scope="module", params=[False, True], ids=["", "recomputed"])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("losses") / "out"
    options = chimera_ir.Options(recompute=request.param)
    chimera_ir.compile("interleaved", options=options, P=1, v=STAGES, N=N).write(directory)
    return directory


@pytest.fixture
def make(opened: Callable[..., Any], compiled: Path) -> Callable[..., Pipeline]:
    return lambda loss, build=build_stage: opened(Pipeline, compiled, build, loss, example())


def marks(loss: Loss) -> tuple[object, ...]:
    return loss.calls, loss.training, *(tensor.tolist() for tensor in (*loss.parameters(), loss.center))


def stepped(pipe: Pipeline, seed: int) -> float:
    value = step(pipe, batch(seed)).loss
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()
    return value  # type: ignore[no-any-return]


def names(pipe: Pipeline) -> list[str]:
    return [name for name, _ in pipe.named_parameters() if name.startswith("loss.")]


def save(directory: Path, pipe: Pipeline) -> None:
    checkpoints = Checkpoints(directory, pipe)
    checkpoints.save()
    checkpoints.close()


def forms(loss: Loss) -> dict[str, Any]:
    return {"module": loss, "method": partial(loss.doubled, 1.0), "argument": partial(Loss.doubled, loss, 1.0)}


@pytest.mark.full
@pytest.mark.parametrize("form", forms(Loss()))
def test_a_loss_is_trained_as_in_one_process(make: Callable[..., Pipeline], form: str) -> None:
    loss, twin = Loss(), Loss()
    modules = [build_stage(stage, STAGES) for stage in range(STAGES)]
    pipe = make(forms(loss)[form])
    assert marks(loss) == marks(twin), "the start leaves its marks"
    assert names(pipe) == OF_LOSS
    assert type(pipe.stages[1]) is Head
    optimizer = torch.optim.SGD([p for module in (*modules, twin) for p in module.parameters()], lr=0.1)
    for seed in (1, 2):
        expected = 0.0
        for x, y in micro_batches(*batch(seed)):
            with collecting() as auxiliary:
                value = twin(modules[1](modules[0](x)), y)
            expected += value.item() / N
            (sum((added for _, added in auxiliary), value) / N).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert stepped(pipe, seed) == pytest.approx(expected, rel=1e-12)
    for mine, theirs in zip([*loss.parameters(), loss.center], [*twin.parameters(), twin.center], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
    assert loss.calls == twin.calls


def test_evaluations_and_checks_leave_the_loss_as_it_was(make: Callable[..., Pipeline]) -> None:
    loss = Loss()
    pipe = make(loss)
    stepped(pipe, 1)
    before = marks(loss)
    pipe.evaluate([batch(2)])
    assert marks(loss) == before
    assert "parameters" not in pipe.check(batch(3)).partition("FAILED")[2]
    assert marks(loss) == before


def test_a_loss_is_saved_resumed_exported_and_loaded(make: Callable[..., Pipeline], tmp_path: Path) -> None:
    first, second, third = Loss(), Loss(), Loss()
    pipe = make(first)
    stepped(pipe, 1)
    save(tmp_path, pipe)
    pipe.export_weights(tmp_path / "weights.pt")
    after = stepped(pipe, 2)
    assert {*torch.load(tmp_path / "weights.pt")} > {*OF_LOSS, "loss.center", "stages.1.loss.weight"}
    other = make(second)
    Checkpoints(tmp_path, other).resume()
    assert stepped(other, 2) == after
    assert marks(second)[1:] == marks(first)[1:]
    another = make(third)
    assert another.load_weights(tmp_path / "weights.pt") == []
    assert stepped(another, 2) == after


def test_a_file_without_the_loss_leaves_it_as_it_is_and_one_with_a_part_is_refused(
    make: Callable[..., Pipeline], tmp_path: Path
) -> None:
    plain, loss = make(nn.MSELoss()), Loss()
    plain.export_weights(tmp_path / "weights.pt")
    save(tmp_path / "saved", plain)
    pipe = make(loss)
    pipe.load_weights(tmp_path / "weights.pt")
    assert marks(loss) == marks(Loss())
    some = torch.load(tmp_path / "weights.pt") | {"loss.scale": torch.ones(()).double()}
    torch.save(some, tmp_path / "part.pt")
    with pytest.raises(BadCheckpoint, match=r"loss\.projection\.weight"):
        pipe.load_weights(tmp_path / "part.pt")
    with pytest.raises(BadCheckpoint, match=r"loss\."):
        Checkpoints(tmp_path / "saved", pipe).resume()
    # Buffers alone were not saved by earlier versions.
    weighted = nn.CrossEntropyLoss(weight=torch.arange(3.0).double())
    Checkpoints(tmp_path / "saved", make(weighted)).resume()
    assert weighted.weight is not None
    assert weighted.weight.tolist() == [0.0, 1.0, 2.0]


def test_a_loss_shares_with_the_last_stage_as_its_parts_do(make: Callable[..., Pipeline]) -> None:
    head = build_stage(1, STAGES)
    assert isinstance(head, Head)
    pipe = make(Loss(head.weight), lambda s, n: head if s else build_stage(s, n))
    pipe.step(batch(1))
    assert names(pipe) == ["loss.scale"]
    pipe.check(batch(1))


def test_a_loss_that_shares_with_another_stage_needs_a_declaration(
    alone: World, make: Callable[..., Pipeline], tmp_path: Path
) -> None:
    first = build_stage(0, STAGES)
    assert isinstance(first, nn.Linear)

    def build(stage: int, stages: int) -> nn.Module:
        return build_stage(stage, stages) if stage else first

    with pytest.raises(Misuse, match=r'the loss share.*\(0, "weight"\), \("loss", "projection.weight"\).*--tied 0,1'):
        make(Loss(first.weight), build)
    options = chimera_ir.Options(tied=[(0, 1)])
    chimera_ir.compile("interleaved", options=options, P=1, v=STAGES, N=N).write(tmp_path / "out")
    tied = [[(0, "weight"), ("loss", "projection.weight")]]
    with Pipeline(tmp_path / "out", build_stage, Loss(), example(), tied=tied) as pipe:
        pipe.check(batch(0))
        assert names(pipe) == ["loss.scale"]
    with pytest.raises(
        Misuse, match=r"tied names 'weight' in the loss, which has no such parameter .did you mean scale"
    ):
        Pipeline(tmp_path / "out", build_stage, Loss(), example(), tied=[[(0, "weight"), ("loss", "weight")]])


def test_a_method_of_the_model_is_no_loss_of_its_own(make: Callable[..., Pipeline]) -> None:
    """What is a part of a stage already is not the loss's."""
    head = Head().double()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = head

        def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return plain_loss(output, target)

    pipe = make(Model().loss, lambda s, n: head if s else build_stage(s, n))
    assert names(pipe) == []
    pipe.step(batch(1))
