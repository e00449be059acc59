"""Bytes that a rank needs, against sums by hand; the tests with torchrun compare it with what is really allocated."""

import ctypes
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime.errors import Misuse
from chimera_runtime.program.kept_bytes import MovedBytes
from chimera_runtime.program.rank_facts import VALUES, EdgeValue, HostedMicros
from chimera_runtime.ranks.world import World
from chimera_runtime.stage import saved_tensors
from chimera_runtime.tools.watch import memory
from chimera_runtime.tools.watch.memory import (
    ON_GPU,
    ON_HOST,
    PeakMemory,
    RankBytes,
    RankNeed,
    bytes_of,
    computing_dtype,
    of_stage,
    peak_of,
    peak_seconds,
    refuse_beyond,
    resident,
    share_of,
    smallest_share,
    state_bytes,
)
from chimera_runtime.values.boundary import Boundary
from chimera_runtime.values.byte_text import byte_text
from tests.unit.runtime.models import Layer, facts, model, setting
from tests.unit.runtime.thread_ranks import alone_job, job, together, worlds

BYTES = 8
B = 3
FIRST, LAST = 4 * BYTES, 2 * BYTES
"""The weights of the two stages: 2 by 2 and 1 by 2 numbers."""
MESSAGE = B * 2 * BYTES
TARGET = B * BYTES


def need_of(world: World, known: Any = None, of_model: Any = None, size: int = B, is_sharded: bool = False) -> RankNeed:
    """The memory that a rank needs for the stages of its facts; by default all."""
    made, built = setting(world, known, of_model, options=f"--micro-batch-size {size}", measures=True)
    held = built if known is None else {s: built[s] for s in known.stages}
    return RankNeed(made, made.model.steps, held, is_sharded)


def said(world: World, known: Any, limit: int = 10**9, of_model: Any = None) -> str:
    return refuse_beyond(limit, need_of(world, known, of_model))


def said_by_all(ranks: list[World], facts_of: list[Any], limit: int = 10**9) -> list[str]:
    """The words of each rank, or the error that it raises."""

    def text(world: World, known: Any) -> str:
        try:
            return said(world, known, limit)
        except Misuse as refused:
            return f"refused: {refused}"

    return together([partial(text, world, known) for world, known in zip(ranks, facts_of, strict=True)])


def need(text: str) -> dict[str, str]:
    parts = text.split(": ", 2)[2].split(" (stage")[0].split(", ")
    return dict(part.split(" ", 1) for part in parts)  # type: ignore[misc]


def test_a_need_is_the_sum_of_its_parts() -> None:
    assert RankBytes(1, 20, 300, 4000, 50000).total == 54321


def test_weights_gradients_and_optimizer_are_counted(alone: World) -> None:
    """The gradients of the largest stage once more, and a number for each parameter; SGD has no state."""
    with worlds(alone, alone_job()) as (world,):
        text = said(world, facts(0, 1, kept=(((0, 0, 0), (1, 0, 0)),)))
    assert need(text) == {
        "weights": byte_text(FIRST + LAST),
        "gradients": byte_text(FIRST + LAST + 2 * BYTES + FIRST),
        "optimizer": "0 B",
        "messages": "0 B",
        "activations": "0 B",
    }


