"""What is found out of stages at start, that nothing remains of it, and what a stage must not return."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from chimera_runtime import Pipeline, auxiliary_loss
from chimera_runtime.blame import ModelError
from chimera_runtime.data.micro_batch_source import Batches
from chimera_runtime.errors import Misuse
from chimera_runtime.program.kept_bytes import MovedBytes
from chimera_runtime.program.rank_facts import HostedMicros
from chimera_runtime.ranks.world import World
from chimera_runtime.stage import module_state, saved_tensors
from chimera_runtime.start import assemble, probe
from chimera_runtime.start.probe import ProbeResult, memory_report
from chimera_runtime.values.nested import ONE_TENSOR, form_of
from tests.unit.runtime import kept
from tests.unit.runtime.models import ITEMS, facts, item, loss, model, setting
from tests.unit.runtime.staged import tuple_of
from tests.unit.runtime.thread_ranks import alone_job, job, together, worlds

WIDTH = 2


def stages(*modules: Callable[[], nn.Module]) -> Any:
    return model(lambda stage, _stages: modules[stage]().double())


def found(alone: World, *modules: Callable[[], nn.Module], measures: bool = False, **facts: Any) -> ProbeResult:
    with worlds(alone, alone_job(stages=len(modules), **facts)) as (world,):
        return setting(world, of_model=stages(*modules), measures=measures, options="--micro-batch-size 3")[0].probed


class Call(nn.Module):
    """A module that applies a function to the input, or to the output of a linear layer."""

    def __init__(self, function: Callable[[Any], Any], linear: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.linear = function, linear or nn.Identity()

    def forward(self, x: Any) -> Any:
        return self.function(self.linear(x))


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def calling(function: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    return lambda: Call(function)


def then(function: Callable[[torch.Tensor], Any]) -> Callable[[], nn.Module]:
    return lambda: Call(function, linear())


FIRST = calling(lambda tensors: tensors[0] * 2)


def found_by_all(alone: World, used: Any, of_job: Any, measures: bool = False) -> list[Any]:
    """The findings of each rank, or the error that it raises."""
    with worlds(alone, of_job) as ranks:
        batches = Batches(used.dataset(), 3, 2, 1, 1, 0, 0)
        # Built before: ranks are threads here, and building draws from the generator that the probe watches.
        built = [assemble.modules(world, used, 0) for world in ranks]

        def find(world: World, modules: dict[int, nn.Module]) -> ProbeResult | str:
            try:
                return probe.probe_stages(world, used, batches, modules, seed=0, measures=measures)
            except Misuse as refused:
                return str(refused)

        return together([partial(find, world, mine) for world, mine in zip(ranks, built, strict=True)])


# Boundaries.


def test_a_boundary_is_what_a_stage_returns_for_a_micro_batch(alone: World) -> None:
    boundaries = found(alone, then(lambda y: (y, y.detach() + 1, y.argmax(1), y * 3)), FIRST, linear).boundaries
    first, second = boundaries.values()
    assert (first.form, second.form) == (tuple_of(4), ONE_TENSOR)
    assert first.shapes == ((3, WIDTH), (3, WIDTH), (3,), (3, WIDTH))
    assert first.dtypes == (torch.float64, torch.float64, torch.int64, torch.float64)
    assert first.recorded == (True, False, False, True)
    assert first.differentiable == (True, False, False, False), "nobody uses the last one"
    assert second.differentiable == (True,)


@pytest.mark.parametrize(
    ("modules", "recorded", "differentiable"),
    [
        pytest.param(
            (linear, linear, calling(torch.Tensor.detach), linear),
            (1, 1, 0),
            (0, 0, 0),
            id="a gradient that stops later",
        ),
        pytest.param(
            (linear, then(torch.Tensor.detach), calling(lambda x: x.requires_grad_() * 2), linear),
            (1, 0, 1),
            (0, 0, 1),
            id="a stage requires gradients where the stage before has no graph",
        ),
    ],
)
def test_gradients_come_back_where_they_go_on(
    alone: World, modules: Any, recorded: tuple[int, ...], differentiable: tuple[int, ...]
) -> None:
    boundaries = found(alone, *modules).boundaries.values()
    assert [b.recorded for b in boundaries] == [(bool(number),) for number in recorded]
    assert [b.differentiable for b in boundaries] == [(bool(number),) for number in differentiable]


@pytest.mark.parametrize("placement", [(0, 1, 2), (0, 1, 0), (1, 1, 0)])
def test_all_ranks_find_the_same_wherever_the_stages_are(alone: World, placement: tuple[int, ...]) -> None:
    modules = (then(lambda y: (y, y.detach() + 1)), FIRST, then(lambda y: y.sum(1)))
    workers = max(placement) + 1
    findings = found_by_all(
        alone, stages(*modules), job(workers=workers, stages=3, placement=(placement,)), measures=True
    )
    assert findings == [found(alone, *modules, measures=True)] * workers


def first_of_two(alone: World, output: Callable[[torch.Tensor], Any], backend: str) -> None:
    """The first stage is looked at on a rank of its own; nobody is there to take what it hands on."""
    used = stages(then(output), FIRST)
    with worlds(replace(alone, backend=backend), job()) as (world, _):
        batches = Batches(used.items(), 1, 2, 1, 1, 0, 0)
        probe.probe_stages(world, used, batches, assemble.modules(world, used, 0), seed=0, measures=False)


def short(y: torch.Tensor) -> Any:
    return y, y.argmax(1).short()


def test_a_dtype_that_the_backend_cannot_send_is_refused_before_anything_is_sent(alone: World) -> None:
    with pytest.raises(Misuse, match=r"stage 0 returned a tensor of torch\.int16, which the backend nccl cannot send"):
        first_of_two(alone, short, "nccl")


def test_what_stays_on_a_worker_may_have_any_dtype(alone: World) -> None:
    (boundary,) = found(replace(alone, backend="nccl"), then(short), FIRST).boundaries.values()
    assert boundary.dtypes == (torch.float64, torch.int16)


def test_a_tensor_on_another_device_is_refused_before_anything_is_sent(alone: World) -> None:
    with pytest.raises(Misuse, match="stage 0 returned a tensor on meta, and its rank computes on cpu"):
        first_of_two(alone, lambda y: (y, y.to("meta")), "gloo")


class Handing(nn.Module):
    """Hands on a dict, and takes a mask."""

    def forward(self, x: Any, mask: torch.Tensor) -> Any:
        return {"x": x * mask[:, None], "nothing": None, "heads": 2}


class Taking(nn.Module):
    """Takes such a dict, and all keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: Any, **keywords: Any) -> torch.Tensor:
        assert set(keywords) == {"mask"}
        assert state["nothing"] is None
        output: torch.Tensor = self.linear(state["x"]) * state["heads"]
        return output


