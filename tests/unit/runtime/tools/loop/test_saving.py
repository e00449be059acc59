"""--save, --resume, --load, --export and a SIGTERM in a loop of train.py: when is saved, and what is said."""

import copy
import inspect
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import chimera_ir
from chimera_runtime.blame import LaneOperation, ModelError
from chimera_runtime.checkpoint.storage import whole
from chimera_runtime.errors import BadCheckpoint, Misuse
from chimera_runtime.model.model import Layers, ModelFile
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.ranks.world import World
from chimera_runtime.tools.loop.saving import Optimizers, Saving, Terminated, under_autocast
from chimera_runtime.values.boundary import accepted
from chimera_runtime.values.nested import draw_seed
from tests.unit.runtime.kept import WIDTH, B, Count, N, adam, mini_batch, pipeline
from tests.unit.runtime.models import model
from tests.unit.runtime.thread_ranks import alone_job, groups, together, worlds


@dataclass
class Ended:
    """The outcome of an update."""

    is_last: bool


@pytest.fixture
def make(alone: World, one_worker: Path) -> Iterator[Callable[..., tuple[Saving, Pipeline, list[str]]]]:
    """Makes what the options ask for, over a pipeline of its own, with what it says."""
    pipes = []

    def saving(
        loader: Any = None, optimizers: Any = None, termination: str | None = "SIGTERM", **given: Any
    ) -> tuple[Saving, Pipeline, list[str]]:
        nothing = dict.fromkeys(("save", "save_every", "resume", "load", "export"))
        options = Namespace(**{**nothing, "keep": 3, "steps": 10, "check_only": False} | given)
        pipe = pipeline(one_worker)
        pipes.append(pipe)
        said: list[str] = []
        stepping = [adam(pipe)] if optimizers is None else optimizers
        saving = Saving(
            options, pipe, stepping, [], {"data": loader or Count()}, said.append, lambda: termination, lambda *_: None
        )
        return saving, pipe, said

    yield saving
    for pipe in pipes:
        pipe.close()


def train(pipe: Pipeline, updates: int) -> None:
    pipe.load_state_dict({**pipe.state_dict(), "update": {"0": (pipe.updates + updates,)}})
    pipe.items_used += updates * pipe.items


# When it is time.


def test_it_is_time_every_so_many_updates_but_not_at_the_end(make: Callable[..., Any], tmp_path: Path) -> None:
    """The end saves all anyway."""
    saving, pipe, _ = make(save=tmp_path, save_every=2, steps=6)
    due = []
    for _ in range(6):
        train(pipe, 1)
        due.append(saving.is_due(Ended(False)))
    assert due == [False, True, False, True, False, False]
    assert not saving.is_over
    never, pipe, _ = make(save=tmp_path)
    train(pipe, 2)
    assert not never.is_due(Ended(False))


@pytest.mark.parametrize("first", [0, 2], ids=["with a flush", "while a stream fills"])
def test_training_is_over_an_update_after_the_one_in_which_a_rank_asked(
    make: Callable[..., Any], tmp_path: Path, first: int
) -> None:
    """The newest outcome is not read: that would wait."""
    saving, _, _ = make(save=tmp_path)

    class Newest:
        @property
        def is_last(self) -> bool:
            raise AssertionError("it was waited for")

    seen = []
    for outcome in (*[None] * first, Ended(False), Ended(True)):
        saving.is_due(outcome)
        seen.append(saving.is_over)
    saving.is_due(Newest())
    assert [*seen, saving.is_over] == [False] * (first + 2) + [True]


# All of it.


def test_a_run_saves_once_at_its_end_exports_and_the_next_goes_on(make: Callable[..., Any], tmp_path: Path) -> None:
    saved, file = tmp_path / "saved", tmp_path / "model.pt"
    used, there = Count(), Count()
    saving, pipe, said = make(used, save=saved, resume=saved, export=file)
    saving.begin()
    train(pipe, 3)
    used.numbers[0] = 7
    saving.save()
    saving._checkpoints.wait()
    written = (saved / "update-00000003").stat().st_ino
    saving.end()
    assert said == [f"--resume {saved}: no checkpoint there yet; the training begins", f"exported to {file}"]
    assert [path.name for path in whole(saved)] == ["update-00000003"]
    assert (saved / "update-00000003").stat().st_ino == written, "it was there already"

    again, resumed, said = make(there, save=saved, resume=saved)
    again.begin()
    assert there.numbers == [7]
    assert said == [f"resumed from {saved / 'update-00000003'}, after update 3, item {3 * B * N}"]
    again.end()
    assert (saved / "update-00000003").stat().st_ino == written
    assert all(map(torch.equal, resumed.parameters(), pipe.parameters()))