def test_every_further_copy_counts_what_is_trained(alone: World) -> None:
    class Frozen(nn.Module):
        def __init__(self, *_: int) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2, bias=False, dtype=torch.float64)
            self.frozen = nn.Parameter(torch.ones(5, dtype=torch.float64), requires_grad=False)
            self.register_buffer("buffer", torch.ones(7, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    with worlds(alone, alone_job(stages=1)) as (world,):
        text = said(world, facts(0, copies=3), of_model=model(Frozen))
    assert need(text)["weights"] == byte_text((3 * 4 + 5 + 7) * BYTES)


def test_receive_buffers_and_what_is_on_its_way_are_messages(alone: World) -> None:
    """The middle one of three stages has slots for 2 + 1 activations and a gradient, and sends 1 and 2 of them."""
    with worlds(alone, alone_job(stages=3)) as (world,):
        text = said(world, facts(1, inputs=(2, 1), gradients=(1,), sending=(1, 2)))
        assert need(text)["messages"] == byte_text((3 + 1 + 0 + 2) * MESSAGE)


def test_messages_of_a_third_value_count_by_the_buffers_that_receive_them(
    alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that goes back along each edge: the middle one of three stages has two slots for it, and sends four."""
    value = EdgeValue(False, made="norms", slots="norms_read", buffers="norm_buffers", views="views")
    monkeypatch.setitem(VALUES, "n", value)
    numbers = (torch.zeros(1, dtype=torch.float64),)
    monkeypatch.setattr(Boundary, "norm_buffers", lambda *_: numbers, raising=False)
    known = facts(1)
    (of_stage,) = known.stages.values()
    with_norms = replace(of_stage, slots=of_stage.slots | {"n": ((1, 1),)}, sending=of_stage.sending | {"n": 4})
    with worlds(alone, alone_job(stages=3)) as (world,):
        text = said(world, replace(known, stages={1: with_norms}))
    assert need(text)["messages"] == byte_text((2 + 4) * BYTES)


def test_of_what_is_sent_and_run_again_nothing_was_saved(alone: World) -> None:
    """The tanh saves its result, which is what is sent: it counts as an activation, unless the stage runs again."""
    known = facts(0, sending=(1, 0))
    for recomputing, messages in (((), 0), ((0,), MESSAGE)):
        with worlds(alone, alone_job(recomputing=recomputing)) as (world,):
            assert need(said(world, known))["messages"] == byte_text(messages)


def test_activations_are_those_of_the_fullest_moment(alone: World) -> None:
    """A forward of stage 0 keeps input and result; stage 1 its input, which is that result, and losses aside."""
    with worlds(alone, alone_job()) as (world,):
        text = said(world, facts(0, kept=(((0, 1, 0),), ((0, 3, 0),), ((0, 2, 0),))))
        assert need(text)["activations"] == byte_text(3 * 2 * MESSAGE)
        assert f"(stage 0: 1 x M_theta = {byte_text(FIRST)}, 3 x M_a = {byte_text(2 * MESSAGE)})" in text


def test_memory_on_the_host_is_told_apart(alone: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fullest moment has three micro-batches there; of each, stage 0 moves a tensor that is not handed on."""
    monkeypatch.setattr(saved_tensors, "SMALLEST", 1)

    class Turning(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).cos().sin() if not self.last else super().forward(x)

    known = replace(facts(0, kept=(((0, 1, 0),),)), on_host=((HostedMicros(0, 2),), (HostedMicros(0, 3),)))
    with worlds(alone, alone_job(moving=(0,))) as (world,):
        text = said(world, known, of_model=model(Turning))
    assert text.endswith(f"), and {byte_text(3 * 2 * MESSAGE)} of host memory")


def test_of_what_a_forward_keeps_a_received_input_is_among_the_messages(alone: World) -> None:
    """The last stage keeps its input, and its output less the target for the loss."""
    kept = (((1, 3, 0),),)
    with worlds(alone, alone_job()) as (world,):
        assert need(said(world, facts(1, kept=kept)))["activations"] == byte_text(3 * (MESSAGE + TARGET))
    with worlds(alone, job()) as ranks:
        known = [facts(0, kept=(((0, 0, 0),),)), facts(1, copies=40, kept=kept)]
        text, _ = said_by_all(ranks, known)
    assert "rank 1 (worker 1) needs" in text
    assert need(text)["activations"] == byte_text(3 * TARGET)


def test_of_a_forward_that_runs_again_its_input_is_kept_and_its_target(alone: World) -> None:
    """The input counts unless it lies in a receive buffer: stage 1 of two workers receives all of its inputs."""
    with worlds(alone, alone_job(recomputing=(0, 1))) as (world,):
        assert need(said(world, facts(0, kept=(((0, 0, 2),),))))["activations"] == byte_text(2 * MESSAGE)
        assert need(said(world, facts(1, kept=(((1, 0, 2),),))))["activations"] == byte_text(2 * (MESSAGE + TARGET))
    with worlds(alone, job(recomputing=(0, 1))) as ranks:
        texts = said_by_all(ranks, [facts(0, kept=(((0, 0, 2),),)), facts(1, kept=(((1, 0, 40),),))])
    assert texts[0] == texts[1]
    assert texts[0].split(": ")[2].startswith("weights")
    assert need(texts[0])["activations"] == byte_text(40 * TARGET)
    assert "rank 1 (worker 1) needs" in texts[0]


def test_more_than_the_limit_stops_every_rank_with_the_fullest_named(alone: World) -> None:
    with worlds(alone, job()) as ranks:
        messages = said_by_all(ranks, [facts(0, kept=(((0, 5, 0),),)), facts(1)], 64)
    assert messages[0] == messages[1]
    assert messages[0].startswith("refused: --memory-limit 64 B: rank 0 (worker 0) needs ")
    assert messages[0].endswith("choose a smaller --micro-batch-size, a scheme that recomputes, or more stages")


@pytest.mark.parametrize(("limit", "others"), [(10, "; 1 other rank needs too much as well; "), (600, "); choose")])
def test_others_that_need_too_much_are_counted(alone: World, limit: int, others: str) -> None:
    with worlds(alone, job()) as ranks:
        text, _ = said_by_all(ranks, [facts(0, kept=(((0, 9, 0),),)), facts(1)], limit)
    assert text.startswith("refused: ")
    assert others in text


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [
        (lambda parameters: torch.optim.SGD(parameters, lr=1), 0),
        (lambda parameters: torch.optim.SGD(parameters, lr=1, momentum=0.9), 10 * 4),
        (lambda parameters: torch.optim.Adam(parameters, lr=1), 2 * 10 * 4 + 4),
        (lambda _: None, 2 * 10 * 4),
    ],
)
def test_the_state_of_an_optimizer_is_measured_without_memory_or_guessed_at_two_a_weight(
    optimizer: Any, state: int
) -> None:
    """Adam keeps two numbers a weight, and how many steps it has made."""
    parameter = nn.Parameter(torch.ones(10))
    before = torch.get_rng_state()
    assert state_bytes(optimizer, [parameter]) == state
    assert torch.equal(torch.get_rng_state(), before)
    assert parameter.grad is None
    assert torch.equal(parameter, torch.ones(10))


def test_an_optimizer_is_given_what_the_model_wrote_on_its_parameters() -> None:
    parameter = nn.Parameter(torch.ones(10))
    parameter.scale = 3  # type: ignore[attr-defined]
    scales: list[int] = []

    def optimizer(parameters: Any) -> Any:
        scales.extend(p.scale for p in parameters)
        return torch.optim.SGD(parameters, lr=1)

    state_bytes(optimizer, [parameter])
    assert scales == [3]


def test_bytes_are_those_of_the_elements() -> None:
    assert bytes_of([torch.ones(3), torch.ones(2, 2, dtype=torch.float64), torch.ones(())]) == 12 + 32 + 4
    assert bytes_of([]) == 0


def test_replicas_that_share_the_state_need_a_share_of_it_and_others_are_told_that_they_could(alone: World) -> None:
    """Four and two numbers on two ranks: momentum of two and one."""
    momentum = model(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    needed = {}
    for is_sharded in (False, True):
        with worlds(alone, alone_job(), copies=2) as pair:
            sums = dict.fromkeys(alone_job().groups, (None, (0, 1)))
            known = facts(0, 1, kept=(((0, 0, 0), (1, 0, 0)),))

            def text(world: World, limit: int, is_sharded: bool = is_sharded, known: Any = known) -> str:
                return refuse_beyond(limit, need_of(world, known, momentum, is_sharded=is_sharded))

            pair = [replace(world, sums=sums) for world in pair]
            needed[is_sharded], _ = together([partial(text, world, 10**9) for world in pair])
            with pytest.raises(Misuse, match=r"or more stages(, or --shard-optimizer)?$") as error:
                together([partial(text, world, 1) for world in pair])
            assert str(error.value).endswith("--shard-optimizer") != is_sharded
    assert need(needed[False])["optimizer"] == byte_text(FIRST + LAST)
    assert need(needed[True])["optimizer"] == byte_text((FIRST + LAST) // 2)


# Memory that ranks have used and that they need, with memory that is really taken.

MIB = 2**20


def resident_in_use() -> int:
    """Resident bytes, without memory that the C library keeps for itself: a test before may have told it to."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    return resident()


def test_memory_that_was_taken_and_given_back_is_in_the_peak(alone: World) -> None:
    with worlds(alone, alone_job()) as (world,):
        peak = PeakMemory(need_of(world, size=1), resident_in_use())
        _ = torch.ones(48 * MIB)
        del _
        assert 0.9 * 192 * MIB <= peak._used() <= 1.5 * 192 * MIB


@pytest.mark.skipif(not memory._STATUS.exists(), reason="a peak is counted anew on Linux alone")
def test_what_was_used_before_training_is_not_in_the_peak(alone: World) -> None:
    """Model like those of --check."""
    _ = torch.ones(48 * MIB)
    del _
    with worlds(alone, alone_job()) as (world,):
        peak = PeakMemory(need_of(world, size=1), resident())
        assert peak._used() < 48 * MIB


def test_rank_0_has_a_line_for_every_rank(alone: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeakMemory, "_used", lambda self: (1 + self._world.place.rank) * MIB)
    with worlds(alone, job()) as ranks:
        known = [facts(0, copies=3, kept=(((0, 2, 0),), ((0, 1, 9),))), facts(1, kept=(((1, 1, 0),),))]

        def lines(world: World) -> tuple[list[str], int]:
            need = need_of(world, known[world.place.worker], size=1)
            return PeakMemory(need, 0).lines(), need.need().total

        (said, first), (silent, second) = together([lambda world=world: lines(world) for world in ranks])  # type: ignore[misc]
    assert silent == []
    assert said[0] == f"peak memory ({ON_HOST})"
    assert [" ".join(line.split()) for line in said[1:]] == [
        "rank M_theta M_a needs used",
        f"0 3 2 {byte_text(first)} 1 MiB",
        f"1 1 1 {byte_text(second)} 2 MiB",
    ]


def test_where_tensors_move_the_host_has_columns_and_is_not_in_what_is_used(
    alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_read", lambda _name: 5 * MIB)
    with worlds(alone, alone_job(moving=(0, 1))) as (world,):
        made, built = setting(world, replace(facts(0, 1), on_host=((HostedMicros(1, 2),),)), measures=True)
        made = replace(made, probed=replace(made.probed, moved_bytes={0: MovedBytes(0), 1: MovedBytes(MIB)}))
        peak = PeakMemory(RankNeed(made, made.model.steps, built), MIB)
        world.host_link.to_host([torch.empty(MIB + 1, dtype=torch.uint8)])
        said = peak.lines()
    assert said[0] == f"peak memory ({ON_HOST}; what is on the host apart)"
    assert " ".join(said[1].split()) == "rank M_theta M_a needs used needs on host used on host"
    assert said[2].split()[-6:] == ["2", "MiB", "2", "MiB", "1", "MiB"]


def test_where_there_is_no_proc_the_peak_of_the_process_is_all_there_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(memory, "_STATUS", tmp_path_factory.mktemp("none") / "status")
    assert resident() > 10 * MIB


def test_on_a_gpu_it_is_what_torchs_allocator_says(alone: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from the making on; by numbers that stand in for torch.cuda's."""
    peaks = {"now": 900 * MIB}
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _device: peaks.update(now=5 * MIB))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: peaks["now"])
    with worlds(alone, alone_job()) as (world,):
        made, built = setting(world, measures=True)
        on_gpu = replace(made, world=replace(world, device=torch.device("cuda", 0)))
        peak = PeakMemory(RankNeed(on_gpu, made.model.steps, built), resident())
        assert peak.lines()[0] == f"peak memory ({ON_GPU})"
        assert peak._used() == 5 * MIB


# The share of a rank in the memory of its GPU, by numbers that stand in for torch.cuda's.

GIB = 2**30


@pytest.mark.parametrize(
    ("gpus", "ranks", "totals", "share"),
    [
        (2, 2, {0: 80 * GIB, 1: 80 * GIB}, 80 * GIB),
        (2, 2, {0: 80 * GIB, 1: 24 * GIB}, 24 * GIB),
        (2, 5, {0: 60 * GIB, 1: 60 * GIB}, 20 * GIB),
    ],
)
def test_ranks_on_a_gpu_share_it_and_the_smallest_share_is_for_all(
    alone: World, gpus: int, ranks: int, totals: dict[int, int], share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, totals[device.index]))
    with worlds(alone, job()) as both:
        on_gpus = [replace(world, device=torch.device("cuda", world.place.rank % gpus)) for world in both]
        assert min(share_of(world.device) for world in on_gpus) == share
        assert (
            together([lambda world=world: smallest_share(world.control_group, world.device) for world in on_gpus])
            == [share] * 2
        )  # type: ignore[misc]


def test_on_the_cpu_a_size_is_needed(alone: World) -> None:
    with pytest.raises(Misuse, match="the ranks are on the CPU; give a size, as in --memory-limit 16GiB"):
        smallest_share(alone.control_group, alone.device)


# Floating-point operations by hand, and the peaks of devices.


OF_FIRST, OF_LAST = 2 * B * 2 * 2, 2 * B * 2
"""A product of B by 2 with 2 by 2 numbers, and one with 2 by 1: a sum and a product for each number of either."""


def test_a_backward_computes_twice_what_a_forward_does_but_for_the_input_of_the_first_stage(alone: World) -> None:
    with worlds(alone, alone_job()) as (world,):
        made, built = setting(world, options=f"--micro-batch-size {B}")
        assert of_stage(made, built[0], 0) == 2 * OF_FIRST
        assert of_stage(made, built[1], 1) == 3 * OF_LAST


def test_a_stage_is_as_it_was_after_it_was_counted(alone: World) -> None:
    class Noisy(nn.Module):
        def __init__(self, *_: int) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout()).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)  # type: ignore[no-any-return]

    with worlds(alone, alone_job(stages=1)) as (world,):
        made, built = setting(world, facts(0), model(Noisy), options=f"--micro-batch-size {B}")
        before, drawn = {k: v.clone() for k, v in built[0].state_dict().items()}, torch.get_rng_state()
        assert of_stage(made, built[0], 0) == 2 * OF_FIRST
    assert all(torch.equal(tensor, before[name]) for name, tensor in built[0].state_dict().items())
    assert all(parameter.grad is None for parameter in built[0].parameters())
    assert torch.equal(torch.get_rng_state(), drawn)