def masked() -> list[Any]:
    return [(x, y, {"mask": torch.tensor(float(i % 2))}) for i, (x, y) in enumerate(map(item, range(ITEMS)))]


def test_structures_and_keyword_arguments_are_found_on_all_ranks(alone: World) -> None:
    modules = (linear, Handing, Taking)
    used = model(lambda stage, _stages: modules[stage]().double(), items=masked)
    first, second = found_by_all(alone, used, job(workers=2, stages=3, placement=((0, 1, 0),)))
    assert first == second
    assert [boundary.form for boundary in first.boundaries.values()] == [
        ONE_TENSOR,
        form_of({"x": ..., "nothing": None, "heads": 2}),
    ]
    assert [traits.keywords for traits in first.traits] == [(), ("mask",), ("mask",)]


def test_a_keyword_argument_that_no_stage_takes_is_refused(alone: World) -> None:
    used = model(lambda stage, _stages: linear().double(), items=masked)
    with (
        worlds(alone, alone_job()) as (world,),
        pytest.raises(Misuse, match="no stage takes the keyword argument mask"),
    ):
        setting(world, of_model=used)


def test_auxiliary_losses_are_known_by_stage_and_keep_micro_batches_apart(alone: World) -> None:
    """A gradient comes back for what they alone depend on."""

    def balanced(tensors: Any) -> torch.Tensor:
        auxiliary_loss("spare", tensors[1].mean())
        auxiliary_loss("balance", tensors[0].mean())
        return tensors[0].detach()  # type: ignore[no-any-return]

    modules = then(lambda y: (y, y * 3, y + 1)), lambda: nn.Sequential(Call(balanced), linear()), linear
    findings = found(alone, *modules)
    assert findings.auxiliary == ("balance", "spare")
    assert [traits.auxiliary for traits in findings.traits] == [(), ("balance", "spare"), ()]
    assert [traits.alone for traits in findings.traits] == ["", "has auxiliary losses", ""]
    assert findings.boundaries[0].differentiable == (True, True, False)


