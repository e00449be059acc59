"""Changes by frozen stages around a schedule: the baseline, texts, predictions, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

import chimera_ir
from chimera_ir.errors import CompileError, Incomparable
from chimera_ir.ir.ops import Compute, Send
from chimera_ir.ir.text.printer import show

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
SCHEME = EXAMPLES / "frozen.chim"
MEASURED = chimera_ir.Options(
    profile=EXAMPLES / "small.profile.toml", cluster=EXAMPLES / "small.cluster.toml", micro_batch_size=8
)


def test_the_baseline_freezes_the_same_stages() -> None:
    compiled = chimera_ir.compile(SCHEME, a=1, g=1, D=2, N=6)
    assert compiled.opponent.header.frozen == compiled.header.frozen == (0, 2, 3)
    assert compiled.opponent.schedule.lanes == compiled.schedule.lanes
    text = show(compiled.opponent.schedule)
    assert chimera_ir.compile(chimera_ir.Source("again.sir", text)).schedule == compiled.opponent.schedule


def test_a_scheme_to_compare_with_loses_the_operations_that_frozen_stages_lack() -> None:
    options = chimera_ir.Options(against="zb_h1")
    against = chimera_ir.compile(SCHEME, options=options, a=1, g=2, D=1, N=8).opponent.schedule
    letters = {
        stage: {part.kind.letter for lane in against.lanes for part in lane if part.parts[0].stage == stage}
        for stage in range(4)
    }
    assert letters == {0: {"F"}, 1: {"F", "I", "W"}, 2: {"F", "I", "W"}, 3: {"F", "I"}}


def test_a_pair_cannot_lose_its_backward() -> None:
    scheme = SCHEME.read_text(encoding="utf-8").replace("on s", "on if s < L/2 then s else L-1 - s")
    text = scheme.replace(" @ 2*m + s", "").replace(" @ back", "").replace("pipe down", "workers L/2 pipe down")
    options = chimera_ir.Options(against="dualpipe_v")
    vee = chimera_ir.compile(chimera_ir.Source("vee.chim", text), options=options, a=1, g=7, D=0, N=8)
    with pytest.raises(Incomparable, match="it has pairs, and the frozen stage 0 has no `B`"):
        _ = vee.report


def test_recompute_passes_over_stages_without_a_backward() -> None:
    options = chimera_ir.Options(recompute=True)
    compiled = chimera_ir.compile(SCHEME, options=options, a=2, g=1, D=1, N=4)
    assert [pipe.recompute for pipe in compiled.header.pipes] == [(2, 3)]
    recomputed = {part.stage for lane in compiled.schedule.lanes for part in lane if part.kind.letter == "recompute"}
    assert recomputed == {2, 3}
    assert compiled.report.stashed_inputs[:2] == (0, 0)


def test_frozen_weights_have_no_gradients_and_no_optimizer() -> None:
    memory = chimera_ir.compile(SCHEME, options=MEASURED, a=1, g=2, D=1, N=4).prediction.memory
    assert [bool(need.gradients) for need in memory] == [False, True, True, False]
    assert [bool(need.optimizer) for need in memory] == [False, True, True, False]
    assert all(need.weights for need in memory)


def test_a_send_that_nothing_answers_is_waited_for_soon() -> None:
    """The memory of what an encoder hands on is free while it goes on, not at its end."""
    program = chimera_ir.compile(SCHEME, a=2, g=2, D=0, N=16).program
    for lane in program.lanes[:2]:
        last_send = max(place for place, line in enumerate(lane) if isinstance(line, Send))
        waits = [place for place, line in enumerate(lane) if type(line).__name__ == "WaitSend"]
        assert sum(place < last_send for place in waits) >= 6
    assert not any(isinstance(line, Compute) and line.kind.sums for lane in program.lanes[:2] for line in lane)


@pytest.mark.parametrize("emitted", ["torch_csv", "torch_csv_comms"])
def test_a_schedule_of_torch_has_no_frozen_stages(emitted: str) -> None:
    with pytest.raises(CompileError, match="stage 0 is frozen, and in torch's schedules every stage has a backward"):
        getattr(chimera_ir.compile(SCHEME), emitted)


def test_the_report_names_the_frozen_stages() -> None:
    assert chimera_ir.compile(SCHEME).report.as_json()["frozen"] == [0, 2, 3, 4]
    assert "frozen" not in chimera_ir.compile("dapple").report.as_json()


def test_an_evaluation_has_no_frozen_stages() -> None:
    compiled = chimera_ir.compile(SCHEME)
    assert compiled.evaluation.header == replace(compiled.evaluation.header, frozen=())