def test_a_run_that_is_over_already_says_so(make: Callable[..., Any], tmp_path: Path) -> None:
    saving, pipe, _ = make(save=tmp_path, steps=3)
    saving.begin()
    train(pipe, 3)
    saving.end()
    for steps, more in ((4, []), (3, ["nothing left to do: 3 of 3 updates are done (--steps)"])):
        again, _, said = make(resume=tmp_path, steps=steps)
        again.begin()
        again.end()
        assert said[1:] == more
    check, _, said = make(resume=tmp_path, steps=3, check_only=True)
    check.begin()
    check.end()
    assert len(said) == 1


def test_a_run_that_is_ended_saves_and_says_where_and_exports_nothing(make: Callable[..., Any], tmp_path: Path) -> None:
    saving, pipe, said = make(save=tmp_path / "saved", export=tmp_path / "model.pt")
    saving.begin()
    train(pipe, 2)
    saving.is_over = True
    with pytest.raises(Terminated) as ended:
        saving.end()
    assert str(ended.value) == f"SIGTERM: saved after update 2 in {tmp_path / 'saved'}, for --resume"
    assert [path.name for path in whole(tmp_path / "saved")] == ["update-00000002"]
    assert said == []
    assert not (tmp_path / "model.pt").exists()


def test_a_run_whose_model_file_asks_for_the_end_ends_as_any_other(make: Callable[..., Any], tmp_path: Path) -> None:
    saving, pipe, said = make(save=tmp_path / "saved", export=tmp_path / "model.pt", termination=None)
    saving.begin()
    train(pipe, 2)
    saving.is_over = True
    saving.end()
    assert [path.name for path in whole(tmp_path / "saved")] == ["update-00000002"]
    assert said == [f"exported to {tmp_path / 'model.pt'}"]


def test_a_check_alone_saves_nothing(make: Callable[..., Any], tmp_path: Path) -> None:
    saving, _, _ = make(save=tmp_path / "saved", check_only=True)
    saving.begin()
    saving.end()
    assert whole(tmp_path / "saved") == []


def test_weights_alone_are_loaded_and_the_training_begins_anew(make: Callable[..., Any], tmp_path: Path) -> None:
    weights = {name: torch.full_like(p, 0.25) for name, p in make()[1].named_parameters()}
    torch.save({**weights, "head.bias": torch.ones(1), "head.weight": torch.ones(1)}, tmp_path / "model.pt")
    saving, pipe, said = make(load=tmp_path / "model.pt")
    saving.begin()
    assert all(bool((p == 0.25).all()) for p in pipe.parameters())
    assert pipe.updates == 0
    assert said == [f"--load {tmp_path / 'model.pt'}: the model has no head.bias, head.weight"]
    saving.save()
    saving.end()
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_what_cannot_be_is_said_before_the_first_update(make: Callable[..., Any], tmp_path: Path) -> None:
    for options, words in [
        ({"export": tmp_path / "none" / "model.pt"}, "there is no directory"),
        ({"load": tmp_path / "none.pt"}, "No such file"),
        ({"save": Path(__file__)}, "checkpoints cannot be saved in"),
    ]:
        saving, _, _ = make(**options)
        with pytest.raises(BadCheckpoint, match=words):
            saving.begin()
    with pytest.raises(Misuse, match=r"a Count cannot be saved: --save needs optimizers of torch.optim"):
        make(save=tmp_path, optimizers=[type("Count", (), {})()])


# The optimizers of all stages of a rank, as one.