@pytest.mark.parametrize(("count", "expected"), [(3.0, 8.0), (0.0, 2.0), (None, None)])
def test_a_loss_with_a_count_says_what_an_update_may_count(
    alone: World, count: float | None, expected: float | None
) -> None:
    """Two micro-batches as the first one."""

    def judge(output: torch.Tensor, target: torch.Tensor) -> Any:
        return loss(output, target) if count is None else (loss(output, target), count)

    used = model(lambda stage, _stages: linear().double(), judge)
    with worlds(alone, alone_job()) as (world,):
        findings = setting(world, of_model=used, options="--micro-batch-size 3")[0].probed
    assert findings.expected_count == expected
    assert [boundary.counted for boundary in findings.boundaries.values()] == [expected is not None]


# Traits.


@pytest.mark.parametrize(
    ("module", "alone_because"),
    [
        (linear, ""),
        (then(lambda y: nn.functional.dropout(y, 0.5)), "draws random numbers"),
        (lambda: nn.BatchNorm1d(WIDTH), "updates its buffers running_mean, running_var, num_batches_tracked"),
        (lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False), ""),
    ],
)
def test_why_a_stage_cannot_run_several_micro_batches_at_once(
    alone: World, module: Callable[[], nn.Module], alone_because: str
) -> None:
    """Batch statistics that are not kept cannot be seen from outside."""
    traits = found(alone, module, linear).traits
    assert traits[0].alone == alone_because
    assert traits[1].alone == ""


def test_a_tensor_without_dimensions_keeps_both_stages_from_it(alone: World) -> None:
    traits = found(alone, then(lambda y: (y, y.sum())), FIRST).traits
    assert [t.alone for t in traits] == [
        f"has {what} that are not tensors with the micro-batch in dimension 0" for what in ("outputs", "inputs")
    ]


def test_a_first_stage_whose_items_are_no_tensors_runs_them_one_by_one(alone: World) -> None:
    class Named(nn.Linear):
        def forward(self, batch: Any) -> torch.Tensor:
            return super().forward(batch["x"])

    items = [({"x": item(i)[0], "name": "text"}, item(i)[1]) for i in range(ITEMS)]
    used = model(lambda *_: Named(WIDTH, WIDTH).double(), loss, lambda: items)
    with worlds(alone, alone_job(stages=1)) as (world,):
        (traits,) = setting(world, of_model=used)[0].probed.traits
    assert traits.alone == "has inputs that are not tensors with the micro-batch in dimension 0"


# Footprints.


def test_footprints_are_measured_where_they_are_asked_for(alone: World) -> None:
    """A linear layer saves its input; what it hands on, two tensors of three rows, it does not need."""
    assert found(alone, linear, linear).footprints == []
    first, last = found(alone, linear, linear, measures=True).footprints
    size = 3 * WIDTH * 8
    assert (first.activations, first.inputs, first.saved_inputs, first.results, first.targets) == (size,) * 4 + (0,)
    assert last.targets == 3 * 8