def test_all_ranks_together_need_the_time_of_an_update_at_their_peaks(alone: World) -> None:
    """Two workers, two copies, two micro-batches; every stage is counted once, and all four devices take part."""
    with worlds(alone, job(), copies=2) as ranks:

        def seconds(world: World) -> float:
            made, built = setting(world, facts(world.place.worker), options=f"--micro-batch-size {B}")
            return peak_seconds(made, built, 0.5, torch.float64)

        found = together([lambda world=world: seconds(world) for world in ranks])  # type: ignore[misc]
    operations = 2 * 2 * (2 * OF_FIRST + 3 * OF_LAST)
    assert found == [pytest.approx(operations / (4 * 0.5e12))] * 4


def test_the_peak_of_a_cpu_has_to_be_given(alone: World) -> None:
    with worlds(alone, alone_job()) as (world,):
        made, built = setting(world)
        with pytest.raises(
            Misuse, match="--device-peak auto: the peak of cpu in float64 is not known; give its TFLOPS"
        ):
            peak_seconds(made, built, None, torch.float64)


@pytest.mark.parametrize(
    ("device", "dtype", "tensor_float", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, False, 312e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, True, 156e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, False, 19.5e12),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", torch.bfloat16, False, None),
        ("NVIDIA H100 80GB HBM3", torch.float16, False, 989.5e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, False, 756.5e12),
        ("NVIDIA H200 NVL", torch.bfloat16, False, 835.5e12),
        ("NVIDIA GH200 480GB", torch.float64, False, 67e12),
        ("NVIDIA GB200", torch.bfloat16, False, 2500e12),
        ("NVIDIA A10G", torch.bfloat16, False, None),
        ("NVIDIA L4", torch.float64, False, None),
        ("NVIDIA H100 PCIe", torch.float8_e4m3fn, False, None),
        ("cpu", torch.float32, False, None),
    ],
)
def test_a_device_is_known_by_words_of_its_name(
    device: str, dtype: torch.dtype, tensor_float: bool, peak: float | None
) -> None:
    assert peak_of(device, dtype, tensor_float) == peak


def test_products_are_in_the_dtype_of_autocast_or_of_most_weights() -> None:
    modules = {0: nn.Linear(9, 9).bfloat16(), 1: nn.LayerNorm(9)}
    assert computing_dtype(modules, None) is torch.bfloat16
    assert computing_dtype(modules, torch.float16) is torch.float16
    assert computing_dtype({}, None) is torch.float32
