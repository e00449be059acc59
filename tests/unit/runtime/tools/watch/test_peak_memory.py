"""Memory that ranks have used and that they need, with memory that is really taken."""

import ctypes
from dataclasses import replace

import pytest
import torch

from chimera_runtime.program.kept_bytes import MovedBytes
from chimera_runtime.program.rank_facts import HostedMicros
from chimera_runtime.ranks.world import World
from chimera_runtime.tools.watch import memory
from chimera_runtime.tools.watch.memory import ON_GPU, ON_HOST, PeakMemory, RankNeed, resident
from chimera_runtime.values.byte_text import byte_text
from tests.unit.runtime.models import facts, setting
from tests.unit.runtime.thread_ranks import alone_job, job, together, worlds

MIB = 2**20


def resident_in_use() -> int:
    """Resident bytes, without memory that the C library keeps for itself: a test before may have told it to."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    return resident()


def test_memory_that_was_taken_and_given_back_is_in_the_peak(alone: World) -> None:
    with worlds(alone, alone_job()) as (world,):
        made, built = setting(world, measures=True)
        peak = PeakMemory(RankNeed(made, made.model.steps, built), resident_in_use())
        _ = torch.ones(48 * MIB)
        del _
        assert 0.9 * 192 * MIB <= peak._used() <= 1.5 * 192 * MIB


@pytest.mark.skipif(not memory._STATUS.exists(), reason="a peak is counted anew on Linux alone")
def test_what_was_used_before_training_is_not_in_the_peak(alone: World) -> None:
    """Model like those of --check."""
    _ = torch.ones(48 * MIB)
    del _
    with worlds(alone, alone_job()) as (world,):
        made, built = setting(world, measures=True)
        peak = PeakMemory(RankNeed(made, made.model.steps, built), resident())
        assert peak._used() < 48 * MIB


def test_rank_0_has_a_line_for_every_rank(alone: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeakMemory, "_used", lambda self: (1 + self._world.place.rank) * MIB)
    with worlds(alone, job()) as ranks:
        known = [facts(0, copies=3, kept=(((0, 2, 0),), ((0, 1, 9),))), facts(1, kept=(((1, 1, 0),),))]

        def lines(world: World) -> tuple[list[str], int]:
            made, built = setting(world, known[world.place.worker], measures=True)
            held = {s: built[s] for s in known[world.place.worker].stages}
            need = RankNeed(made, made.model.steps, held)
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