class Again(Call):
    """A layer whose forward runs again in a backward."""

    def __init__(self) -> None:
        super().__init__(lambda y: y, linear())

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.linear, x, use_reentrant=False)


def test_what_the_halves_of_a_backward_leave_behind_is_measured_where_backwards_are_split(alone: World) -> None:
    """In tensors of three rows.

    Between two layers the first half lets go of nothing, for the second layer keeps the whole graph before it; both
    keep the gradient of their result, of which one was received. What comes behind the last layer is let go of. What
    would run again is let go of as a whole, but for the input, which is not the graph's own. The first stage leaves all
    to the second half.
    """
    two = partial(nn.Sequential, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    behind = partial(nn.Sequential, nn.Linear(WIDTH, WIDTH), nn.Tanh())
    stages = (linear, two, behind, Again, linear)
    footprints = found(alone, *stages, measures=True, split_backward=tuple(range(len(stages)))).footprints
    size = 3 * WIDTH * 8
    halves = [(of.released, of.operands, of.received_operands) for of in footprints]
    assert halves == [(0, size, size), (0, 2 * size, size), (size, size, 0), (0, 0, 0), (halves[-1][0], size, 0)]
    for none in found(alone, *stages, measures=True).footprints:
        assert (none.released, none.operands, none.received_operands) == (0, 0, 0)


# What is refused.


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "stage 0 returned None; return a tensor, or tensors in tuples, lists and dicts"),
        (5, "stage 0 returned a int; return"),
        ((), "stage 0 returned a tuple; return"),
        ({"x": torch.ones(2), "y": {object()}}, "stage 0 returned a dict with a set in it; return"),
    ],
)
def test_what_a_stage_must_not_return_is_named(alone: World, returned: Any, words: str) -> None:
    with pytest.raises(Misuse) as refused:
        found(alone, then(lambda _: returned), linear)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("judged", "words"),
    [
        (lambda *_: 5.0, "loss returned a float; return the mean over the micro-batch, a tensor of one number"),
        (lambda output, _: output, r"loss returned a tensor of shape \(3, 2\); return"),
    ],
)
def test_a_loss_is_one_number(alone: World, judged: Any, words: str) -> None:
    used = model(lambda *_: linear().double(), judged)
    with worlds(alone, alone_job()) as (world,), pytest.raises(Misuse, match=words):
        setting(world, of_model=used, options="--micro-batch-size 3")


def test_a_stage_that_is_run_again_must_leave_its_input_alone(alone: World) -> None:
    def changing() -> nn.Module:
        return nn.Sequential(nn.ReLU(inplace=True), linear())

    with pytest.raises(ModelError, match="the forward of stage 1"):
        found(alone, linear, changing)
    with pytest.raises(Misuse, match="stage 0 changes its input in place, but is to run on it again"):
        found(alone, changing, linear, recomputing=(0,))
    found(alone, changing, linear)


def test_a_tensor_without_dimensions_cannot_be_sent_for_several_micro_batches(alone: World) -> None:
    modules = then(lambda y: y.sum()), calling(lambda x: x * 2)
    found(alone, *modules)
    with pytest.raises(Misuse, match="stage 0 returns a tensor without dimensions, but handles several micro-batches"):
        found(alone, *modules, grouped=(0,))


class Writing(nn.Linear):
    """Changes a parameter, by a function of its own."""

    def __init__(self, write: Callable[[nn.Linear], Any]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.write = write
        self.frozen = nn.Parameter(torch.ones(64), requires_grad=False)

    @torch.no_grad()
    def changed(self) -> None:
        self.write(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.changed()
        return super().forward(x)


WRITES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda of: setattr(of, "bias", nn.Parameter(of.bias + 1)), "registers, replaces or deletes the parameter bias"),
    (lambda of: of.register_parameter("new", nn.Parameter(of.bias * 2)), "replaces or deletes the parameter new"),
    (lambda of: delattr(of, "frozen"), "registers, replaces or deletes the parameter frozen"),
    (lambda of: of.frozen.data.add_(1), "writes its frozen parameter frozen, which is too large for a copy"),
]