class Drawing(torch.optim.SGD):
    """Adds a number drawn at random."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(torch.rand(()))


def modules() -> dict[int, nn.Module]:
    return {stage: nn.Linear(1, 1, bias=False) for stage in (0, 3)}


def made(built: dict[int, nn.Module], kind: Any = Drawing, idle: bool = False) -> Optimizers:
    used = replace(model(), optimizer=lambda parameters: kind(parameters, lr=0.5))
    return Optimizers(used, built, seed=7, idle=idle)


def weights(built: dict[int, nn.Module]) -> list[float]:
    return [p.item() for module in built.values() for p in module.parameters()]


def drawn(update: int, stage: int) -> float:
    torch.manual_seed(draw_seed("step", 7, update, stage))
    return torch.rand(()).item()


def test_a_step_draws_by_update_and_stage_wherever_it_is_made() -> None:
    built = modules()
    before, optimizers = weights(built), made(built)
    optimizers.step()
    optimizers.step_in_lane(SimpleNamespace(group=(3,)))  # type: ignore[arg-type]
    optimizers.step()
    expected = [w + drawn(0, s) + drawn(1, s) for w, s in zip(before, (0, 3), strict=True)]
    assert weights(built) == pytest.approx(expected)


def test_a_rehearsal_makes_no_steps() -> None:
    built = modules()
    before = weights(built)
    made(built, idle=True).step()
    assert weights(built) == before


def test_gradients_are_cleared_and_learning_rates_are_told_by_stage() -> None:
    built = modules()
    optimizers = made(built)
    for module in built.values():
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
    optimizers.zero_grad()
    assert all(p.grad is None for module in built.values() for p in module.parameters())
    assert optimizers.learning_rates == {"0": [0.5], "3": [0.5]}


def test_an_error_of_an_optimizer_names_the_step() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise ValueError("no step")

    with pytest.raises(ModelError, match="the optimizer's step") as raised:
        made({5: nn.Linear(1, 1)}, Failing).step()
    assert raised.value.operation == LaneOperation("step", 5, (), 0)


def test_a_sharded_state_is_gathered_after_all_steps_and_schedulers_see_a_step(alone: World) -> None:
    """Both copies step their half of each weight, one stage in its lane; and as without shards, they have all."""

    def run(world: World | None, in_lane: bool) -> list[list[float]]:
        built: dict[int, nn.Module] = {stage: nn.Linear(4, 1, bias=False) for stage in (0, 1)}
        for module in built.values():
            nn.init.ones_(module.weight)  # type: ignore[arg-type]
        used = replace(
            model(optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.5)),
            scheduler=lambda optimizer, _: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        )
        optimizers = Optimizers(used, built, seed=7, idle=False, sharded_over=world)
        for step in range(3):
            for stage, module in built.items():
                for parameter in module.parameters():
                    parameter.grad = torch.arange(4.0).reshape(1, 4) - step * stage
            if in_lane:
                optimizers.step_in_lane(SimpleNamespace(group=(1,)))  # type: ignore[arg-type]
            optimizers.step()
            optimizers.zero_grad()
        assert optimizers.learning_rates == {"0": [0.0625], "1": [0.0625]}
        return [p.flatten().tolist() for module in built.values() for p in module.parameters()]

    with worlds(alone, alone_job(), copies=2) as pair, groups(2) as first, groups(2) as second:
        sums = [{(0,): (a, (0, 1)), (1,): (b, (0, 1))} for a, b in zip(first, second, strict=True)]
        shared = [replace(world, sums=of_world) for world, of_world in zip(pair, sums, strict=True)]
        results = together([partial(run, world, world is shared[0]) for world in shared])
    assert results[0] == results[1] == run(None, False)


# A pipeline under --autocast computes what one process computes with torch.autocast around forward and loss.


class Block(nn.Module):
    """Notes in which dtype it has computed, in the order of its forwards; it takes a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, *, shift: float = 0.0) -> torch.Tensor:
        result: torch.Tensor = self.linear(x)
        self.dtypes.append(result.dtype)
        return result.tanh() + shift


