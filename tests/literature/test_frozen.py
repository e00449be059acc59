"""Frozen stages in 1F1B: makespans and peaks, as an independent simulator finds them, and the shortest order."""

from importlib.util import find_spec
from pathlib import Path

import pytest

import chimera_ir
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.cluster import FREE, Cluster
from chimera_ir.profile.costs import StageCosts
from tests.simulator import Simulator
from tests.timings import stage_timing

SCHEME = Path(__file__).resolve().parents[2] / "docs" / "examples" / "frozen.chim"

INSTANCES = {
    "an encoder of 2 stages, 3 trained ones": ({"a": 2, "g": 3, "D": 0, "N": 8}, 32, [0, 0, 3, 2, 1]),
    "an encoder, a trained stage, 3 frozen ones": ({"a": 1, "g": 1, "D": 3, "N": 8}, 28, [0, 4, 3, 2, 1]),
    "all trained": ({"a": 0, "g": 5, "D": 0, "N": 8}, 36, [5, 4, 3, 2, 1]),
}


@pytest.mark.parametrize("name", INSTANCES)
def test_makespan_and_peaks(name: str) -> None:
    sizes, makespan, peaks = INSTANCES[name]
    compiled = chimera_ir.compile(SCHEME, **sizes)
    assert compiled.report.makespan == makespan
    assert [*compiled.report.activations] == peaks
    stage = StageCosts(1, 1, 0, {1: stage_timing(1, 2, 3, 1, 1, 1, 1, halves=(1, 1))})
    setting = Setting((stage,) * compiled.header.stages, Cluster("free", 4096, 1, 1, 0, FREE, FREE, FREE), 1, 1)
    assert max(end for *_, end in Simulator(compiled.program, setting).computes) == makespan
    # The baseline freezes the same stages: it is the same schedule.
    assert compiled.report.baseline.makespan == makespan
    assert [*compiled.report.baseline.activations] == peaks


@pytest.mark.skipif(find_spec("ortools") is None, reason="OR-Tools is not installed: the extra search")
def test_with_a_frozen_encoder_no_order_is_shorter() -> None:
    sizes, makespan, _ = INSTANCES["an encoder of 2 stages, 3 trained ones"]
    found = chimera_ir.compile(SCHEME, options=chimera_ir.Options(search=60), **sizes)
    assert found.improvement.result.proven
    assert found.improvement.result.makespan == makespan
    assert found.improvement.result.hints["dapple"] == makespan


@pytest.mark.parametrize("stages", [2, 3, 4, 6])
@pytest.mark.parametrize("micro_batches", [1, 4, 9])
def test_a_frozen_encoder_costs_its_way_to_the_first_trained_stage(stages: int, micro_batches: int) -> None:
    """1F1B of the trained stages alone takes 3(N + D - 1); the encoder adds a forward for each of its stages."""
    for a in range(1, 4):
        found = chimera_ir.compile(SCHEME, a=a, g=stages, D=0, N=micro_batches).report
        assert found.makespan == 3 * (micro_batches + stages - 1) + a
        trained = [min(stages - s, micro_batches) for s in range(stages)]
        assert [*found.activations] == [0] * a + trained


@pytest.mark.parametrize(
    "name", ["an encoder of 2 stages, 3 trained ones", "an encoder, a trained stage, 3 frozen ones"]
)
def test_a_frozen_encoder_does_not_run_ahead_of_what_it_feeds(name: str) -> None:
    """Waits for sends alone hold it back: nothing answers its messages, and a stage of the text takes longer."""
    sizes, _, _ = INSTANCES[name]

    def buffers(micro_batches: int) -> int:
        program = chimera_ir.compile(SCHEME, **(sizes | {"N": micro_batches})).program
        return max(1 + recv.slot for parts in program.parts for recv in parts.recvs.lines)

    assert buffers(8) == buffers(40) <= 5