@pytest.mark.parametrize(("write", "words"), WRITES)
def test_a_write_into_a_parameter_that_cannot_be_undone_is_refused_on_all_ranks(
    alone: World, monkeypatch: pytest.MonkeyPatch, write: Callable[[Any], Any], words: str
) -> None:
    monkeypatch.setattr(module_state, "_ROOM", 100)
    first, second = found_by_all(alone, stages(linear, lambda: Writing(write)), job())
    assert first == second
    assert words in first


@pytest.mark.parametrize("moves", [{}, {"moving": (1,), "split_backward": (1,), "moving_operands": (1,)}])
def test_a_write_into_a_parameter_is_undone_and_known(alone: World, moves: dict[str, Any]) -> None:
    """Also where the forward runs several times, to measure."""
    used = stages(linear, lambda: Writing(lambda of: (of.bias.add_(1), of.weight.add_(0))))
    with worlds(alone, alone_job(**moves)) as (world,):
        context, built = setting(world, of_model=used, measures=True, options="--micro-batch-size 3")
        fresh = assemble.modules(world, used, 0)
    assert [traits.changed for traits in context.probed.traits] == [(), ("bias",)]
    assert [traits.touched for traits in context.probed.traits] == [(), ("weight", "bias")]
    for stage, module in built.items():
        for mine, theirs in zip(module.parameters(), fresh[stage].parameters(), strict=True):
            assert torch.equal(mine, theirs)


# A backward that is not linear gets a remark where the loss returns sums and counts, and only there.


def clipped(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-1e-3, 1e-3)


def clip(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-1e-3, 1e-3)


class Once(torch.autograd.Function):
    """Its backward can run once."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        context.kept = [2.0]
        return 2 * x

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return context.kept.pop() * gradient


class Hooked(nn.Module):
    """A layer with a hook, or something else, in its backward."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(kept.WIDTH, kept.WIDTH).double()
        if way == "parameter":
            self.linear.weight.register_hook(clipped)
        if way == "accumulated":
            self.linear.weight.register_post_accumulate_grad_hook(clip)
        if way == "module":
            self.linear.register_full_backward_hook(
                lambda _m, ins, _o: tuple(g if g is None else clipped(g) for g in ins)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.linear, x, use_reentrant=False)
        if self.way == "inside":
            y.register_hook(clipped)
        z = Once.apply(y) if self.way == "once" else torch.tanh(y)  # type: ignore[no-untyped-call]
        if self.way == "output":
            z.register_hook(clipped)
        if self.way == "linear":
            z.register_hook(lambda gradient: -gradient)
        return z


def counted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (output - target).square().sum(), output.numel()


@pytest.mark.parametrize(
    ("way", "is_bent"),
    [
        *[(way, True) for way in ("parameter", "accumulated", "module", "inside", "output")],
        *[(way, False) for way in ("linear", "none", "once")],
    ],
)
@pytest.mark.parametrize("loss", [counted, kept.loss])
def test_a_backward_that_is_not_linear_is_said(
    alone: World, one_worker: Path, way: str, is_bent: bool, loss: Callable[..., Any]
) -> None:
    stage = int(way == "module")  # such a hook wants inputs with gradients

    def build(number: int, _stages: int) -> nn.Module:
        torch.manual_seed(number)
        return Hooked(way if number == stage else "none")

    with Pipeline(one_worker, build, loss, kept.mini_batch(0, kept.B)) as pipe:
        said = [remark.partition(" with")[0] for remark in pipe.remarks if "not linear" in remark]
        expected = [f"the backward of stage {stage} is not linear in the gradients"]
        assert said == (expected if is_bent and loss is counted else [])
        pipe.step(kept.mini_batch(0))