def judged(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A product as well, so that its dtype says where the loss runs."""
    return (output @ output.t()).square().mean() + (output - target).square().mean()


def under(of_model: ModelFile) -> Any:
    return under_autocast(of_model, "cpu", torch.bfloat16)


def test_a_stage_and_the_loss_run_under_autocast_and_their_weights_stay_as_they_are() -> None:
    of_model = under(model(lambda *_: Block(), judged))
    module = of_model.build_stage(0, 1)
    output = module(torch.ones(2, WIDTH))
    assert (output.dtype, module.linear.weight.dtype) == (torch.bfloat16, torch.float32)
    assert of_model.loss(torch.ones(2, WIDTH), torch.ones(2, WIDTH)).dtype is torch.float32
    x = torch.sin(torch.arange(2.0 * WIDTH)).reshape(2, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(of_model.loss(x, x), judged(x, x))
    assert not torch.equal(of_model.loss(x, x), judged(x, x))
    assert of_model.autocast is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_on_a_gpu_it_is_the_autocast_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []

    def autocast(*arguments: Any) -> Any:
        entered.append(arguments)
        return nullcontext()

    monkeypatch.setattr(torch, "autocast", autocast)
    of_model = under_autocast(model(lambda *_: Block(), judged), "cuda", torch.bfloat16)
    x = of_model.build_stage(0, 1)(torch.ones(2, WIDTH))
    of_model.loss(x, x)
    assert entered == [("cuda", torch.bfloat16)] * 2


def test_a_module_is_otherwise_the_same() -> None:
    module = under(model(lambda *_: Block())).build_stage(0, 1)
    assert isinstance(module, Block)
    assert (type(module).__name__, type(module).__qualname__, type(module).__module__) == ("Block", "Block", __name__)
    assert [name for name, _ in module.named_parameters()] == ["linear.weight", "linear.bias"]
    assert accepted(module, ["shift", "other"]) == ("shift",)
    assert inspect.signature(module.forward) == inspect.signature(Block().forward)


def test_a_copy_of_a_module_runs_with_its_own_weights_under_autocast_too() -> None:
    module = under(model(lambda *_: Block())).build_stage(0, 1)
    twin = copy.deepcopy(module)
    nn.init.zeros_(twin.linear.weight)
    nn.init.zeros_(twin.linear.bias)
    assert twin(torch.ones(2, WIDTH)).abs().max() == 0
    assert twin.dtypes[-1] is torch.bfloat16


def compiled(*_: int) -> Any:
    return torch.compile(Block(), backend="eager")


def with_a_forward_of_its_own(*_: int) -> Block:
    module = Block()
    module.forward = Block.forward.__get__(module)  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize("build", [compiled, with_a_forward_of_its_own])
def test_what_has_a_forward_in_another_place_runs_under_autocast(build: Callable[..., Any]) -> None:
    module = under(model(build)).build_stage(0, 1)
    assert module(torch.ones(2, WIDTH)).dtype is torch.bfloat16


def test_layers_run_each_under_autocast() -> None:
    layered = replace(model(), build_stage=Layers([Block, Block]), reference=Block)
    of_model = under(layered)
    assert [make()(torch.ones(2, WIDTH)).dtype for make in of_model.build_stage.layers] == [torch.bfloat16] * 2
    assert of_model.reference()(torch.ones(2, WIDTH)).dtype is torch.bfloat16
    assert of_model.build_stage.ranges(2) == [range(1), range(1, 2)]


def test_each_of_several_losses_runs_under_autocast() -> None:
    def is_on(_output: torch.Tensor, _target: torch.Tensor) -> bool:
        return torch.is_autocast_enabled("cpu")

    of_model = under(replace(model(), loss={"text": is_on, "head": is_on}))
    assert [of_model.of_sink(name).loss(torch.ones(1), torch.ones(1)) for name in ("text", "head")] == [True, True]


def test_what_is_no_module_is_left_to_whoever_looks_at_it() -> None:
    assert under(model(lambda *_: 3)).build_stage(0, 1) == 3  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_losses_and_messages_are_those_of_one_process(alone: World, tmp_path: Path, recompute: bool) -> None:
    """Two stages; where they recompute, the second forward runs within the backward, and all the same under it."""
    options = chimera_ir.Options(recompute=recompute)
    chimera_ir.compile("interleaved", options=options, P=1, v=2, N=N).write(tmp_path / "out")
    of_model = under(model(lambda *_: Block(), judged))
    x, y = (tensor.float() for tensor in mini_batch(0))
    with Pipeline(tmp_path / "out", of_model.build_stage, of_model.loss, (x[:B], y[:B])) as pipe:
        (boundary,) = pipe._context.probed.boundaries.values()
        assert boundary.dtypes == (torch.bfloat16,)
        stages: list[Any] = [copy.deepcopy(module) for module in pipe.stages.values()]
        outcome = pipe.step((x, y))
        assert outcome is not None
        held_out = pipe.evaluate([(x, y)])
        gradients = [parameter.grad for parameter in pipe.parameters()]
        seen = [dtype for module in pipe.stages.values() for dtype in module.dtypes]  # type: ignore[union-attr]
    assert {*seen} == {torch.bfloat16}

    losses = []
    for micro in range(N):
        with torch.autocast("cpu", torch.bfloat16):
            value = x[micro * B : (micro + 1) * B]
            for stage in stages:
                value = Block.forward(stage, value)
            losses.append(judged(value, y[micro * B : (micro + 1) * B]))
        (losses[-1] / N).backward()
    assert outcome.loss == pytest.approx(sum(loss.item() for loss in losses) / N, rel=1e-6)
    assert held_out == pytest.approx(outcome.loss, rel=1e-6)
    expected = [parameter.grad for stage in stages for parameter in stage.parameters()]
    for mine, theirs in zip(gradients, expected, strict=True):
        assert mine is not None
        assert mine.dtype is torch.float32
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