# What is told of memory where there is no more of it.

CPU = torch.device("cpu")


def test_the_host_has_a_peak_and_a_size() -> None:
    size = r"[0-9.]+ [KMGT]iB"
    assert re.fullmatch(
        rf"memory: this process has used at most {size}, of {size} in the machine", memory_report(CPU, None)
    )


def test_what_the_schedule_keeps_is_told_in_the_units_of_the_report() -> None:
    known = facts(0, 3, kept=(((0, 2, 0), (3, 1, 0)), ((0, 0, 4), (3, 1, 2))), copies=2)
    words = memory_report(CPU, known).split("; ")
    assert words[1] == (
        "the schedule keeps 4 x M_theta of weights here (stage 0: 2, stage 3: 2) and up to 3 x M_a of activations "
        "(stage 0: 2, stage 3: 1)"
    )
    recomputing = memory_report(CPU, facts(1, kept=(((1, 1, 3),),)))
    assert "up to 1 x M_a of activations (stage 1: 1 and 3 x inputs alone)" in recomputing
    assert "up to 0 x M_a of activations (none)" in memory_report(CPU, facts(1))
    on_host = replace(facts(1), on_host=((HostedMicros(1, 2),), (HostedMicros(1, 3),)))
    assert "up to 0 x M_a of activations (none), of up to 3 more on the host; --mem" in memory_report(CPU, on_host)
    sliced = memory_report(CPU, facts(1, kept=(((1, 5, 0, 0, 5, 1),),)), slices=4, units=4)
    assert "up to 1.25 x M_a of activations (stage 1: 1.25 and 5 carries)" in sliced
    unequal = memory_report(CPU, facts(1, kept=(((1, 12, 0, 0, 6, 2),),)), slices=4, units=8)
    assert "up to 1.5 x M_a of activations (stage 1: 1.5 and 3 carries)" in unequal


# Bytes that go to the host: what the probe measures of stages that have moves.


def test_the_bytes_that_go_to_the_host_are_measured_of_the_stages_that_have_moves(
    alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Profiles tell the same from sizes alone: what is saved, without inputs and outputs."""
    monkeypatch.setattr(saved_tensors, "SMALLEST", 1)
    turning, tensor = then(lambda y: y.sin().cos().tanh()), 3 * WIDTH * 8
    result = found(alone, turning, turning, linear, moving=(0, 1), measures=True)
    assert result.moved_bytes == {0: MovedBytes(2 * tensor), 1: MovedBytes(2 * tensor)}
    for stage, footprint in enumerate(result.footprints[:2]):
        is_fed = stage > 0
        assert (
            footprint.activations_with_inputs(is_fed) - footprint.resident(is_fed)
            == result.moved_bytes[stage].activations
        )
    assert found(alone, turning, turning).moved_bytes == {}


def test_of_what_is_kept_between_halves_gradients_and_the_graph_below_them_move(
    alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stage 1 keeps its input and what it received; above its first layer, one tensor and one gradient are left.

    Profiles tell the same from sizes alone.
    """
    monkeypatch.setattr(saved_tensors, "SMALLEST", 1)
    tensor = 3 * WIDTH * 8

    two = partial(nn.Sequential, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    options: dict[str, Any] = {"moving_operands": (1,), "split_backward": (1,), "measures": True}
    result = found(alone, linear, two, linear, **options)
    assert result.moved_bytes == {1: MovedBytes(0, 2 * tensor)}
    footprint = result.footprints[1]
    halfway = footprint.activations_with_inputs(True) - footprint.released + footprint.operands
    assert halfway - footprint.resident_operands(True, footprint.received_operands) == 2 * tensor


# Nothing remains of the micro-batch at start, in modules, generators and the example.


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
